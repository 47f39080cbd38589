import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.data.base import bounded, stratified_order


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_every_prefix_holds_the_classes_in_proportion(classes):
    targets = torch.tensor(classes)
    order = stratified_order(targets)
    assert sorted(order.tolist()) == list(range(len(classes)))
    share = torch.bincount(targets, minlength=5) / len(classes)
    for length in range(1, len(classes) + 1):
        held = torch.bincount(targets[order[:length]], minlength=5)
        # rounding puts each class half an image off at most, and the prefix itself 5 halves
        assert ((held - length * share).abs() <= 0.5 + 2.5 * share + 1e-6).all()


def test_equal_classes_differ_by_one_image_at_most():
    targets = torch.arange(100) // 10
    held = torch.bincount(targets[stratified_order(targets)[:37]])
    assert held.max() - held.min() <= 1


def test_a_bound_keeps_the_stored_order_and_is_no_run_of_neighbours():
    targets = torch.arange(400) // 100
    chosen = bounded(targets, 40)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert torch.bincount(targets[chosen]).tolist() == [10] * 4
    assert (chosen.diff() > 1).float().mean() > 0.5
    assert torch.equal(bounded(targets, 40), chosen)


def test_no_bound_or_a_wide_one_keeps_all():
    targets = torch.tensor([0, 1, 1])
    assert bounded(targets, None).tolist() == bounded(targets, 3).tolist() == bounded(targets, 9).tolist() == [0, 1, 2]
