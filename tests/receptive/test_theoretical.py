"""Rows of the table beyond sizes: global, unknown, misaligned and lost fields, and bad input."""

import json

import pytest
import torch
import torchvision
from torch import nn

from compress import receptive_field, trace
from compress.errors import ModelError, ReceptiveFieldError
from compress.receptive import unproductive_layers
from tests.receptive.support import support, torchvision_model


def table(model, *shape):
    return receptive_field(model, torch.rand(shape or (1, 3, 32, 32)))


class SqueezeExcite(nn.Module):
    """Squeeze-and-excite."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        x = self.conv(x)
        return x * self.squeeze(self.pool(x)).sigmoid()


def test_squeeze_and_excite_is_global_and_keeps_its_local_size():
    row = table(SqueezeExcite()).rows[-1]
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
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 3)

        def forward(self, x):
            return head(self.conv(x))

    row = table(Model(), 1, 3, 12, 12).rows[-1]
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
    """Masked positions have weight e^-100, so that only gradients far above it count."""
    torch.manual_seed(0)
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
    """Two swaps of the axes of an image, the second by attribute, and a maximum between."""

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


class Skewed(nn.Module):
    """Two branches of one size whose centres differ by half a pixel."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, stride=2, padding=1)
        self.pool = nn.AvgPool2d(2, 2)

    def forward(self, x):
        return self.conv(x) + self.pool(x)


def test_branches_with_different_centres_are_said_to_be_misaligned():
    row = table(Skewed()).row("add")
    assert row.size == (3, 3)  # -1 .. 1 and 0 .. 1
    assert len(row.notes) == 1
    assert "0.5 px" in row.notes[0]
    assert "misaligned" in row.notes[0]


class Unequal(nn.Module):
    """Two branches of one size whose strides differ: 9 -> 3 by stride 3 and by stride 4 with padding."""

    def __init__(self):
        super().__init__()
        self.left = nn.Conv1d(1, 1, 3, stride=3, bias=False)
        self.right = nn.Conv1d(1, 1, 3, stride=4, padding=1, bias=False)

    def forward(self, x):
        return self.left(x) + self.right(x)


def test_branches_with_different_strides_are_misaligned_and_still_exact_at_the_image_size():
    model = Unequal()
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
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 5)

        def forward(self, x):
            return {"a": self.a(x), "both": (self.b(x), self.a(self.b(x)))}

    image = torch.rand(1, 3, 16, 16)
    found = receptive_field(Many(), image)
    traced = receptive_field(trace(Many(), image), image)
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
    records = json.loads(json.dumps(table(SqueezeExcite()).records()))
    assert records[-1]["local_size"] == [3, 3]
    assert records[-1]["status"] == "global"


def test_unproductive_layers_of_a_plain_network():
    """Sizes 3, 5, 7, 9: at 6 pixels the fourth convolution is the first whose input (7) is larger than the image."""
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
