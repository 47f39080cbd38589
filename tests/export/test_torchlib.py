"""torch's table of ONNX functions from the cache, against the one that torch builds itself."""

import pytest

from compress.export.onnx import looked_up_once, operators_named_once, table_built_once

registration = pytest.importorskip("torch.onnx._internal.exporter._registration")


def test_the_table_is_torchs_own_and_no_export_changes_the_next():
    registry = registration.ONNXRegistry
    before = registry.__dict__["from_torchlib"]
    with table_built_once():
        first = registry().from_torchlib(opset_version=19)
        first.functions.clear()
        second = registry.from_torchlib(opset_version=19)
        second.functions["aten::relu"].clear()
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
