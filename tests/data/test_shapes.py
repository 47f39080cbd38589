import math

import numpy as np
import pytest
import torch
from matplotlib.path import Path as Outline
from torch.nn import functional as F

from compress import DataSpec, load_data
from compress.data.base import BatchPlan
from compress.data.shapes import (
    EXTENT,
    LAYERS,
    OBJECT,
    OUTLINES,
    PATTERNS,
    TONES,
    VERSIONS,
    Scenes,
    class_names,
    make_scenes,
    noise,
    outline_bank,
    paint,
    pattern_bank,
    polygon,
    with_clutter,
)
from compress.errors import DataError

CPU = torch.device("cpu")


def shapes(**values):
    return load_data(DataSpec(**{"name": "shapes", "image_size": 32, "train_images": 60, "val_images": 20, **values}))


# --- what is drawn ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("points", [[(-1, -1), (1, -1), (0, 1)], [(-0.9, -0.9), (0.8, -0.7), (0.1, 0.0), (0.7, 1.0)]])
def test_the_inside_of_a_polygon_is_negative(points):
    at = torch.rand(500, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3 - 1.5
    inside = Outline(np.array([*points, points[0]])).contains_points(at.numpy())
    assert 20 < inside.sum() < 480
    assert np.array_equal((polygon(at, points) < 0).numpy(), inside)


def test_outlines_fit_their_pictures_and_differ():
    inside = outline_bank()[: len(OUTLINES)] < 0
    border = torch.ones(inside.shape[1:], dtype=torch.bool)
    border[1:-1, 1:-1] = False
    assert not (inside & border).any()
    for row in range(len(OUTLINES)):
        for other in range(row):
            both = (inside[row] & inside[other]).sum() / (inside[row] | inside[other]).sum()
            assert both < 0.9, (OUTLINES[row], OUTLINES[other])


def test_patterns_are_half_dark_and_have_contrast():
    bank = pattern_bank()
    assert len(bank) == len(PATTERNS) * VERSIONS
    assert 0 <= bank.min() <= bank.max() <= 1
    for pattern in bank:
        assert 0.25 < pattern.mean() < 0.75
        assert pattern.std() > 0.3


def one_disc(*, centre, radius, size):
    half = radius / 0.9  # the bank's disc has radius 0.9
    matrix = torch.tensor([[1.0, 0.0, -centre[0]], [0.0, 1.0, -centre[1]]]) / (half * EXTENT)
    seen = torch.zeros(1, LAYERS)
    seen[:, OBJECT] = 1
    scenes = Scenes(
        matrices=matrix.expand(1, LAYERS, 2, 3),
        outlines=torch.zeros(1, LAYERS, dtype=torch.int64),
        patterns=torch.zeros(1, LAYERS, dtype=torch.int64),
        colours=torch.ones(1, LAYERS, 2, 3),
        sizes=torch.full((1, LAYERS), half),
        opacity=seen,
        base=torch.zeros(1, 3, 5, 5),
        noise=torch.zeros(1),
    )
    return paint(scenes, size)[0]


@pytest.mark.parametrize("size", [32, 100, 224])
def test_a_disc_stands_where_it_should_at_every_size(size):
    image = one_disc(centre=(0.25, -0.4), radius=0.45, size=size)
    weight = image[0].double()
    at = (torch.arange(size, dtype=torch.float64) * 2 + 1) / size - 1
    assert float(weight.sum()) * (2 / size) ** 2 == pytest.approx(math.pi * 0.45**2, rel=0.02)
    assert float((weight.sum(0) * at).sum() / weight.sum()) == pytest.approx(0.25, abs=0.01)
    assert float((weight.sum(1) * at).sum() / weight.sum()) == pytest.approx(-0.4, abs=0.01)
    assert torch.equal(image[0], image[2])


def test_noise_is_uniform_and_differs_between_channels():
    values = noise(5, torch.arange(8), 32)
    assert values.shape == (8, 3, 32, 32)
    assert -1 <= values.min() <= values.max() < 1
    assert values.mean().abs() < 0.01
    assert float(values.var()) == pytest.approx(1 / 3, rel=0.03)
    assert np.abs(np.corrcoef(values.transpose(0, 1).flatten(1).numpy()) - np.eye(3)).max() < 0.05


# --- classes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_classes", [2, 3, 10, 20, 37, 100])
def test_every_class_is_a_cue_triple_of_its_own(num_classes):
    assert len(set(class_names(num_classes))) == num_classes


@pytest.mark.parametrize("num_classes", [8, 20, 100])
def test_no_two_cues_give_a_class_away(num_classes):
    cues = [name.rsplit(" ", 2) for name in class_names(num_classes)]
    for pair in ((0, 1), (0, 2), (1, 2)):
        left = [(cue[pair[0]], cue[pair[1]]) for cue in cues]
        assert max(map(left.count, left)) > 1


def test_the_object_has_its_class_and_nothing_else_does():
    numbers, num_classes = torch.arange(200), 100
    scenes = make_scenes(0, numbers, numbers % num_classes, num_classes=num_classes)
    names = class_names(num_classes)
    for n in range(200):
        outline, pattern, tone = names[n % num_classes].rsplit(" ", 2)
        assert OUTLINES[scenes.outlines[n, OBJECT]] == outline
        assert PATTERNS[scenes.patterns[n, OBJECT] // VERSIONS] == pattern
        red, _, blue = scenes.colours[n, OBJECT].mean(0).tolist()
        assert TONES[int(red < blue)] == tone
    shaped = scenes.outlines < len(OUTLINES)
    patterned = (scenes.colours[:, :, 0] - scenes.colours[:, :, 1]).abs().amax(-1) > 1e-3
    assert (shaped & patterned).sum(1).tolist() == [1] * 200
    assert (shaped & patterned)[:, OBJECT].all()


def test_another_class_changes_the_object_alone():
    numbers = torch.arange(20)
    one, other = (paint(make_scenes(0, numbers, numbers * 0 + c, num_classes=100), 64) for c in (0, 99))
    changed = ((one - other).abs().amax(1) > 1e-4).float().mean((1, 2))
    assert 0.01 < changed.min() <= changed.max() < 0.6


def test_classes_are_balanced_and_named():
    data = shapes(num_classes=5)
    _, targets = data.train.load(list(range(60)), epoch=None, device=CPU)
    assert torch.bincount(targets).tolist() == [12] * 5
    assert data.train.num_classes == len(data.train.labels) == 5


# --- splits ----------------------------------------------------------------------------------------------------


def test_pictures_depend_on_seed_and_index_alone():
    split = shapes().train
    whole, targets = split.load(list(range(20)), epoch=None, device=CPU)
    some, some_targets = split.load([13, 4], epoch=None, device=CPU)
    torch.testing.assert_close(some, whole[[13, 4]], atol=1e-5, rtol=0)
    assert torch.equal(some_targets, targets[[13, 4]])
    assert torch.equal(shapes().train.load(list(range(20)), epoch=None, device=CPU)[0], whole)
    assert not torch.allclose(shapes(seed=1).train.load(list(range(20)), epoch=None, device=CPU)[0], whole)


def test_training_and_evaluation_share_no_picture():
    data = shapes()
    train, _ = data.train.load(list(range(60)), epoch=None, device=CPU)
    val, _ = data.val.load(list(range(20)), epoch=None, device=CPU)
    assert torch.cdist(train.flatten(1), val.flatten(1)).min() > 5


def test_augmentation_moves_the_camera_in_training_only():
    data = shapes()
    still, _ = data.train.load([3], epoch=None, device=CPU)
    first, second = (data.train.load([3], epoch=epoch, device=CPU)[0] for epoch in (0, 1))
    assert not torch.allclose(still, first, atol=0.1)
    assert not torch.allclose(second, first, atol=0.1)
    assert torch.equal(first, data.train.load([3], epoch=0, device=CPU)[0])
    assert torch.equal(data.val.load([3], epoch=1, device=CPU)[0], data.val.load([3], epoch=None, device=CPU)[0])
    assert torch.equal(shapes(augment=False).train.load([3], epoch=1, device=CPU)[0], still)


def test_the_camera_moves_the_drawn_scene_as_it_would_move_the_picture():
    numbers = torch.arange(6)
    mirror = torch.tensor([[-1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64).expand(6, 2, 3)
    plain, mirrored = (make_scenes(0, numbers, numbers, num_classes=20, camera=camera) for camera in (None, mirror))
    even = torch.full_like(plain.base, 0.5)  # the light of the background is the same
    pictures = [paint(Scenes(**{**vars(scenes), "base": even}), 48) for scenes in (plain, mirrored)]
    torch.testing.assert_close(pictures[1], pictures[0].flip(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("size", [8, 31, 64])
def test_pictures_are_images(size):
    split = shapes(image_size=size, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)).train
    images, targets = split.load(list(range(20)), epoch=0, device=CPU)
    assert images.shape == (20, 3, size, size)
    assert (images.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert 0 <= images.min() <= images.max() <= 1
    assert images.flatten(1).std(1).min() > 0.03


def test_normalization_suits_the_pictures():
    images, _ = shapes(image_size=64).train.load(list(range(60)), epoch=0, device=CPU)
    assert images.mean().abs() < 0.3
    assert 0.5 < images.std() < 1.2


def test_sizes_where_the_recipe_says_nothing():
    data = load_data(DataSpec(name="shapes"))
    assert (len(data.train), len(data.val), data.train.num_classes) == (20_000, 2_000, 20)


@pytest.mark.parametrize(("num_classes", "allowed"), [(0, "1 to"), (1, "2 to 100"), (101, "2 to 100")])
def test_a_number_of_classes_that_cannot_be(num_classes, allowed):
    with pytest.raises(DataError, match=rf"num_classes is {num_classes}.*{allowed}"):
        shapes(num_classes=num_classes)


def test_without_clutter_the_object_stands_alone():
    numbers = torch.arange(12)
    scenes = make_scenes(0, numbers, numbers, num_classes=20)
    light = F.interpolate(scenes.base, size=(64, 64), mode="bilinear", align_corners=True)
    alone, half, whole = (paint(with_clutter(scenes, share), 64) for share in (0.0, 0.5, 1.0))
    at = (torch.arange(64) * 2 + 1) / 64 - 1
    grid = torch.stack(torch.meshgrid(at, at, indexing="xy"), dim=-1)
    rows = scenes.matrices[:, OBJECT]
    reach = (torch.einsum("nij,yxj->nyxi", rows[..., :2], grid) + rows[:, None, None, :, 2]).abs().amax(-1)
    outside = (reach > 1)[:, None].expand_as(alone)
    assert 0.1 < outside.float().mean() < 0.9
    torch.testing.assert_close(alone[outside], light[outside], atol=1e-5, rtol=0)
    assert ((alone - light).abs().amax((1, 2, 3)) > 0.1).all()
    far = [(picture - alone).abs().mean() for picture in (half, whole)]
    assert 0 < far[0] < far[1]
    assert torch.equal(whole, paint(scenes, 64))


def test_clutter_of_the_recipe():
    few, usual = (next(shapes(clutter=c).val.batches(BatchPlan(batch_size=8)))[0] for c in (0.0, 1.0))
    assert not torch.allclose(few, usual, atol=0.1)
    with pytest.raises(DataError, match=r"data.clutter is 1.5: .*0 to 1"):
        shapes(clutter=1.5)
