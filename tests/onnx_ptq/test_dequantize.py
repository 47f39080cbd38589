# Files that ONNX Runtime's own tools quantized become float files again, which are compared on ONNX Runtime.

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnxruntime import GraphOptimizationLevel as Level
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from onnxruntime.transformers.optimizer import optimize_model

import compress
from compress.errors import QuantizationError
from tests.exact import optimized
from tests.networks import TinyResNet, with_statistics
from tests.onnx_models import onnx_model
from tests.onnx_ptq.files import attention, batches, export, gated_net, model_of, run, shuffled, sqnr, weights

NETWORKS = {"resnet": TinyResNet, "gated": gated_net, "attention": attention, "shuffled": shuffled}


class Reader(CalibrationDataReader):
    def __init__(self):
        self.left = [{"picture": x.numpy()} for x in batches(2)]

    def get_next(self):
        return self.left.pop() if self.left else None


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("float")
    torch.manual_seed(0)
    return {name: export(with_statistics(make()), folder / f"{name}.onnx") for name, make in NETWORKS.items()}


def ops_of(path):
    return {node.op_type for node in onnx.load(path).graph.node}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("form", QuantFormat)
@pytest.mark.parametrize("activations", ["QUInt8", "QInt8"])
def test_static_files_are_float_again(exported, tmp_path, name, form, activations):
    # Weights alone are rounded then; ReLUs that the tool left out are there again.
    options = {"per_channel": True, "activation_type": QuantType[activations], "weight_type": QuantType.QInt8}
    quantize_static(exported[name], tmp_path / "q.onnx", Reader(), quant_format=form, **options)
    again = compress.dequantize_onnx(tmp_path / "q.onnx")
    assert again == tmp_path / "q.float.onnx"
    x = batches(1, seed=7)[0].numpy()
    assert sqnr(run(exported[name], x), run(again, x)) > 45
    assert not any("Linear" in kind or "Integer" in kind for kind in ops_of(again))
    assert {t.data_type for t in onnx.load(again).graph.initializer} <= {TensorProto.FLOAT, TensorProto.INT64}


def test_dynamic_files_and_blocks_of_four_bits(exported, tmp_path):
    x, file = batches(1, seed=7)[0].numpy(), exported["attention"]
    quantize_dynamic(file, tmp_path / "dynamic.onnx", per_channel=True)
    made = MatMulNBitsQuantizer(onnx.load(file), block_size=16, is_symmetric=False, bits=4)
    made.process()
    made.model.save_model_to_file(str(tmp_path / "blocks.onnx"))
    again = compress.dequantize_onnx(tmp_path / "dynamic.onnx", tmp_path / "a.onnx")
    assert sqnr(run(file, x), run(again, x)) > 45
    again = compress.dequantize_onnx(tmp_path / "blocks.onnx", tmp_path / "b.onnx")
    assert sqnr(run(tmp_path / "blocks.onnx", x), run(again, x)) > 60  # the weights that the file stands for


@pytest.mark.parametrize("target", ["tensorrt", "openvino", "onnxruntime"])
def test_our_own_files_get_the_same_layers_again(exported, tmp_path, target):
    spec = compress.QuantSpec(target=target)
    first = compress.quantize_onnx(exported["gated"], batches(), spec=spec, out=tmp_path / "first.onnx")
    again = compress.dequantize_onnx(first, tmp_path / "again.onnx")
    second = compress.quantize_onnx(again, batches(), spec=spec, out=tmp_path / "second.onnx")
    assert [r.int8 for r in compress.audit_onnx(first).rows] == [r.int8 for r in compress.audit_onnx(second).rows]
    x = batches(1, seed=3)[0].numpy()
    assert sqnr(run(exported["gated"], x), run(second, x)) > sqnr(run(exported["gated"], x), run(first, x)) - 3


def test_integers_that_are_read_with_a_second_scale_and_zero_point(tmp_path):
    parts = {"s": np.float32(0.02), "z": np.uint8(120), "s2": np.float32(0.05), "z2": np.uint8(100)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["first"]),
        helper.make_node("DequantizeLinear", ["q", "s2", "z2"], ["second"]),
        helper.make_node("DequantizeLinear", ["q", "s2", "z"], ["third"]),
        helper.make_node("Concat", ["first", "second", "third"], ["y"], axis=1),
    ]
    onnx.save(onnx_model(nodes, {"x": [4, None]}, {"y": [4, None]}, parts, opset=17), tmp_path / "q.onnx")
    stripped = compress.dequantize_onnx(tmp_path / "q.onnx", tmp_path / "float.onnx")
    x = np.random.default_rng(0).uniform(-2, 2, (4, 9)).astype(np.float32)
    assert sqnr(run(tmp_path / "q.onnx", x), run(stripped, x)) > 35


def test_refusals(exported, tmp_path):
    with pytest.raises(QuantizationError, match="holds no quantizer"):
        compress.dequantize_onnx(exported["resnet"], tmp_path / "x.onnx")
    pair = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="quantize"),
        helper.make_node("Cast", ["q"], ["f"], name="cast", to=TensorProto.FLOAT),
        helper.make_node("Softmax", ["f"], ["y"], name="last"),
    ]
    onnx.save(model_of(pair, {"s": np.float32(0.1), "z": np.int8(0)}), tmp_path / "m.onnx")
    with pytest.raises(QuantizationError, match="cast .Cast. reads the integers 'q' themselves"):
        compress.dequantize_onnx(tmp_path / "m.onnx")


def test_operators_of_other_domains_run_with_their_library(tmp_path):
    library = pytest.importorskip("onnxruntime_extensions").get_library_path()
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="first"),
        helper.make_node("NegPos", ["a"], ["n", "p"], name="parts", domain="ai.onnx.contrib"),
        helper.make_node("Sub", ["p", "n"], ["s"], name="sum"),
        helper.make_node("Conv", ["s", "v"], ["y"], name="last"),
    ]
    constants = {"w": weights(4, 3, 3, 3), "v": weights(4, 4, 3, 3)}
    onnx.save(model_of(nodes, constants, shape=("n", 3, 8, 8), domains=("ai.onnx.contrib",)), tmp_path / "m.onnx")
    x = batches(1, size=8)[0]
    for ops, share in (((), 108 / 252), ((library,), 1.0)):
        done = compress.quantize_onnx(tmp_path / "m.onnx", [x], ops=ops, out=tmp_path / "q.onnx")
        assert compress.audit_onnx(done).int8_share == pytest.approx(share)
        found = compress.check_onnx(tmp_path / "m.onnx", done, x, target="tensorrt", ops=ops)
        assert ("its own library" in found.warning) == (not ops) and (found.written_db or 30) > 25
    assert compress.cast_onnx(tmp_path / "m.onnx", batches=[x], ops=[library]).sqnr_db > 50


def test_a_library_that_is_none_is_named(exported, tmp_path):
    (tmp_path / "lib.so").write_bytes(b"none")
    for name, match in (("gone.so", "gone.so: no such file"), ("lib.so", "no library of operators")):
        with pytest.raises(compress.errors.CompressError, match=match):
            compress.quantize_onnx(exported["resnet"], batches(), ops=[tmp_path / name])


def test_a_weight_in_blocks_is_what_the_reference_says(tmp_path):
    q, s = np.arange(-32, 32, dtype=np.int8).reshape(8, 8), np.linspace(0.1, 0.9, 16, dtype=np.float32).reshape(2, 8)
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "s"], ["w"], axis=0, block_size=4),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    model = model_of(nodes, {"q": q, "s": s}, opset=21)
    onnx.save(model, tmp_path / "m.onnx")
    graph = onnx.load(compress.dequantize_onnx(tmp_path / "m.onnx")).graph
    (weight,) = (numpy_helper.to_array(t) for t in graph.initializer)
    model.graph.output[0].name = "w"
    del model.graph.node[1]
    (expected,) = ReferenceEvaluator(model).run(None, {"x": np.zeros((2, 3, 8, 8), np.float32)})
    np.testing.assert_array_equal(weight, expected)


# Files that ONNX Runtime's own optimizers wrote, against the files that they were made from.


def domains(path):
    return {node.domain for node in onnx.load(path).graph.node}


@pytest.mark.parametrize("network", [TinyResNet, gated_net, attention])
def test_fused_operators_are_opened(tmp_path, network):
    file, x = export(with_statistics(network()), tmp_path / "float.onnx"), batches(1, seed=3)[0]
    fused = optimized(file, Level.ORT_ENABLE_EXTENDED)
    assert "com.microsoft" in domains(fused)
    quantized = compress.quantize_onnx(fused, batches(), out=tmp_path / "q.onnx")
    half = compress.cast_onnx(fused, tmp_path / "h.onnx", batches=batches())
    for path, least in ((quantized, 25), (half.path, 55)):
        assert domains(path) == {""}
        assert sqnr(run(file, x.numpy()), run(path, x.numpy())) > least
    plain = compress.audit_onnx(compress.quantize_onnx(file, batches(), out=tmp_path / "p.onnx"))
    assert sum(row.int8 for row in compress.audit_onnx(quantized).rows) == sum(row.int8 for row in plain.rows)


def test_norms_with_a_skip_are_opened(tmp_path):
    file, x = export(with_statistics(attention()), tmp_path / "float.onnx"), batches(1, seed=3)[0]
    fused = optimize_model(str(file), model_type="vit", num_heads=2, hidden_size=16, opt_level=0)
    fused.save_model_to_file(str(tmp_path / "fused.onnx"))
    assert "SkipLayerNormalization" in ops_of(tmp_path / "fused.onnx")
    half = compress.cast_onnx(tmp_path / "fused.onnx", tmp_path / "h.onnx", batches=batches())
    assert domains(half.path) == {""} and sqnr(run(file, x.numpy()), run(half.path, x.numpy())) > 55


@pytest.mark.parametrize(
    ("op", "attributes", "inputs"),
    [
        ("QuickGelu", {"alpha": 1.5}, ["x"]),
        ("Gelu", {}, ["x"]),
        ("FusedMatMul", {"alpha": 0.3}, ["x", "w"]),
        ("FusedConv", {"activation": "LeakyRelu", "activation_params": [0.2]}, ["x", "k", "b", "x"]),
        ("FusedConv", {"activation": "Clip", "activation_params": [0.0, 0.4]}, ["x", "k"]),
    ],
)
def test_each_is_what_onnx_runtime_computes(tmp_path, op, attributes, inputs):
    constants = {"w": np.eye(8, dtype=np.float32) * 2, "k": np.full((3, 3, 1, 1), 0.3, np.float32)}
    constants["b"] = np.float32([1, 2, 3])
    nodes = [
        helper.make_node(op, inputs, ["a"], name="fused", domain="com.microsoft", **attributes),
        helper.make_node("MatMul", ["a", "w"], ["y"], name="last"),
    ]
    path = tmp_path / "m.onnx"
    onnx.save(model_of(nodes, constants, domains=("com.microsoft",)), path)
    x = batches(1, size=8)[0].numpy()[:2]
    done = compress.cast_onnx(path, batches=[x])
    assert domains(done.path) == {""} and sqnr(run(path, x), run(done.path, x)) > 50


def test_the_layout_of_a_machine_is_refused(tmp_path):
    file = optimized(export(with_statistics(TinyResNet()), tmp_path / "float.onnx"), Level.ORT_ENABLE_ALL)
    if not any(domain.endswith("nchwc") for domain in domains(file)):
        pytest.skip("ONNX Runtime has no such layout on this processor")
    for call in (compress.quantize_onnx, compress.cast_onnx):
        with pytest.raises(QuantizationError, match="ORT_ENABLE_EXTENDED"):
            call(file, batches=batches(), out=tmp_path / "q.onnx")
