"""Settings of all tests: one thread per process, a seed, and no test that a slow machine fails."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
