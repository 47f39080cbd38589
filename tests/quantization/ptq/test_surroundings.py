"""What surrounds a call (an autocast, a default device, other threads) changes neither ranges nor files."""

from concurrent.futures import ThreadPoolExecutor

import onnx
import pytest
import torch
from torch import nn

import compress
from compress.errors import ExportError

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2)).eval()


def quantized(model):
    return compress.quantize(model, X[:2], [X], spec=compress.QuantSpec(target="openvino"))


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_an_autocast_changes_neither_ranges_nor_the_file(tmp_path):
    expected = quantized(network())
    with torch.autocast("cpu", torch.bfloat16):
        found = quantized(network())
        path = compress.export_onnx(found, X[:2], tmp_path / "m.onnx")
        assert torch.is_autocast_enabled("cpu")  # it is the caller's, and stays on
    assert same(found, expected)
    types = {value.type.tensor_type.elem_type for value in onnx.load(path).graph.output}
    assert types == {onnx.TensorProto.FLOAT}


def test_a_default_device_leaves_quantizers_where_their_layers_are():
    model, expected = network(), quantized(network())
    with torch.device("meta"):
        found = quantized(model)
    assert same(found, expected)


def test_several_threads_quantize_at_once():
    models, expected = [network() for _ in range(4)], quantized(network())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(quantized, models))
    assert all(same(one, expected) for one in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_network_in_a_type_that_no_file_has_is_refused(dtype, tmp_path):
    with pytest.raises(ExportError, match=r"parameters are torch\.\w+ \(0\.weight\): export it in float32"):
        compress.export_onnx(quantized(network()).to(dtype), X.to(dtype), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())
