import torch

from compress.data import BatchPlan, DataSpec, load_data
from compress.data.augment import Movement
from compress.data.memory import in_memory


def shapes():
    return load_data(DataSpec(name="shapes", image_size=24, num_classes=5, train_images=23, val_images=7))


def test_images_kept_in_memory_are_those_of_the_split_to_half_a_grey_value():
    drawn = shapes().train
    kept = in_memory(drawn, "cpu", batch_size=10)
    (images, targets), (own, own_targets) = (next(s.batches(BatchPlan(batch_size=23))) for s in (drawn, kept))
    assert torch.equal(targets, own_targets)
    assert kept.images.dtype == torch.uint8
    assert (images - own).abs().max() <= 0.5 / 255 / min(drawn.preprocessing.std) + 1e-5
    assert (kept.labels, kept.preprocessing, len(kept)) == (drawn.labels, drawn.preprocessing, 23)


def test_images_kept_in_memory_come_in_the_order_of_the_split_and_move_where_asked():
    drawn = shapes().train
    still, moved = in_memory(drawn, "cpu"), in_memory(drawn, "cpu", movement=Movement(flip=True))
    plan = BatchPlan(batch_size=8, epoch=3)
    assert still.batch_indices(plan) == drawn.batch_indices(plan)
    for (a, _), (b, _) in zip(still.batches(plan), moved.batches(plan), strict=True):
        same = ((a - b).abs().amax((1, 2, 3)) < 1e-3) | ((a.flip(-1) - b).abs().amax((1, 2, 3)) < 1e-3)
        assert same.all()
