import copy
import math

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance
from torch import nn

from analysis.erf_paper.run import gaussian_size, uniform_profile, uniform_sigma
from compress import effective_receptive_field
from compress.errors import DataError, ModelError, ReceptiveFieldError
from compress.receptive import ErfOptions, effective_receptive_fields, erf_drift
from compress.receptive.effective import (
    above_threshold,
    contribution_area,
    distances,
    gaussian_fit,
    layers_to_show,
    mass_radius,
    probe_images,
    radial_distance,
    radial_profile,
    second_moment,
)
from tests.networks import Net, unchanged

ONES = ErfOptions(upstream="ones")


def uniform_network(layers, kernel):
    parts = [nn.Conv2d(1, 1, kernel, padding=kernel // 2, bias=False) for _ in range(layers)]
    for conv in parts:
        nn.init.constant_(conv.weight, 1 / kernel**2)
    return nn.Sequential(*parts)


@pytest.mark.parametrize(("kernel", "layers"), [(3, 5), (3, 10), (3, 20), (3, 40), (5, 5), (5, 20), (7, 5), (7, 10)])
def test_uniform_networks_have_the_closed_form(kernel, layers):
    # Luo et al., section 2.2: the map is the box convolved with itself, its variance n (k^2 - 1) / 12.
    side = layers * (kernel - 1) + 1
    field = effective_receptive_field(uniform_network(layers, kernel), torch.rand(1, 1, side, side))
    profile = uniform_profile(layers, kernel)
    torch.testing.assert_close(
        field.normalized, profile[:, None] * profile[None] / profile.max() ** 2, rtol=1e-3, atol=1e-6
    )
    assert second_moment(field.heat) == pytest.approx((uniform_sigma(layers, kernel),) * 2, rel=0.01)
    published = {5: 8.31, 10: 11.70, 20: 16.16, 40: 22.74}
    if kernel == 3:
        assert field.metrics.size == pytest.approx(published[layers], rel=0.001)
    assert field.metrics.theoretical_share == pytest.approx(field.metrics.size / side)


def small_net():
    def run(net, x):
        y = net.a(x)
        z = net.act(net.norm(net.b(y))) * 1.0
        z += y
        z = torch.relu_(z) + 1.0
        z.mul_(2.0)
        return net.head(net.block(z).mean((2, 3)))

    return Net(
        run,
        a=nn.Conv2d(3, 8, 3, padding=1),
        b=nn.Conv2d(8, 8, 3, padding=1),
        norm=nn.BatchNorm2d(8),
        act=nn.ReLU(inplace=True),
        block=nn.Sequential(nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Hardswish(inplace=True)),
        head=nn.Linear(8, 4),
    )


@pytest.fixture
def small():
    return small_net().double().eval()


def plain_autograd(model, images, path, unit):
    total = torch.zeros(images.shape[2:], dtype=torch.float64)
    for image in images:
        x = image[None].clone().requires_grad_()
        seen = {}
        handle = model.get_submodule(path).register_forward_hook(lambda m, i, o: seen.update(out=o.clone()))  # noqa: B023
        model(x)
        handle.remove()
        (gradient,) = torch.autograd.grad(seen["out"][0, :, unit[0], unit[1]].sum(), x)
        total += gradient.abs().sum((0, 1))
    return total / len(images)


@pytest.mark.parametrize("path", ["a", "norm", "block", "block.0"])
@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_graph_and_batches_equal_plain_autograd(small, path, batch_size):
    images = torch.rand(5, 3, 12, 14, dtype=torch.float64)
    options = ErfOptions(upstream="ones", batch_size=batch_size)
    field = effective_receptive_field(small, images, layer=path, options=options)
    torch.testing.assert_close(field.heat, plain_autograd(small, images, path, field.unit))
    assert (field.method, field.images) == ("graph", 5)


def test_several_layers_at_once_equal_one_at_a_time(small):
    # Operations that overwrite their input must not change the result of an earlier layer.
    images = torch.rand(3, 3, 12, 12, dtype=torch.float64)
    names = ["a", "b", "norm", "act", "block.0", "block"]
    together = effective_receptive_fields(small, images, layers=names, options=ONES)
    for name, field in zip(names, together, strict=True):
        torch.testing.assert_close(field.heat, effective_receptive_field(small, images, layer=name, options=ONES).heat)
        torch.testing.assert_close(field.heat, plain_autograd(small, images, name, field.unit))


def test_batches_and_pairs_and_generators_give_the_same(small):
    images = torch.rand(4, 3, 12, 12, dtype=torch.float64)
    whole = effective_receptive_field(small, images, options=ONES)
    pairs = effective_receptive_field(small, ((part, 0) for part in images.split(3)), options=ONES)
    torch.testing.assert_close(whole.heat, pairs.heat)


@pytest.mark.parametrize("average", ["absolute", "positive", "rms", "signed"])
def test_averages(small, average):
    images = torch.rand(3, 3, 8, 8, dtype=torch.float64)
    field = effective_receptive_field(
        small, images, layer="b", options=ErfOptions(upstream="ones", average=average, batch_size=2)
    )
    x = images.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(small.b(small.a(x))[:, :, 4, 4].sum(), x)
    expected = {
        "absolute": gradient.abs().mean(0).sum(0),
        "positive": gradient.relu().mean(0).sum(0),
        "rms": gradient.square().mean(0).sum(0).sqrt(),
        "signed": gradient.mean(0).abs().sum(0),
    }[average]
    torch.testing.assert_close(field.heat, expected)


def test_random_upstream_is_repeatable_and_measures_the_norm(small):
    # With many draws the mean magnitude tends to sqrt(2 / pi) of the root of the summed squares over channels.
    image = torch.rand(1, 3, 8, 8, dtype=torch.float64)
    options = ErfOptions(batch_size=50)
    field, second = (
        effective_receptive_field(small, image.expand(3000, -1, -1, -1), layer="a", options=options) for _ in range(2)
    )
    assert torch.equal(field.heat, second.heat)
    jacobian = small.a.weight.detach()  # a convolution's gradient is its kernel
    expected = jacobian.square().sum(0).sqrt().sum(0) * math.sqrt(2 / math.pi)
    torch.testing.assert_close(field.heat[3:6, 3:6], expected, rtol=0.06, atol=0)


def test_influence_lies_within_the_theoretical_field():
    model = torchvision.models.resnet18(weights=None)
    field = effective_receptive_field(model, torch.rand(2, 3, 80, 80), layer="layer2")
    (top, bottom), (left, right) = field.theoretical.interval(field.unit)
    outside = field.heat.clone()
    outside[top : bottom + 1, left : right + 1] = 0
    assert field.theoretical.size == (99, 99)
    assert outside.amax() == 0


@pytest.mark.parametrize(
    ("model", "layer", "grid"),
    [
        (torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 16, num_classes=3), "encoder.ln", (4, 4)),
        (torchvision.models.SwinTransformer([4, 4], 8, [2, 2], [2, 2], [4, 4], num_classes=3), None, (4, 4)),
        (torchvision.models.convnext.ConvNeXt([torchvision.models.convnext.CNBlockConfig(8, None, 2)]), None, (8, 8)),
    ],
    ids=["vit", "swin", "convnext"],
)
def test_transformers_and_convnext_without_editing(model, layer, grid):
    field = effective_receptive_field(model.eval(), torch.rand(2, 3, 32, 32))
    assert layer is None or field.layer == layer
    assert field.grid == grid
    assert field.centre == pytest.approx((19.5, 19.5) if grid == (4, 4) else (17.5, 17.5))
    assert math.dist(divmod(int(field.heat.argmax()), 32), field.centre) < 12


def test_tokens_are_found_behind_the_class_token():
    # The gradient of a token of a patch embedding covers its own patch.
    field = effective_receptive_field(
        VIT.eval(), torch.rand(1, 3, 32, 32), layer="encoder.dropout", options=ErfOptions(unit=(1, 3))
    )
    places = field.heat.nonzero()
    assert [*places.amin(0), *places.amax(0)] == [8, 24, 15, 31]


def loops():
    # A model that torch.fx cannot trace, and that returns a dict.
    def run(net, x):
        for step in net.steps:
            x = step(x)
            if x.sum() > -1e9:
                x = net.act(x + 1)
        return {"map": x, "mean": x.mean()}

    return Net(
        run,
        steps=nn.ModuleList([nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)]),
        act=nn.ReLU(inplace=True),
    )


def test_a_model_that_cannot_be_traced_is_reached_with_hooks_that_are_removed():
    model = loops().double()
    images = torch.rand(2, 3, 9, 9, dtype=torch.float64)
    field = effective_receptive_field(model, images, layer="steps.1", options=ONES)
    assert field.method.startswith("hooks (") and field.theoretical is None
    torch.testing.assert_close(field.heat, plain_autograd(model, images, "steps.1", (4, 4)))
    assert effective_receptive_field(model, images).layer == "act"
    assert all(not module._forward_hooks for module in model.modules())
    with pytest.raises(ReceptiveFieldError, match=r"did you mean 'steps\.1'"):
        effective_receptive_field(model, images, layer="steps.11")


def test_a_layer_inside_a_part_that_was_kept_whole():
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), loops())
    field = effective_receptive_field(model, torch.rand(1, 3, 9, 9), layer="1.steps.0")
    assert field.method.startswith("hooks (")
    assert field.heat.ne(0).sum() == 25


def test_the_model_is_left_as_it_was(small):
    with unchanged(small.train()):
        effective_receptive_field(small, torch.rand(1, 3, 8, 8, dtype=torch.float64))
    assert small.training and small.act.inplace
    assert all(p.requires_grad and p.grad is None for p in small.parameters())


def test_float64_of_a_float32_model_is_more_exact():
    network = uniform_network(12, 3)
    field = effective_receptive_field(network, torch.rand(1, 1, 25, 25), options=ErfOptions(double=True))
    assert next(network.parameters()).dtype == torch.float32
    profile = uniform_profile(12, 3)
    torch.testing.assert_close(field.heat / field.heat.sum(), torch.outer(profile, profile), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (33, 32)])
def test_odd_and_tiny_images(size):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1))
    field = effective_receptive_field(model, torch.rand(2, 3, *size), layer="1")
    assert field.heat.shape == size
    assert 0 < field.metrics.count <= size[0] * size[1]


def dead():
    model = nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU())
    nn.init.constant_(model[0].bias, -100.0)
    return model


def overwrites(net, x):
    y = net.a(x).exp()
    y.mul_(2.0)  # the gradient of exp needs its result
    return y * 1.0


VIT = torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 16, num_classes=3)


@pytest.mark.parametrize(
    ("model", "size", "options", "words"),
    [
        (dead(), 8, {"layer": "1"}, "zero for all 3 images.*dead"),
        (VIT, 32, {"layer": "encoder.ln", "options": ONES}, "sum to zero"),  # not measured as noise
        (Net(overwrites, a=nn.Conv2d(3, 3, 3)), 8, {}, "inplace operation"),  # breaks its own gradient
    ],
)
def test_fields_that_mean_nothing_are_said(model, size, options, words):
    with pytest.raises(ReceptiveFieldError, match=words):
        effective_receptive_field(model, torch.rand(3, 3, size, size), **options)


def test_images_in_which_a_unit_is_dead_are_counted():
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())
    nn.init.constant_(model[0].weight, 1.0)
    nn.init.constant_(model[0].bias, 0.0)
    images = torch.tensor([1.0, -1.0, -2.0]).view(3, 1, 1, 1).expand(3, 1, 4, 4)
    field = effective_receptive_field(model, images, layer="1")
    assert (field.images, field.dead_images) == (3, 2)


@pytest.mark.parametrize(
    ("layer", "image", "message"),
    [
        ("b", torch.rand(1, 3, 8, 8), "no gradient leads"),
        ("bb", torch.rand(1, 3, 8, 8), "no layer 'bb'"),
        ("a", torch.full((1, 3, 8, 8), float("nan")), "not finite|computes something else"),
        ("sum_1", torch.rand(1, 3, 8, 8), "no position"),
        ("a", torch.rand(3, 8, 8), r"\(N, C, height, width\)"),
        ("a", torch.rand(0, 3, 8, 8), "no images"),
    ],
)
def test_bad_input_is_refused(layer, image, message):
    model = Net(
        lambda net, x: (net.b(net.a(x).detach()), (x > 0).sum((2, 3))), a=nn.Conv2d(3, 3, 3), b=nn.Conv2d(3, 3, 3)
    )
    if image.isnan().any():
        model.a = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Hardswish())
    with pytest.raises((ReceptiveFieldError, ModelError), match=message):
        effective_receptive_field(model, image, layer=layer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"upstream": "one"}, "ones, random"),
        ({"average": "mean"}, "absolute"),
        ({"average": "signed"}, "needs upstream"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ReceptiveFieldError, match=message):
        ErfOptions(**options)


@pytest.mark.parametrize(
    ("images", "unit", "message"),
    [
        (torch.rand(1, 3, 8, 8), (6, 0), "6 x 6 units"),
        ([torch.rand(1, 3, 8, 8), torch.rand(1, 3, 9, 8)], None, "differ in size"),
        ([["no tensor", 0]], None, "holds str"),
    ],
)
def test_a_unit_outside_and_images_of_two_sizes_are_refused(images, unit, message):
    with pytest.raises((ReceptiveFieldError, DataError), match=message):
        effective_receptive_field(nn.Conv2d(3, 3, 3), images, options=ErfOptions(unit=unit))


def test_drift_is_zero_for_the_same_network_and_grows_with_the_change():
    model = uniform_network(6, 3)
    images = torch.rand(2, 1, 21, 21)
    first = effective_receptive_field(model, images)
    same = erf_drift(first, effective_receptive_field(copy.deepcopy(model), images))
    assert (same.total_variation, same.moved_px, same.radius_change_px, same.size_ratio) == (0, 0, 0, 1)
    drifts = []
    for scale in (0.5, 0.1):
        narrow, around = copy.deepcopy(model), torch.full((3, 3), scale)
        around[1, 1] = 1
        for conv in narrow:
            conv.weight.data *= around
        drifts.append(erf_drift(first, effective_receptive_field(narrow, images)))
    assert 0 < drifts[0].total_variation < drifts[1].total_variation <= 1
    assert drifts[1].radius_change_px < drifts[0].radius_change_px < 0
    assert drifts[1].moved_px == pytest.approx(-drifts[1].radius_change_px)  # all influence moved inwards
    assert drifts[1].size_ratio < drifts[0].size_ratio < 1
    with pytest.raises(ReceptiveFieldError, match="differ in size"):
        erf_drift(first, effective_receptive_field(model, torch.rand(1, 1, 23, 23)))


def test_probe_images():
    crops = probe_images("photographs", 3, (20, 30))
    assert crops.shape == (3, 3, 20, 30) and 0.3 < float(crops.std()) < 3
    assert torch.equal(crops, probe_images("photographs", 3, (20, 30)))
    assert probe_images("noise", 2, (5, 5), seed=1).shape == (2, 3, 5, 5)
    with pytest.raises(ReceptiveFieldError, match="did you mean 'noise'"):
        probe_images("noize", 1, (5, 5))


def test_layers_to_show_end_blocks_in_order():
    names = layers_to_show(torchvision.models.resnet18(weights=None), torch.zeros(1, 3, 64, 64), count=8)
    assert names == [f"layer{i}.{j}" for i in (1, 2, 3, 4) for j in (0, 1)]
    assert layers_to_show(loops(), torch.zeros(1, 3, 9, 9)) in ([None], ["act"])


maps = st.builds(
    lambda seed, h, w: torch.rand(h, w, generator=torch.Generator().manual_seed(seed), dtype=torch.float64),
    st.integers(0, 999),
    st.integers(3, 12),
    st.integers(3, 12),
)


def gaussian(height, width, centre, sigma):
    rows = torch.arange(height, dtype=torch.float64) - centre[0]
    columns = torch.arange(width, dtype=torch.float64) - centre[1]
    return torch.exp(-0.5 * ((rows / sigma[0]) ** 2)[:, None] - 0.5 * ((columns / sigma[1]) ** 2)[None])


@given(st.floats(8, 30), st.floats(8, 30), st.floats(2, 12), st.floats(2, 12), st.floats(0.1, 1e6))
@settings(max_examples=25)
def test_fit_recovers_a_gaussian(row, column, sigma_row, sigma_column, height):
    fit = gaussian_fit(height * gaussian(40, 37, (row, column), (sigma_row, sigma_column)))
    assert fit.sigma == pytest.approx((sigma_row, sigma_column), rel=1e-3)
    assert fit.centre == pytest.approx((row, column), abs=1e-2)
    assert fit.r_squared == pytest.approx(1, abs=1e-6)


def test_fit_recovers_a_gaussian_wider_than_the_image():
    fit = gaussian_fit(gaussian(64, 64, (31, 31), (90.0, 60.0)))
    assert fit.sigma == pytest.approx((90, 60), rel=1e-2)


def test_fit_says_that_noise_is_no_gaussian():
    assert gaussian_fit(torch.rand(64, 64, dtype=torch.float64)).r_squared < 0.2


@given(maps, st.floats(0.05, 0.99))
def test_mass_radius_against_brute_force(heat, share):
    centre = (heat.shape[0] / 2, heat.shape[1] / 2)
    distance = distances(heat.shape, centre)
    radii = sorted(set(distance.flatten().tolist()))
    expected = next(r for r in radii if heat[distance <= r].sum() >= share * heat.sum() * (1 - 1e-12))
    assert mass_radius(heat, share, centre) == pytest.approx(expected)


@given(maps, st.floats(0.05, 0.99))
def test_contribution_area_against_brute_force(heat, share):
    height, width = heat.shape
    row, column = height // 2, width // 2
    for reach in range(max(height, width)):
        part = heat[max(0, row - reach) : row + reach + 1, max(0, column - reach) : column + reach + 1]
        if part.sum() >= share * heat.sum() * (1 - 1e-12):
            break
    assert contribution_area(heat, share) == pytest.approx(part.numel() / heat.numel())


@given(maps, maps)
def test_radial_distance_against_scipy(left, right):
    height, width = min(left.shape[0], right.shape[0]), min(left.shape[1], right.shape[1])
    left, right = (m[:height, :width] / m[:height, :width].sum() for m in (left, right))
    radius = distances((height, width), (height / 2, width / 2))
    expected = wasserstein_distance(
        radius.flatten().numpy(), radius.flatten().numpy(), left.flatten().numpy(), right.flatten().numpy()
    )
    assert radial_distance(left, right, radius) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kernel", [3, 5, 7])
@pytest.mark.parametrize("layers", [5, 10, 20, 40])
def test_uniform_networks_tend_to_the_gaussian(kernel, layers):
    heat = torch.outer(*[uniform_profile(layers, kernel)] * 2)
    assert second_moment(heat) == pytest.approx((uniform_sigma(layers, kernel),) * 2, rel=1e-9)
    limit = gaussian_size(uniform_sigma(layers, kernel))
    assert math.sqrt(above_threshold(heat)) == pytest.approx(limit, rel=0.04 if layers == 5 else 0.03)


@given(maps)
def test_radial_profile_holds_all_influence(heat):
    radius, mass = radial_profile(heat, (1.0, 2.0))
    assert len(radius) == len(mass) and float(mass.sum()) == pytest.approx(1)
