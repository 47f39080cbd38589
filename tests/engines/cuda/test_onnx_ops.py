"""Every operation of the table against ONNX's own backend tests, and without data for its shapes."""

import warnings

import numpy as np
import pytest
import torch
from onnx.backend.test.loader import load_model_tests

from compress.engines.cuda.onnx_ops import OPERATIONS, apply
from compress.engines.cuda.plan.graph import _attribute, _on_meta
from compress.errors import EngineError

UNUSUAL = {"uint16", "uint32", "uint64", "bfloat16", "float8_e4m3fn", "float4_e2m1fn", "int4", "uint4", "int2", "uint2"}
EMPTY = {"test_reduce_max_empty_set", "test_reduce_max_empty_set_bool", "test_reduce_min_empty_set"}


def plain(arrays):
    return all(isinstance(a, np.ndarray) and a.dtype.kind in "fiub" and a.dtype.name not in UNUSUAL for a in arrays)


def cases():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests = load_model_tests(kind="node")
    for case in tests:
        if case.model is None or len(case.model.graph.node) != 1 or case.name in EMPTY:
            continue
        node = case.model.graph.node[0]
        if node.op_type in OPERATIONS and not node.domain:
            for inputs, outputs in case.data_sets:
                if plain([*inputs, *outputs]):
                    yield case.name, node, inputs, outputs


CASES = list(cases())


def given(node, inputs):
    attributes = {a.name: _attribute(a, node, "case") for a in node.attribute}
    attributes.setdefault("outputs", len(node.output))
    arrays = iter(inputs)
    return attributes, [torch.from_numpy(np.array(next(arrays))) if name else None for name in node.input]


def test_there_are_cases_for_most_operations():
    assert len(CASES) > 500
    assert len({node.op_type for _, node, _, _ in CASES}) > 90


@pytest.mark.parametrize("kind", sorted({node.op_type for _, node, _, _ in CASES}))
def test_an_operation_computes_what_onnx_says_or_refuses(kind):
    agreed = refused = 0
    for name, node, inputs, outputs in CASES:
        if node.op_type != kind:
            continue
        attributes, tensors = given(node, inputs)
        try:
            results = apply(kind, attributes, tensors)
        except EngineError:
            refused += 1
            continue
        for result, expected in zip(results, outputs, strict=False):
            assert tuple(result.shape) == expected.shape, name
            np.testing.assert_allclose(
                result.double().numpy(), expected.astype(float), rtol=1e-3, atol=1e-5, err_msg=name
            )
        without_data = apply(kind, attributes, _on_meta(kind, tensors))
        assert [r.shape for r in without_data] == [r.shape for r in results], name
        agreed += 1
    assert agreed
    assert agreed >= refused or kind in {"Resize", "AveragePool"}


def test_an_unknown_operator_is_refused_with_a_near_miss():
    with pytest.raises(EngineError, match="Rellu is not supported, did you mean 'Relu'"):
        apply("Rellu", {}, [torch.ones(1)])


def test_a_shape_that_depends_on_data_is_refused():
    with pytest.raises(EngineError, match="computed from the network's input"):
        apply("Reshape", {}, [torch.ones(4), torch.empty(2, dtype=torch.int64, device="meta")])
