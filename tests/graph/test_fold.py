import pytest
import torch
import torchvision
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from compress import quantize, trace
from compress.graph.fold import fold_batchnorm
from compress.sparsity.parametrization import apply_masks, masks_of, nm_mask
from tests.networks import Net, TinyResNet, with_statistics


def folded(model, x):
    graph = trace(model, x)
    return graph, fold_batchnorm(graph)


def test_outputs_stay_and_batchnorm_goes():
    model, x = with_statistics(TinyResNet()).double(), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    graph, paths = folded(model, x)
    torch.testing.assert_close(graph(x), model(x), rtol=1e-9, atol=1e-9)
    assert len(paths) == 6
    assert not [m for m in graph.modules() if isinstance(m, nn.BatchNorm2d)]


FOLDS = {
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d(6), (2, 4, 5, 5)),
    "transposed with groups": (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), nn.BatchNorm2d(6), (2, 4, 5, 5)),
    "linear": (nn.Linear(5, 7), nn.BatchNorm1d(7), (4, 5)),
    "weight norm": (weight_norm(nn.Conv2d(3, 6, 3)), nn.BatchNorm2d(6), (2, 3, 7, 7)),
    "spectral norm": (spectral_norm(nn.Conv2d(3, 6, 3)), nn.BatchNorm2d(6), (2, 3, 7, 7)),
}


@pytest.mark.parametrize("name", FOLDS)
def test_a_batchnorm_folds_into_the_layer_before_it(name):
    *parts, shape = FOLDS[name]
    model, x = with_statistics(nn.Sequential(*parts, nn.ReLU())).double(), torch.randn(shape, dtype=torch.float64)
    graph, paths = folded(model, x)
    assert paths == ("1",)
    torch.testing.assert_close(graph(x), model(x), rtol=1e-9, atol=1e-9)


def test_preactivation_networks_keep_what_has_no_layer_before_it():
    model, x = with_statistics(torchvision.models.densenet121()), torch.randn(2, 3, 32, 32)
    graph, paths = folded(model, x)
    torch.testing.assert_close(graph(x), model(x), rtol=1e-3, atol=1e-3)
    assert "features.norm0" in paths and "features.denseblock1.denselayer1.norm1" not in paths


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
    # A BatchNorm that holds its activation, as timm's does: DistributedDataParallel waits for its gradients.
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
    def forward(self, x):
        return 2 * super().forward(x)


def test_channels_on_another_axis_are_not_folded():
    # Of tokens (N, L, C) BatchNorm1d normalizes the positions, and a linear layer's outputs are the last axis.
    model, x = with_statistics(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))).eval(), torch.randn(2, 6, 6)
    graph, paths = folded(model, x)
    assert paths == ()
    torch.testing.assert_close(graph(x), model(x))


def calls(function, norm=None, layer=None):
    return Net(function, conv=layer or nn.Conv2d(3, 3, 1), norm=norm or nn.BatchNorm2d(3))


def batch_norm(m, x):
    return nn.functional.batch_norm(m.conv(x), m.norm.running_mean, m.norm.running_var)


STAY = {
    "a layer that is called twice": (lambda m, x: m.norm(m.conv(m.conv(x))), None),
    "a BatchNorm that is called twice": (lambda m, x: m.norm(m.norm(m.conv(x))), None),
    "the statistics of each batch": (lambda m, x: m.norm(m.conv(x)), nn.BatchNorm2d(3, track_running_stats=False)),
    "a function before it": (lambda m, x: m.norm(nn.functional.conv2d(x, m.conv.weight)), None),
    "the network's input": (lambda m, x: m.norm(x), None),
    "an activation between": (lambda m, x: m.norm(m.conv(x).relu()), None),
    "another normalization": (lambda m, x: m.norm(m.conv(x)), nn.InstanceNorm2d(3, track_running_stats=True)),
    "an output that is read twice": (lambda m, x: m.norm(y := m.conv(x)) + y, None),
    "a layer with a forward of its own": (lambda m, x: m.norm(m.conv(x)), None, _Doubled(3, 3, 1)),
    "a function in its place": (batch_norm, None),
}


@pytest.mark.parametrize("name", STAY)
def test_a_batchnorm_stays(name):
    model, x = calls(*STAY[name]).eval(), torch.randn(2, 3, 4, 4)
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
    # The child is what another node still calls, as timm's BatchNormAct2d has it.
    norm = nn.BatchNorm2d(3)
    norm.act = nn.ReLU()
    model = with_statistics(calls(lambda m, x: m.norm.act(m.norm(m.conv(x))), norm))
    x = torch.randn(2, 3, 4, 4)
    expected, graph = model(x), trace(model, x)
    graph.train(training)
    assert fold_batchnorm(graph) == ("norm",)
    assert set(graph.state_dict()) == {"conv.weight", "conv.bias"} and graph.norm.training == training
    torch.testing.assert_close(graph.eval()(x), expected)


def test_a_folded_batchnorm_that_is_read_elsewhere_keeps_its_parameters():
    model = with_statistics(calls(lambda m, x: m.norm(m.conv(x)) * m.norm.weight.mean()))
    x = torch.randn(2, 3, 4, 4)
    graph, paths = folded(model, x)
    assert paths == ("norm",)
    torch.testing.assert_close(graph(x), model(x))
