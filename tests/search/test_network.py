# A configuration applied to a network, against the network itself with the same channels set to zero.

import copy

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from compress import ModelSpec, SearchSpec, build_model
from compress.errors import SearchError
from compress.search.network import CRITERIA, apply, channel_scores, distance, reconstruct, removed_classes
from compress.search.space import analyse, make_space
from tests.networks import Net, network

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
STRUCTURE = analyse(network(), IMAGES)
SPACE = make_space(STRUCTURE, SearchSpec(widths=(0.75, 0.5, 0.25), multiple=2), "openvino")
WIDTHS = {element: choices for element, choices in SPACE.elements.items() if element.startswith("width")}


def zeroed(removed):
    # The whole network with the scale and shift of removed channels at zero, which ReLU and pools keep.
    model = copy.deepcopy(STRUCTURE.graph)
    with torch.no_grad():
        for axis in STRUCTURE.axes:
            path, _, name = axis.path.rpartition(".")
            module = model.get_submodule(path)
            if isinstance(module, nn.BatchNorm2d) and name in {"weight", "bias"}:
                getattr(module, name)[torch.isin(axis.classes, torch.tensor(removed, dtype=torch.int64))] = 0
    return model


@given(st.fixed_dictionaries({e: st.sampled_from(c) for e, c in WIDTHS.items()}), st.integers(0, 1000))
@settings(max_examples=15)
def test_a_smaller_network_computes_what_zeroed_channels_compute(configuration, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = {n: torch.rand(len(g.classes), generator=generator) for n, g in STRUCTURE.groups.items()}
    small = apply(STRUCTURE, configuration, scores)
    torch.testing.assert_close(small(IMAGES), zeroed(removed_classes(STRUCTURE, configuration, scores))(IMAGES))
    for element, choice in configuration.items():
        assert small.get_submodule(element.removeprefix("width ")).out_channels == int(choice)


def test_nothing_removed_is_the_float_network_and_it_is_left_alone():
    model = network()
    before = copy.deepcopy(model.state_dict())
    assert torch.equal(apply(analyse(model, IMAGES), {})(IMAGES), model(IMAGES))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_block_left_out_is_its_identity():
    model = network()
    without = apply(analyse(model, IMAGES), {"block block1": "left out"})
    model.block1 = nn.ReLU()
    torch.testing.assert_close(without(IMAGES), model(IMAGES))
    assert not any(name.startswith("block1.conv") for name, _ in without.named_modules())


def in_place():
    def run(net, x):
        y = net.relu(net.conv1(x))
        return net.overwriting(y + net.conv2(y)) + 3 * y

    return Net(
        run,
        conv1=nn.Conv2d(3, 8, 3, padding=1),
        conv2=nn.Conv2d(8, 8, 3, padding=1),
        relu=nn.ReLU(),
        overwriting=nn.Hardtanh(-0.2, 0.2, inplace=True),
    )


def test_what_overwrote_the_sum_of_a_block_left_out_leaves_the_identity_alone():
    model = in_place().eval()
    found = analyse(model, IMAGES)
    small = apply(found, {f"block {next(iter(found.blocks))}": "left out"})
    y = model.conv1(IMAGES).relu()
    torch.testing.assert_close(small(IMAGES), y.clamp(-0.2, 0.2) + 3 * y)


def test_a_resnet_without_a_block_is_reconstructed():
    model = torchvision.models.resnet18(num_classes=10).eval()
    found = analyse(model, IMAGES)
    configuration = {"block layer1.1": "left out"}
    small = reconstruct(apply(found, configuration), found, configuration, {}, [IMAGES], steps=1)
    assert not torch.equal(small.conv1.weight, model.conv1.weight)
    torch.testing.assert_close(small.bn1.running_mean, small.conv1(IMAGES).mean((0, 2, 3)))


def test_blocks_and_groups_of_mobilenet_v2():
    # 17 inverted residuals, 10 of them with a sum (Sandler et al., arXiv 1801.04381, table 2).
    model = torchvision.models.mobilenet_v2(num_classes=10).eval()
    found = analyse(model, torch.randn(2, 3, 32, 32))
    assert len(found.blocks) == 10
    assert {name: reason for name, reason in found.left.items() if "output" not in reason} == {}
    kept = {"width features.2.conv.0.0": "48", "width features.3.conv.2": "16"}
    kept = {e: c for e, c in kept.items() if e.removeprefix("width ") in found.groups}
    small = apply(found, kept)
    depthwise = small.get_submodule("features.2.conv.1.0")
    assert (depthwise.groups, depthwise.in_channels, depthwise.out_channels) == (48, 48, 48)
    assert small(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_a_norm_that_calls_a_function_is_followed_as_a_module_of_its_name():
    # As timm's BatchNormAct2d, with an assertion about shapes that would keep the block.
    class NormAct(nn.BatchNorm2d):
        def forward(self, x):
            torch._assert(x.ndim == 4, "four dimensions")
            use = self.training or self.running_mean is None
            mean, var = self.running_mean, self.running_var
            return torch.relu(functional.batch_norm(x, mean, var, self.weight, self.bias, use, self.momentum, self.eps))

    def block():
        def run(net, x):
            x = net.stem(x)
            return x + net.last(net.norm(net.inner(x)))

        return Net(
            run, stem=nn.Conv2d(3, 8, 1), inner=nn.Conv2d(8, 8, 3, padding=1), norm=NormAct(8), last=nn.Conv2d(8, 8, 1)
        )

    model = block().eval()
    found = analyse(model, IMAGES)
    assert list(found.groups) == ["inner"] and len(found.blocks) == 1
    small = apply(found, {"width inner": "4"})
    assert small.state_dict().keys() == model.state_dict().keys()
    mean = small.get_buffer("norm.running_mean").clone()
    small.train()(IMAGES)
    assert mean.shape == (4,) and not torch.equal(small.get_buffer("norm.running_mean"), mean)
    torch.testing.assert_close(
        apply(found, {f"block {next(iter(found.blocks))}": "left out"})(IMAGES), model.stem(IMAGES)
    )


def test_shuffled_channels_stay_and_say_why():
    def shuffled():
        def run(net, x):
            x = net.first(x)
            x = net.second(x.view(len(x), 2, 4, *x.shape[2:]).transpose(1, 2).reshape(len(x), 8, *x.shape[2:]))
            return net.fc(x.mean((2, 3)))

        return Net(run, first=nn.Conv2d(3, 8, 1), second=nn.Conv2d(8, 6, 1), fc=nn.Linear(6, 2))

    found = analyse(shuffled().eval(), IMAGES)
    assert "first" not in found.groups
    assert "second" in found.groups


def test_a_rebuilt_network_takes_the_weights():
    scores = channel_scores(STRUCTURE, "magnitude", [])
    configuration = {"width conv1": "4", "block block1": "left out"}
    small = apply(STRUCTURE, configuration, scores)
    options = {"model": {"name": "tests.networks:tiny"}, "image": [3, 16, 16], "configuration": configuration}
    made = build_model(ModelSpec(name="compress.search.network:rebuilt", options=options), num_classes=10)
    made.load_state_dict(small.state_dict())
    torch.testing.assert_close(made.eval()(IMAGES), small(IMAGES))


def test_reconstruction_comes_nearer():
    model = build_model(ModelSpec(name="tests.networks:tiny"), num_classes=10)
    pictures = torch.randn(64, 3, 16, 16)
    model.train()(pictures)  # statistics of these pictures
    found = analyse(model.eval(), pictures[:2])
    configuration = {"width block1.conv1": "4"}
    scores = channel_scores(found, "taylor", [pictures])

    def far(steps):
        small = reconstruct(apply(found, configuration, scores), found, configuration, scores, [pictures], steps=steps)
        return distance([small(pictures)], [found.graph(pictures)])

    assert far(30) < far(0)


def test_widths_out_of_range_are_refused():
    with pytest.raises(SearchError, match="width conv1 is 9: it must be from 1 to 8"):
        apply(STRUCTURE, {"width conv1": "9"})


# Importance of channels, against autograd and closed forms.

CRITERIA_IMAGES = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(2))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.norm.weight.data = torch.tensor([0.5, -1.0, 2.0, 0.1])

    def forward(self, x, factor=None):
        x = self.norm(self.conv(x))
        x = torch.relu(x if factor is None else x * factor[:, :, None, None])
        return self.fc(x.mean((2, 3)))


MODEL = Gated().eval()
CRITERIA_STRUCTURE = analyse(MODEL, CRITERIA_IMAGES)


def scores(criterion):
    return channel_scores(CRITERIA_STRUCTURE, criterion, [CRITERIA_IMAGES])["conv"]


def test_first_and_second_order_are_those_of_autograd():
    factor = torch.ones(6, 4, requires_grad=True)
    out = MODEL(CRITERIA_IMAGES, factor)
    (by_image,) = torch.autograd.grad(functional.cross_entropy(out, out.argmax(1), reduction="sum"), factor)
    torch.testing.assert_close(scores("taylor"), by_image.sum(0).square())
    torch.testing.assert_close(scores("fisher"), by_image.square().sum(0))


def test_magnitude_batchnorm_and_reconstruction_are_their_formulas():
    weight, fc = MODEL.conv.weight.detach(), MODEL.fc.weight.detach()
    torch.testing.assert_close(scores("magnitude"), weight.square().sum((1, 2, 3)) + fc.square().sum(0))
    torch.testing.assert_close(scores("batchnorm"), torch.tensor([0.5, 1.0, 2.0, 0.1]))
    hidden = torch.relu(MODEL.norm(MODEL.conv(CRITERIA_IMAGES))).mean((2, 3)).detach()
    torch.testing.assert_close(scores("reconstruction"), hidden.square().mean(0) * fc.square().sum(0))


@pytest.mark.parametrize("criterion", CRITERIA)
def test_channels_of_tokens_of_norms_and_of_groups_have_scores_and_are_removed(criterion):
    def run(net, x):
        x = net.group(net.norm(net.conv(x)).relu()).relu()
        x = net.first(net.last(net.up(x).flatten(2).mT)).relu()
        return net.fc(x.mean(1))

    parts = {"conv": nn.Conv2d(3, 16, 3), "norm": nn.GroupNorm(4, 16), "group": nn.Conv2d(16, 16, 1, groups=4)}
    parts |= {"up": nn.ConvTranspose2d(16, 8, 2, 2), "last": nn.LayerNorm(8), "first": nn.Linear(8, 12)}
    model = Net(run, **parts, fc=nn.Linear(12, 4)).eval()
    structure = analyse(model, CRITERIA_IMAGES)
    assert {name: len(group.classes) for name, group in structure.groups.items()} == {
        **{"conv": 4, "group": 4},  # of each of four groups one
        **{"up": 8, "first": 12},
    }
    scores = channel_scores(structure, criterion, [CRITERIA_IMAGES])
    small = apply(structure, {"width conv": "2", "width group": "3", "width up": "5", "width first": "7"}, scores)
    shapes = [tuple(small.get_submodule(name).weight.shape[:2]) for name in ("conv", "group", "up", "first", "fc")]
    assert shapes == [(8, 3), (12, 2), (12, 5), (7, 5), (4, 7)] and small(CRITERIA_IMAGES).shape == (6, 4)
    if criterion == "taylor":
        hidden = []
        model.first.register_forward_hook(lambda module, inputs, output: hidden.append(output))
        out = model(CRITERIA_IMAGES)
        loss = functional.cross_entropy(out, out.detach().argmax(1), reduction="sum")
        product = hidden[0] * torch.autograd.grad(loss, hidden[0])[0]
        torch.testing.assert_close(scores["first"], product.sum((0, 1)).square())


def test_unknown_criteria_are_refused():
    assert set(CRITERIA) == {"magnitude", "batchnorm", "taylor", "fisher", "reconstruction"}
    with pytest.raises(SearchError, match="tailor"):
        channel_scores(CRITERIA_STRUCTURE, "tailor", [CRITERIA_IMAGES])
