"""Bytes of files whose contents are known, and numpy's or ONNX's own count of each tensor."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compress.errors import EngineError
from compress.measure.sizes import model_sizes
from tests.engines.models import classifier, quantized_classifier


def test_weights_by_type(tmp_path):
    path = quantized_classifier(tmp_path / "q.onnx")
    sizes = model_sizes(path)
    int8 = 4 * 27 + 4 + 1  # weight, its zero points, the input's
    float32 = 4 * (4 + 4 + 20 + 5 + 2)  # bias, weight scales, head, its bias, two activation scales
    assert sizes.by_type == {"float32": float32, "int8": int8, "uint8": 1}
    assert next(iter(sizes.by_type)) == "float32"
    assert sizes.weight_bytes == float32 + int8 + 1
    assert sizes.file_bytes == len(path.read_bytes())


@pytest.mark.parametrize("kind", [k for k in TensorProto.DataType.values() if k not in (0, TensorProto.STRING)])
def test_every_type_has_the_size_that_onnx_stores(tmp_path, kind):
    """An odd count, so that packed types end in half a byte."""
    array = np.zeros(7, helper.tensor_dtype_to_np_dtype(kind))
    tensor = numpy_helper.from_array(array, "w")
    assert tensor.data_type == kind
    graph = helper.make_graph([], "g", [], [helper.make_tensor_value_info("w", kind, [7])], [tensor])
    onnx.save(helper.make_model(graph), str(tmp_path / "m.onnx"))
    assert model_sizes(tmp_path / "m.onnx").weight_bytes == len(tensor.raw_data)


def test_constants_and_subgraphs_count(tmp_path):
    def constant(name, count):
        value = numpy_helper.from_array(np.zeros(count, np.float32))
        return helper.make_node("Constant", [], [name], value=value)

    branches = [
        helper.make_graph([constant(n, 3)], n, [], [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3])])
        for n in ("yes", "no")
    ]
    branches[0].initializer.append(numpy_helper.from_array(np.zeros(2, np.int64), "inner"))
    node = helper.make_node("If", ["condition"], ["out"], then_branch=branches[0], else_branch=branches[1])
    graph = helper.make_graph(
        [constant("outer", 5), node],
        "g",
        [helper.make_tensor_value_info("condition", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [3])],
    )
    onnx.save(helper.make_model(graph), str(tmp_path / "m.onnx"))
    assert model_sizes(tmp_path / "m.onnx").by_type == {"float32": 4 * (3 + 3 + 5), "int64": 16}


def test_external_data_counts(tmp_path):
    inside = classifier(tmp_path / "inside.onnx")
    model = onnx.load(str(inside))
    onnx.save(model, str(tmp_path / "out.onnx"), save_as_external_data=True, location="out.bin", size_threshold=0)
    sizes, expected = model_sizes(tmp_path / "out.onnx"), model_sizes(inside)
    assert (sizes.weight_bytes, sizes.by_type) == (expected.weight_bytes, expected.by_type)
    assert sizes.file_bytes == sum((tmp_path / name).stat().st_size for name in ("out.onnx", "out.bin"))
    (tmp_path / "out.bin").unlink()
    with pytest.raises(EngineError, match=r"out\.bin: no such file"):
        model_sizes(tmp_path / "out.onnx")


def test_bad_files_are_refused(tmp_path):
    (tmp_path / "m.onnx").write_bytes(classifier(tmp_path / "whole.onnx").read_bytes()[:300])
    with pytest.raises(EngineError, match=r"m\.onnx: not an ONNX model"):
        model_sizes(tmp_path / "m.onnx")
    with pytest.raises(EngineError, match=r"none\.onnx: no such file"):
        model_sizes(tmp_path / "none.onnx")
