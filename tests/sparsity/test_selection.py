"""Learned n:m masks: each formula against torch's own, the update against torch's Adam, and a choice that is known."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from compress import MaskSchedule, SparsitySpec, sparsify, squash_masks
from compress.errors import SparsityError
from compress.sparsity.parametrization import (
    DEVIATION,
    REGULARIZATION,
    STRENGTH,
    Moment,
    Selection,
    as_groups,
    first_logits,
    from_groups,
    gumbel_noise,
    gumbel_softmax,
    masked_layers,
    nm_mask,
    patterns,
)
from compress.sparsity.spec import SparsityRule
from tests.sparsity.nets import batch, small

CPU = torch.device("cpu")


def test_groups_are_those_of_nm_masks():
    weight = torch.randn(6, 8, 3, 2)
    groups = as_groups(weight, 4)
    assert torch.equal(from_groups(groups, weight.shape), weight)
    assert (as_groups(nm_mask(weight, 2, 4), 4).sum(1) == 2).all()
    masks = patterns(2, 4)
    best = masks[(groups.abs() @ masks.T).argmax(1)] > 0
    assert torch.equal(from_groups(best, weight.shape), nm_mask(weight, 2, 4))


@pytest.mark.parametrize("temperature", [0.05, 1.0, 4.0])
def test_gumbel_softmax_is_torchs(temperature):
    logits = torch.randn(50, 6)
    torch.manual_seed(3)
    expected = nn.functional.gumbel_softmax(7.0 * logits, tau=temperature)
    torch.manual_seed(3)
    noise = gumbel_noise((50, 6), CPU)
    torch.testing.assert_close(gumbel_softmax(logits, noise, 7.0, temperature), expected)


def test_the_first_logits_prefer_the_mask_by_what_they_share_with_it():
    mask = torch.tensor([[True, True, False, False]])
    logits = first_logits(mask, patterns(2, 4), torch.zeros(1, 6))
    # by hand: patterns 12 13 14 23 24 34 share 2 1 1 1 1 0 values with 12, of which the mean is 1
    torch.testing.assert_close(logits, STRENGTH * DEVIATION * torch.tensor([[1.0, 0, 0, 0, 0, -1]]))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([(2, 4), (1, 4), (1, 2), (3, 5)]), st.floats(0.5, 4), st.floats(1, 20))
def test_the_update_is_adam_on_the_papers_loss(seed, kind, temperature, scale):
    """MaskLLM's loss of the soft mask, written out with autograd, and torch's Adam on its gradient."""
    torch.manual_seed(seed)
    masks, groups = patterns(*kind), 5
    logits = nn.Parameter(torch.randn(groups, len(masks)) * 0.1)
    weight, direction = torch.randn(2, groups, kind[1])
    adam = torch.optim.Adam([logits], lr=0.01, eps=1e-12)
    state = logits.detach().clone()
    noise = gumbel_noise((groups, len(masks)), CPU)
    selection = Selection(
        logits=state,
        mean=torch.zeros_like(state),
        square=torch.zeros_like(state),
        shares=gumbel_softmax(state, noise, scale, temperature),
    )
    clear = torch.ones_like(state, dtype=torch.bool)
    for step in range(1, 4):
        shares = ((scale * logits).log_softmax(1) + noise).div(temperature).softmax(1)
        hard = masks[shares.argmax(1)]
        soft = shares @ masks
        soft = hard + soft - soft.detach()  # straight through
        loss = (direction * weight * soft).sum() - REGULARIZATION * (weight * soft).square().sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        clear &= logits.grad.abs() > 1e-5 * logits.grad.abs().max()  # Adam steps by the sign: of the others it is noise
        noise = gumbel_noise((groups, len(masks)), CPU)
        now = Moment(count=step, lr=0.01, scale=scale, temperature=temperature)
        drawn = selection.advance(weight, direction * weight, masks, noise, now)
        torch.testing.assert_close(selection.logits[clear], logits.detach()[clear], rtol=1e-3, atol=1e-4)
        assume(clear.float().mean() >= 0.5)  # else there is little to compare: a sharp choice has hardly a gradient
        selection.logits.copy_(logits.detach())
        expected = ((scale * logits.detach()).log_softmax(1) + noise).div(temperature).softmax(1)
        selection.shares.copy_(expected)
        assert (drawn.sum(1) == kind[0]).all()


def test_a_choice_that_magnitudes_cannot_see_is_learned():
    """Inputs whose weights are small carry the target; those of large weights are zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8, bias=False))
    planted = torch.zeros(8, 16, dtype=torch.bool)
    planted.view(8, 4, 4)[..., [1, 2]] = True
    with torch.no_grad():
        model[0].weight.copy_(torch.where(planted, 0.1, 1.0))
    dead = ~planted[0]
    spec = SparsitySpec(schedule="gumbel", kernels="any", rules=(SparsityRule(match="0"),), end=0.9)
    sparsify(model, spec)
    layer = masked_layers(model)["0"]
    assert torch.equal(layer.mask, ~planted)
    schedule, optimizer = MaskSchedule(model, spec), torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1, 201):
        x = torch.randn(32, 16).masked_fill(dead, 0.0)
        (model(x) - x @ torch.where(planted, 0.1, 0.0).T).square().sum().backward()
        optimizer.step()
        schedule.after_step(step, 200, optimizer)
        optimizer.zero_grad()
    assert (layer.mask & planted).sum() > 0.9 * planted.sum()
    squash_masks(model)
    assert (model[0].weight != 0).sum() == planted.sum()


def test_a_loop_that_has_dropped_its_gradients_is_told_what_to_do():
    model, spec = small(), SparsitySpec(schedule="gumbel")
    sparsify(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(batch()).square().mean().backward()
    optimizer.zero_grad()
    with pytest.raises(SparsityError, match="before zero_grad"):
        MaskSchedule(model, spec).after_step(1, 10, optimizer)


def test_masks_of_another_schedule_are_refused():
    model = small()
    sparsify(model, SparsitySpec())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(SparsityError, match="call sparsify with the same spec"):
        MaskSchedule(model, SparsitySpec(schedule="gumbel")).after_step(1, 10, optimizer)
