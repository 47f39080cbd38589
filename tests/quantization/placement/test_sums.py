"""Sums: which of them fuse with a layer, and which of their branches and results have a quantizer."""

import pytest
import torch.nn.functional as F
from torch import nn

from compress import QuantSpec, Rule
from tests.quantization.placement.test_place import quantized
from tests.quantization.placement.test_requests import conv, placed, rules

RESIDUAL = {  # tensors with a quantizer beside the input: the identity branch of a sum that a convolution fuses with
    "the longer branch fuses": (lambda m, x: m.a(x) + m.c(F.relu(m.b(x))), {"relu", "a"}),
    "in the other order": (lambda m, x: m.c(F.relu(m.b(x))) + m.a(x), {"relu", "a"}),
    "what a layer reads is its identity": (lambda m, x: m.a(y := m.b(x)) + y, {"b"}),
    "a result that is read twice fuses with nothing": (lambda m, x: (m.same(y := m.b(x)) + x, y.exp()), set()),
    "an identity between": (lambda m, x: (m.same(m.b(x)) + x.exp(), x), {"exp"}),
    "a sum that broadcasts": (lambda m, x: m.a(x) + m.b(x.amax((2, 3), keepdim=True)), {"amax"}),
    "a number": (lambda m, x: m.a(x) + 1, set()),
}


@pytest.mark.parametrize("name", RESIDUAL)
def test_residual_sums(name):
    function, expected = RESIDUAL[name]
    result = placed(function, a=conv(), b=conv(), c=conv(), same=nn.Identity())
    assert quantized(result) - {"x"} == expected
    asked = [row for row in result.decisions if "residual add" in row.rule]
    refused = [row for row in result.decisions if row.rule == "add stays float"]
    assert (len(asked), len(refused)) == {
        "what a layer reads is its identity": (1, 0),  # the other branch, a, does
        "a result that is read twice fuses with nothing": (0, 1),
        "a sum that broadcasts": (0, 0),
        "a number": (0, 0),
    }.get(name, (1, 0))


def test_sums_of_volumes_fuse_and_sums_of_tokens_do_not():
    volumes = placed(lambda m, x: m.a(x) + x.exp(), shape=(2, 4, 3, 3, 3), a=nn.Conv3d(4, 4, 1))
    assert quantized(volumes) == {"x", "exp"}
    tokens = placed(lambda m, x: m.a(x) + x.exp(), shape=(2, 4, 4), a=nn.Linear(4, 4))
    assert quantized(tokens) == {"x"} and rules(tokens, "add") == []


def test_a_sum_whose_layer_is_float_stays_float():
    result = placed(
        lambda m, x: F.relu(m.up(m.first(x)) + x),
        shape=(2, 4, 6),
        spec=QuantSpec(rules=(Rule(match="up", enable=False),)),
        first=nn.Conv1d(4, 4, 1),
        up=nn.ConvTranspose1d(4, 4, 1),
    )
    assert quantized(result) == {"x"}  # a sum of three dimensions is none of images
    result = placed(
        lambda m, x: m.last(F.relu(m.a(x) + x)),
        spec=QuantSpec(rules=(Rule(match="a", enable=False),)),
        a=conv(),
        last=conv(),
    )
    assert rules(result, "add") == ["add stays float"] and quantized(result) == {"relu"}


def test_a_sum_that_broadcasts_has_no_result_in_integers_of_its_own():
    result = placed(lambda m, x: F.gelu(m.a(x) + m.b(x.amax((2, 3), keepdim=True))), "onnxruntime", a=conv(), b=conv())
    assert not any("add" in row.rule for row in result.decisions)


def test_the_result_of_a_sum_is_asked_for_by_the_sum_and_not_by_its_layer():
    spec = QuantSpec(target="onnxruntime", residual="identity")
    result = placed(lambda m, x: m.c(F.relu(m.a(x) + x.exp())).mean((2, 3)), spec=spec, a=conv(), c=conv())
    assert rules(result, "relu") == ["add output, conv input"]
