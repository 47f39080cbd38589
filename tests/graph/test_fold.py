import pytest
import torch
import torchvision
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from compress import quantize, trace
from compress.graph.fold import fold_batchnorm
from compress.sparsity.parametrization import apply_masks, masks_of, nm_mask
from tests.networks import TinyResNet, with_statistics


def folded(model, x):
    graph = trace(model, x)
    paths = fold_batchnorm(graph)
    return graph, paths


def test_outputs_stay_and_batchnorm_goes():
    model, x = with_statistics(TinyResNet()).double(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    graph, paths = folded(model, x)
    torch.testing.assert_close(graph(x), model(x), rtol=1e-9, atol=1e-9)
    assert len(paths) == 6
    assert not [m for m in graph.modules() if isinstance(m, nn.BatchNorm2d)]


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolutions_fold(groups):
    model = nn.Sequential(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=groups), nn.BatchNorm2d(6), nn.ReLU())
    model, x = with_statistics(model).double(), torch.randn(2, 4, 5, 5, dtype=torch.float64)
    graph, paths = folded(model, x)
    assert paths == ("1",)
    torch.testing.assert_close(graph(x), model(x), rtol=1e-9, atol=1e-9)


def test_linear_folds():
    model = with_statistics(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    graph, paths = folded(model, x)
    assert paths == ("1",)
    torch.testing.assert_close(graph(x), model(x), rtol=1e-9, atol=1e-9)


def test_what_cannot_fold_stays():
    class Branches(nn.Module):
        """The convolution's output is read twice, so its BatchNorm must stay."""

        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            y = self.conv(x)
            return self.bn(y) + y

    model, x = with_statistics(Branches()), torch.randn(2, 3, 4, 4)
    graph, paths = folded(model, x)
    assert paths == ()
    torch.testing.assert_close(graph(x), model(x))


def test_preactivation_networks_keep_what_has_no_layer_before_it():
    model, x = with_statistics(torchvision.models.densenet121()), torch.randn(2, 3, 32, 32)
    graph, paths = folded(model, x)
    torch.testing.assert_close(graph(x), model(x), rtol=1e-3, atol=1e-3)
    assert "features.norm0" in paths and "features.denseblock1.denselayer1.norm1" not in paths


@pytest.mark.parametrize("how", [weight_norm, spectral_norm])
def test_parametrized_weights_fold(how):
    model = nn.Sequential(how(nn.Conv2d(3, 6, 3)), nn.BatchNorm2d(6), nn.ReLU())
    model, x = with_statistics(model).double().eval(), torch.randn(2, 3, 7, 7, dtype=torch.float64)
    graph, paths = folded(model, x)
    assert paths == ("1",)
    torch.testing.assert_close(graph(x), model(x), rtol=1e-9, atol=1e-9)


def test_a_mask_stays_on_the_weight_that_it_is_folded_into():
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    model, x = with_statistics(model).eval(), torch.randn(2, 4, 7, 7)
    apply_masks(model, {"0": nm_mask(model[0].weight.flatten(1), 2, 4).view_as(model[0].weight)})
    graph, _ = folded(model, x)
    torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-6)
    assert torch.equal(masks_of(graph)["0"], masks_of(model)["0"])
    qmodel = quantize(model, x, [x])  # its zeros are held through quantization, and while it trains
    assert not masks_of(qmodel)["0"].all() and torch.equal(masks_of(qmodel)["0"], masks_of(model)["0"])


def test_no_parameter_is_left_without_a_reader():
    """A BatchNorm that holds its activation, as timm's does: DistributedDataParallel waits for its gradients."""

    class NormAct(nn.BatchNorm2d):
        def __init__(self, channels):
            super().__init__(channels)
            self.act = nn.ReLU()

        def forward(self, x):
            x = nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False)
            return self.act(x)

    model = nn.Sequential(nn.Conv2d(3, 4, 3), NormAct(4), nn.Conv2d(4, 4, 3), NormAct(4), nn.Conv2d(4, 2, 1))
    x = torch.randn(2, 3, 9, 9)
    qmodel = quantize(with_statistics(model).eval(), x, [x])
    qmodel.train()(x).sum().backward()
    assert all(parameter.grad is not None for parameter in qmodel.parameters())
    assert not [name for name in qmodel.state_dict() if "running" in name]


class _Doubled(nn.Conv2d):
    """A layer with a forward of its own, whose weight alone does not say what it computes."""

    def forward(self, x):
        return 2 * super().forward(x)


class _Functional(nn.Module):
    """BatchNorm as a function, which has no module to fold."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("mean", torch.full((4,), 0.5))
        self.register_buffer("var", torch.full((4,), 2.0))

    def forward(self, x):
        return nn.functional.batch_norm(self.conv(x), self.mean, self.var)


@pytest.mark.parametrize("make", [lambda: nn.Sequential(_Doubled(3, 4, 3), nn.BatchNorm2d(4)), _Functional])
def test_what_a_weight_alone_does_not_describe_is_not_folded(make):
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(2, 3, 8, 8)
    for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        nn.init.constant_(norm.running_mean, 0.5)
    graph_module = trace(model, x)
    assert fold_batchnorm(graph_module) == ()
    torch.testing.assert_close(graph_module(x), model(x))


def test_channels_on_another_axis_are_not_folded():
    """Of tokens (N, L, C) BatchNorm1d normalizes the positions, and a linear layer's outputs are the last axis."""
    model, x = with_statistics(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))).eval(), torch.randn(2, 6, 6)
    graph, paths = folded(model, x)
    assert paths == ()
    torch.testing.assert_close(graph(x), model(x))


class _Calls(nn.Module):
    """A function of a convolution, a BatchNorm and an image."""

    def __init__(self, function, norm=None):
        super().__init__()
        self.conv, self.norm, self.function = nn.Conv2d(3, 3, 1), norm or nn.BatchNorm2d(3), function

    def forward(self, x):
        return self.function(self, x)


STAY = {
    "a layer that is called twice": (lambda m, x: m.norm(m.conv(m.conv(x))), None),
    "a BatchNorm that is called twice": (lambda m, x: m.norm(m.norm(m.conv(x))), None),
    "the statistics of each batch": (lambda m, x: m.norm(m.conv(x)), nn.BatchNorm2d(3, track_running_stats=False)),
    "a function before it": (lambda m, x: m.norm(nn.functional.conv2d(x, m.conv.weight)), None),
    "the network's input": (lambda m, x: m.norm(x), None),
    "an activation between": (lambda m, x: m.norm(m.conv(x).relu()), None),
    "another normalization": (lambda m, x: m.norm(m.conv(x)), nn.InstanceNorm2d(3, track_running_stats=True)),
}


@pytest.mark.parametrize("name", STAY)
def test_a_batchnorm_stays(name):
    model, x = _Calls(*STAY[name]).eval(), torch.randn(2, 3, 4, 4)
    if model.norm.track_running_stats:
        model.norm.running_mean += 1.0
    graph, paths = folded(model, x)
    assert paths == ()
    torch.testing.assert_close(graph(x), model(x))


def test_a_batchnorm_that_is_to_be_kept_stays_and_the_others_do_not():
    model = with_statistics(
        nn.Sequential(*(make for _ in range(2) for make in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))))
    )
    graph = trace(model, torch.randn(2, 3, 4, 4))
    (kept,) = [node for node in graph.graph.nodes if node.target == "1"]
    assert fold_batchnorm(graph, keep=[kept]) == ("3",)
    assert [name for name, m in graph.named_modules() if isinstance(m, nn.BatchNorm2d)] == ["1"]


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_folded_parameters_are_trained_if_the_weight_was(trained, bias):
    model = with_statistics(nn.Sequential(nn.Conv2d(3, 4, 1, bias=bias), nn.BatchNorm2d(4)))
    model[0].weight.requires_grad_(trained)
    graph, paths = folded(model, torch.randn(2, 3, 4, 4))
    assert paths == ("1",)
    assert [parameter.requires_grad for parameter in graph.parameters()] == [trained, trained]


@pytest.mark.parametrize("training", [True, False])
def test_a_folded_batchnorm_leaves_its_child_and_no_parameter(training):
    """The child is what another node still calls, as timm's BatchNormAct2d has it."""
    norm = nn.BatchNorm2d(3)
    norm.act = nn.ReLU()
    model = with_statistics(_Calls(lambda m, x: m.norm.act(m.norm(m.conv(x))), norm))
    x = torch.randn(2, 3, 4, 4)
    expected, graph = model(x), trace(model, x)
    graph.train(training)
    assert fold_batchnorm(graph) == ("norm",)
    assert set(graph.state_dict()) == {"conv.weight", "conv.bias"} and graph.norm.training == training
    torch.testing.assert_close(graph.eval()(x), expected)


def test_a_folded_batchnorm_that_is_read_elsewhere_keeps_its_parameters():
    model = with_statistics(_Calls(lambda m, x: m.norm(m.conv(x)) * m.norm.weight.mean()))
    x = torch.randn(2, 3, 4, 4)
    graph, paths = folded(model, x)
    assert paths == ("norm",)
    torch.testing.assert_close(graph(x), model(x))
