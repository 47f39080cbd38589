import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from compress import DataSpec, load_data
from compress.data.base import BatchPlan


@pytest.fixture(scope="module")
def small():
    return load_data(DataSpec(image_size=8, augment=False))


def everything(split):
    images, targets = split.load(list(range(len(split))), epoch=None, device=torch.device("cpu"))
    return split.preprocessing, images, targets


def test_the_splits_are_scikit_learns_images_once_each(small):
    restored = []
    for split in (small.train, small.val):
        preprocessing, images, targets = everything(split)
        greys = (images[:, 0] * preprocessing.std[0] + preprocessing.mean[0]) * 16
        assert (greys - greys.round()).abs().max() < 0.04  # 17 greys in 8 bits
        restored += [(int(t), *g.round().int().flatten().tolist()) for g, t in zip(greys, targets, strict=True)]
    bunch = load_digits()
    expected = [(int(t), *g.astype(int).ravel().tolist()) for g, t in zip(bunch.images, bunch.target, strict=True)]
    assert sorted(restored) == sorted(expected)


def test_a_quarter_of_each_digit_evaluates(small):
    train, val = (torch.bincount(split.targets) for split in (small.train, small.val))
    assert len(small.val) == 449
    assert ((val / (train + val)) - 0.25).abs().max() < 0.01


def test_a_nearest_neighbour_learns_one_split_and_knows_the_other(small):
    (_, images, targets), (_, val_images, val_targets) = everything(small.train), everything(small.val)
    classifier = KNeighborsClassifier(3).fit(images[:, 0].flatten(1).numpy(), targets.numpy())
    assert classifier.score(val_images[:, 0].flatten(1).numpy(), val_targets.numpy()) > 0.97


def test_the_split_does_not_depend_on_the_seed(small):
    assert torch.equal(load_data(DataSpec(image_size=8, seed=7)).val.images, small.val.images)


def test_images_are_resized_as_pillow_does_and_normalized(small):
    data = load_data(DataSpec(image_size=48, mean=(0.0, 0.1, 0.2), std=(1.0, 0.5, 0.25)))
    images, targets = data.val.load([5, 100], epoch=None, device=torch.device("cpu"))
    assert images.shape == (2, 3, 48, 48)
    assert (images.dtype, targets.dtype) == (torch.float32, torch.int64)
    source = Image.fromarray(small.val.images[100, 0].numpy().astype(np.float32), mode="F")
    expected = torch.from_numpy(np.array(source.resize((48, 48), Image.Resampling.BILINEAR))) / 255
    torch.testing.assert_close(images[1], torch.stack((expected, (expected - 0.1) * 2, (expected - 0.2) * 4)))


def test_the_constants_are_those_of_the_pixels():
    pixels = load_digits().images / 16
    preprocessing = load_data(DataSpec()).val.preprocessing
    assert preprocessing.mean == pytest.approx((pixels.mean(),) * 3, abs=1e-3)
    assert preprocessing.std == pytest.approx((pixels.std(),) * 3, abs=1e-3)


def test_training_images_move_a_little_and_evaluation_ones_do_not():
    data = load_data(DataSpec(image_size=32))
    cpu = torch.device("cpu")
    still, _ = data.train.load([3], epoch=None, device=cpu)
    moved, _ = data.train.load([3], epoch=0, device=cpu)
    assert not torch.allclose(still, moved)
    assert torch.nn.functional.cosine_similarity(still.flatten(), moved.flatten(), dim=0) > 0.5
    assert not torch.allclose(moved, data.train.load([3], epoch=1, device=cpu)[0])
    assert torch.equal(data.val.load([3], epoch=4, device=cpu)[0], data.val.load([3], epoch=None, device=cpu)[0])
    plain = load_data(DataSpec(image_size=32, augment=False)).train
    assert torch.equal(plain.load([3], epoch=0, device=cpu)[0], still)


def test_an_image_is_the_same_in_any_batch():
    split = load_data(DataSpec(image_size=32)).train
    cpu = torch.device("cpu")
    alone, target = split.load([70], epoch=2, device=cpu)
    among, targets = split.load([5, 70, 900, 1], epoch=2, device=cpu)
    torch.testing.assert_close(among[1], alone[0], atol=1e-6, rtol=0)
    assert targets[1] == target[0]


def test_a_bound_keeps_all_digits():
    data = load_data(DataSpec(train_images=100, val_images=20))
    assert (len(data.train), len(data.val)) == (100, 20)
    assert torch.bincount(data.val.targets).tolist() == [2] * 10


def test_a_pass_can_be_resumed_and_leaves_the_global_random_state_alone():
    split = load_data(DataSpec(image_size=8, train_images=50)).train
    before = torch.get_rng_state()
    whole = list(split.batches(BatchPlan(batch_size=16, epoch=3)))
    rest = list(split.batches(BatchPlan(batch_size=16, epoch=3, first=2)))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(whole) == 4
    torch.testing.assert_close(whole[2:], rest, rtol=0, atol=0)
