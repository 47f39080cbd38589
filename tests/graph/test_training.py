# What a model does in training only is in its graph too: from one random state both compute the same in training.

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.nn.functional as F
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchvision.ops import StochasticDepth

from compress import CompressWarning, QuantSpec, quantize, trace
from compress.errors import ModelError
from compress.graph.canonical import canonical_graph
from compress.graph.compare import TOLERANCE, Reference, relative_error, same_results
from compress.graph.report import report_of
from compress.quantization.quantizer import quantizers
from compress.quantization.report import quantization_report_of
from tests.networks import Net, TinyResNet, unchanged, with_statistics

X = torch.randn(4, 8, 8, 8, generator=torch.Generator().manual_seed(0))


def two_convolutions(run, **parts):
    return Net(run, a=nn.Conv2d(8, 8, 3, padding=1), b=nn.Conv2d(8, 8, 3, padding=1), **parts)


def between(run, **parts):
    return two_convolutions(lambda s, x: s.b(run(s, F.relu(s.a(x)))), **parts)


def noisy(s, x):
    if s.training:
        x = x + 0.1 * torch.randn_like(x)
    return x


def drop_path(s, x):
    # As timm's DropPath does it, with an operation in place whose result nobody reads.
    if not s.training:
        return x
    kept = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.5)
    kept.div_(0.5)
    return x * kept


def attention(s, x):
    t = x.flatten(2).transpose(1, 2).unflatten(-1, (2, 4)).transpose(1, 2)
    y = F.scaled_dot_product_attention(t, t, t, dropout_p=0.5 if s.training else 0.0)
    return y.transpose(1, 2).flatten(2).transpose(1, 2).reshape(x.shape)


NETWORKS = {
    "function": lambda: between(lambda s, x: F.dropout(x, 0.5, training=s.training)),
    "whole channels": lambda: between(lambda s, x: F.dropout2d(x, 0.5, s.training)),
    "two": lambda: between(lambda s, x: F.dropout(x, 0.5, s.training) + F.dropout(x, 0.2, s.training)),
    "noise": lambda: between(noisy),
    "noise on both branches": lambda: between(lambda s, x: noisy(s, x) + s.a(noisy(s, x))),
    "drop path": lambda: between(lambda s, x: x + drop_path(s, x)),
    "module under a branch": lambda: between(lambda s, x: s.d(x) if s.training else x, d=nn.Dropout(0.5)),
    "stochastic depth": lambda: between(lambda s, x: x + s.d(s.b(x)), d=StochasticDepth(0.5, "row")),
    "attention": lambda: between(attention),
}


@torch.no_grad()
def in_training(model, x=X, seed=3):
    torch.manual_seed(seed)
    return model.train()(x)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_graph_is_as_random_as_the_model(name):
    model = NETWORKS[name]().eval()
    graph = trace(model, X)
    assert not report_of(graph).training and not model.training
    torch.testing.assert_close(graph(X), model(X))
    for twin in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph))):
        torch.testing.assert_close(in_training(twin), in_training(model))
        assert not torch.equal(in_training(twin, seed=4), in_training(twin, seed=5))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_quantized_network_is_too_and_quantizes_as_without(name):
    model = NETWORKS[name]().eval()
    qmodel = quantize(model, X, [X], spec=QuantSpec(bias_correction=None))
    assert {"a", "b"} <= {site.path for site in qmodel.placement.weights}
    assert set(model.state_dict()) == {key for key in qmodel.state_dict() if "quantizer" not in key}
    for _, quantizer in quantizers(qmodel):
        quantizer.enabled = False
    torch.testing.assert_close(in_training(qmodel), in_training(model), rtol=1e-4, atol=1e-5)
    assert not torch.equal(in_training(qmodel, seed=4), in_training(qmodel, seed=5))


def test_stochastic_depth_of_a_real_network():
    model = torchvision.models.efficientnet_b0(num_classes=4, stochastic_depth_prob=0.5).eval()
    x = torch.randn(2, 3, 32, 32)
    with unchanged(model):
        graph = trace(model, x)
    for network in (model, graph):
        network.train()
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.0
    torch.testing.assert_close(in_training(graph, x), in_training(model, x))


def test_what_cannot_be_kept_is_said():
    def with_auxiliary(s, x):
        y = F.relu(s.a(x))
        return (s.b(y), s.aux(y)) if s.training else s.b(y)

    model = two_convolutions(with_auxiliary, aux=nn.Conv2d(8, 2, 1)).eval()
    qmodel = quantize(model, X, [X])
    assert any("in training the model does more" in note for note in quantization_report_of(qmodel).notes())
    plain = quantization_report_of(quantize(between(lambda s, x: x).eval(), X, [X])).notes()
    assert plain == ["corrected 2 biases"]


def statistics(move):
    def run(s, x):
        if s.training:
            move(s, x.detach().mean((0, 2, 3), keepdim=True))
        return x - s.mean

    model = between(run).eval()
    model.register_buffer("mean", torch.zeros(1, 8, 1, 1))
    model.register_buffer("calls", torch.zeros(()))
    return model


def in_place(s, mean):
    s.calls += 1
    s.mean.mul_(0.9).add_(mean, alpha=0.1)


def assigned(s, mean):
    s.calls = s.calls + 1
    s.mean = 0.9 * s.mean + 0.1 * mean


@pytest.mark.parametrize("move", [in_place, assigned])
def test_statistics_that_training_moves_are_those_of_the_model_and_their_loss_is_said(move):
    # Tracing in training mode wrote into the buffers that the graph shares with the model.
    model = statistics(move)
    model.mean.fill_(0.5)
    qmodel = quantize(model, X, [X])
    torch.testing.assert_close(qmodel.mean, torch.full((1, 8, 1, 1), 0.5), rtol=0, atol=0)
    assert model.mean.unique().tolist() == [0.5] and model.calls == 0
    assert any("buffers that it updates" in note for note in quantization_report_of(qmodel).notes())


def test_parameters_that_training_averages_are_those_of_the_model():
    # A vector quantizer: in training mode it moves the vectors of its codebook towards its inputs.
    def nearest(s, x):
        rows = s.a(x).permute(0, 2, 3, 1).flatten(0, 2)
        index = (rows @ s.book.weight.t() - s.book.weight.square().sum(1) / 2).argmax(1)
        if s.training:
            s.book.weight.data.copy_(0.5 * s.book.weight + rows[:4])
        return s.b(s.book(index).view(4, 8, 8, 8).permute(0, 3, 1, 2))

    model = two_convolutions(nearest, book=nn.Embedding(4, 8)).eval()
    with unchanged(model):
        graph = trace(model, X)
        assert "in training the model does more" in report_of(graph).training
        torch.testing.assert_close(graph(X), model(X))
        quantize(model, X, [X])


def test_buffers_that_only_later_calls_read_count_as_well():
    # The results of the first call in training are the same, so outputs alone do not show the loss.
    found = trace(statistics(lambda s, mean: in_place(s, 0 * mean)), X)
    assert "buffers that it updates" in report_of(found).training


def counts(s, x):
    s.calls += 1
    return x * s.calls


def counts_in_data(s, x):
    s.mean.data += 1
    return x * s.mean.view(-1, 1, 1)


def averages(s, x):
    s.mean.lerp_(x.mean((0, 2, 3)), 0.1)
    return x - s.mean.view(-1, 1, 1)


def only_first(s, x):
    s.seen, seen = True, s.seen
    return x if seen else 2 * x


def first_mean(s, x):
    if s.offset is None:
        s.offset = x.mean()
    return x - s.offset


@pytest.mark.parametrize("run", [counts, counts_in_data, averages, only_first, first_mean])
def test_results_that_depend_on_earlier_calls_are_refused(run):
    model = between(run, calls=0, seen=False, offset=None).eval()
    model.register_buffer("mean", torch.zeros(8))
    with pytest.raises(ModelError, match=r"other results for the same inputs.*writes (calls|mean|seen|offset)"):
        quantize(model, X, [X])
    assert (model.calls, model.seen, model.offset, model.mean.any()) == (0, False, None, False)


def caches(s, x):
    if s.grid is None:
        s.grid = torch.arange(8.0)
    return x + s.grid


def mask_of_size(s, x):
    if s.grid is None or s.grid.shape != x.shape:
        s.grid = 2 * torch.ones_like(x)
    return x * s.grid


def mask_of_first_size(s, x):
    if s.grid is None:
        s.grid = torch.ones_like(x) / 2
    return x * s.grid


def parameter_of_first_call(s, x):
    if s.gain is None:
        s.gain = nn.Parameter(torch.full((x.shape[1], 1, 1), 2.0))
    return x * s.gain


@pytest.mark.filterwarnings("error::compress.errors.CompressWarning")
@pytest.mark.parametrize("run", [caches, mask_of_size, mask_of_first_size, parameter_of_first_call])
def test_a_cache_passes_for_any_batch(run):
    model = between(run, grid=None).eval()
    model.register_parameter("gain", None)
    graph_module = trace(model, X)
    assert model.grid is None and model.gain is None
    for x in (X, X[:1]):
        torch.testing.assert_close(graph_module(x), copy.deepcopy(model)(x))
    quantize(model, X, [X[:1]]).train()


def in_place_in_evaluation(s, x):
    s.mean.copy_(x.mean((0, 2, 3)))
    return x


def test_what_the_quantized_network_lacks_is_a_warning():
    with pytest.warns(CompressWarning, match="in training the model does more"):
        quantize(between(lambda s, x: s.c(x) if s.training else x, c=nn.Conv2d(8, 8, 1)).eval(), X, [X]).train()
    model = between(in_place_in_evaluation).eval()
    model.register_buffer("mean", torch.zeros(8))
    with pytest.warns(CompressWarning, match="writes mean in evaluation mode"):
        quantize(model, X, [X])


@pytest.mark.parametrize(
    ("run", "shape"),
    [
        (lambda s, x: x * 3 if len(x) > 2 else x, (4, 8, 8, 8)),
        (lambda s, x: x * 3 if x.shape[3] > 8 else x, (1, 8, 8, 16)),
    ],
)
def test_a_calibration_batch_that_takes_another_way_than_the_example_is_refused(run, shape):
    batch, model = torch.randn(shape), between(run).eval()
    with pytest.raises(ModelError, match="on a calibration batch of .* decides by the sizes or values"):
        quantize(model, X[:1], [X[:1], batch])
    noise = quantize(model, batch, [batch])(batch) - model(batch)
    assert noise.abs().max() < 0.1 * model(batch).abs().max()


# The guard: a rewritten network that computes something else is refused, rounding errors are not.

COMPARE_X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


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
    reference, graph = Reference.of(model, COMPARE_X), canonical_graph(model, COMPARE_X)
    reference.check(graph, "folding")
    graph.get_submodule(path).weight.data.mul_(1.2)
    with pytest.raises(ModelError, match=rf"folding changes what TinyResNet computes, .* first at {path}:"):
        reference.check(graph, "folding")


def chaotic(depth):
    # Each layer amplifies differences by about 1.5, so that float32 holds no digit of the result.
    layers = [nn.Linear(32, 32, bias=False) for _ in range(depth)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=2.5 / 32**0.5)
    return with_statistics(nn.Sequential(*(part for one in layers for part in (one, nn.BatchNorm1d(32), nn.Tanh()))))


def test_a_chaotic_network_is_not_refused_for_its_rounding_errors():
    model, x = chaotic(50), torch.randn(4, 32)
    graph = canonical_graph(model, x)
    assert relative_error(model(x), graph(x)) > TOLERANCE
    assert not [m for m in graph.modules() if isinstance(m, nn.BatchNorm1d)]


def test_a_defect_of_a_deep_network_is_refused_all_the_same():
    model, x = chaotic(4), torch.randn(4, 32)
    graph = canonical_graph(model, x)
    graph.get_submodule("6").weight.data[:, 0] *= 1.1
    with pytest.raises(ModelError, match="first at 6:"):
        Reference.of(model, x).check(graph, "folding")


def test_a_models_own_hook_is_named_if_the_graph_lacks_its_effect():
    model = TinyResNet().eval()
    model.register_forward_hook(lambda module, args, result: result * 2)
    with pytest.raises(ModelError, match="the model has hooks, .* wrap it in a module"):
        trace(model, COMPARE_X)
