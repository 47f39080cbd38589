"""The guard: a rewritten network that computes something else is refused, rounding errors are not."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compress import trace
from compress.errors import ModelError
from compress.graph.canonical import canonical_graph
from compress.graph.compare import TOLERANCE, Reference, relative_error, same_results
from tests.networks import TinyResNet, with_statistics

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@given(st.floats(1e-30, 1e30), st.floats(1e-6, 0.5))
def test_the_error_is_relative_to_the_largest_value_whatever_the_scale(scale, error):
    reference = torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64) * scale
    result = reference + torch.tensor([0.0, 0.0, 2 * error], dtype=torch.float64) * scale
    assert relative_error(reference, result) == pytest.approx(error, rel=1e-9)


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


def test_any_structure_of_results_is_compared():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([4.0])
    for make in (lambda x, y: (x, [y]), lambda x, y: {"x": x, "y": y}, Pair):
        assert relative_error(make(a, b), make(a.clone(), b.clone())) == 0
        assert relative_error(make(a, b), make(a, b + 1)) == 0.25
    assert relative_error((a, b), (a,)) == float("inf") == relative_error(a, a[:, None])


def test_nan_and_infinity_agree_only_in_their_places():
    odd = torch.tensor([1.0, float("nan"), float("inf"), -float("inf")])
    assert same_results(odd, odd.clone())
    assert not same_results(odd, odd.nan_to_num()) and not same_results(odd, odd[[0, 1, 3, 2]])
    assert same_results(torch.zeros(0), torch.zeros(0)) and not same_results(torch.zeros(2), torch.ones(2))
    assert same_results(torch.tensor([True, False]), torch.tensor([True, False]))


@pytest.mark.parametrize("path", ["conv1", "block1.conv2", "block2.downsample.0", "fc"])
def test_the_first_module_that_differs_is_named(path):
    model = with_statistics(TinyResNet()).eval()
    reference, graph = Reference.of(model, X), canonical_graph(model, X)
    reference.check(graph, "folding")
    graph.get_submodule(path).weight.data.mul_(1.2)
    with pytest.raises(ModelError, match=rf"folding changes what TinyResNet computes, .* first at {path}:"):
        reference.check(graph, "folding")


class Chaotic(nn.Module):
    """Each layer amplifies differences by about 1.5, so that float32 holds no digit of the result."""

    def __init__(self, depth=50):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(depth))
        for layer in self.layers:
            nn.init.normal_(layer.weight, std=2.5 / 32**0.5)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.tanh(norm(layer(x)))
        return x


def test_a_chaotic_network_is_not_refused_for_its_rounding_errors():
    model, x = with_statistics(Chaotic()).eval(), torch.randn(4, 32)
    graph = canonical_graph(model, x)
    assert relative_error(model(x), graph(x)) > TOLERANCE
    assert not [m for m in graph.modules() if isinstance(m, nn.BatchNorm1d)]


def test_a_defect_of_a_deep_network_is_refused_all_the_same():
    model, x = with_statistics(Chaotic(4)).eval(), torch.randn(4, 32)
    graph = canonical_graph(model, x)
    graph.get_submodule("layers.2").weight.data[:, 0] *= 1.1
    with pytest.raises(ModelError, match="first at layers.2:"):
        Reference.of(model, x).check(graph, "folding")


def test_a_model_keeps_its_modes():
    model = TinyResNet().train()
    model.block1.eval()
    Reference.of(model, X)
    assert model.training and model.block2.training and not model.block1.bn1.training


def test_a_models_own_hook_is_named_if_the_graph_lacks_its_effect():
    model = TinyResNet().eval()
    model.register_forward_hook(lambda module, args, result: result * 2)
    with pytest.raises(ModelError, match="the model has hooks, .* wrap it in a module"):
        trace(model, X)
