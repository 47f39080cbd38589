# OpenVINO and ONNX Runtime: the same results as ONNX's own reference evaluator, the same refusals.

import ctypes
import subprocess
import sys
import warnings

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import compress
from compress import CompressWarning, build_engine
from compress.engines import onnxruntime as engine_of_onnx_runtime
from compress.engines import openvino as engine_of_openvino
from compress.errors import EngineError, EngineUnavailableError
from compress.export.openvino import to_unsigned
from compress.support import process
from tests.engines.models import classifier, images, quantized_classifier, write
from tests.exact import compute, on_engine
from tests.onnx_models import onnx_model

ENGINES = ("openvino", "onnxruntime")
both = pytest.mark.parametrize("name", ENGINES)


# A sum that ends between two steps may round the other way; the mean of 64 pixels moves by less than a step.
NEAR, STEP = {"rtol": 1e-4, "atol": 1e-5}, {"atol": 20 / 255}


def assert_reference(path, name, x, tolerance, *, computed=None, **options):
    # An engine returns what ONNX's reference evaluator computes of a file, or of another file of the same network.
    (expected,) = ReferenceEvaluator(str(computed or path)).run(None, {"input": x})
    with build_engine(path, name, **options) as engine:
        results = engine.run({"input": x})
        assert list(results) == ["logits"]
        np.testing.assert_allclose(results["logits"], expected, **tolerance)
        return engine.info


@both
@pytest.mark.parametrize("batch_size", [None, 2])
def test_results_are_the_reference_evaluators(tmp_path, name, batch_size):
    options = {"batch_size": batch_size, "precision": "f32", "threads": 1}
    assert_reference(classifier(tmp_path / "m.onnx"), name, images(), NEAR, **options)


@both
def test_a_quantized_file_gives_the_reference_results(tmp_path, name):
    assert_reference(quantized_classifier(tmp_path / "q.onnx"), name, images(4), STEP, batch_size=4, precision="f32")


@pytest.mark.parametrize(
    ("flags", "saturates"),
    [
        ("fpu sse4_1 avx2 fma", True),  # Zen 3, Coffee Lake
        ("avx2 avx512f avx512bw avx512vl", True),  # Skylake-SP
        ("avx2 avx512f avx512_vnni", False),  # Ice Lake, Zen 4
        ("avx2 avx_vnni", False),  # Alder Lake
        ("asimd asimddp i8mm", False),  # ARM adds in 32 bits
    ],
)
def test_processors_whose_sums_of_bytes_saturate_are_known(monkeypatch, flags, saturates):
    monkeypatch.setattr(process, "read_fact", lambda path: f"processor : 0\nflags : {flags}\n")
    assert process.sums_bytes_in_16_bits() == saturates


def test_without_vnni_weights_are_unsigned_and_the_results_the_same(tmp_path, monkeypatch):
    path = quantized_classifier(tmp_path / "q.onnx")
    monkeypatch.setattr(engine_of_onnx_runtime, "sums_bytes_in_16_bits", lambda: True)
    for fuse in ("yes", "no"):
        assert assert_reference(path, "onnxruntime", images(4), STEP, fuse=fuse).options["weights"] == "u8"


TINY_SCALE = """
<ir_version: 9, opset_import: ["" : 19]> g (float[N, 8] x) => (float[N, 8] y) {
  s = Constant <value = float {1e-10}> ()
  n = Neg (x)
  c = Clip (n, low, high)
  q = QuantizeLinear (c, s, z)
  y = DequantizeLinear (q, s, z)
}
"""


@both
def test_a_clip_before_a_tiny_scale_is_computed(tmp_path, name):
    path = write(tmp_path / "q.onnx", TINY_SCALE, {"low": np.float32(0), "high": np.float32(6), "z": np.int8(0)})
    x = np.linspace(-1e-8, 1e-8, 8, dtype=np.float32)[None]
    expected = ReferenceEvaluator(str(path)).run(None, {"x": x})[0]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        engine = build_engine(path, name, precision="f32")
    assert ["ClipQuantRewrite" in str(one.message) for one in seen] == [True] * (name == "onnxruntime")
    np.testing.assert_allclose(engine.run({"x": x})["y"], expected, atol=2e-10)


@pytest.mark.parametrize(
    ("nodes", "read"),
    [
        ("r = Reshape (d, shape)", "r"),
        ("r = Reshape (d, shape) t = Transpose (r) w = Relu (t)", "t"),
        ("r = Reshape (d, shape) w = Relu (r)", "w"),
        ("r = Reshape (d, shape)", "d"),
    ],
)
def test_what_an_if_reads_behind_a_pair_ends_no_process(tmp_path, nodes, read):
    text = f"""<ir_version: 9, opset_import: ["" : 19]> g (float[1, 4] x, bool c) => (float y)
        <float s = {{0.05}}, int8 z = {{0}}, int64[2] shape = {{1, 4}}> {{
        q = QuantizeLinear (x, s, z) d = DequantizeLinear (q, s, z) {nodes}
        y = If (c) <then_branch = t1 () => (float a) {{ a = ReduceSum <keepdims = 0> ({read}) }},
                    else_branch = e1 () => (float b) {{ b = ReduceMax <keepdims = 0> ({read}) }}> }}"""
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    feed = {"x": np.array([[1, 2, -3, 5]], np.float32), "c": np.array(True)}
    (expected,) = ReferenceEvaluator(str(path)).run(None, feed)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with build_engine(path, "onnxruntime") as engine:
            np.testing.assert_allclose(engine.run(feed)["y"], expected)
    assert any("QDQPropagationTransformer" in str(one.message) for one in seen) == (read in "rt")


@pytest.mark.parametrize("largest", [64, 65])
def test_openvino_warns_of_weights_that_saturate_without_vnni(tmp_path, monkeypatch, largest):
    path = quantized_classifier(tmp_path / "q.onnx")
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.INT8 and len(tensor.dims) > 1:
            values = onnx.numpy_helper.to_array(tensor)
            cut = np.sign(values) * np.minimum(np.abs(values.astype(int)), largest)
            cut.flat[0] = -largest
            tensor.CopyFrom(onnx.numpy_helper.from_array(cut.astype(np.int8), tensor.name))
    onnx.save(model, path)
    monkeypatch.setattr(engine_of_openvino, "sums_bytes_in_16_bits", lambda: True)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        build_engine(path, "openvino")
    assert [w.category for w in seen if "num_bits: 7" in str(w.message)] == [CompressWarning] * (largest > 64)


@both
def test_results_stay_as_they_are_after_the_next_run(tmp_path, name):
    engine = build_engine(classifier(tmp_path / "m.onnx"), name, precision="f32")
    first = engine.run({"input": images(seed=1)})["logits"]
    kept = first.copy()
    engine.run({"input": images(seed=2)})
    np.testing.assert_array_equal(first, kept)


@both
def test_what_an_engine_says_of_itself(tmp_path, name):
    path = classifier(tmp_path / "m.onnx", metadata={"compress.labels": '["a"]', "other": "text"})
    dynamic, fixed = build_engine(path, name), build_engine(path, name, batch_size=3, threads=1)
    assert dynamic.metadata == {"compress.labels": '["a"]', "other": "text"}
    assert [(t.name, t.dtype, t.shape) for t in dynamic.inputs] == [("input", "float32", (-1, 3, 8, 8))]
    assert [(t.name, t.dtype, t.shape) for t in dynamic.outputs] == [("logits", "float32", (-1, 5))]
    assert (fixed.inputs[0].shape, fixed.outputs[0].shape) == ((3, 3, 8, 8), (3, 5))
    assert (fixed.info.engine, fixed.info.path, fixed.info.device) == (name, str(path), "CPU")
    assert "1" in fixed.info.options.values()


def test_openvino_says_which_float_precision_ran(tmp_path):
    path = classifier(tmp_path / "m.onnx")
    forced, own = build_engine(path, "openvino", precision="f32"), build_engine(path, "openvino")
    assert (forced.info.label, forced.info.float_precision) == ("openvino (f32)", "f32")
    assert own.info.label == f"openvino ({own.info.float_precision})"
    kinds = {layer.precision for layer in own.runtime_layers() if layer.kind == "Convolution"}
    assert kinds == {own.info.float_precision}


def test_onnxruntime_says_f32_only_of_files_that_are(tmp_path):
    info = build_engine(classifier(tmp_path / "m.onnx"), "onnxruntime").info
    assert (info.float_precision, info.label) == ("f32", "onnxruntime")
    half = """
    <ir_version: 8, opset_import: ["" : 19]>
    half (float[batch, 4] input) => (float[batch, 4] logits) {
        short = Cast<to = 10>(input)
        twice = Add(short, short)
        logits = Cast<to = 1>(twice)
    }
    """
    with pytest.raises(EngineError, match="export it in that precision"):
        build_engine(write(tmp_path / "h.onnx", half, {}), "onnxruntime", precision="f32")


def test_openvino_runtime_layers_show_the_int8_convolution(tmp_path):
    engine = build_engine(quantized_classifier(tmp_path / "q.onnx"), "openvino", batch_size=1)
    convolutions = [layer for layer in engine.runtime_layers() if layer.kind == "Convolution"]
    assert [layer.precision in {"i8", "u8"} for layer in convolutions] == [True]
    assert not [layer for layer in engine.runtime_layers() if layer.kind == "Const"]
    assert any(layer.original_names for layer in convolutions)
    with pytest.raises(EngineError, match="does not report"):
        build_engine(tmp_path / "q.onnx", "onnxruntime").runtime_layers()


@both
def test_outputs_have_the_files_names_and_order(tmp_path, name):
    text = """
    <ir_version: 8, opset_import: ["" : 19]>
    two (float[batch, 2] second, float[batch, 2] first) => (float[batch, 2] zeta, float[batch, 2] alpha) {
        alpha = Sub(second, first)
        zeta = Identity(alpha)
    }
    """
    engine = build_engine(write(tmp_path / "m.onnx", text, {}), name, precision="f32")
    one, two = np.ones((1, 2), np.float32), np.full((1, 2), 2, np.float32)
    results = engine.run({"first": one, "second": two})
    assert [t.name for t in engine.inputs] == ["second", "first"]
    assert list(results) == ["zeta", "alpha"]
    np.testing.assert_array_equal(results["zeta"], one)
    np.testing.assert_array_equal(results["alpha"], one)


@both
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "missing input input"),
        ({"imput": images()}, "did you mean 'input'"),
        ({"input": images(), "more": images()}, "unknown input 'more'"),
        ({"input": images().astype(np.float64)}, "is float64; the engine takes float32"),
        ({"input": images()[:, :2]}, r"shape \(2, 2, 8, 8\); the engine takes \(2, 3, 8, 8\)"),
        ({"input": images(3)}, r"shape \(3, 3, 8, 8\)"),
        ({"input": images()[0]}, r"shape \(3, 8, 8\)"),
        ({"input": images().tolist()}, "give a numpy array"),
        (images(), r"inputs is a ndarray: give arrays by name \(input\)"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(tmp_path, name, inputs, message):
    engine = build_engine(classifier(tmp_path / "m.onnx"), name, batch_size=2)
    with pytest.raises(EngineError, match=message):
        engine.run(inputs)


@both
def test_strided_inputs_are_taken(tmp_path, name):
    engine = build_engine(classifier(tmp_path / "m.onnx"), name, precision="f32")
    strided = images(4)[::2]
    expected = engine.run({"input": strided.copy()})["logits"]
    np.testing.assert_array_equal(engine.run({"input": strided})["logits"], expected)


@both
@pytest.mark.parametrize("damage", ["missing", "folder", "empty", "text", "truncated", "headless"])
def test_bad_files_are_refused_by_name(tmp_path, name, damage):
    path = tmp_path / "model.onnx"
    whole = classifier(tmp_path / "whole.onnx").read_bytes()
    if damage == "folder":
        path.mkdir()
    elif damage == "headless":
        onnx.save(helper.make_model(helper.make_graph([], "g", [], [])), str(path))
    elif damage != "missing":
        path.write_bytes({"empty": b"", "text": b"not a model", "truncated": whole[: len(whole) // 2]}[damage])
    with pytest.raises(EngineError, match="model.onnx"):
        build_engine(path, name)


@both
def test_a_model_in_the_place_of_a_file_is_refused(name):
    model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    for call in (
        lambda: build_engine(model, name),
        lambda: compress.audit_onnx(model),
        lambda: compress.audit_engine(model),
        lambda: compress.check_onnx(model, "q.onnx", x, target=name),
        lambda: compress.quantize_onnx(model, [x]),
        lambda: compress.from_onnx(None),
        lambda: compress.load(model),
        lambda: compress.export_onnx(model, x, model),
    ):
        with pytest.raises(compress.CompressError, match=r"a (Linear|NoneType) was given where a path is wanted"):
            call()


@pytest.mark.parametrize("part", ["opset import", "IR version"])
def test_a_file_that_lacks_a_part_is_refused_by_its_name(tmp_path, part):
    model = onnx.load(classifier(tmp_path / "m.onnx"))
    model.ClearField("opset_import" if part == "opset import" else "ir_version")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    for read in (lambda p: build_engine(p, "openvino"), compress.from_onnx):
        with pytest.raises(compress.CompressError, match=rf"m\.onnx: not a whole ONNX model \(it has no {part}\)"):
            read(tmp_path / "m.onnx")


@both
def test_an_unknown_operator_is_refused_by_file(tmp_path, name):
    node = helper.make_node("Blend", ["input"], ["logits"], domain="some.where")
    model = onnx_model([node], {"input": [1]}, {"logits": [1]}, ir_version=8, domains=["some.where"])
    onnx.save(model, tmp_path / "odd.onnx")
    with pytest.raises(EngineError, match=r"odd\.onnx.*Blend"):
        build_engine(tmp_path / "odd.onnx", name)


@both
def test_a_fixed_batch_is_not_changed(tmp_path, name):
    path = classifier(tmp_path / "m.onnx", batch=1)
    assert build_engine(path, name, batch_size=1).inputs[0].shape == (1, 3, 8, 8)
    with pytest.raises(EngineError, match="export it with a dynamic batch"):
        build_engine(path, name, batch_size=4)


@both
def test_a_closed_engine_says_so(tmp_path, name):
    with build_engine(classifier(tmp_path / "m.onnx"), name) as engine:
        pass
    with pytest.raises(EngineError, match="closed"):
        engine.run({"input": images()})


def test_devices_and_providers_that_are_not_here(tmp_path):
    path = classifier(tmp_path / "m.onnx")
    with pytest.raises(EngineUnavailableError, match="no device 'TPU'"):
        build_engine(path, "openvino", device="TPU")
    with pytest.raises(EngineUnavailableError, match="did you mean 'CPUExecutionProvider'"):
        build_engine(path, "onnxruntime", provider="CPUExecutionProvidr")
    assert build_engine(path, "onnxruntime", provider="CPUExecutionProvider").info.device == "CPU"
    with pytest.raises(EngineError, match="did you mean 'bf16'"):
        build_engine(path, "openvino", precision="bf161")


def test_openvino_reads_its_own_format(tmp_path):
    openvino = pytest.importorskip("openvino")
    path, own = classifier(tmp_path / "m.onnx"), tmp_path / "m.xml"
    openvino.save_model(openvino.Core().read_model(str(path)), str(own), compress_to_fp16=False)
    assert_reference(own, "openvino", images(), NEAR, computed=path, batch_size=2, precision="f32")


# OpenVINO and signed activations that are concatenated: the oracle is ONNX Runtime without optimizations.

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 8, 12, 12)).astype(np.float32)


def joined():
    init = {
        "s": np.float32(0.03),
        "s2": np.float32(0.02),
        "z": np.int8(0),
        "z2": np.int8(-3),
        "q": RNG.integers(-127, 128, (8, 16, 3, 3)).astype(np.int8),
        "ws": np.full(8, 0.005, np.float32),
        "wz": np.zeros(8, np.int8),
    }
    node = helper.make_node
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["aq"]),
        node("DequantizeLinear", ["aq", "s", "z"], ["a"]),
        node("QuantizeLinear", ["x", "s2", "z2"], ["bq"]),
        node("DequantizeLinear", ["bq", "s2", "z2"], ["b"]),
        node("Concat", ["a", "b"], ["c"], axis=1),
        node("DequantizeLinear", ["q", "ws", "wz"], ["w"], axis=0),
        node("Conv", ["c", "w"], ["y"], pads=[1] * 4),
    ]
    return onnx_model(nodes, {"x": ["batch", 8, 12, 12]}, {"y": ["batch", 8, 12, 12]}, init)


@pytest.mark.parametrize("external", [False, True])
def test_openvino_computes_what_the_file_says(tmp_path, external):
    pytest.importorskip("openvino")
    model, path = joined(), tmp_path / "joined.onnx"
    expected = compute(model, X, optimize=False)
    onnx.save(model, path, save_as_external_data=external, size_threshold=0, location="weights")
    found = on_engine(path, "openvino", X, batch_size=2, precision="f32").numpy()
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_integers_that_other_nodes_read_stay_signed():
    model = joined()
    model.graph.node.append(helper.make_node("Cast", ["aq"], ["kept"], to=TensorProto.INT32))
    model.graph.output.append(helper.make_tensor_value_info("kept", TensorProto.INT32, None))
    to_unsigned(model)
    assert next(n.input[2] for n in model.graph.node if n.op_type == "QuantizeLinear") == "z"


# Engines and signals: a process that has freed OpenVINO's models still survives a signal with a handler.

PROGRAM = """
import signal, subprocess, sys
from compress.engines import build_engine

signal.signal(signal.SIGCHLD, lambda *_: None)
engines = [build_engine(sys.argv[1], "openvino") for _ in range(2)]
while engines:
    engines.pop(0)
subprocess.run(["true"], check=True)
print("alive")
"""


def signal_stack():
    # Return this thread's stack from sigaltstack(2) as bytes: pointer, flags and size.
    stack = ctypes.create_string_buffer(24)
    ctypes.CDLL(None).sigaltstack(None, stack)
    return stack.raw


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="alternate signal stacks are looked at on Linux only")
def test_models_freed_in_the_order_of_their_making_leave_no_dead_stack(tmp_path):
    path = classifier(tmp_path / "m.onnx")
    before = signal_stack()
    engines = [build_engine(path, "openvino") for _ in range(2)]
    assert signal_stack() == before
    while engines:
        engines.pop(0)
        assert signal_stack() == before


def test_a_signal_after_that_kills_nobody(tmp_path):
    path = classifier(tmp_path / "m.onnx")
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "alive")
