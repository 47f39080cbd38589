"""Settings of all tests: one thread per process, seeds, and no test that a slow machine fails.

`pytest --hypothesis-profile search` draws examples anew in each run, to look for what the fixed ones do not show.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
os.fsync = lambda _: None  # what tests write need not outlive a loss of power, and a disk takes its time
SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("search", **SLOW)
# what passed on one machine passes on the next
settings.register_profile("any machine", derandomize=True, max_examples=50, **SLOW)
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
