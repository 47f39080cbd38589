from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from compress import DataSpec, load_data
from compress.data.base import BatchPlan
from compress.errors import DataError

SIZE = (24, 32)
CLASSES = ("left", "right")


def write(root, *, images="{split}", masks="{split}annot", count=5):
    for split in ("train", "val"):
        for number in range(count):
            column = 8 + 4 * number  # the class changes here, and the image is brighter
            pixels = np.full((*SIZE, 3), 40, np.uint8)
            pixels[:, column:] = 200
            classes = (np.arange(SIZE[1]) >= column).astype(np.uint8)[None].repeat(SIZE[0], 0)
            classes[:2] = 11
            for folder, array in ((images, pixels), (masks, classes)):
                path = root / folder.format(split=split) / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(path)


def spec(root, **options):
    defaults = {"image_size": SIZE, "classes": CLASSES, "ignore_index": 11, "workers": 0, "batch_size": 2}
    return DataSpec(name="masks", root=str(root), **{**defaults, **options})


@pytest.mark.parametrize(
    ("images", "masks"),
    [("{split}", "{split}annot"), ("images/{split}", "masks/{split}"), ("{split}/images", "{split}/masks")],
)
def test_each_layout_is_read(tmp_path, images, masks):
    write(tmp_path, images=images, masks=masks)
    data = load_data(spec(tmp_path))
    pictures, targets = data.val.load([0, 4], epoch=None, device=torch.device("cpu"))
    assert pictures.shape == (2, 3, *SIZE)
    assert targets.shape == (2, *SIZE)
    assert torch.equal(data.val.preprocessing.pixels(pictures)[:, 0, 2:] == 200, targets[:, 2:] == 1)
    assert (targets[:, :2] == 255).all()
    assert data.train.labels == CLASSES


def test_images_and_masks_are_augmented_together_and_alike_on_every_call(tmp_path):
    write(tmp_path)
    data = load_data(spec(tmp_path))
    plan = BatchPlan(batch_size=2, epoch=3)
    batches = list(data.train.batches(plan))
    again = list(data.train.batches(plan))
    other = list(data.train.batches(BatchPlan(batch_size=2, epoch=4)))
    assert all(
        torch.equal(a, b) for one, two in zip(batches, again, strict=True) for a, b in zip(one, two, strict=True)
    )
    assert not torch.equal(batches[0][0], other[0][0])
    pictures, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    bright = data.train.preprocessing.pixels(pictures)[:, 0]
    certain = (targets != 255) & ((bright < 60) | (bright > 180))  # not where resizing blended both
    assert certain.float().mean() > 0.3
    assert torch.equal((bright > 180)[certain], (targets == 1)[certain])


def test_resized_masks_hold_classes_alone(tmp_path):
    write(tmp_path)
    _, targets = load_data(spec(tmp_path, image_size=(12, 20))).val.load([1], epoch=None, device=torch.device("cpu"))
    assert set(targets.unique().tolist()) <= {0, 1, 255}


@pytest.mark.parametrize("mode", ["P", "RGB"])
def test_masks_hold_the_same_classes_with_a_palette_and_as_grey_pixels_in_rgb(tmp_path, mode):
    write(tmp_path, count=1)
    wanted = load_data(spec(tmp_path)).val.load([0], epoch=None, device=torch.device("cpu"))[1]
    path = tmp_path / "valannot" / "0.png"
    grey = Image.open(path)
    mask = Image.merge("RGB", [grey] * 3)
    if mode == "P":
        mask = grey.copy()
        mask.putpalette([(37 * i) % 256 for i in range(768)])
        assert mask.mode == "P"
    mask.save(path)
    assert torch.equal(load_data(spec(tmp_path)).val.load([0], epoch=None, device=torch.device("cpu"))[1], wanted)


def mask_of(array):
    return lambda path: Image.fromarray(np.asarray(array, np.uint8)).save(path)


DAMAGE = {
    "size": (mask_of(np.zeros((10, 10))), r"valannot/1.png is 10 x 10 pixels and its image 32 x 24"),
    "class": (
        mask_of(np.full(SIZE, 7)),
        r"valannot/1.png holds the classes 7; data.classes names 0 to 1, and data.ignore_index is 11",
    ),
    "colour": (mask_of(np.full((*SIZE, 3), (128, 0, 0))), r"colour image \(mode RGB\)"),
    "file": (lambda path: path.write_bytes(b"no image"), r"valannot/1.png is not a readable image"),
    "missing": (Path.unlink, r"1 images of .*val have no mask NAME.png in .*valannot: 1.png"),
    "empty": (lambda path: [file.unlink() for file in (path.parents[1] / "val").iterdir()], "val holds no images"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_bad_masks_are_named(tmp_path, kind):
    write(tmp_path)
    damage, message = DAMAGE[kind]
    damage(tmp_path / "valannot" / "1.png")
    with pytest.raises(DataError, match=message):
        list(load_data(spec(tmp_path)).val.batches(BatchPlan(batch_size=5)))


def test_bad_masks_are_left_out_if_the_recipe_says_so(tmp_path):
    write(tmp_path)
    DAMAGE["class"][0](tmp_path / "valannot" / "1.png")
    split = load_data(spec(tmp_path, on_error="skip")).val
    assert sum(len(targets) for _, targets in split.batches(BatchPlan(batch_size=5))) == 4
    assert [name.endswith("1.png") for name in split.skipped] == [True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": None}, "data.classes is missing"),
        ({"num_classes": 3}, "data.classes names 2"),
        ({}, "holds no images and masks in a known layout"),
    ],
)
def test_bad_specifications_and_an_unknown_layout_are_refused(tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        load_data(spec(tmp_path, **options))
