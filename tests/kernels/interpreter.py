"""Triton's interpreter, for the tests of kernels on machines without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def interpreted(module):
    """Output of a module's checks, in a process of its own: Triton decides at import whether it interprets."""
    pytest.importorskip("triton", minversion="3.7", reason="older interpreters cannot loop with NumPy 2.4")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
