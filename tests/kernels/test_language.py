"""Kernels can be imported where Triton is not installed, and training falls back to torch's operations."""

import subprocess
import sys

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
import compress
from compress.errors import QuantizationError
from compress.kernels.triton.language import HAS_TRITON
assert not HAS_TRITON
x = torch.randn(2, 3, 8, 8)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3), torch.nn.GELU())
qmodel = compress.quantize(model.eval(), x, [x])
assert torch.equal(compress.fuse_for_training(qmodel)(x), qmodel(x))
try:
    compress.fuse_for_training(qmodel, kernels="triton")
except QuantizationError as error:
    print(error)
"""


def test_without_triton_kernels_are_imported_and_only_asking_for_them_is_refused():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Triton is not installed" in done.stdout
