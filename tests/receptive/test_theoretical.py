# Rows of the table beyond sizes: global, unknown, misaligned and lost fields, and bad input.

import json
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from compress import receptive_field, trace
from compress.errors import ModelError, ReceptiveFieldError
from compress.receptive import unproductive_layers
from compress.receptive.fields import (
    IDENTITY,
    fit,
    interpolated,
    nearest,
    proportional,
    sliding,
    through,
    transposed,
    unite,
)
from tests.further import further
from tests.networks import Net
from tests.receptive.support import support, supports, torchvision_model, without_chance


def table(model, *shape):
    return receptive_field(model, torch.rand(shape or (1, 3, 32, 32)))


def squeeze_excite():
    def run(net, x):
        x = net.conv(x)
        return x * net.squeeze(net.pool(x)).sigmoid()

    return Net(run, conv=nn.Conv2d(3, 3, 3, padding=1), pool=nn.AdaptiveAvgPool2d(1), squeeze=nn.Conv2d(3, 3, 1))


def test_squeeze_and_excite_is_global_and_keeps_its_local_size():
    row = table(squeeze_excite()).rows[-1]
    assert row.status == "global"
    assert "pool" in row.reason
    assert row.size == (32, 32)
    assert row.local_size == (3, 3)


@pytest.mark.parametrize(
    "head",
    [
        lambda x: x.mean((2, 3)),
        lambda x: torch.nn.functional.adaptive_avg_pool2d(x, 1),
        lambda x: torch.amax(x, (2, 3)),
        lambda x: x.flatten(1).softmax(-1),
        lambda x: torch.nn.functional.group_norm(x, 3),
        lambda x: torch.nn.functional.instance_norm(x),
        lambda x: x.flatten(2) @ x.flatten(2).transpose(1, 2),
        lambda x: torch.einsum("nchw,ncij->nhwij", x, x).sum((3, 4)),
    ],
)
def test_operations_over_all_positions_are_global(head):

    row = table(Net(lambda net, x: head(net.conv(x)), conv=nn.Conv2d(3, 6, 3)), 1, 3, 12, 12).rows[-1]
    assert row.status == "global"
    assert row.seen == (12, 12)


def test_pooling_one_axis_is_global_on_that_axis_only():
    class Strip(nn.Module):
        def forward(self, x):
            return x.mean(3)

    row = table(Strip(), 1, 3, 8, 10).rows[-1]
    assert row.status == "global"
    assert row.size == (1, 10)


def test_vision_transformer_is_local_before_attention_and_global_after():
    found = table(torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 16, num_classes=3))
    assert found.row("conv_proj").size == (8, 8)
    attention = found.row("encoder.layers.encoder_layer_0.self_attention")
    after = found.row("encoder.ln")
    assert (after.status, after.seen) == ("global", (32, 32))
    assert "attention" in after.reason
    assert attention.status == "global"


def test_shifted_windows_equal_the_support_of_the_gradient():
    # Masked positions have weight e^-100, so that only gradients far above it count.
    model = torchvision.models.SwinTransformer([2, 2], 8, [4, 4], [2, 2], [4, 4], num_classes=3).eval()
    image = torch.rand(1, 3, 40, 32)  # 10 x 8 units: padded to whole windows in one axis
    row = receptive_field(model, image).row("features.1")
    seen = {}
    model.features[1].register_forward_hook(lambda m, i, o: seen.update(out=o))
    image.requires_grad_()
    model(image)
    for unit in [(0, 0), (3, 3), (4, 5), (5, 2), (9, 7)]:
        weights = torch.randn(seen["out"].shape[-1])
        value = (seen["out"][0, unit[0], unit[1]] * weights).sum()
        (gradient,) = torch.autograd.grad(value, image, retain_graph=True)
        reached = gradient.abs().amax((0, 1)) > 1e-18
        rows, columns = reached.any(1).nonzero().flatten(), reached.any(0).nonzero().flatten()
        expected = ((int(rows[0]), int(rows[-1])), (int(columns[0]), int(columns[-1])))
        assert row.interval(unit) == expected


class Opaque(nn.Module):
    def forward(self, x):
        return x if x.sum() > 1e9 else x.sort(-1).values


def test_an_unknown_operation_is_unknown_from_there_on_by_name():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), Opaque(), nn.Conv2d(3, 3, 3), nn.AdaptiveAvgPool2d(1))
    found = table(model)
    assert found.row("0").size == (3, 3)
    for name in ("1", "2", "3"):
        row = found.row(name)
        assert row.status == "unknown"
        assert row.size == row.effective_stride == row.seen == (None, None)
        assert "from 1 (Opaque) on" in row.reason
    assert found.unknown.name == found.row("1").name
    with pytest.raises(ReceptiveFieldError, match="Opaque"):
        found.row("3").interval((0, 0))


class Sorting(nn.Module):
    def forward(self, x):
        return torch.sort(x, -1)[0] + 1


class Spelled(nn.Module):
    def forward(self, x):
        y = x.transpose(2, 3)
        return torch.maximum(y, torch.nn.functional.max_pool2d(y, 3, 1, 1)).mT.flip(3)


def test_spellings_and_functions_that_other_analyses_know():
    row = table(nn.Sequential(nn.Conv2d(3, 3, 3), Spelled())).rows[-1]
    assert row.interval((0, 0, 4, 4)) == ((3, 7), (24, 28))


def test_an_unknown_function_that_returns_a_tuple():
    rows = table(Sorting()).rows
    assert rows[0].status == "exact"
    assert {row.status for row in rows[1:]} == {"unknown"}
    assert "sort" in rows[-1].reason


def skewed():
    # Two branches of one size whose centres differ by half a pixel.
    return Net(
        lambda net, x: net.conv(x) + net.pool(x), conv=nn.Conv2d(3, 3, 3, stride=2, padding=1), pool=nn.AvgPool2d(2, 2)
    )


def test_branches_with_different_centres_are_said_to_be_misaligned():
    row = table(skewed()).row("add")
    assert row.size == (3, 3)  # -1 .. 1 and 0 .. 1
    assert len(row.notes) == 1
    assert "0.5 px" in row.notes[0]
    assert "misaligned" in row.notes[0]


def unequal():
    # Two branches of one size whose strides differ: 9 -> 3 by stride 3 and by stride 4 with padding.
    return Net(
        lambda net, x: net.left(x) + net.right(x),
        left=nn.Conv1d(1, 1, 3, stride=3, bias=False),
        right=nn.Conv1d(1, 1, 3, stride=4, padding=1, bias=False),
    )


def test_branches_with_different_strides_are_misaligned_and_still_exact_at_the_image_size():
    model = unequal()
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    image = torch.rand(1, 1, 9, requires_grad=True)
    row = receptive_field(model, image.detach()).row("add")
    assert "strides 3 and 4" in row.notes[0]
    assert row.effective_stride == (None,)
    output = model(image)
    expected = [support(output, image, (0, 0, u)) for u in range(3)]
    assert [row.interval((u,)) for u in range(3)] == expected
    assert row.size == (max(b - a + 1 for ((a, b),) in expected),)
    assert "image size" in row.reason


def test_slices_that_fold_pixels_into_channels():
    class Focus(nn.Module):
        def forward(self, x):
            return torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)

    row = table(Focus()).rows[-1]
    assert (row.size, row.effective_stride) == ((2, 2), (2, 2))
    assert row.interval((3, 5)) == ((6, 7), (10, 11))


def test_pixel_unshuffle_and_shuffle():
    found = table(nn.Sequential(nn.PixelUnshuffle(2), nn.PixelShuffle(2)), 1, 4, 8, 8)
    assert (found.row("0").size, found.row("0").effective_stride) == ((2, 2), (2, 2))
    assert found.row("1").interval((3, 3)) == ((3, 3), (3, 3))


@pytest.mark.parametrize("shape", [(1, 3, 40), (1, 3, 20, 30), (1, 3, 9, 10, 11)])
def test_one_to_three_axes(shape):
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 3]
    pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[len(shape) - 3]
    row = table(nn.Sequential(conv(3, 4, 3), pool(2), conv(4, 4, 3)), *shape).rows[-1]
    axes = len(shape) - 2
    assert row.size == (8,) * axes
    assert row.effective_stride == (2,) * axes


def test_axes_differ():
    row = table(nn.Conv2d(3, 4, (3, 7), stride=(1, 2), padding=(0, 3), dilation=(2, 1))).rows[-1]
    assert row.size == (5, 7)
    assert row.effective_stride == (1, 2)
    assert row.effective_padding == (0, 3)


@pytest.mark.parametrize("size", [1, 2, 7, 33])
def test_odd_and_tiny_inputs(size):
    row = table(torchvision_model("resnet18"), 1, 3, size, size).row("layer4")
    assert row.size == (435, 435)
    assert row.seen == (size, size)


def test_dict_and_tuple_outputs_and_graph_modules():
    def many():
        return Net(
            lambda net, x: {"a": net.a(x), "both": (net.b(x), net.a(net.b(x)))},
            a=nn.Conv2d(3, 3, 3),
            b=nn.Conv2d(3, 3, 5),
        )

    image = torch.rand(1, 3, 16, 16)
    found = receptive_field(many(), image)
    traced = receptive_field(trace(many(), image), image)
    assert found.row("a").size == (7, 7)  # its last call
    assert [row.size for row in found] == [row.size for row in traced]


def test_a_misspelt_layer_names_near_misses():
    with pytest.raises(ReceptiveFieldError, match=r"did you mean 'layer4\.1"):
        table(torchvision_model("resnet18")).row("layer4.1.conv22")


@pytest.mark.parametrize("shape", [(1, 3), (3,), (1, 3, 0, 8)])
def test_what_is_no_image_is_refused(shape):
    with pytest.raises(ReceptiveFieldError, match="batch of images"):
        receptive_field(nn.Identity(), torch.zeros(shape))


def test_a_model_that_does_not_fit_its_input_is_refused():
    with pytest.raises(ModelError):
        receptive_field(nn.Conv2d(4, 4, 3), torch.zeros(1, 3, 8, 8))


def test_no_such_unit():
    row = table(nn.Conv2d(3, 3, 3)).rows[-1]
    with pytest.raises(ReceptiveFieldError, match="no unit"):
        row.interval((30, 0))


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    table(model)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_records_are_json():
    records = json.loads(json.dumps(table(squeeze_excite()).records()))
    assert records[-1]["local_size"] == [3, 3]
    assert records[-1]["status"] == "global"


def test_unproductive_layers_of_a_plain_network():
    # Sizes 3, 5, 7, 9: at 6 pixels the fourth convolution is the first whose input (7) is larger than the image.
    model = nn.Sequential(*[nn.Conv2d(1 if i == 0 else 2, 2, 3, padding=1, bias=False) for i in range(5)])
    found = unproductive_layers(table(model, 1, 1, 6, 6))
    assert [layer.path for layer in found.layers] == ["3", "4"]
    assert [layer.input_size for layer in found.layers] == [(7, 7), (9, 9)]
    assert all(layer.certain for layer in found.layers)
    inner, first = 2 * 2 * 9 * 36, 2 * 9 * 36
    assert [layer.macs for layer in found.layers] == [inner, inner]
    assert found.share == pytest.approx(2 * inner / (4 * inner + first))
    assert unproductive_layers(table(model, 1, 1, 6, 6), (12, 12)).layers == ()


def test_shortcuts_make_a_layer_critical_rather_than_unproductive():
    found = unproductive_layers(table(torchvision_model("resnet18"), 1, 3, 64, 64))
    assert found.layers
    assert not found.layers[0].certain
    assert found.certain_share < found.share


# The algebra of windows against enumeration of sets of positions.

slidings = st.builds(
    sliding, st.integers(1, 5), stride=st.integers(1, 4), dilation=st.integers(1, 3), padding=st.integers(0, 4)
)
transposeds = st.builds(
    transposed, st.integers(1, 5), stride=st.integers(1, 4), dilation=st.integers(1, 3), padding=st.integers(0, 4)
)
windows = st.one_of(slidings, transposeds)


def positions(window, unit):
    first, last = window.at(unit)
    return set(range(first, last + 1, window.step))


@given(windows, windows, st.integers(-20, 20))
def test_through_is_the_hull_of_all_that_the_read_units_see(inner, outer, unit):
    composed = through(inner, outer)
    seen = set()
    for position in positions(outer, unit):
        first, last = inner.at(position)
        seen |= set(range(first, last + 1))
    first, last = composed.at(unit)
    assert (first, last) == (min(seen), max(seen)) if seen else first > last


@given(windows)
def test_identity_changes_nothing(window):
    assert [through(IDENTITY, window).at(u) for u in range(9)] == [window.at(u) for u in range(9)]
    assert [through(window, IDENTITY).at(u) for u in range(9)] == [window.at(u) for u in range(9)]


@given(slidings, slidings, st.integers(-9, 9))
def test_unite_is_the_hull_where_strides_agree(a, b, unit):
    united = unite(a, b)
    if a.stride != b.stride:
        assert united is None
    else:
        assert united.at(unit) == (min(a.at(unit)[0], b.at(unit)[0]), max(a.at(unit)[1], b.at(unit)[1]))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_transposed_reads_what_its_gradient_reaches(kernel, stride, dilation):
    window = transposed(kernel, stride=stride, dilation=dilation)
    x = torch.ones(1, 1, 12, requires_grad=True)
    y = F.conv_transpose1d(x, torch.ones(1, 1, kernel), stride=stride, dilation=dilation)
    for unit in range(y.shape[-1]):
        (gradient,) = torch.autograd.grad(y[0, 0, unit], x, retain_graph=True)
        reached = {p for p in positions(window, unit) if 0 <= p < 12}
        assert reached == set(gradient[0, 0].nonzero().flatten().tolist())


@given(st.integers(1, 30), st.integers(1, 30))
def test_adaptive_pool_reads_what_its_gradient_reaches(inputs, outputs):
    x = torch.ones(1, 1, inputs, requires_grad=True)
    y = F.adaptive_avg_pool1d(x, outputs)
    window = proportional(inputs, outputs)
    for unit in range(outputs):
        (gradient,) = torch.autograd.grad(y[0, 0, unit], x, retain_graph=True)
        assert positions(window, unit) == set(gradient[0, 0].nonzero().flatten().tolist())


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("inputs", "outputs"), [(12, 5), (24, 8), (10, 25)])
def test_antialiased_resize_reads_what_its_gradient_reaches(mode, inputs, outputs):
    x = torch.ones(1, 1, inputs, 1, dtype=torch.float64, requires_grad=True)
    y = F.interpolate(x, (outputs, 1), mode=mode, antialias=True)
    ratio = Fraction(inputs, outputs)
    window = interpolated(
        ratio, reach=1 if mode == "bilinear" else 2, offset=ratio / 2 - Fraction(1, 2), antialias=True
    )
    for unit in range(outputs):
        (gradient,) = torch.autograd.grad(y[0, 0, unit, 0], x, retain_graph=True)
        places = (gradient[0, 0, :, 0].abs() > 1e-12).nonzero().flatten().tolist()
        first, last = window.at(unit)
        assert (max(first, 0), min(last, inputs - 1)) == (places[0], places[-1])


def test_affine_numbers_of_known_operations():
    conv = sliding(7, stride=2, padding=3)
    assert (conv.size, conv.stride, conv.padding) == (7, 2, 3)
    up = transposed(4, stride=2, padding=1)
    assert (up.size, up.stride) == (2, Fraction(1, 2))
    assert through(conv, up).size == 9
    assert nearest(Fraction(1, 3)).stride == Fraction(1, 3)
    assert sliding(3, dilation=4).size == 9


def test_a_gap_in_a_transposed_convolution_reads_nothing():
    window = transposed(1, stride=3)
    assert [len(positions(window, u)) for u in range(6)] == [1, 0, 0, 1, 0, 0]
    assert window.smallest == 0


@given(st.builds(sliding, st.integers(1, 5), stride=st.integers(1, 4), padding=st.integers(0, 1)), st.integers(6, 12))
def test_fit_finds_a_window_from_what_units_read(window, count):
    size = window.at(count - 1)[1] + 1
    spans = [window.at(u) for u in range(count)]
    clipped = [(max(a, 0), min(b, size - 1)) for a, b in spans]
    found = fit([a for a, _ in clipped], [b for _, b in clipped], size)
    assert found is not None
    assert [(max(a, 0), min(b, size - 1)) for a, b in map(found.at, range(count))] == clipped


def test_fit_refuses_what_does_not_advance():
    assert fit([3, 0, 1, 2], [3, 0, 1, 2], 4) is None
    assert fit([0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2], 3) is None


# Every torchvision family: the table against the support of autograd gradients, and against published sizes.

PUBLISHED = {
    "alexnet": (195, "features"),
    "vgg16": (212, "features"),
    "resnet18": (435, "layer4"),
    "resnet50": (427, "layer4"),
    "resnet101": (971, "layer4"),
    "mobilenet_v2": (491, "features"),
}

# (model, module whose units are checked, image size): odd and even sizes, not all square
FAMILIES = [
    ("alexnet", "features", (97, 80)),
    ("vgg11_bn", "features", (65, 48)),
    ("resnet34", "layer3", (75, 64)),
    ("resnet50", "layer3", (64, 41)),
    ("resnext50_32x4d", "layer3", (40, 57)),
    ("densenet121", "features.transition3", (63, 48)),
    ("mobilenet_v2", "features", (70, 64)),
    ("mobilenet_v3_large", "features", (64, 50)),
    ("efficientnet_b0", "features", (48, 65)),
    ("inception_v3", "Mixed_7a", (96, 83)),
    ("googlenet", "inception5b", (70, 64)),
    ("convnext_tiny", "features.5", (70, 64)),
    ("regnet_y_400mf", "trunk_output", (40, 64)),
    ("mnasnet0_5", "layers", (64, 47)),
    ("shufflenet_v2_x0_5", "conv5", (64, 71)),
    ("squeezenet1_1", "features", (64, 71)),
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    size, path = PUBLISHED[name]
    row = receptive_field(torchvision_model(name), torch.zeros(1, 3, 64, 64)).row(path)
    assert row.size == (size, size)
    assert row.status == "exact"
    assert row.effective_stride == (32, 32)


@pytest.mark.parametrize(("name", "path", "size"), further(FAMILIES, FAMILIES[::3]), ids=[f[0] for f in FAMILIES])
def test_intervals_equal_the_support_of_the_gradient(name, path, size):
    row = receptive_field(torchvision_model(name), torch.zeros(1, 3, *size)).row(path)
    height, width = row.units
    units = list(dict.fromkeys([(0, 0), (height // 2, width // 2), (height - 1, width - 1)]))
    model = without_chance(torchvision_model(name))
    expected = supports(model, torch.rand(1, 3, *size, dtype=torch.float64), path, units)
    assert [row.interval(unit) for unit in units] == expected


@pytest.mark.parametrize(("name", "path", "length"), [("resnet18", "layer4", 480), ("mobilenet_v2", "features", 512)])
def test_unclipped_size_equals_the_support_in_a_long_image(name, path, length):
    # A strip longer than the field: the size without borders is reached, not only clipped intervals.
    row = receptive_field(torchvision_model(name), torch.zeros(1, 3, length, 32)).row(path)
    unit = (row.units[0] // 2, 0)
    model = without_chance(torchvision_model(name))
    ((rows, _),) = supports(model, torch.rand(1, 3, length, 32, dtype=torch.float64), path, [unit])
    assert rows[1] - rows[0] + 1 == row.size[0]
    assert rows[0] == unit[0] * row.effective_stride[0] - row.effective_padding[0]
