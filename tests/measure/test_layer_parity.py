"""Layer parity on files that are right, and on files in which one known thing was spoiled."""

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from compress import ActivationSpec, QuantSpec, export_onnx, quantize
from compress.errors import EngineError
from compress.measure.layer_parity import layer_parity
from tests.exact import WEIGHTS
from tests.networks import network

X = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=["tensorrt", "openvino"])
def exported(request, tmp_path_factory):
    spec = QuantSpec(target=request.param, activations=ActivationSpec(calibrator="max"), weights=WEIGHTS)
    qmodel = quantize(network(), X[:2], [X], spec=spec)
    return qmodel, export_onnx(qmodel, X[:2], tmp_path_factory.mktemp("parity") / "model.onnx")


def spoiled(path, target, change, *, node):
    """The file with the initializer that feeds input 1 (the scale) of a node, or a weight, changed."""
    model = onnx.load(str(path))
    (found,) = (n for n in model.graph.node if n.name == node)
    for tensor in model.graph.initializer:
        if tensor.name in found.input and numpy_helper.to_array(tensor).dtype == np.float32:
            tensor.CopyFrom(numpy_helper.from_array(change(numpy_helper.to_array(tensor)), tensor.name))
    onnx.save(model, str(target))
    return target


@pytest.mark.parametrize(("engine", "precision"), [("onnxruntime", None), ("openvino", "f32")])
def test_a_right_file_differs_by_rounding_alone(exported, engine, precision):
    qmodel, path = exported
    found = layer_parity(qmodel, path, X, engine=engine, precision=precision)
    assert found.first is None and "rounding" in found.verdict and found.missing == ()
    sites = {site.name for site in qmodel.placement.activations}
    assert {point.quantizer for point in found.points} == sites
    assert found.points[0].operations == () and found.points[0].largest_steps == 0  # the image itself
    assert found.logits.sqnr_db > 25 and max(point.largest_steps for point in found.points) <= 1
    assert sum(point.elements for point in found.points) > 10_000


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_wrong_weight_is_found_where_it_stands(exported, tmp_path, engine):
    qmodel, path = exported
    bad = spoiled(path, tmp_path / "bad.onnx", lambda a: a * 1.2, node="/block2/conv1/DequantizeLinear")
    found = layer_parity(qmodel, bad, X, engine=engine, precision="f32")
    assert "block2.conv1" in found.first.operations, found.verdict
    assert "block2.conv2" not in found.first.operations
    assert [point for point in found.points if point.diverges] == [found.first]  # none after it inherits it
    assert "block2.conv1" in found.verdict and found.first.more_steps > found.tolerance


def test_a_bias_that_is_wrong_by_less_than_a_step_is_not_called_divergence(exported, tmp_path):
    qmodel, path = exported
    step = next(p.scale for p in layer_parity(qmodel, path, X).points if "block2.conv1" in p.operations)
    bad = spoiled(path, tmp_path / "bias.onnx", lambda b: b + 0.5 * step, node="/block2/conv1/Conv")
    found = layer_parity(qmodel, bad, X)
    point = next(p for p in found.points if "block2.conv1" in p.operations)
    assert point.one_step > 0.05 and not point.diverges


def test_refusals(exported, tmp_path):
    qmodel, path = exported
    with pytest.raises(EngineError, match="tolerance"):
        layer_parity(qmodel, path, X, tolerance=1)
    plain = onnx.load(str(path))
    for node in plain.graph.node:
        node.output[:] = [name.replace("DequantizeLinear", "Other") for name in node.output]
        node.input[:] = [name.replace("DequantizeLinear", "Other") for name in node.input]
    onnx.save(plain, str(tmp_path / "other.onnx"))
    with pytest.raises(EngineError, match="of another network"):
        layer_parity(qmodel, tmp_path / "other.onnx", X)
