# FP8 and integers of 4, 6 and 8 bits up to ONNX; the oracles are ONNX's reference evaluator and torch's casts.

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

from compress import ActivationSpec, QuantSpec, Rule, WeightSpec, audit_onnx, build_engine, export_onnx, quantize
from compress.errors import ExportError, QuantizationError
from compress.quantization.numerics import QuantFormat, fake_quantize, quantize_tensor, scale_from_amax
from compress.quantization.sensitivity import sqnr
from tests.exact import compute, kinds_on_engine, session_options
from tests.networks import Net, network

X = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
E4M3 = QuantFormat(kind="e4m3")
WIDE = ActivationSpec(num_bits=16)
FP8 = {"weights": WeightSpec(kind="e4m3"), "activations": ActivationSpec(kind="e4m3", calibrator="max")}


@settings(max_examples=25)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20), st.floats(2**-6, 1024, width=32))
def test_e4m3_is_torchs_cast_saturated(values, amax):
    x, scale = torch.tensor(values), scale_from_amax(torch.tensor(amax), E4M3)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    x = torch.cat([x, every * scale, (every[1:] + every[:-1]) / 2 * scale, torch.tensor([1e6, -1e6])])
    q = quantize_tensor(x, scale, E4M3)
    assert q.dtype == torch.float8_e4m3fn
    expected = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(q.float(), expected.float())
    torch.testing.assert_close(fake_quantize(x, scale, E4M3), expected.float() * scale, rtol=0, atol=0)
    inside = x.abs() <= amax
    small = 2.0**-10 * scale  # half a step of its subnormal numbers
    assert bool(((fake_quantize(x, scale, E4M3) - x).abs() <= (x.abs() / 16 + small) * 1.0001)[inside].all())


def test_e4m3_gradient_passes_what_did_not_saturate():
    x = torch.tensor([-500.0, -448.0, 0.3, 448.0, 449.0], requires_grad=True)
    fake_quantize(x, torch.tensor(1.0), E4M3).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 1, 0]


CASES = {
    "w4": (QuantSpec(weights=WeightSpec(num_bits=4), activations=ActivationSpec(calibrator="max")), 21),
    "w4 below opset 21": (QuantSpec(weights=WeightSpec(num_bits=4), activations=ActivationSpec(calibrator="max")), 19),
    "w4 per tensor": (QuantSpec(weights=WeightSpec(num_bits=4, axis=None)), 21),
    "w6a6": (QuantSpec(weights=WeightSpec(num_bits=6), activations=ActivationSpec(num_bits=6, calibrator="max")), 19),
    "w4a4": (QuantSpec(weights=WeightSpec(num_bits=4), activations=ActivationSpec(num_bits=4, calibrator="max")), 21),
    "w8a16": (QuantSpec(target="onnxruntime", activations=WIDE), 19),
    "w8a12": (QuantSpec(target="litert", activations=ActivationSpec(num_bits=12)), 21),
    "fp8": (QuantSpec(**FP8), 19),
    "fp8, unsigned target": (QuantSpec(target="openvino", **FP8), 21),
}
TYPES = {"w4": ("int8", "int4"), "w4 below opset 21": ("int8", "int8"), "w4 per tensor": ("int8", "int4")}
TYPES |= {"w6a6": ("int8", "int8"), "w4a4": ("int8", "int4")}
TYPES |= {"w8a16": ("uint16", "int8"), "w8a12": ("int16", "int8")}
TYPES |= dict.fromkeys(("fp8", "fp8, unsigned target"), ("float8_e4m3fn", "float8_e4m3fn"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    # (what fake quantization returns, file) of a case, made once.
    kept, folder = {}, tmp_path_factory.mktemp("formats")

    def make(name):
        if name not in kept:
            spec, opset = CASES[name]
            qmodel = quantize(network(), X[:2], [X], spec=spec)
            path = export_onnx(qmodel, X[:2], folder / f"{len(kept)}.onnx", opset=opset)
            kept[name] = qmodel(X), path
        return kept[name]

    return make


@pytest.mark.parametrize("name", CASES)
def test_file_computes_what_fake_quantization_does(name, made):
    expected, path = made(name)
    found = ReferenceEvaluator(str(path)).run(None, {"input": X.numpy()})[0]
    assert sqnr(expected, torch.from_numpy(found)) > 60
    audit = audit_onnx(path)
    assert {(row.input_type, row.weight_type) for row in audit.rows} == {TYPES[name]}
    assert all(row.int8 == (row.input_type in {"int8", "uint8"}) for row in audit.rows)


@pytest.mark.parametrize("target", ["onnxruntime", "litert"])
def test_a_rule_of_sixteen_bits_widens_what_its_layer_reads_and_writes_alone(tmp_path, target):
    rules = (Rule(match="block1.conv2", activations=WIDE),)
    qmodel = quantize(network(), X[:2], [X], spec=QuantSpec(target=target, rules=rules))
    wide = [row for row in qmodel.placement.decisions if row.num_bits == 16]
    assert wide and all("16 bits for block1." in row.reason for row in wide)
    path = export_onnx(qmodel, X[:2], tmp_path / "model.onnx")
    types = {row.name: row.input_type for row in audit_onnx(path).rows}
    assert next(name for name, kind in types.items() if kind.endswith("int16")) == "/block1/conv2/Conv"
    assert set(types.values()) == ({"uint8", "uint16"} if target == "onnxruntime" else {"uint8", "int16"})
    expected = qmodel(X)
    (found,) = ort.InferenceSession(path, session_options()).run(None, {"input": X.numpy()})
    assert sqnr(expected, torch.from_numpy(found)) > 35
    with pytest.raises(ExportError, match="half precision does not hold"):
        export_onnx(qmodel, X[:2], tmp_path / "half.onnx", precision="fp16")


def test_int4_file_is_smaller_and_holds_the_same_integers(made):
    protos = [onnx.load(made(name)[1]) for name in ("w4", "w4 below opset 21")]
    sizes = []
    for proto, kind in zip(protos, (TensorProto.INT4, TensorProto.INT8), strict=True):
        weights = [t for t in proto.graph.initializer if t.data_type == kind and len(t.dims) > 1]
        sizes.append((len(weights), sum(len(t.raw_data) for t in weights)))
    assert sizes[0][0] == sizes[1][0] == 7 and 2 * sizes[0][1] - sizes[1][1] in range(8)  # odd sizes round up
    arrays = [
        sorted(
            (numpy_helper.to_array(t).astype(np.int8).ravel().tolist() for t in p.graph.initializer if len(t.dims) > 1),
        )
        for p in protos
    ]
    assert arrays[0] == arrays[1]


_READ = [(name, "openvino") for name in ("w4", "w6a6", "fp8")]
_READ += [(name, "onnxruntime") for name in ("w4", "w6a6", "fp8", "fp8, unsigned target")]


@pytest.mark.parametrize(("name", "engine"), _READ)
def test_engines_that_read_it_agree(name, engine, made):
    expected, path = made(name)
    (found,) = build_engine(path, engine).run({"input": X.numpy()}).values()
    assert sqnr(expected, torch.from_numpy(np.asarray(found))) > 25


def test_onnxruntime_says_that_it_computes_fp8_in_float(made):
    label = "onnxruntime (FP8 computed in float)"
    assert [build_engine(made(name)[1], "onnxruntime").info.label for name in ("fp8", "w4")] == [label, "onnxruntime"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (QuantSpec(weights=WeightSpec(kind="e4m3")), "both the same kind"),
        (QuantSpec(weights=WeightSpec(kind="e4m3"), activations=ActivationSpec(kind="e4m3")), "evenly spaced"),
        (QuantSpec(weights=WeightSpec(kind="e4m3", num_bits=4), activations=FP8["activations"]), "FP8 has 8"),
        (QuantSpec(rules=(Rule(match="conv1", weights=WeightSpec(kind="e4m3")),)), "rules.0"),
        (QuantSpec(rules=(Rule(match="block1.conv1", **FP8),)), "as integers and as FP8"),
    ],
)
def test_mixtures_are_refused(spec, words):
    with pytest.raises(QuantizationError, match=words):
        quantize(network(), X[:2], [X], spec=spec)


# INT32 biases: ONNX Runtime then runs matrix products in 8 bits, and computes what fake quantization does.

BIAS_X = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(0))


def block():
    torch.manual_seed(0)

    def run(net, x):
        x = x + net.b(torch.nn.functional.gelu(net.a(net.norm(x))))
        return net.fc(x.mean(1))

    return Net(run, norm=nn.LayerNorm(16), a=nn.Linear(16, 32), b=nn.Linear(32, 16), fc=nn.Linear(16, 4))


def written(tmp_path, target, precision="fp32"):
    spec = QuantSpec(target=target, activations=ActivationSpec(calibrator="max"))
    qmodel = quantize(block().eval(), BIAS_X, [BIAS_X], spec=spec)
    return qmodel, export_onnx(qmodel, BIAS_X, tmp_path / "model.onnx", precision=precision)


def test_all_products_run_in_8_bits_and_agree_with_fake_quantization(tmp_path, capfd):
    qmodel, path = written(tmp_path, "onnxruntime")
    ort.InferenceSession(str(path))
    assert capfd.readouterr() == ("", "")  # it warns of constants that nothing reads
    options = session_options()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.add_free_dimension_override_by_name("batch", 3)
    session = ort.InferenceSession(str(path), options)
    kinds = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert kinds.count("QGemm") + kinds.count("MatMulIntegerToFloat") == 3 and "Gemm" not in kinds
    (result,) = session.run(None, {"input": BIAS_X.numpy()})
    assert sqnr(qmodel(BIAS_X), torch.from_numpy(result)) > 40


def test_a_linear_layer_of_tokens_that_is_called_twice_runs_in_8_bits(tmp_path):
    model = Net(lambda net, x: net.fc(net.a(net.a(x).relu()).relu()), a=nn.Linear(16, 16), fc=nn.Linear(16, 4)).eval()
    x = torch.randn(3, 5, 16)
    qmodel = quantize(model, x, [x], spec=QuantSpec(target="onnxruntime"))
    path = export_onnx(qmodel, x, tmp_path / "model.onnx")
    kinds = kinds_on_engine(path)
    assert kinds.count("QGemm") + kinds.count("MatMulIntegerToFloat") == 3 and "FusedMatMul" not in kinds
    assert sqnr(qmodel(x), torch.from_numpy(compute(path, x.numpy()))) > 40


@pytest.mark.parametrize(("target", "precision"), [("openvino", "fp32"), ("tensorrt", "fp32"), ("onnxruntime", "fp16")])
def test_other_targets_and_precisions_keep_their_biases(tmp_path, target, precision):
    _, path = written(tmp_path, target, precision)
    types = {tensor.data_type for tensor in onnx.load(path).graph.initializer}
    assert onnx.TensorProto.INT32 not in types


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime"])
def test_biases_of_channels_that_are_nearly_zero_come_out(tmp_path, target, precision):
    # ONNX Runtime adds biases as INT32; beside weights of 1e-8 a bias of 1 came out as another number (6 dB).
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    with torch.no_grad():
        for layer, channel in ((model[0], 2), (model[2], 5), (model[5], 1)):
            layer.weight[channel] *= 1e-8
            layer.bias[channel] = 1.0
    x = torch.randn(8, 3, 8, 8)
    qmodel = quantize(model.eval(), x, [x], spec=QuantSpec(target=target))
    path = export_onnx(qmodel, x, tmp_path / "m.onnx", precision=precision)
    with build_engine(path, "onnxruntime") as engine, torch.no_grad():
        result = torch.from_numpy(engine.run({"input": x.numpy()})["logits"])
        assert sqnr(qmodel(x), result) > 40
        assert sqnr(model(x), result) > 30
