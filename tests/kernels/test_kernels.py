# Kernels against torch, numpy, Pillow and float64; those of Triton in its interpreter, or on a GPU.

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from compress.kernels.epilogue import Epilogue
from compress.kernels.fake_quantize import fused_quantize
from compress.kernels.memory_format import pack, unpack
from compress.kernels.resample import Window, resample
from compress.kernels.triton.conv_int8 import stem_filter, stem_fits, stem_image
from compress.kernels.triton.depthwise import fits
from compress.kernels.triton.weights import written_on_device
from tests.kernels.float64 import GPU_CASES, check_depthwise
from tests.kernels.interpreter import interpreted


@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=4),
    last=st.booleans(),
    unsigned=st.booleans(),
    bounds=st.sampled_from([(-math.inf, math.inf), (0.0, math.inf), (0.0, 6.0)]),
    has=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_one_operation_is_torchs_own_chain(shape, last, unsigned, bounds, has, seed):
    # Against torch's ReLU, ReLU6 and fake quantization; the scale is a power of two, as theirs multiplies by 1 / s.
    torch.manual_seed(seed)
    y = (4 * torch.randn(shape, dtype=torch.float32)).requires_grad_()
    values = y.contiguous(memory_format=torch.channels_last) if last and y.dim() == 4 else y
    bias = torch.randn(shape[1], requires_grad=True) if has[0] else None
    residual = torch.randn(shape, requires_grad=True) if has[1] else None
    low, high = (0, 255) if unsigned else (-128, 127)
    scale = 2.0**-6 if unsigned else 2.0**-5
    epilogue = Epilogue(low, high, *bounds, None, 1)
    result = fused_quantize(values, torch.tensor(scale * high), epilogue, bias=bias, residual=residual)
    x = y if bias is None else y + bias.view([-1 if i == 1 else 1 for i in range(y.dim())])
    x = x if residual is None else x + residual
    x = {(0.0, math.inf): F.relu, (0.0, 6.0): F.relu6}.get(bounds, lambda t: t)(x)
    expected = torch.fake_quantize_per_tensor_affine(x, scale, 0, low, high)
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    inputs = [t for t in (y, bias, residual) if t is not None]
    weights = torch.randn(shape)
    torch.testing.assert_close(
        torch.autograd.grad((result * weights).sum(), inputs),
        torch.autograd.grad((expected * weights).sum(), inputs),
        rtol=1e-05,
        atol=1e-05,
    )


@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=4), last=st.booleans(), seed=st.integers(0, 99))
def test_bits_are_numpys_in_memory_order(shape, last, seed):
    torch.manual_seed(seed)
    bits = torch.rand(shape) > 0.5
    if last and len(shape) == 4:
        bits = bits.contiguous(memory_format=torch.channels_last)
    stored = np.lib.stride_tricks.as_strided(bits.numpy(), (bits.numel(),), (1,))
    packed = pack(bits)
    assert np.array_equal(packed.numpy(), np.packbits(stored, bitorder="little"))
    assert torch.equal(unpack(packed, bits), bits)


@pytest.mark.parametrize("kernels", ["fake_quantize", "learned", "batch_norm", "conv", "resample"])
def test_triton_kernels_compute_the_same_in_the_interpreter(kernels):
    interpreted(f"tests.kernels.interpreted_{kernels}")


def test_a_table_written_on_the_device_holds_addresses_of_64_bits():
    addresses = [(1 << 47) + 16 * i for i in range(130)] + [0, 1]
    assert written_on_device(addresses, torch.device("cpu")).tolist() == addresses


# Kernels of learned ranges; their gradients against LSQ's definition are in tests/quantization/test_learned.py.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_kernels_compute_what_torch_does():
    from tests.kernels.interpreted_learned import cases, check

    for case in cases():
        check(*case, device="cuda")


# Batch norm, activation and quantizer in one operation.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_kernels_compute_what_float64_does():
    from tests.kernels.interpreted_batch_norm import (
        BOUNDS,
        DTYPES,
        FORMATS,
        GPU_SHAPES,
        check,
        check_a_mean_far_from_zero,
    )

    for i, (shape, dtype) in enumerate(itertools.product(GPU_SHAPES, DTYPES)):
        check(shape, dtype, BOUNDS[i % 3], i % 4 != 3, FORMATS[i % 2], "cuda")
    check_a_mean_far_from_zero("cuda")


def test_the_kernels_compile_for_a_gpu_that_is_not_here():
    pytest.importorskip("triton")
    from compress.kernels.epilogue import Epilogue
    from compress.kernels.triton.ahead import compile_requests, recorded
    from compress.kernels.triton.batch_norm import Running, batch_norm_quantize

    x = torch.zeros(8, 96, 28, 28, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight, bias = torch.ones(96, requires_grad=True), torch.zeros(96, requires_grad=True)
    with recorded() as recording:
        running = Running(torch.zeros(96), torch.ones(96), 0.1)
        y, *_ = batch_norm_quantize(
            x.requires_grad_(), weight, bias, weight.detach()[0], running, 1e-5, Epilogue(-128, 127, 0.0)
        )
        y.sum().backward()
    assert [request.name for request in recording] == [
        "sums_kernel",
        "statistics_kernel",
        "forward_kernel",
        "backward_kernel",
        "backward_kernel",
    ]
    found = compile_requests(list(recording), (9, 0), jobs=1)
    assert found == [""] * 5


# Convolutions on INT8 codes: sums are exact, and the epilogue rounds as the plain path does.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_it_computes_what_float64_does():
    from tests.kernels.interpreted_conv import CASES, check, check_stem

    for case in CASES:
        check(case, "cuda")
    check_stem("cuda")


@given(
    taps=st.integers(1, 9),
    padding=st.integers(0, 4),
    channels=st.integers(1, 4),
    height=st.integers(9, 20),
    width=st.integers(9, 20),
)
def test_a_stem_on_blocks_of_pixels_is_the_same_convolution(taps, padding, channels, height, width):
    generator = torch.Generator().manual_seed(taps)
    x = torch.randint(-128, 128, (2, channels, height, width), dtype=torch.int8, generator=generator)
    weight = torch.randint(-127, 128, (3, channels, taps, taps), dtype=torch.int8, generator=generator)
    expected = F.conv2d(x.double(), weight.double(), stride=2, padding=padding)
    result = F.conv2d(stem_image(x, taps, padding).double(), stem_filter(weight, padding).double())
    assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("shape", "stride", "padding", "dilation", "fits"),
    [
        ((64, 3, 7, 7), 2, 3, 1, True),
        ((32, 3, 3, 3), 2, 1, 1, True),
        ((64, 3, 3, 3), 1, 1, 1, False),
        ((64, 5, 7, 7), 2, 3, 1, False),
        ((64, 3, 7, 5), 2, 3, 1, False),
        ((64, 3, 7, 7), 2, 3, 2, False),
    ],
)
def test_which_first_layers_are_stems(shape, stride, padding, dilation, fits):
    pairs = [(n, n) for n in (stride, padding, dilation)]
    assert stem_fits(torch.empty(shape), *pairs) is fits


# Depthwise convolutions of training; Triton's interpreter computes them with the convolutions on codes.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu_they_compute_what_float64_does(dtype, compiled):
    for case in GPU_CASES[:1] if compiled else GPU_CASES:
        check_depthwise(case, dtype, "cuda", compiled)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"weight": (8, 1, 5, 5), "padding": (2, 2)}, False),
        ({"weight": (8, 2, 7, 7)}, False),
        ({"weight": (16, 1, 7, 7)}, False),
        ({"padding": (2, 3)}, False),
        ({"stride": (2, 1)}, False),
        ({"dilation": (1, 2)}, False),
        ({"x": torch.empty(2, 8, 9, 9)}, False),
    ],
)
def test_which_convolutions_fit(change, expected):
    case = {
        "x": torch.empty(2, 8, 9, 9).contiguous(memory_format=torch.channels_last),
        "weight": (8, 1, 7, 7),
        "dtype": torch.bfloat16,
        "stride": (1, 1),
        "padding": (3, 3),
        "dilation": (1, 1),
    } | change
    assert fits(case.pop("x"), torch.empty(case.pop("weight")), **case) is expected


# Windows of images, resized: torch's operations against Pillow, and the kernel against them.


@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(1, 40), st.integers(1, 30), st.integers(1, 30))
def test_parts_are_resized_as_pillow_does(seed, rows, columns, height, width):
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (rows + 5, columns + 7, 3), dtype=np.uint8)
    part = Image.fromarray(image).crop((4, 2, 4 + columns, 2 + rows)).resize((width, height), Image.Resampling.BILINEAR)
    window = Window(2, rows, height, 0, 4, columns, width, 0, seed % 2)
    found = resample([torch.from_numpy(image).permute(2, 0, 1).contiguous()], [window], (height, width))[0]
    found = found.flip(-1) if seed % 2 else found
    assert np.abs(np.asarray(part, dtype=int) - found.permute(1, 2, 0).numpy()).max() <= 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_kernel_computes_what_torch_does():
    from tests.kernels.interpreted_resample import check

    check("cuda")


# Kernels can be imported where Triton is not installed, and training falls back to torch's operations.

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
import compress
from compress.errors import QuantizationError
from compress.kernels.triton.launch import HAS_TRITON
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
