"""Windows of images, resized: torch's operations against Pillow, and the kernel against them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from compress.kernels.resample import Window, resample
from tests.kernels.interpreter import interpreted


@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 40), st.integers(1, 30), st.integers(1, 30))
def test_parts_are_resized_as_pillow_does(seed, rows, columns, height, width):
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (rows + 5, columns + 7, 3), dtype=np.uint8)
    part = Image.fromarray(image).crop((4, 2, 4 + columns, 2 + rows)).resize((width, height), Image.Resampling.BILINEAR)
    window = Window(2, rows, height, 0, 4, columns, width, 0, seed % 2)
    found = resample([torch.from_numpy(image).permute(2, 0, 1).contiguous()], [window], (height, width))[0]
    found = found.flip(-1) if seed % 2 else found
    apart = np.abs(np.asarray(part, dtype=int) - found.permute(1, 2, 0).numpy())
    assert apart.max() <= 1


def test_the_kernel_computes_the_same_in_the_interpreter():
    assert interpreted("tests.kernels.interpreted_resample").splitlines() == ["6 windows"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_kernel_computes_what_torch_does():
    from tests.kernels.interpreted_resample import check

    check("cuda")
