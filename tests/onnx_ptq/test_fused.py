# Files that ONNX Runtime's own optimizers wrote, against the files that they were made from.

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnxruntime import GraphOptimizationLevel as Level
from onnxruntime.transformers.optimizer import optimize_model

import compress
from compress.errors import QuantizationError
from tests.networks import TinyResNet, with_statistics
from tests.onnx_ptq.files import attention, batches, export, gated_net, model_of, run, sqnr


def optimized(file, level):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level, options.log_severity_level = level, 3
    options.optimized_model_filepath = str(file.with_name(f"{file.stem}.optimized.onnx"))
    onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return file.with_name(f"{file.stem}.optimized.onnx")


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
    optimize_model(str(file), model_type="vit", num_heads=2, hidden_size=16, opt_level=0).save_model_to_file(
        str(tmp_path / "fused.onnx")
    )
    assert "SkipLayerNormalization" in {node.op_type for node in onnx.load(tmp_path / "fused.onnx").graph.node}
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
        options = {"batches": batches()} if call is compress.quantize_onnx else {}
        with pytest.raises(QuantizationError, match="ORT_ENABLE_EXTENDED"):
            call(file, out=tmp_path / "q.onnx", **options)
