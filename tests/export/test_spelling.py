# Operations that an exporter does not know are spelled as others; the oracle is ONNX's reference evaluator.

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx.reference import ReferenceEvaluator
from torch import nn

import compress
from compress.errors import ExportError
from compress.export.onnx import looked_up_once, operators_named_once, table_built_once
from compress.export.prepare import prepare
from tests.networks import Net


def test_adaptive_maxima_over_equal_windows_are_maxima(tmp_path):
    def run(net, x):
        x = net.conv(x)
        y = net.pool(x)
        row = net.row(x.flatten(2)) + net.row(y.flatten(2))
        return row.flatten(1) + F.adaptive_max_pool2d(y, 1).flatten(1).repeat(1, 2)

    pools = {"pool": nn.AdaptiveMaxPool2d((4, 2)), "row": nn.AdaptiveMaxPool1d(2)}
    model, x = Net(run, conv=nn.Conv2d(3, 8, 3, padding=1), **pools).eval(), torch.randn(2, 3, 8, 8)
    program = torch.export.export(prepare(model, x), (x,))
    assert not [node for node in program.graph.nodes if "adaptive" in str(node.target)]
    path = compress.export_onnx(model, x, tmp_path / "pools.onnx")
    (got,) = ReferenceEvaluator(str(path)).run(None, {"input": x.numpy()})
    np.testing.assert_allclose(got, model(x).detach(), atol=1e-5)
    assert any(node.name.startswith("/pool") for node in onnx.load(path).graph.node)


@pytest.mark.parametrize("kind", [nn.AdaptiveMaxPool2d, nn.AdaptiveAvgPool2d])
@pytest.mark.parametrize("size", [(3, 5), (11, 8), (None, 3)])
def test_windows_of_several_sizes_are_slices(size, kind, tmp_path):
    # A pooling of equal windows would compute something else.
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), kind(size)).eval(), torch.randn(3, 3, 8, 8)
    path = compress.export_onnx(model, x[:2], tmp_path / "pool.onnx")
    assert "GatherND" not in {node.op_type for node in onnx.load(path).graph.node}  # which LiteRT does not have
    (got,) = ReferenceEvaluator(str(path)).run(None, {"input": x.numpy()})
    np.testing.assert_allclose(got, model(x).detach(), atol=1e-5)


@pytest.mark.parametrize("quantized", [False, True])
def test_the_tail_of_log_sigmoid_is_in_the_file(tmp_path, quantized):
    # The function and the module, on inputs far below -18, where ONNX Runtime's sigmoid ends.
    def run(net, x):
        y = 40 * net.conv(x)
        return torch.cat([F.logsigmoid(y), net.module(y)], 1)

    model, x = Net(run, conv=nn.Conv2d(3, 4, 1), module=nn.LogSigmoid()).eval(), torch.randn(2, 3, 6, 6)
    model = compress.quantize(model, x, [x]) if quantized else model
    path = compress.export_onnx(model, x, tmp_path / "m.onnx")
    expected = model(x).detach().numpy()
    assert expected.min() < -30
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        (got,) = onnxruntime.InferenceSession(str(path), options).run(None, {"input": x.numpy()})
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [3, 40])
def test_windows_over_the_edge_are_averaged_on_onnx_runtime_as_in_torch(window, tmp_path):
    pool = nn.AvgPool2d(window, 2 if window == 3 else None, ceil_mode=True)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), pool, nn.Conv2d(8, 4, 1)).eval()
    images = torch.randn(4, 3, 8, 8)
    qmodel = compress.quantize(model, images, [images], spec=compress.QuantSpec(target="onnxruntime"))
    path = compress.export_onnx(qmodel, images, tmp_path / "model.onnx")
    with compress.build_engine(path, "onnxruntime", batch_size=4) as engine, torch.no_grad():
        got, wanted = torch.from_numpy(engine.run({"input": images.numpy()})["logits"]), qmodel(images)
    assert (got - wanted).square().mean() < 1e-3 * wanted.square().mean()


def test_averages_keep_their_divisor(tmp_path):
    def run(net, x):
        x = net.pool(net.conv(x))
        return F.avg_pool2d(x, 2, 1, 0, False, True, 3) + F.avg_pool2d(x, (2, 2), stride=1, divisor_override=7)

    pool, x = nn.AvgPool2d(3, 2, 1, divisor_override=5), torch.randn(2, 3, 8, 8)
    model = Net(run, conv=nn.Conv2d(3, 8, 3, padding=1), pool=pool).eval()
    path = compress.export_onnx(model, x, tmp_path / "averages.onnx")
    (got,) = ReferenceEvaluator(str(path)).run(None, {"input": x.numpy()})
    np.testing.assert_allclose(got, model(x).detach(), atol=1e-5)
    with pytest.raises(ExportError, match="divisor_override and ceil_mode"):
        compress.export_onnx(nn.AvgPool2d(3, 2, ceil_mode=True, divisor_override=5), x, tmp_path / "ceil.onnx")


# torch's table of ONNX functions from the cache, against the one that torch builds itself.

registration = pytest.importorskip("torch.onnx._internal.exporter._registration")


def test_the_table_is_torchs_own_and_no_export_changes_the_next():
    registry = registration.ONNXRegistry
    before = registry.__dict__["from_torchlib"]
    with table_built_once():
        registry().from_torchlib(opset_version=19).functions.clear()
        registry.from_torchlib(opset_version=19).functions["aten::relu"].clear()
        third = registry.from_torchlib(opset_version=19)
    assert registry.__dict__["from_torchlib"] is before
    own = registry.from_torchlib(opset_version=19)
    assert third.opset_version == own.opset_version == 19
    rows = [{k: [row.onnx_function for row in rows] for k, rows in t.functions.items()} for t in (third, own)]
    assert rows[0] == rows[1]


def test_a_failure_inside_leaves_torch_as_it_was():
    before = registration.ONNXRegistry.__dict__["from_torchlib"]
    with pytest.raises(ValueError, match="no"), looked_up_once():
        raise ValueError("no")
    assert registration.ONNXRegistry.__dict__["from_torchlib"] is before


def test_composite_operators_are_those_that_torch_names_itself():
    utils = pytest.importorskip("torch._export.utils")
    before = utils._materialize_cpp_cia_ops
    own = set(utils._collect_all_valid_cia_ops())
    with operators_named_once():
        found = [set(utils._collect_all_valid_cia_ops()) for _ in range(2)]
    assert utils._materialize_cpp_cia_ops is before
    assert own == found[0] == found[1] and len(own) > 100
