"""`data.max_pixels`: every reader of pictures keeps to it, and Pillow's own limit does not count."""

import dataclasses
import io

import numpy as np
import pytest
import torch
from PIL import Image

from compress import DataSpec, load_data
from compress.data.base import BatchPlan
from compress.data.decode import centre_crop, open_image, random_crop
from compress.data.files import PictureInput
from compress.data.preprocessing import Preprocessing
from compress.errors import DataError
from compress.measure.end_to_end import decode
from compress.pipeline.predict import read_picture
from tests.data import test_boxes, test_masks

WIDTH, HEIGHT = 60, 40


def encoded(kind="PNG", width=WIDTH, height=HEIGHT):
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def folder(root, **values):
    for part in ("train", "val"):
        (root / part / "a").mkdir(parents=True)
        (root / part / "a" / "0.jpg").write_bytes(encoded("JPEG"))
    return DataSpec(name="folder", root=str(root), image_size=8, workers=0, **values)


def masks(root, **values):
    test_masks.write(root)
    return DataSpec(
        name="masks", root=str(root), image_size=8, workers=0, classes=test_masks.CLASSES, ignore_index=11, **values
    )


def boxes(root, **values):
    test_boxes.write_voc(root)
    return DataSpec(name="voc", root=str(root), image_size=8, workers=0, classes=test_boxes.CLASSES, **values)


def largest(root):
    return max(image.width * image.height for image in map(Image.open, sorted(root.rglob("*.[jp][pn]g"))))


@pytest.mark.parametrize("write", [folder, masks, boxes])
def test_an_image_at_the_limit_is_read_and_a_larger_one_named(tmp_path, write):
    spec, plan = write(tmp_path), BatchPlan(batch_size=2)
    limit = largest(tmp_path)
    for number, refused in ((limit, False), (limit - 1, True)):
        data = load_data(dataclasses.replace(spec, max_pixels=number))
        for split in (data.train, data.val):
            if refused:
                with pytest.raises(DataError, match=rf"\.(png|jpg) is not a readable image .*at most {number:,} are"):
                    list(split.batches(plan))
            else:
                assert list(split.batches(plan))


def test_a_device_that_decodes_keeps_to_it_too(tmp_path):
    data = load_data(folder(tmp_path, decode="gpu", max_pixels=WIDTH * HEIGHT - 1))
    with pytest.raises(DataError, match=r"0\.jpg is not a readable image .*60 x 40 pixels.*data\.max_pixels"):
        list(data.val.device_batches(BatchPlan(batch_size=2), torch.device("cpu")))


def test_single_pictures_keep_to_it(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encoded())
    form = Preprocessing(image_size=8)
    for cropped in (True, False):
        assert read_picture(path, form, cropped=cropped, max_pixels=WIDTH * HEIGHT).shape == (3, 8, 8)
        with pytest.raises(DataError, match=r"a\.png cannot be read as a picture: it has 60 x 40 pixels"):
            read_picture(path, form, cropped=cropped, max_pixels=WIDTH * HEIGHT - 1)
    assert len(decode([encoded()], max_pixels=WIDTH * HEIGHT)) == 1
    with pytest.raises(DataError, match="picture 7 is not a readable image .*60 x 40 pixels"):
        decode([encoded()], first=7, max_pixels=WIDTH * HEIGHT - 1)


def test_a_file_that_says_it_is_huge_is_refused_before_it_is_decoded(tmp_path):
    small = encoded()
    path = tmp_path / "huge.bmp"
    file = io.BytesIO()
    Image.open(io.BytesIO(small)).save(file, "BMP")
    header = bytearray(file.getvalue())
    header[18:26] = (60_000).to_bytes(4, "little") * 2  # BITMAPINFOHEADER: width and height
    path.write_bytes(header)
    with pytest.raises(DataError, match=r"60,000 x 60,000 pixels, and at most 178,956,970 are decoded"):
        PictureInput(size=(8, 8)).read(path)


def test_pillows_limit_neither_counts_nor_changes(monkeypatch):
    """Its limit is made small, so that the pictures need not be large; parts of them are cut out, too."""
    with open_image(io.BytesIO(encoded())) as file:
        image = file.convert("RGB")
    strip = Image.fromarray(np.random.default_rng(1).integers(0, 256, (700, 20, 3), dtype=np.uint8))
    draws = torch.rand(41, generator=torch.Generator().manual_seed(0)).tolist()

    def all_of():
        with open_image(io.BytesIO(encoded())) as file:
            assert file.size == (WIDTH, HEIGHT)
        return [
            random_crop(image, (8, 8), draws),
            centre_crop(image, (8, 8), crop_ratio=0.875),
            centre_crop(strip, (8, 8), crop_ratio=1.0),
        ]

    expected = all_of()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64)
    assert all(map(torch.equal, all_of(), expected))
    assert Image.MAX_IMAGE_PIXELS == 64
