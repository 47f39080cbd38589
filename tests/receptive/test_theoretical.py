# Rows of the table beyond sizes: global, unknown, misaligned and lost fields, and bad input.

import itertools
import json

import pytest
import torch
import torch.nn.functional as F
import torchvision
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from compress import receptive_field, trace
from compress.errors import ModelError, ReceptiveFieldError
from compress.receptive import unproductive_layers
from tests.further import further
from tests.networks import Net, Opaque, unchanged
from tests.receptive.support import support, supports, torchvision_model, without_chance
from tests.roofline_model.networks import squeeze_excite


def table(model, *shape):
    return receptive_field(model, torch.rand(shape or (1, 3, 32, 32)))


def pointwise(net, x):
    y = net.conv(x).abs().clamp_min(0.1).reciprocal() - abs(torch.floor(net.conv(x)))
    return y.true_divide(2.0).double().swapdims(2, 3).erf() + torch.zeros_like(x[:, :1, 2:, 2:])


def axes(count):
    conv, pool = (getattr(nn, f"{kind}{count}d") for kind in ("Conv", "MaxPool"))
    return nn.Sequential(conv(3, 4, 3), pool(2), conv(4, 4, 3))


ONE_AXIS = nn.Conv2d(3, 4, (3, 7), stride=(1, 2), padding=(0, 3), dilation=(2, 1))
QUARTERS = ((0, 0), (1, 0), (0, 1), (1, 1))
FOLDED = Net(lambda net, x: torch.cat([x[..., i::2, j::2] for i, j in QUARTERS], 1))
CONV3, SQUEEZED = nn.Conv2d(3, 6, 3), squeeze_excite()


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        (SQUEEZED, (1, 3, 32, 32), {"status": "global", "size": (32, 32), "local_size": (3, 3)}),
        (Net(pointwise, conv=CONV3), (1, 3, 12, 12), {"status": "exact", "local_size": (3, 3)}),  # of one element each
        (Net(lambda net, x: x.mean(3)), (1, 3, 8, 10), {"status": "global", "size": (1, 10)}),  # on that axis only
        *((axes(n), (1, 3, *[20] * n), {"size": (8,) * n, "effective_stride": (2,) * n}) for n in (1, 2, 3)),
        (ONE_AXIS, (1, 3, 32, 32), {"size": (5, 7), "effective_stride": (1, 2), "effective_padding": (0, 3)}),
        (FOLDED, (1, 3, 32, 32), {"size": (2, 2), "effective_stride": (2, 2)}),
        (nn.PixelUnshuffle(2), (1, 4, 8, 8), {"size": (2, 2), "effective_stride": (2, 2)}),
    ],
)
def test_the_last_row(model, shape, expected):
    row = table(model, *shape).rows[-1]
    assert {name: getattr(row, name) for name in expected} == expected
    assert model is not SQUEEZED or "pool" in row.reason


@pytest.mark.parametrize(
    ("model", "shape", "unit", "expected"),
    [
        (FOLDED, (1, 3, 32, 32), (3, 5), ((6, 7), (10, 11))),
        (nn.Sequential(nn.PixelUnshuffle(2), nn.PixelShuffle(2)), (1, 4, 8, 8), (3, 3), ((3, 3), (3, 3))),
    ],
)
def test_pixels_folded_into_channels(model, shape, unit, expected):
    assert table(model, *shape).rows[-1].interval(unit) == expected


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
        lambda x: torch.einsum("...hw, ...ij -> ...hw", x, x),
        lambda x: x.std((2, 3)),
        lambda x: x.flatten(2).logsumexp(-1),
        lambda x: x.flatten(2).median(-1)[0],
        lambda x: x.sort(-1)[0].topk(3, 2)[0],
        lambda x: x.gather(3, x.abs().argsort(2).clamp(max=9)),
        lambda x: torch.zeros_like(x).scatter_add(2, x.argmax(1, keepdim=True).clamp(max=9), x),
        lambda x: torch.histc(x, 5),
    ],
)
def test_operations_over_all_positions_are_global(head):

    row = table(Net(lambda net, x: head(net.conv(x)), conv=nn.Conv2d(3, 6, 3)), 1, 3, 12, 12).rows[-1]
    assert (row.status, row.seen) == ("global", (12, 12))


FIELDS = {
    "glu": lambda x: F.glu(x, 1),
    "paddings": nn.Sequential(nn.CircularPad2d(1), nn.Conv2d(6, 6, 3), nn.ReflectionPad2d(2), nn.SyncBatchNorm(6)),
    "in place": lambda x: (x * 2).neg_().add_(1).unsqueeze_(0).squeeze_(0).roll(1, 3),
    "glu of rows": lambda x: F.glu(x, 2),
    "cumsum": lambda x: x.cumsum(2),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, -1),
    "functions": lambda x: torch.hypot(x, torch.lerp(x, x.roll(2, 3), 0.25)) * ~x.gt(0.5).logical_and(x < 2),
    "gather": lambda x: x.gather(2, torch.tensor([5, 0, 3]).view(1, 1, 3, 1).expand(1, 6, 3, 10)),
    "search": lambda x: x * (1 + torch.bucketize(x, torch.tensor([0.0, 1.0]))),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_of_functions_equal_the_support_of_the_gradient(name):
    model = Net(lambda net, x: net.f(net.conv(x)), conv=nn.Conv2d(3, 6, 3), f=FIELDS[name]).eval()
    row, image = table(model, 1, 3, 12, 12).rows[-1], torch.rand(1, 3, 12, 12, requires_grad=True)
    result = model(image)
    for unit in ((0, 0), (2, 7), (1, 9)):
        index = (slice(None), slice(None), *unit) if row.located else (0, 0, *unit)
        assert row.interval(unit if row.located else index) == support(result, image, index)


@pytest.mark.parametrize("f", [lambda x: x.sort(3)[0], lambda x: x.topk(4)[0], lambda x: x.kthvalue(3, 3, True)[0]])
def test_fields_of_orders_equal_what_changes_their_values(f):
    model = Net(lambda net, x: f(net.conv(x)), conv=nn.Conv2d(3, 4, 3)).eval()
    row, image = table(model, 1, 3, 8, 8).rows[-1], torch.rand(1, 3, 8, 8)
    before, changes = model(image), torch.zeros(8, 8, dtype=torch.bool)
    for place in itertools.product(range(8), repeat=2):
        for value in (-9.0, 9.0):
            other = image.clone()
            other[:, :, place[0], place[1]] = value
            changes[place] |= (model(other) != before)[0, :, 2, 0].any()
    assert reached(changes) == row.interval((2, 0)) == ((2, 4), (0, 7))


def test_vision_transformer_is_local_before_attention_and_global_after():
    found = table(torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 16, num_classes=3))
    assert found.row("conv_proj").size == (8, 8)
    assert found.row("encoder.layers.encoder_layer_0.self_attention").status == "global"
    after = found.row("encoder.ln")
    assert (after.status, after.seen) == ("global", (32, 32)) and "attention" in after.reason


def reached(pixels):
    # The first and last row, and the first and last column, of pixels that are marked.
    places = [pixels.any(axis).nonzero().flatten().tolist() for axis in (1, 0)]
    return tuple((marked[0], marked[-1]) for marked in places)


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
        value = (seen["out"][0, unit[0], unit[1]] * torch.randn(seen["out"].shape[-1])).sum()
        (gradient,) = torch.autograd.grad(value, image, retain_graph=True)
        assert row.interval(unit) == reached(gradient.abs().amax((0, 1)) > 1e-18)


def test_an_unknown_operation_is_unknown_from_there_on_by_name():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), Opaque(), nn.Conv2d(3, 3, 3), nn.AdaptiveAvgPool2d(1))
    found = table(model)
    assert found.row("0").size == (3, 3)
    for name in ("1", "2", "3"):
        row = found.row(name)
        assert row.status == "unknown" and "from 1 (Opaque) on" in row.reason
        assert row.size == row.effective_stride == row.seen == (None, None)
    assert found.unknown.name == found.row("1").name
    with pytest.raises(ReceptiveFieldError, match="Opaque"):
        found.row("3").interval((0, 0))


def test_spellings_and_functions_that_other_analyses_know():
    def spelled(net, x):
        y = net.conv(x).transpose(2, 3)
        return torch.maximum(y, torch.nn.functional.max_pool2d(y, 3, 1, 1)).mT.flip(3)

    row = table(Net(spelled, conv=nn.Conv2d(3, 3, 3))).rows[-1]
    assert row.interval((0, 0, 4, 4)) == ((3, 7), (24, 28))


def test_an_unknown_function_that_returns_a_tuple():
    rows = table(Net(lambda net, x: torch.std_mean(x, -1)[0] + 1)).rows
    assert rows[0].status == "exact"
    assert {row.status for row in rows[1:]} == {"unknown"}
    assert "std_mean" in rows[-1].reason


def skewed():
    # Two branches of one size whose centres differ by half a pixel.
    return Net(
        lambda net, x: net.conv(x) + net.pool(x), conv=nn.Conv2d(3, 3, 3, stride=2, padding=1), pool=nn.AvgPool2d(2, 2)
    )


def test_branches_with_different_centres_are_said_to_be_misaligned():
    row = table(skewed()).row("add")
    assert row.size == (3, 3)  # -1 .. 1 and 0 .. 1
    (note,) = row.notes
    assert "0.5 px" in note and "misaligned" in note


def test_branches_with_different_strides_are_misaligned_and_still_exact_at_the_image_size():
    # Two branches of one size whose strides differ: 9 -> 3 by stride 3 and by stride 4 with padding.
    left, right = nn.Conv1d(1, 1, 3, stride=3, bias=False), nn.Conv1d(1, 1, 3, stride=4, padding=1, bias=False)
    model = positive(Net(lambda net, x: net.left(x) + net.right(x), left=left, right=right))
    image = torch.rand(1, 1, 9, dtype=torch.float64, requires_grad=True)
    row, output = receptive_field(model, image.detach()).row("add"), model(image)
    assert "strides 3 and 4" in row.notes[0]
    assert row.effective_stride == (None,)
    expected = [support(output, image, (0, 0, u)) for u in range(3)]
    assert [row.interval((u,)) for u in range(3)] == expected
    assert row.size == (max(b - a + 1 for ((a, b),) in expected),)
    assert "image size" in row.reason


@pytest.mark.parametrize("size", [1, 2, 7, 33])
def test_odd_and_tiny_inputs(size):
    row = table(torchvision_model("resnet18"), 1, 3, size, size).row("layer4")
    assert (row.size, row.seen) == ((435, 435), (size, size))


def test_dict_and_tuple_outputs_and_graph_modules():
    model = Net(
        lambda net, x: {"a": net.a(x), "both": (net.b(x), net.a(net.b(x)))}, a=nn.Conv2d(3, 3, 3), b=nn.Conv2d(3, 3, 5)
    )
    image = torch.rand(1, 3, 16, 16)
    found, traced = receptive_field(model, image), receptive_field(trace(model, image), image)
    assert found.row("a").size == (7, 7)  # its last call
    assert [row.size for row in found] == [row.size for row in traced]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: table(skewed()).row("cnv"), ReceptiveFieldError, "did you mean 'conv'"),
        (lambda: table(nn.Conv2d(3, 3, 3)).rows[-1].interval((30, 0)), ReceptiveFieldError, "no unit"),
        (lambda: table(nn.Identity(), 1, 3), ReceptiveFieldError, "batch of images"),
        (lambda: table(nn.Identity(), 3), ReceptiveFieldError, "batch of images"),
        (lambda: table(nn.Identity(), 1, 3, 0, 8), ReceptiveFieldError, "batch of images"),
        (lambda: table(nn.Conv2d(4, 4, 3)), ModelError, "Conv2d"),
    ],
)
def test_what_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True)).train()
    with unchanged(model):
        table(model)
    assert model.training


def test_records_are_json():
    record = json.loads(json.dumps(table(squeeze_excite()).records()))[-1]
    assert (record["local_size"], record["status"]) == ([3, 3], "global")


def test_unproductive_layers_of_a_plain_network():
    # Sizes 3, 5, 7, 9: at 6 pixels the fourth convolution is the first whose input (7) is larger than the image.
    model = nn.Sequential(*[nn.Conv2d(1 if i == 0 else 2, 2, 3, padding=1, bias=False) for i in range(5)])
    found = unproductive_layers(table(model, 1, 1, 6, 6))
    inner, first = 2 * 2 * 9 * 36, 2 * 9 * 36
    rows = [(layer.path, layer.input_size, layer.certain, layer.macs) for layer in found.layers]
    assert rows == [("3", (7, 7), True, inner), ("4", (9, 9), True, inner)]
    assert found.share == pytest.approx(2 * inner / (4 * inner + first))
    assert unproductive_layers(table(model, 1, 1, 6, 6), (12, 12)).layers == ()


def test_shortcuts_make_a_layer_critical_rather_than_unproductive():
    found = unproductive_layers(table(torchvision_model("resnet18"), 1, 3, 64, 64))
    assert found.layers and not found.layers[0].certain
    assert found.certain_share < found.share


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("inputs", "outputs"), [(12, 5), (24, 8), (10, 25)])
def test_antialiased_resize_reads_what_its_gradient_reaches(mode, inputs, outputs):
    x = torch.ones(1, 1, inputs, 1, dtype=torch.float64, requires_grad=True)
    model = Net(lambda net, x: F.interpolate(x, (outputs, 1), mode=mode, antialias=True))
    row, y = receptive_field(model, x.detach()).rows[-1], model(x)
    for unit in range(outputs):
        assert row.interval((unit, 0)) == support(y, x, (0, 0, unit, 0), least=1e-12)


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
    row = table(torchvision_model(name), 1, 3, 64, 64).row(path)
    assert (row.size, row.status, row.effective_stride) == ((size, size), "exact", (32, 32))


@pytest.mark.parametrize(("name", "path", "size"), further(FAMILIES, FAMILIES[::3]), ids=[f[0] for f in FAMILIES])
def test_intervals_equal_the_support_of_the_gradient(name, path, size):
    row = receptive_field(torchvision_model(name), torch.zeros(1, 3, *size)).row(path)
    height, width = row.units
    units = list(dict.fromkeys([(0, 0), (height // 2, width // 2), (height - 1, width - 1)]))
    image = torch.rand(1, 3, *size, dtype=torch.float64)
    expected = supports(without_chance(torchvision_model(name)), image, path, units)
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


# Random small networks: every unit's interval against the support of its gradient, unit by unit.


CHANNELS = 4
ROUNDING = 1e-13


def resize(**options):
    return Net(lambda net, x: F.interpolate(x, **net.options), options=options)


def pad(left, right, mode):
    return Net(lambda net, x: F.pad(x, net.amounts, mode=net.mode), amounts=(left, right), mode=mode)


def branches(kernel, dilation, concat):
    def run(net, x):
        y = net.conv(x)
        return net.mix(torch.cat([x, y], 1)) if net.concat else x + y

    return Net(
        run,
        conv=nn.Conv1d(CHANNELS, CHANNELS, kernel, dilation=dilation, padding="same", bias=False),
        mix=nn.Conv1d(2 * CHANNELS, CHANNELS, 1, bias=False),
        concat=concat,
    )


def slice_net(start, step):
    return Net(lambda net, x: x[..., net.start :: net.step], start=start, step=step)


def roll(by):
    return Net(lambda net, x: x.roll(net.by, -1), by=by)


def tokens():
    return Net(
        lambda net, x: net.linear(x.transpose(1, 2)).permute(0, 2, 1), linear=nn.Linear(CHANNELS, CHANNELS, bias=False)
    )


def shuffle(net, x):
    n, c, length = x.shape
    y = x.view(n, c // 2, 2, length).transpose(2, 3).reshape(n, c // 2, 2 * length)
    return torch.cat([y, y], dim=1)


small = st.integers(1, 4)
layers = st.one_of(
    st.builds(
        lambda k, s, p, d, g: nn.Conv1d(CHANNELS, CHANNELS, k, s, p, d, groups=g, bias=False),
        st.integers(1, 5),
        st.integers(1, 3),
        st.integers(0, 3),
        small,
        st.sampled_from([1, 2, CHANNELS]),
    ),
    st.builds(
        lambda k, s, p, d: nn.ConvTranspose1d(CHANNELS, CHANNELS, k, s, min(p, d * (k - 1)), dilation=d, bias=False),
        st.integers(1, 4),
        st.integers(1, 3),
        st.integers(0, 2),
        st.integers(1, 3),
    ),
    st.builds(
        lambda k, s, c: nn.AvgPool1d(k, s, padding=k // 2, ceil_mode=c),
        st.integers(1, 4),
        st.integers(1, 3),
        st.booleans(),
    ),
    st.builds(nn.AdaptiveAvgPool1d, st.integers(1, 9)),
    st.builds(lambda n: resize(size=n, mode="nearest"), st.integers(1, 20)),
    st.builds(lambda n: resize(size=n, mode="nearest-exact"), st.integers(1, 20)),
    st.builds(lambda n, a: resize(size=n, mode="linear", align_corners=a), st.integers(2, 20), st.booleans()),
    st.builds(lambda f: resize(scale_factor=f, mode="linear"), st.sampled_from([0.5, 1.5, 2.0, 3.0])),
    st.builds(pad, st.integers(0, 2), st.integers(0, 2), st.sampled_from(["constant", "replicate", "circular"])),
    st.builds(
        lambda k, m: nn.Conv1d(CHANNELS, CHANNELS, k, padding=k // 2, padding_mode=m, bias=False),
        st.sampled_from([1, 3]),
        st.sampled_from(["circular", "replicate"]),
    ),
    st.builds(branches, st.integers(1, 4), st.integers(1, 2), st.booleans()),
    st.builds(slice_net, st.integers(0, 1), st.integers(1, 2)),
    st.builds(roll, st.integers(-2, 2)),
    st.builds(tokens),
    st.builds(Net, st.just(shuffle)),
)


def positive(model):
    for parameter in model.parameters():
        parameter.data = 0.5 + torch.rand_like(parameter)
    return model.double().eval()


def runs(model, image):
    try:
        return model(image).shape[-1] > 0
    except (RuntimeError, ValueError):  # a kernel or a circular padding larger than the map
        return False


@settings(max_examples=80)
@example([resize(size=14, mode="linear", align_corners=False)], 18)  # unit 10 lies on pixel 13
@given(st.lists(layers, min_size=1, max_size=5), st.integers(5, 24))
def test_every_unit_sees_what_its_gradient_reaches(stack, length):
    model = positive(nn.Sequential(*stack))
    image = torch.rand(1, CHANNELS, length, dtype=torch.float64, requires_grad=True)
    while not runs(model, image):
        model = model[:-1]
    if not len(model):
        return
    row = receptive_field(model, image.detach()).rows[-1]
    assert row.status in {"exact", "global"}
    output = model(image)
    if row.located:
        units = [(u,) for u in range(output.shape[-1])]
        indices = [(slice(None), slice(None), *unit) for unit in units]
    else:
        indices = units = [(0, c, u) for c in range(output.shape[1]) for u in range(output.shape[-1])]
    assert [row.interval(u) for u in units] == [support(output, image, i, least=ROUNDING) for i in indices]


@given(st.lists(layers, min_size=1, max_size=4))
def test_size_without_borders_is_that_of_a_long_image(stack):
    # If a window exists, a unit in the middle of a long image depends on exactly that window.
    model = positive(nn.Sequential(*stack))
    image = torch.rand(1, CHANNELS, 400, dtype=torch.float64, requires_grad=True)
    if not runs(model, image):
        return
    row = receptive_field(model, image.detach()).rows[-1]
    if row.status != "exact" or row.effective_stride[0] is None or row.reason:
        return
    values = [image]
    for module in model:
        values.append(module(values[-1]))
    output, length = values[-1], values[-1].shape[-1]
    if min(value.shape[-1] for value in values) < 80:  # too near to the borders, or reduced by a resize
        return
    units = range(length // 2, length // 2 + 24)
    found = [support(output, image, (slice(None), slice(None), u), least=ROUNDING)[0] for u in units]
    sizes = [b - a + 1 for a, b in (pair for pair in found if pair)]
    assert max(sizes, default=0) <= row.size[0]
    if row.effective_stride[0].denominator <= 24:
        assert max(sizes, default=0) == row.size[0]


def test_rows_taken_apart_and_stacked_again_keep_their_own_fields():
    model = Net(
        lambda net, x: torch.stack([row * 2 for row in net.conv(x).unbind(2)][::-1], 2), conv=nn.Conv2d(3, 4, 3)
    )
    x = torch.rand(1, 3, 12, 10, requires_grad=True)
    row = receptive_field(model, x.detach()).rows[-1]
    (gradient,) = torch.autograd.grad(model(x)[0, :, 2, 5].sum(), x)
    assert row.interval((0, 0, 2, 5)) == reached(gradient[0].abs().sum(0) > 0) and row.size == (3, 3)
    assert "the size is that at this image size" in row.reason
