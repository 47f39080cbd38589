# The oracles are torch's own fake_quantize operators, ONNX's reference evaluator and ONNX Runtime.

import copy
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import nn
from torchvision.models.swin_transformer import SwinTransformerBlock

import compress
from compress.errors import CalibrationError, QuantizationError
from compress.graph.attention import open_attention
from compress.graph.canonical import canonical_graph
from compress.quantization.numerics import (
    QuantFormat,
    amax_from_scale,
    fake_quantize,
    quantize_tensor,
    scale_from_amax,
    zero_of,
)
from compress.quantization.placement.insert import apply_placement, read_fx
from compress.quantization.placement.place import place
from tests.exact import open_session
from tests.onnx_models import onnx_model

INT8, UINT8, OFFSET = QuantFormat(), QuantFormat(signed=False), QuantFormat(offset=True)
WEIGHT = QuantFormat(axis=0, narrow=True)
GELU = QuantFormat(offset=True, lowest=-0.17)
INT16, UINT16, OFFSET16 = (QuantFormat(num_bits=16, **form) for form in ({}, {"signed": False}, {"offset": True}))

floats = st.floats(-1e4, 1e4, width=32)


def onnx_round_trip(x, scale, quant_format):
    kind = str(quant_format.dtype).removeprefix("torch.")
    attributes = {} if quant_format.axis is None else {"axis": quant_format.axis}
    zeros = np.full(scale.shape, int(zero_of(scale, quant_format)), kind)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], **attributes),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], **attributes),
    ]
    model = onnx_model(nodes, {"x": x.shape}, {"y": x.shape}, {"s": scale.numpy(), "z": zeros}, opset=21, ir_version=10)
    kind = getattr(TensorProto, kind.upper())
    model.graph.output.insert(0, helper.make_tensor_value_info("q", kind, x.shape))
    return model


@pytest.mark.parametrize("runner", ["reference", "onnxruntime"])
@given(
    values=st.lists(floats, min_size=1, max_size=20),
    amax=st.floats(2**-6, 1024, width=32),
    quant_format=st.sampled_from([INT8, UINT8, OFFSET, GELU, INT16, UINT16, OFFSET16]),
)
def test_same_integers_as_onnx(runner, values, amax, quant_format):
    x, scale = torch.tensor(values), scale_from_amax(torch.tensor(amax), quant_format)
    x = x.clamp(-1e9 * scale, 1e9 * scale)  # the reference computes in 32 bits, which larger ones overflow
    x = torch.cat(
        [x, scale * torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 127.5, -128.5, 32767.5, -32768.5, 65534.5])]
    )  # ties and the ends
    model = onnx_round_trip(x, scale, quant_format)
    evaluator = ReferenceEvaluator(model) if runner == "reference" else open_session(model)
    q, y = evaluator.run(None, {"x": x.numpy()})
    np.testing.assert_array_equal(quantize_tensor(x, scale, quant_format).numpy(), q)
    np.testing.assert_array_equal(fake_quantize(x, scale, quant_format).numpy(), y)


def test_per_channel_integers_as_onnx():
    x, scale = torch.randn(5, 3, 2, 2), torch.rand(5) * 0.1 + 1e-3
    q, y = ReferenceEvaluator(onnx_round_trip(x, scale, QuantFormat(axis=0))).run(None, {"x": x.numpy()})
    np.testing.assert_array_equal(quantize_tensor(x, scale, QuantFormat(axis=0)).numpy(), q)
    np.testing.assert_array_equal(fake_quantize(x, scale, QuantFormat(axis=0)).numpy(), y)


@given(st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=30), st.sampled_from([0.5, 1.0, 2.0, 0.25]))
def test_gradient_as_torchs_operator(values, scale):
    # A power of two as scale: torch multiplies by its inverse, and then both are exact.
    mine, theirs = (torch.tensor(values, requires_grad=True) for _ in range(2))
    out = fake_quantize(mine, torch.tensor(scale), INT8)
    reference = torch.fake_quantize_per_tensor_affine(theirs, scale, 0, -128, 127)
    torch.testing.assert_close(out, reference, rtol=0, atol=0)
    weights = torch.arange(len(values)) + 1.0
    (out * weights).sum().backward()
    (reference * weights).sum().backward()
    assert torch.equal(mine.grad, theirs.grad)


def test_per_channel_gradient_as_torchs_operator():
    x = torch.randn(4, 3, 3, 3) * 3
    scale = torch.tensor([0.03125, 0.0625, 0.015625, 0.5])
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = fake_quantize(mine, scale, WEIGHT)
    reference = torch.fake_quantize_per_channel_affine(theirs, scale, torch.zeros(4, dtype=torch.int32), 0, -127, 127)
    torch.testing.assert_close(out, reference, rtol=0, atol=0)
    out.square().sum().backward()
    reference.square().sum().backward()
    assert torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("bits", [*range(2, 9), 12, 16])
@pytest.mark.parametrize("signed", [True, False])
def test_ranges(bits, signed):
    quant_format, amax = QuantFormat(num_bits=bits, signed=signed), torch.tensor(3.0)
    assert quant_format.high - quant_format.low + 1 == 2**bits
    torch.testing.assert_close(fake_quantize(amax, scale_from_amax(amax, quant_format), quant_format), amax)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    x, scale = (torch.randn(1000) * 3).to(dtype), torch.tensor(0.0217)
    expected = fake_quantize(x.float(), scale, INT8).to(dtype)
    assert torch.equal(fake_quantize(x, scale, INT8), expected)


def test_autocast_does_not_round_what_sixteen_bits_hold():
    quantizer = compress.Quantizer(OFFSET16)
    quantizer.set_amax(torch.tensor(3.0))
    x = torch.randn(1000).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = quantizer(x.requires_grad_())
    found.sum().backward()
    steps = found.detach().double() / float(quantizer.scale)
    assert found.dtype == torch.float32 and bool(((steps - steps.round()).abs() < 0.01).all())
    assert torch.equal(x.grad, (x.detach().abs() <= 3).to(x.dtype)) and quantizer(x).dtype == torch.bfloat16


def test_types_of_what_is_quantized():
    scale = torch.tensor(0.1)
    assert [f.dtype for f in (INT8, UINT8, OFFSET)] == [torch.int8, torch.uint8, torch.uint8]
    assert [f.zero_point for f in (INT8, UINT8, OFFSET, QuantFormat(num_bits=4, offset=True))] == [0, 0, 128, 8]
    double, step = torch.tensor([0.25 + 1e-12, 0.75 - 1e-12], dtype=torch.float64), torch.tensor(0.5)  # float32: ties
    assert quantize_tensor(double, step, INT8).tolist() == [1, 1]
    found = fake_quantize(double, step, INT8)
    assert found.dtype == torch.float64 and found.tolist() == [0.5, 0.5]
    half = torch.tensor([1.0, -3.0], dtype=torch.bfloat16)
    assert quantize_tensor(half, scale, INT8).tolist() == [10, -30]


@given(amax=st.floats(2**-6, 1024, width=32), lowest=st.floats(-4, -(2**-8), width=32), bits=st.integers(2, 8))
def test_a_range_with_a_lowest_value_is_used_whole(amax, lowest, bits):
    # Both ends are within a step, 0.0 is exact, gradients are torch's, and the steps are never wider than without.
    form = QuantFormat(num_bits=bits, offset=True, lowest=lowest)
    scale = scale_from_amax(torch.tensor(amax), form)
    torch.testing.assert_close(amax_from_scale(scale, form), torch.tensor(amax))
    assert float(scale) <= amax / (2 ** (bits - 1) - 1)
    ends = torch.tensor([max(lowest, -amax), 0.0, amax])
    found = fake_quantize(ends, scale, form)
    assert float(found[1]) == 0 and bool(((found - ends).abs() <= scale * 1.001).all())
    x = torch.linspace(-2 * amax, 2 * amax, 41, requires_grad=True)
    zero, most = int(zero_of(scale, form)), 2**bits - 1
    theirs = torch.fake_quantize_per_tensor_affine(x, float(scale), zero, 0, most)
    (wanted,) = torch.autograd.grad(theirs.sum(), x)
    ours = fake_quantize(x, scale, form)
    (gradient,) = torch.autograd.grad(ours.sum(), x)
    far = ((x / scale).detach().frac().abs() - 0.5).abs() > 1e-3  # torch multiplies by 1 / scale: ties may differ
    torch.testing.assert_close(ours[far], theirs[far], rtol=1e-5, atol=1e-6)
    assert torch.equal(gradient[far], wanted[far])


def ready(amax=2.0):
    quantizer = compress.Quantizer(QuantFormat(), name="layer")
    quantizer.set_amax(torch.tensor(amax))
    return quantizer


NONE = (0.0, -1.0, float("nan"), float("inf"))
FORMS = [
    *(({"num_bits": bits}, "2 to 16") for bits in (1, 17)),
    *(({"kind": "e4m3", **form}, "E4M3 has 8 bits") for form in ({"num_bits": 4}, {"signed": False}, {"offset": True})),
    ({"lowest": 0.1, "offset": True}, "lowest is"),
    ({"lowest": -0.1}, "lowest is"),
    ({"lowest": -0.1, "offset": True, "axis": 0}, "lowest is"),
]
LAYER = compress.Quantizer(QuantFormat(), name="layer")
ROWS = compress.Quantizer(QuantFormat(axis=0), channels=3, name="layer")


@pytest.mark.parametrize(
    ("error", "call", "words"),
    [
        *((QuantizationError, partial(QuantFormat, **form), words) for form, words in FORMS),
        (CalibrationError, lambda: LAYER(torch.randn(3)), "layer has no ranges"),
        *((CalibrationError, partial(LAYER.set_amax, torch.tensor(bad)), "layer: amax is") for bad in NONE),
        *((CalibrationError, partial(ROWS.set_amax, torch.tensor([1.0, bad, 2.0])), "1 of 3 channels") for bad in NONE),
        (CalibrationError, lambda: LAYER.set_amax(torch.ones(2)), r"\(2,\), expected \(\)"),
    ],
)
def test_forms_and_ranges_that_are_none_are_refused(error, call, words):
    with pytest.raises(error, match=words):
        call()


def test_off_is_the_identity():
    quantizer, x = ready(), torch.randn(5)
    quantizer.enabled = False
    assert quantizer(x) is x


def test_copies_pickles_and_loads():
    quantizer, x = ready(1.5), torch.randn(50)
    fresh = compress.Quantizer(QuantFormat())
    fresh.load_state_dict(quantizer.state_dict())
    for twin in (copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer)), fresh):
        assert torch.equal(twin(x), quantizer(x))


def test_loading_an_uncalibrated_state_leaves_it_uncalibrated():
    fresh = compress.Quantizer(QuantFormat(), name="layer")
    fresh.load_state_dict(compress.Quantizer(QuantFormat()).state_dict())
    with pytest.raises(CalibrationError):
        fresh(torch.ones(1))


# Quantizers live where their model does: ranges a channel on another device fail in the first forward pass.

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


def test_quantizers_are_inserted_on_the_device_of_the_model():
    # `meta` represents any device that is not the CPU; nothing can be computed there, so placement is done before.
    graph = canonical_graph(network(), torch.zeros(1, 3, 8, 8))
    placement = place(read_fx(graph), compress.QuantSpec())
    apply_placement(graph.to("meta"), placement)
    assert len(list(graph.buffers())) == len(placement.weights) + len(placement.activations)
    assert {buffer.device.type for buffer in graph.buffers()} == {"meta"}


def windows():
    torch.manual_seed(0)
    return SwinTransformerBlock(16, 2, [4, 4], [2, 2]).eval()


def test_masks_of_shifted_windows_are_made_on_the_device_of_the_model():
    graph = compress.trace(windows(), torch.zeros(1, 8, 8, 16)).to("meta")
    assert open_attention(graph)
    assert {buffer.device.type for buffer in graph.buffers()} == {"meta"}


@gpu
def test_attention_in_windows_is_quantized_on_a_gpu():
    x = torch.randn(2, 8, 8, 16, device="cuda")
    assert compress.quantize(windows().cuda(), x, [x])(x).isfinite().all()


@gpu
@pytest.mark.parametrize("batches_on", ["cpu", "cuda"])
def test_a_model_on_a_gpu_is_quantized_there_and_agrees_with_the_cpu(batches_on):
    x = torch.randn(16, 3, 16, 16)
    spec = compress.QuantSpec(adaround=compress.AdaRoundSpec(steps=5), bias_correction="empirical")
    qmodel = compress.quantize(network().cuda(), x[:2].cuda(), [x.to(batches_on)], spec=spec)
    assert {t.device.type for t in (*qmodel.buffers(), *qmodel.parameters())} == {"cuda"}
    plain = compress.quantize(network(), x[:2], [x])
    on_gpu = compress.quantize(network().cuda(), x[:2].cuda(), [x.to(batches_on)])
    for name, amax in plain.named_buffers():
        torch.testing.assert_close(on_gpu.get_buffer(name).cpu(), amax, rtol=1e-3, atol=0)
