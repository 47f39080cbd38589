"""Pictures made on the device: how many are drawn together changes none of them, nor do processes and devices."""

import pytest
import torch

from compress import DataSpec, load_data
from compress.data.base import BatchPlan

SPECS = {
    "digits": DataSpec(name="digits", image_size=16, train_images=60),
    "shapes": DataSpec(name="shapes", image_size=24, num_classes=5, train_images=60, val_images=7),
}


def pictures(split, plan, device="cpu"):
    return [(images.cpu(), targets.cpu()) for images, targets in split.batches(plan, device=device)]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("chunk", [8, 20, 1000])
def test_a_chunk_changes_no_picture(name, chunk):
    split = load_data(SPECS[name]).train
    plan = BatchPlan(batch_size=8, epoch=3, first=1)
    expected = [split.load(share, epoch=3, device=torch.device("cpu")) for share in split.batch_indices(plan)]
    split.chunk_images = chunk
    found = pictures(split, plan)
    assert len(found) == len(expected)
    for (images, targets), (own_images, own_targets) in zip(expected, found, strict=True):
        assert torch.equal(images, own_images)
        assert torch.equal(targets, own_targets)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("processes", [2, 3])
def test_shares_of_processes_are_the_pictures_of_one(name, processes):
    split = load_data(SPECS[name]).train
    split.chunk_images = 32
    whole = pictures(split, BatchPlan(batch_size=12, epoch=1))
    parts = [pictures(split, BatchPlan(batch_size=12, epoch=1, rank=r, world_size=processes)) for r in range(processes)]
    for (images, targets), *shares in zip(whole, *parts, strict=True):
        for rank, (own_images, own_targets) in enumerate(shares):
            assert torch.equal(images[rank::processes], own_images)
            assert torch.equal(targets[rank::processes], own_targets)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", SPECS)
def test_a_gpu_makes_the_same_pictures(name):
    split = load_data(SPECS[name]).train
    plan = BatchPlan(batch_size=30, epoch=2)
    for (images, targets), (own, own_targets) in zip(pictures(split, plan), pictures(split, plan, "cuda"), strict=True):
        assert torch.equal(targets, own_targets)
        assert (images - own).abs().mean() < 1e-3
