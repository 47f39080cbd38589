import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import jaccard_score
from torch.nn import functional as F
from torchmetrics.classification import MulticlassJaccardIndex

from compress.errors import ModelError
from compress.tasks.segmentation import IGNORED, ConfusionMatrix, cross_entropy, dice, draw_masks, palette, segmentation

LABELS = ("sky", "Traffic sign", "road", "car")


def masks(seed, *, classes=4, ignored=0.2):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, classes, 5, 7, generator=generator)
    targets = torch.randint(0, classes, (3, 5, 7), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < ignored] = IGNORED
    return logits, targets


def measured(batches):
    meter = ConfusionMatrix(LABELS)
    for logits, targets in batches:
        meter.update(logits, targets)
    return meter.compute()


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_iou_is_that_of_scikit_learn_and_torchmetrics(seed):
    batches = [masks(seed), masks(seed + 1)]
    got = measured(batches)
    predicted = torch.cat([logits.argmax(1) for logits, _ in batches])
    targets = torch.cat([target for _, target in batches])
    known = targets != IGNORED
    p, t = predicted[known].numpy(), targets[known].numpy()
    present = np.union1d(p, t)
    assert got["miou"] == pytest.approx(jaccard_score(t, p, labels=present, average="macro"))
    assert got["pixel_accuracy"] == pytest.approx((p == t).mean())
    each = jaccard_score(t, p, labels=present, average=None)
    assert [got[f"iou_{('sky', 'traffic_sign', 'road', 'car')[i]}"] for i in present] == pytest.approx(list(each))
    if len(present) == len(LABELS):
        reference = MulticlassJaccardIndex(len(LABELS), ignore_index=IGNORED)
        assert got["miou"] == pytest.approx(reference(predicted, targets).item(), abs=1e-6)


def test_a_class_that_never_occurs_is_not_counted():
    logits, targets = masks(0)
    logits[:, 3] = -100
    targets[targets == 3] = 0
    got = measured([(logits, targets)])
    assert "iou_car" not in got
    assert got["miou"] == pytest.approx(np.mean([v for k, v in got.items() if k.startswith("iou_")]))


def test_processes_together_measure_the_whole():
    halves = [ConfusionMatrix(LABELS) for _ in range(2)]
    for meter, seed in zip(halves, (3, 4), strict=True):
        meter.update(*masks(seed))
    halves[0].merge_state(halves[1])
    assert halves[0].compute() == measured([masks(3), masks(4)])


@settings(max_examples=15)
@given(seed=st.integers(0, 10_000), smoothing=st.sampled_from([0.0, 0.1]))
def test_cross_entropy_is_the_mean_over_pixels_with_a_class(seed, smoothing):
    logits, targets = masks(seed)
    expected = F.cross_entropy(logits, targets, ignore_index=IGNORED, label_smoothing=smoothing)
    torch.testing.assert_close(cross_entropy(logits, targets, label_smoothing=smoothing), expected)


def test_no_pixel_with_a_class_gives_no_loss_and_no_gradient():
    logits = torch.randn(2, 4, 3, 3, requires_grad=True)
    for loss in (cross_entropy, dice):
        value = loss(logits, torch.full((2, 3, 3), IGNORED))
        (grad,) = torch.autograd.grad(value, logits)
        assert torch.isfinite(value)
        assert not grad.any()


def test_dice_of_a_perfect_prediction_is_zero_and_of_a_wrong_one_is_one():
    _, targets = masks(5)
    truth = F.one_hot(targets.where(targets != IGNORED, 0), 4).movedim(-1, 1).float()
    assert dice(100 * truth, targets).item() == pytest.approx(0, abs=1e-6)
    assert dice(100 * truth.roll(1, dims=1), targets).item() == pytest.approx(1, abs=1e-6)


def test_dice_is_its_formula():
    logits, targets = masks(6, ignored=0)
    share = logits.softmax(1)
    each = []
    for c in range(4):
        p, t = share[:, c], (targets == c).float()
        each.append(2 * (p * t).sum() / (p.square().sum() + t.square().sum()))
    torch.testing.assert_close(dice(logits, targets), 1 - torch.stack(each).mean())


@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 8, 8), (2, 4, 4, 4), (1, 4, 8, 8)])
def test_outputs_of_another_form_are_refused(shape):
    with pytest.raises(ModelError, match=r"it must be \(2, 4, 8, 8\)"):
        segmentation(LABELS).check(torch.zeros(shape), torch.zeros(2, 3, 8, 8))


def test_pictures_show_the_class_of_each_pixel():
    # The first colours of PASCAL VOC's palette, as its development kit lists them.
    assert palette(4).tolist() == [[128, 0, 0], [0, 128, 0], [128, 128, 0], [0, 0, 128]]
    images = torch.zeros(1, 3, 2, 2, dtype=torch.uint8)
    targets = torch.tensor([[[0, 1], [2, IGNORED]]])
    painted = draw_masks(4, images, None, targets)
    assert painted[0, :, 0, 1].tolist() == [0, 77, 0]
    assert painted[0, :, 1, 1].tolist() == [0, 0, 0]
