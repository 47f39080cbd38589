from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from compress.errors import SparsityError
from compress.sparsity.parametrization import (
    kept_magnitude,
    nm_mask,
    partial_mask,
    pattern_mask,
    unstructured_mask,
    verify_nm,
)
from compress.sparsity.spec import parse_pattern

NM = st.sampled_from([(2, 4), (1, 4), (3, 4), (1, 2), (4, 8), (2, 6)])
FLOATS = st.floats(-4, 4, width=32)


@st.composite
def weights(draw, largest=3):
    n, m = draw(NM)
    shape = (draw(st.integers(1, largest)), m * draw(st.integers(1, 2)), *draw(st.sampled_from([(), (2,), (1, 2)])))
    return n, m, torch.from_numpy(draw(hnp.arrays(np.float32, shape, elements=FLOATS)))


@settings(max_examples=60, deadline=None)
@given(weights())
def test_nm_mask_is_the_best_of_all_patterns(drawn):
    n, m, weight = drawn
    mask = nm_mask(weight, n, m)
    groups = weight.abs().double().movedim(1, -1).reshape(-1, m)
    chosen = mask.movedim(1, -1).reshape(-1, m)
    assert (chosen.sum(1) == n).all()
    for values, keep in zip(groups, chosen, strict=True):
        best = max(values[list(pattern)].sum().item() for pattern in combinations(range(m), n))
        assert values[keep].sum().item() == pytest.approx(best)


@settings(max_examples=30, deadline=None)
@given(weights())
def test_nm_mask_follows_given_scores_and_breaks_ties_low(drawn):
    n, m, weight = drawn
    smallest = weight.abs().movedim(1, -1).reshape(-1, m).sort(1).values[:, :n]
    kept = weight.abs()[nm_mask(weight, n, m, scores=-weight.abs())]
    assert kept.double().sum().item() == pytest.approx(smallest.double().sum().item())
    ties = nm_mask(torch.ones_like(weight), n, m).movedim(1, -1).reshape(-1, m)
    assert (ties == (torch.arange(m) < n)).all()


def test_mask_keeps_layout_of_convolutions():
    weight = torch.zeros(2, 8, 3, 3)
    weight[1, [1, 6], 2, 0] = torch.tensor([5.0, -7.0])
    mask = nm_mask(weight, 1, 4)
    assert mask.shape == weight.shape and mask[1, 1, 2, 0] and mask[1, 6, 2, 0]
    assert mask.sum() == weight.numel() / 4


@settings(max_examples=60, deadline=None)
@given(hnp.arrays(np.float32, st.integers(1, 30), elements=FLOATS), st.floats(0, 1))
def test_unstructured_mask_takes_the_smallest(values, ratio):
    mask = unstructured_mask(torch.from_numpy(values), ratio).numpy()
    assert (~mask).sum() == round(ratio * len(values))
    if 0 < mask.sum() < len(mask):
        assert np.abs(values[mask]).min() >= np.abs(values[~mask]).max()


def test_kept_magnitude_of_iid_weights_matches_the_literature():
    generator = torch.Generator().manual_seed(0)
    for draw, structured, unstructured in ((torch.rand, 0.700, 0.750), (torch.randn, 0.7445, 0.7965)):
        weight = draw(1024, 1024, generator=generator)
        assert kept_magnitude(weight, nm_mask(weight, 2, 4)) == pytest.approx(structured, abs=1e-3)
        assert kept_magnitude(weight, unstructured_mask(weight, 0.5)) == pytest.approx(unstructured, abs=1e-3)


def test_kept_magnitude_of_zeros_is_all():
    assert kept_magnitude(torch.zeros(2, 4), nm_mask(torch.zeros(2, 4), 2, 4)) == 1.0


@settings(max_examples=30, deadline=None)
@given(weights(), st.floats(0, 1))
def test_partial_masks_lead_from_all_to_the_mask_by_magnitude(drawn, level):
    n, m, weight = drawn
    final = nm_mask(weight, n, m)
    part = partial_mask(weight, final, level)
    assert torch.equal(partial_mask(weight, final, 0.0), torch.ones_like(final))
    assert torch.equal(partial_mask(weight, final, 1.0), final)
    assert (part | ~final).all()  # keeps all that the final mask keeps
    gone, spared = weight.abs()[~part], weight.abs()[part & ~final]
    assert len(gone) == round(level * int((~final).sum()))
    assert not len(gone) or not len(spared) or gone.max() <= spared.min()


@settings(max_examples=40, deadline=None)
@given(hnp.arrays(np.int8, (3, 8, 2), elements=st.integers(-2, 2)), st.sampled_from([(2, 4), (1, 2), (3, 8)]))
def test_verify_nm_counts_groups_one_by_one(weight, nm):
    n, m = nm
    expected = sum(
        np.count_nonzero(weight[k, g : g + m, r]) > n for k in range(3) for g in range(0, 8, m) for r in range(2)
    )
    assert verify_nm(weight, n, m) == expected
    assert verify_nm(np.moveaxis(weight, 1, 0), n, m, axis=0) == expected


def test_masked_weights_verify_and_dense_ones_do_not():
    weight = torch.randn(8, 16, 3, 3)
    mask = nm_mask(weight, 2, 4)
    assert verify_nm((weight * mask).numpy(), 2, 4) == 0
    assert verify_nm(weight.numpy(), 2, 4) == 8 * 4 * 9


@pytest.mark.parametrize(
    ("weight", "n", "m", "match"),
    [
        (torch.ones(4, 6), 2, 4, "multiple of 4"),
        (torch.ones(8), 2, 4, "multiple of 4"),
        (torch.ones(4, 8), 4, 4, "below m"),
        (torch.ones(4, 8), 0, 4, "below m"),
        (torch.full((4, 8), float("nan")), 2, 4, "NaN"),
        (torch.full((4, 8), float("inf")), 2, 4, "infinite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(weight, n, m, match):
    with pytest.raises(SparsityError, match=match):
        nm_mask(weight, n, m)


def test_other_misuse_is_refused():
    with pytest.raises(SparsityError, match="scores"):
        nm_mask(torch.ones(4, 8), 2, 4, scores=torch.ones(8, 4))
    with pytest.raises(SparsityError, match="between 0 and 1"):
        unstructured_mask(torch.ones(4), 1.5)
    with pytest.raises(SparsityError, match="prune_channels"):
        pattern_mask(torch.ones(4, 4), parse_pattern("channel:0.5"))
    with pytest.raises(SparsityError, match="axis 1"):
        verify_nm(np.ones((4, 6)), 2, 4)
    with pytest.raises(SparsityError, match="axis 2"):
        verify_nm(np.ones((4, 8)), 2, 4, axis=2)
