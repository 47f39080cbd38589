"""The block of channels that an engine computes at a time, and files of times."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import nn

from compress.engines.registry import build_engine
from compress.export.onnx import export_onnx
from compress.files import read_json, write_json
from compress.measure.latency import measure_latency
from compress.measure.machine import describe_machine

GPU_BLOCK = 16
_GPUS = ("cuda", "tensorrt")
_WIDTHS = (64, 72, 80, 96)
_LAYERS, _SIDE = 6, 28
_LOADS, _RUNS, _SECONDS = 2, 60, 0.1
_SMALL = 0.33
"""Share of the growth from 64 channels: less than it from 72 to 80, or from 80 to 96, is none."""


def cache_path(engine: str, version: str, folder: Path | None, *, what: str = "") -> Path:
    """Return the file for an engine of a version on this machine; folder None = the user's."""
    machine = describe_machine()
    gpus = "-".join(gpu.name for gpu in machine.gpus) if engine.startswith(("cuda", "tensorrt")) else ""
    name = f"{what} {engine}-{version}-{machine.cpu}-{machine.usable_cores:g}-{gpus}"
    base = folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compress" / "search"
    return base / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}.json"


def channel_block(engine: str, *, version: str, cache: Path | None = None) -> int:
    """Return the block of an engine: 8, 16 or 32 on CPUs, measured once and kept on disk; 16 on GPUs."""
    if engine.startswith(_GPUS):
        return GPU_BLOCK
    path = cache_path(engine, version, cache, what="block")
    try:
        known = read_json(path)["block"] if path.is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        known = None
    if isinstance(known, int) and known > 0:
        return known
    found = block_of(_times(engine))
    write_json(path, {"block": found})
    return found


def block_of(times: Mapping[int, float]) -> int:
    """Return the block that times by number of channels show; 8 where they show nothing.

    >>> block_of({64: 1.0, 72: 1.44, 80: 1.43, 96: 1.97}), block_of({64: 1.0, 72: 1.2, 80: 1.4, 96: 1.9})
    (16, 8)
    """
    grown = times[96] - times[64]
    if grown < 0.1 * times[64]:
        return 8
    if times[96] - times[80] < _SMALL * grown:
        return 32
    return 16 if times[80] - times[72] < _SMALL * (times[80] - times[64]) else 8


def _times(engine: str) -> dict[int, float]:
    example = torch.zeros(1, 3, _SIDE, _SIDE)
    with tempfile.TemporaryDirectory(prefix="compress-block-") as folder, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        files = {
            width: export_onnx(_network(width), example, Path(folder) / f"{width}.onnx", dynamic_batch=False)
            for width in _WIDTHS
        }
        rows = []
        for _ in range(_LOADS):
            with ExitStack() as stack:
                engines = {
                    str(width): stack.enter_context(build_engine(path, engine, batch_size=1, threads=1))
                    for width, path in files.items()
                }
                timed = measure_latency(engines, batch_size=1, runs=_RUNS, seconds=_SECONDS)
                rows.append([float(np.quantile(row.turns_ms, 0.25)) for row in timed])
    return dict(zip(_WIDTHS, np.min(rows, axis=0).tolist(), strict=True))


def _network(width: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 1)]
    for number in range(_LAYERS):
        layers += [nn.Conv2d(width if number else 64, width, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, 64, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
