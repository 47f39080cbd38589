# Random small networks: every unit's interval against the support of its gradient, unit by unit.

import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from compress import receptive_field
from tests.networks import Net
from tests.receptive.support import support

CHANNELS = 4
ROUNDING = 1e-13


class Resize(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.options = options

    def forward(self, x):
        return F.interpolate(x, **self.options)


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


class Shuffle(nn.Module):
    def forward(self, x):
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
    st.builds(lambda n: Resize(size=n, mode="nearest"), st.integers(1, 20)),
    st.builds(lambda n: Resize(size=n, mode="nearest-exact"), st.integers(1, 20)),
    st.builds(lambda n, a: Resize(size=n, mode="linear", align_corners=a), st.integers(2, 20), st.booleans()),
    st.builds(lambda f: Resize(scale_factor=f, mode="linear"), st.sampled_from([0.5, 1.5, 2.0, 3.0])),
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
    st.builds(Shuffle),
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
@example([Resize(size=14, mode="linear", align_corners=False)], 18)  # unit 10 lies on pixel 13
@given(st.lists(layers, min_size=1, max_size=5), st.integers(5, 24))
def test_every_unit_sees_what_its_gradient_reaches(stack, length):
    model = positive(nn.Sequential(*stack))
    image = torch.rand(1, CHANNELS, length, dtype=torch.float64, requires_grad=True)
    while not runs(model, image):
        model = model[:-1]
    if not len(model):
        return
    table = receptive_field(model, image.detach())
    row = table.rows[-1]
    assert row.status in {"exact", "global"}
    output = model(image)
    if row.located:
        units = [(u,) for u in range(output.shape[-1])]
        indices = [(slice(None), slice(None), *unit) for unit in units]
    else:
        units = [(0, c, u) for c in range(output.shape[1]) for u in range(output.shape[-1])]
        indices = units
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
