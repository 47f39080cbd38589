"""The algebra of windows against enumeration of sets of positions."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

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
