"""The measured roofs of a machine: stored as JSON, used as a `Device`."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from compress.errors import RooflineError
from compress.files import read_json, write_json
from compress.roofline_model.devices import SPARSE, Device

Backend = Literal["cpu", "cuda"]
CONV = " conv"
"""Suffix of the name of a ceiling that was measured with convolutions."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One size that was timed.

    Attributes:
        size: side of the matrices, channels of the convolution, or bytes of the buffer.
        rate: best median of the rates.
        arithmetic_intensity: flops per byte of operands and result; 0 for a copy.
    """

    size: int
    rate: float
    arithmetic_intensity: float


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """One roof.

    Attributes:
        name: `copy`, or a precision such as `int8-2:4`, followed by ` conv` for convolutions.
        rate: the best of its samples; None if it could not be measured.
        unit: `bytes/s` (read and written) or `flops/s` (2 for a multiply-accumulate).
        method: operation that was timed.
        reason: of a missing rate.
    """

    name: str
    rate: float | None
    unit: str
    method: str
    samples: tuple[Sample, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """The measured roofs of one machine, copies first.

    Attributes:
        title: name of the processor or GPU.
        threads: of torch; 0 on a GPU.
        rounds: number of times that each size was timed.
        load_average: over a minute, before and after; empty if the system has none.
    """

    backend: str
    title: str
    threads: int
    rounds: int
    torch_version: str
    load_average: tuple[float, ...]
    ceilings: tuple[Ceiling, ...]

    def as_device(self) -> Device:
        """A `Device` whose peaks are the measured rates (RooflineError: the copies could not be measured)."""
        rates: dict[str, float] = {}
        for ceiling in self.ceilings:
            if ceiling.rate is not None:
                name = ceiling.name.removesuffix(CONV)
                rates[name] = max(ceiling.rate, rates.get(name, 0.0))
        if "copy" not in rates:
            raise RooflineError(f"the ceilings of {self.title} hold no copy bandwidth; measure them again")
        bandwidth = rates.pop("copy")
        return Device(
            name="machine",
            title=self.title,
            bandwidth_bytes_per_s=bandwidth,
            dense_flops_per_s={name: rate for name, rate in rates.items() if not name.endswith(SPARSE)},
            sparse_flops_per_s={n.removesuffix(SPARSE): rate for n, rate in rates.items() if n.endswith(SPARSE)},
            source=f"measured here with torch {self.torch_version}, best of {self.rounds} rounds",
            note=f"{self.threads} threads" if self.threads else "",
        )

    def save(self, path: Path | str | None = None) -> Path:
        """Write as JSON; without a path, to the file that `roofline(device="machine")` uses."""
        return write_json(ceilings_path(self.backend) if path is None else path, asdict(self))


def ceilings_path(backend: str) -> Path:
    """Return this machine's file: $XDG_CACHE_HOME (or ~/.cache) /compress/ceilings-BACKEND.json."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compress" / f"ceilings-{backend}.json"


def load_ceilings(path: Path | str) -> Ceilings:
    """Read a file that `Ceilings.save` wrote (RooflineError: it is missing or has other contents)."""
    try:
        raw: dict[str, Any] = read_json(path)
        ceilings = tuple(
            Ceiling(**{**c, "samples": tuple(Sample(**s) for s in c["samples"])}) for c in raw.pop("ceilings")
        )
        return Ceilings(**{**raw, "load_average": tuple(raw["load_average"])}, ceilings=ceilings)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RooflineError(
            f"{path} holds no ceilings ({error}); measure them with `python -m compress roofline --measure`"
        ) from error


def machine_device() -> Device:
    """This machine as it was measured: its GPU if one was, else its CPU (RooflineError: not measured yet)."""
    backends: tuple[Backend, ...] = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    found = [ceilings_path(backend) for backend in backends if ceilings_path(backend).is_file()]
    if not found:
        raise RooflineError(
            "this machine was not measured yet; run `python -m compress roofline --measure`, or "
            "compress.roofline_model.measure_ceilings().save()"
        )
    return load_ceilings(found[0]).as_device()
