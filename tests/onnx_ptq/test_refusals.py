import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

import compress
from compress.errors import CalibrationError, DataError
from tests.onnx_ptq.files import batches, model_of, weights

DATA = batches(size=8)


def conv(**constants):
    return model_of([helper.make_node("Conv", ["x", "w"], ["y"], name="conv")], {"w": weights(4, 3, 3, 3)} | constants)


def cyclic():
    model = conv()
    model.graph.node[0].input[0] = "z"
    model.graph.node.add(op_type="Relu", input=["y"], output=["z"])
    return model


def huge():
    model = conv()
    model.graph.initializer[0].dims[:] = [1 << 20, 1 << 20, 3, 3]
    return model


def stated():
    # A constant whose size is only stated: 4 TB.
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]),
        helper.make_node("ConstantOfShape", ["size"], ["c"]),
        helper.make_node("ReduceMax", ["c"], ["m"], keepdims=0),
        helper.make_node("Add", ["a", "m"], ["y"]),
    ]
    return model_of(nodes, {"w": weights(4, 3, 3, 3), "size": np.array([1 << 20, 1 << 20], np.int64)})


def outside(location):
    model = conv()
    onnx.external_data_helper.set_external_data(model.graph.initializer[0], location)
    model.graph.initializer[0].ClearField("raw_data")
    model.graph.initializer[0].data_location = TensorProto.EXTERNAL
    return model


def quantized():
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        helper.make_node("Conv", ["d", "w"], ["y"]),
    ]
    return model_of(nodes, {"w": weights(4, 3, 3, 3), "s": np.float32(0.1).reshape(()), "z": np.int8(0).reshape(())})


def of_opset(version):
    model = conv()
    model.opset_import[0].version = version
    return model


CASES = {
    "cyclic": (cyclic, "not a valid ONNX file"),
    "huge dims": (huge, "at most 2147483648 elements"),
    "stated size": (stated, "1099511627776 elements|takes more than 8 GiB"),
    "missing data": (lambda: outside("gone.data"), "not a valid ONNX file|cannot be read"),
    "path traversal": (lambda: outside("../secret.data"), "not a valid ONNX file|cannot be read"),
    "absolute path": (lambda: outside("/etc/hostname"), "not a valid ONNX file|cannot be read"),
    "unknown operator": (lambda: model_of([helper.make_node("Nonsense", ["x"], ["y"])], {}), "not a valid ONNX file"),
    "empty weight": (
        lambda: model_of([helper.make_node("Conv", ["x", "w"], ["y"], name="conv")], {"w": weights(0, 3, 3, 3)}),
        "without elements|cannot be inferred|has the shape|no layer",
    ),
    "quantized already": (quantized, "is quantized already"),
    "opset 5": (lambda: of_opset(5), "opset 5; opsets 6 to 25"),
    "not a number": (lambda: conv(w=np.full((4, 3, 3, 3), np.nan, np.float32)), "conv.weight: NaN or Inf"),
    "no layer": (lambda: model_of([helper.make_node("Relu", ["x"], ["y"])], {}), "no layer that can be quantized"),
    "another kernel than its weight": (
        lambda: model_of(
            [helper.make_node("Conv", ["x", "w"], ["y"], kernel_shape=[5, 5])], {"w": weights(4, 3, 3, 3)}
        ),
        "cannot be inferred|cannot load|fails on a calibration batch",
    ),
    "short data": (lambda: short(), "bytes; the file is broken"),
    "doubling functions": (lambda: doubling(), "1099511627777 operations"),
}


def doubling():
    # Forty functions, each of which calls the next twice: a convolution and 2**40 operations.
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
    last = helper.make_node("Relu", ["a"], ["b"])
    bodies = [
        [helper.make_node(f"F{i + 1}", [a], [b], domain="own") for a, b in (("a", "c"), ("c", "b"))] for i in range(40)
    ] + [[last]]
    nodes = [helper.make_node("Conv", ["x", "w"], ["z"]), helper.make_node("F0", ["z"], ["y"], domain="own")]
    model = model_of(nodes, {"w": weights(4, 3, 3, 3)}, domains=("own",))
    model.functions.extend(
        helper.make_function("own", f"F{i}", ["a"], ["b"], body, imports) for i, body in enumerate(bodies)
    )
    return model


def short():
    model = conv()
    model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-4]
    return model


def refused(tmp_path, content, match, **options):
    # Quantize must fail with `match` on one line, and leave the folder as it was.
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (tmp_path / "secret.data").write_bytes(b"\0" * 4096)
    (folder / "bad.onnx").write_bytes(content)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    with pytest.raises(compress.CompressError, match=match) as caught:
        compress.quantize_onnx(folder / "bad.onnx", **{"batches": DATA} | options)
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    return caught.value


@pytest.mark.parametrize("case", CASES)
def test_bad_files(tmp_path, case):
    make, match = CASES[case]
    error = refused(tmp_path, make().SerializeToString(), match)
    assert "\n" not in str(error)


@pytest.mark.parametrize("kept", [0, 1, 20, 200])
def test_truncated_files(tmp_path, kept):
    refused(tmp_path, conv().SerializeToString()[:kept], "ONNX")


def test_missing_file(tmp_path):
    with pytest.raises(compress.CompressError, match="no such file"):
        compress.quantize_onnx(tmp_path / "none.onnx", DATA)


@pytest.mark.parametrize(
    ("data", "kind", "match"),
    [
        ([], CalibrationError, "no images"),
        ([torch.randn(2, 5, 8, 8)], CalibrationError, r"\(2, 5, 8, 8\) float32 for the input 'x', which takes \(2, 3"),
        ([torch.zeros(2, 3, 8, 8)], CalibrationError, "all collected values are zero"),
        ([{"picture": torch.zeros(2, 3, 8, 8)}], DataError, "a batch holds picture; the file's inputs are x"),
        ([torch.zeros(1, 3, 8, 8)], CalibrationError, "fixed batch of 2"),
        ([torch.full((2, 3, 8, 8), torch.nan)], CalibrationError, "NaN or Inf"),
        (torch.zeros(2, 3, 8, 8), CalibrationError, "iterable of batches"),
        ([np.full((2, 3, 8, 8), "a")], CalibrationError, "an array of <U1; give numbers"),
    ],
)
def test_bad_data(tmp_path, data, kind, match):
    assert isinstance(refused(tmp_path, conv().SerializeToString(), match, batches=data), kind)


def test_bfloat16_batches_calibrate_and_an_input_of_bfloat16_is_named(tmp_path):
    # NumPy has no such type: the arrays are those of ml_dtypes.
    onnx.save(conv(), tmp_path / "x.onnx")
    batch, files = DATA[0].bfloat16(), []
    array = batch.float().numpy().astype(helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16))
    for i, given in enumerate((batch.float(), batch, array, {"x": array})):
        files.append(compress.quantize_onnx(tmp_path / "x.onnx", [given], out=tmp_path / f"{i}.onnx").read_bytes())
    assert len(set(files)) == 1
    model = conv()
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.BFLOAT16
    model.graph.node[0].input[0] = "f"
    model.graph.node.insert(0, helper.make_node("Cast", ["x"], ["f"], to=TensorProto.FLOAT))
    for given in (batch, array, {"x": array}):
        error = refused(tmp_path, model.SerializeToString(), "'x' is bfloat16", batches=[given])
        assert isinstance(error, CalibrationError)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (compress.QuantSpec(batchnorm="keep"), "batchnorm is keep"),
        (compress.QuantSpec(rules=(compress.Rule(match="cnov"),)), "did you mean 'conv'"),
    ],
)
def test_bad_specifications(tmp_path, spec, match):
    refused(tmp_path, conv().SerializeToString(), match, spec=spec)


def test_the_float_file_is_not_overwritten(tmp_path):
    refused(tmp_path, conv().SerializeToString(), "is the float file itself", out=tmp_path / "model" / "bad.onnx")
