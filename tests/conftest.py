"""Settings of all tests: one thread per process, a seed, and no test that a slow machine fails."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.onnx._internal.exporter import _registration

torch.set_num_threads(1)
# torch reads the source of 500 functions anew for each ONNX file that it writes: half of the time of a small one.
_registration.ONNXRegistry.from_torchlib = staticmethod(functools.cache(_registration.ONNXRegistry.from_torchlib))
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
