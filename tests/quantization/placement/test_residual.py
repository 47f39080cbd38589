"""`quantization.residual`: which branches of a sum have a quantizer, read off the graph itself."""

import operator

import pytest
import torch
from torch import nn

import compress
from compress.errors import QuantizationError, RecipeError
from compress.recipe.tree import parse_recipe


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = torch.relu(self.first(x))
        return self.last(torch.relu(self.second(y) + y))


@pytest.mark.parametrize(
    ("residual", "expected"),
    [(None, [False, True]), ("identity", [False, True]), ("both", [True, True]), ("none", [False, False])],
)
def test_branches(residual, expected):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 6)
    qmodel = compress.insert_quantizers(Block(), x, compress.QuantSpec(residual=residual))
    (add,) = [node for node in qmodel.graph.nodes if node.target in {operator.add, torch.add}]
    assert [str(branch.target).startswith("quantizers.") for branch in add.args] == expected
    refused = [row for row in qmodel.placement.decisions if row.rule == "add stays float"]
    assert bool(refused) == (residual == "none")


def test_another_word_is_refused():
    with pytest.raises(QuantizationError, match="identity, both, none"):
        compress.insert_quantizers(Block(), torch.zeros(1, 4, 6, 6), compress.QuantSpec(residual="left"))
    with pytest.raises(RecipeError, match="quantization.residual"):
        parse_recipe({"quantization": {"residual": "left"}})
    assert parse_recipe({"quantization": {"residual": "both"}}).quantization.residual == "both"
