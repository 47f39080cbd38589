"""The machine at hand, against what other sources say of it."""

import json
import os
import platform
from importlib import metadata
from pathlib import Path

import pytest
import torch

from compress.measure.machine import describe_machine


def test_it_is_this_machine():
    machine = describe_machine()
    assert machine.python == platform.python_version()
    assert machine.cores == os.cpu_count()
    assert 0 < machine.usable_cores <= machine.cores
    assert machine.cpu
    assert platform.system() in machine.system
    for name in ("torch", "onnx", "onnxruntime", "openvino"):
        assert machine.versions[name] == metadata.version(name)
    assert len(machine.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="only Linux lists its instruction sets in a file")
def test_instruction_sets_are_torchs():
    isa = describe_machine().isa
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in {"AVX2", "AVX512"}:
        assert {"AVX2": "avx2", "AVX512": "avx512f"}[capability] in isa
    total_kib = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0])
    assert describe_machine().memory_bytes == total_kib * 1024


def test_it_goes_into_json():
    row = describe_machine().to_dict()
    assert json.loads(json.dumps(row)) == row
