"""Methods beyond calibration on files give what they give on the torch model that the file was exported from."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from torch import nn

import compress
from compress import ActivationSpec, AdaRoundSpec, QuantSpec, WeightSpec
from compress.errors import ModelError
from compress.onnx_ptq.quantize import quantize_onnx_file
from tests.onnx_ptq.files import Attention, batches, export, model_of, run, sqnr, weights

MAX = ActivationSpec(calibrator="max")


def unequal():
    """Two convolutions whose channels have ranges from 0.01 to 100, which undo each other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), nn.ReLU6(), nn.Conv2d(8, 4, 1))
    with torch.no_grad():
        factors = torch.logspace(-2, 2, 8)
        model[0].weight.mul_(factors[:, None, None, None])
        model[0].bias.mul_(factors)
        model[2].weight.div_(factors[:, None, None])
    return model.eval()


def plain():
    """Three convolutions."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3, bias=False), nn.ReLU(), nn.Conv2d(16, 4, 1))
    return nn.Sequential(*layers).eval()


def outliers():
    """Two channels of each norm are 100 times as large as the others."""
    torch.manual_seed(0)
    model = Attention().eval()
    with torch.no_grad():
        for norm, layer in ((model.norm1, model.qkv), (model.norm2, model.up)):
            norm.weight[:2] *= 100
            norm.bias[:2] *= 100
            layer.weight[:, :2] /= 100
    return model


CASES = {
    "equalize": (unequal, QuantSpec(equalize=True, weights=WeightSpec(axis=None), activations=MAX)),
    "smooth": (outliers, QuantSpec(smooth=0.5, activations=MAX)),
    "adaround": (
        plain, QuantSpec(adaround=AdaRoundSpec(steps=100, images=8), weights=WeightSpec(num_bits=3), activations=MAX)
    ),
    "bias": (plain, QuantSpec(bias_correction="empirical", weights=WeightSpec(num_bits=3), activations=MAX)),
    "relu6": (unequal, QuantSpec(relu6="relu", insist=True, smooth=None, activations=MAX)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_file_gains_what_its_model_does(tmp_path, name):
    make, spec = CASES[name]
    model, data = make(), batches()
    file = export(model, tmp_path / "float.onnx")
    done = quantize_onnx_file(file, data, spec=spec)
    x = batches(seed=1)[0]
    with torch.no_grad():
        expected = model(x).numpy()
        ours = sqnr(expected, compress.quantize(model, data[0], data, spec=spec)(x).numpy())
    theirs = sqnr(expected, run(done.path, x.numpy()))
    assert theirs == pytest.approx(ours, abs=1.0)
    if name == "relu6":
        assert "Clip" not in {node.op_type for node in onnx.load(done.path).graph.node}
    else:
        without = QuantSpec(weights=spec.weights, activations=MAX)
        simple = compress.quantize_onnx(file, data, spec=without, out=tmp_path / "simple.onnx")
        assert theirs > sqnr(expected, run(simple, x.numpy())) + 0.5
    assert any(word in " ".join(done.notes) for word in ("equalized", "smoothed", "AdaRound", "biases", "ReLU6"))


def test_what_makes_a_file_worse_is_taken_back(tmp_path):
    """Most values before this ReLU6 exceed 6."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 4, 3)).eval()
    with torch.no_grad():
        model[0].weight.mul_(8)
    file, data = export(model, tmp_path / "float.onnx"), batches()
    done = quantize_onnx_file(file, data, spec=QuantSpec(relu6="relu", activations=MAX))
    assert "quantization.relu6 taken back" in " ".join(done.notes)
    simple = compress.quantize_onnx(file, data, spec=QuantSpec(activations=MAX), out=tmp_path / "simple.onnx")
    x = data[0].numpy()
    np.testing.assert_array_equal(run(done.path, x), run(simple, x))


def test_a_product_without_bias_gets_one(tmp_path):
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"], name="relu"),
        helper.make_node("MatMul", ["r", "b"], ["y"], name="second"),
    ]
    constants = {"a": weights(16, 32).T.copy().T, "b": weights(32, 8, seed=1)}
    onnx.save(model_of(nodes, constants, shape=("n", 16), rank=2), tmp_path / "m.onnx")
    data = [np.random.default_rng(i).standard_normal((64, 16)).astype(np.float32) + 1 for i in range(2)]
    spec = QuantSpec(bias_correction="empirical", weights=WeightSpec(num_bits=3), activations=MAX, insist=True)
    path = compress.quantize_onnx(tmp_path / "m.onnx", data, spec=spec)
    float_mean, mean = (run(p, data[0]).mean(0) for p in (tmp_path / "m.onnx", path))
    simple = compress.quantize_onnx(
        tmp_path / "m.onnx",
        data,
        spec=QuantSpec(weights=WeightSpec(num_bits=3), activations=MAX),
        out=tmp_path / "p.onnx",
    )
    assert np.abs(mean - float_mean).mean() < 0.5 * np.abs(run(simple, data[0]).mean(0) - float_mean).mean()


def test_the_refusal_names_the_operator(tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["h"], name="conv"),
        helper.make_node("NonZero", ["h"], ["y"], name="odd"),
    ]
    onnx.save(model_of(nodes, {"w": weights(4, 3, 3, 3)}), tmp_path / "m.onnx")
    x = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    with pytest.raises(ModelError, match="operator NonZero at 'odd'"):
        compress.quantize_onnx(tmp_path / "m.onnx", [x], spec=QuantSpec(bias_correction="empirical"))
