import copy
import dataclasses
import gc
import io
import json
import math
import multiprocessing
import os
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torchvision import transforms
from typer.testing import CliRunner

from compress import DataSpec, load_data
from compress.cli.app import app
from compress.cli.model import Network, network_of
from compress.data.base import BatchPlan, Preprocessing, bounded, stratified_order
from compress.data.decode import open_image, preprocessed, random_box, random_crop, rgb
from compress.data.files import read_input
from compress.data.load import class_count
from compress.errors import DataError
from compress.measure.latency import decode
from compress.pipeline.predict import read_picture
from tests.data import test_boxes
from tests.images import write_images

CPU = torch.device("cpu")
CLASSES = ("ant", "bee", "Cow")


def write_image(path, seed, size=None):
    rng = np.random.default_rng(seed)
    width, height = size or rng.integers(40, 90, 2).tolist()
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    for part, count in (("train", 5), ("val", 3)):
        for number, name in enumerate(CLASSES):
            for i in range(count):
                ending = ("jpg", "png", "JPEG")[i % 3]
                write_image(root / part / name / f"{i:02}.{ending}", seed=100 * number + i + len(part))
    (root / "train" / "ant" / "notes.txt").write_text("no image")
    (root / "train" / ".hidden").mkdir()
    return root


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made, tmp_path / "images")


def spec(root, **values):
    return DataSpec(**{"name": "folder", "root": str(root), "image_size": 32, "workers": 0, **values})


def whole(split):
    return split.load(list(range(len(split))), epoch=None, device=CPU)


def test_classes_are_the_folders_sorted_by_name(made):
    data = load_data(spec(made))
    assert data.train.labels == data.val.labels == ("Cow", "ant", "bee")
    assert (len(data.train), len(data.val)) == (15, 9)
    assert whole(data.val)[1].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(("size", "crop_ratio"), [(32, 0.875), (24, 1.0), (60, 0.7)])
def test_evaluation_images_are_those_of_torchvisions_reference(made, size, crop_ratio):
    method = "bicubic" if size % 3 else "bilinear"
    data = load_data(spec(made, image_size=size, crop_ratio=crop_ratio, interpolation=method))
    images, _ = whole(data.val)
    reference = transforms.Compose(
        [
            transforms.Resize(round(size / crop_ratio), interpolation=transforms.InterpolationMode(method)),
            transforms.CenterCrop(size),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    files = [file for name in sorted(CLASSES) for file in sorted((made / "val" / name).iterdir())]
    expected = torch.stack([reference(Image.open(file).convert("RGB")) for file in files])
    torch.testing.assert_close(images, expected)
    assert images.dtype == torch.float32
    assert (data.val.preprocessing.crop_ratio, data.val.preprocessing.interpolation) == (crop_ratio, method)


def test_bicubic_training_crops_differ_and_are_refused_where_nothing_resizes_so(made):
    splits = {m: load_data(spec(made, interpolation=m)).train for m in ("bilinear", "bicubic")}
    by = {m: split.load([4], epoch=1, device=CPU)[0] for m, split in splits.items()}
    assert 0 < (by["bilinear"] - by["bicubic"]).abs().mean() < 0.2
    for more in ({"decode": "gpu"}, {"name": "cifar10"}):
        with pytest.raises(DataError, match="data.interpolation is bicubic"):
            load_data(dataclasses.replace(spec(made, interpolation="bicubic"), **more))


def test_other_kinds_of_images_become_rgb(root):
    for number, mode in enumerate(("L", "P", "RGBA", "CMYK", "1")):
        ending = "jpg" if mode == "CMYK" else "png"
        Image.new("RGB", (40, 40), (200, 100, 50)).convert(mode).save(root / "val" / "ant" / f"mode{number}.{ending}")
    assert whole(load_data(spec(root)).val)[0].shape == (14, 3, 32, 32)


def test_training_crops_depend_on_seed_epoch_and_index_alone(made):
    split = load_data(spec(made)).train
    again = split.load([9], epoch=1, device=CPU)[0]
    assert torch.equal(split.load([4, 9], epoch=1, device=CPU)[0][1:], again)
    assert not torch.allclose(split.load([9], epoch=2, device=CPU)[0], again)
    assert not torch.allclose(load_data(spec(made, seed=1)).train.load([9], epoch=1, device=CPU)[0], again)
    plain = load_data(spec(made, augment=False)).train
    assert torch.equal(plain.load([9], epoch=1, device=CPU)[0], split.load([9], epoch=None, device=CPU)[0])


def test_half_of_the_training_images_are_mirrored(tmp_path):
    ramp = np.broadcast_to(np.linspace(0, 255, 64, dtype=np.uint8)[None, :, None], (64, 64, 3))
    for part in ("train", "val"):
        (tmp_path / part / "a").mkdir(parents=True)
        Image.fromarray(ramp.copy()).save(tmp_path / part / "a" / "ramp.png")
    split = load_data(spec(tmp_path)).train
    slopes = [split.load([0], epoch=epoch, device=CPU)[0][0, 0].diff(dim=-1).mean() for epoch in range(60)]
    assert 18 <= sum(slope < 0 for slope in slopes) <= 42


@given(
    st.integers(1, 3000), st.integers(1, 3000), st.lists(st.floats(0, 1, exclude_max=True), min_size=40, max_size=40)
)
@settings(max_examples=100)
def test_the_random_part_lies_inside_and_is_of_an_allowed_shape(width, height, draws):
    top, left, h, w = random_box(width, height, draws)
    assert 0 <= top < top + h <= height and 0 <= left < left + w <= width
    if min(width, height) > 50:
        assert 0.7 < w / h < 1.4


def test_random_parts_have_areas_from_8_to_100_percent():
    rng = np.random.default_rng(0)
    boxes = np.array([random_box(500, 400, rng.random(40).tolist()) for _ in range(2000)])
    areas = boxes[:, 2] * boxes[:, 3] / (500 * 400)
    assert 0.07 < areas.min() < 0.12 and 0.85 < areas.max() <= 1
    shapes = np.log(boxes[:, 3] / boxes[:, 2])
    assert abs(shapes.mean()) < 0.05 and np.abs(shapes).max() < math.log(4 / 3) + 0.03
    assert (boxes[:, 0] > 150).any() and (boxes[:, 0] == 0).any()


@pytest.mark.parametrize("epoch", [None, 2])
def test_workers_change_nothing(made, epoch):
    plan = BatchPlan(batch_size=4, epoch=epoch, first=1)
    before = torch.get_rng_state()
    alone = list(load_data(spec(made, workers=0)).train.batches(plan))
    helped = list(load_data(spec(made, workers=2)).train.batches(plan))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(alone) == 3
    torch.testing.assert_close(alone, helped, rtol=0, atol=0)


def test_a_bound_keeps_all_classes(made):
    data = load_data(spec(made, train_images=6, val_images=3))
    assert whole(data.train)[1].tolist() == [0, 0, 1, 1, 2, 2] and len(data.val) == 3


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("damage", ["truncated", "text", "empty"])
def test_an_unreadable_image_is_named(root, workers, damage):
    file = root / "val" / "bee" / "00.jpg"
    file.write_bytes({"truncated": file.read_bytes()[:-200], "text": b"hello", "empty": b""}[damage])
    split = load_data(spec(root, workers=workers)).val
    with pytest.raises(DataError, match=r"bee.00\.jpg is not a readable image .*on_error: skip"):
        list(split.batches(BatchPlan(batch_size=4)))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_left_out_and_counted(root, workers):
    file = root / "val" / "bee" / "00.jpg"
    file.write_bytes(b"hello")
    split = load_data(spec(root, workers=workers, on_error="skip")).val
    for _ in range(2):
        batches = list(split.batches(BatchPlan(batch_size=2)))
        assert [len(targets) for _, targets in batches] == [2, 2, 2, 1, 1]
        assert torch.cat([targets for _, targets in batches]).tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
        assert split.skipped == [str(file)]


def test_a_batch_of_unreadable_images_is_left_out(root):
    for file in (root / "val" / "bee").iterdir():
        file.write_bytes(b"")
    split = load_data(spec(root, on_error="skip")).val
    assert [len(targets) for _, targets in split.batches(BatchPlan(batch_size=3))] == [3, 3]
    assert len(split.skipped) == 3


def test_a_worker_that_dies_is_a_data_error(made, monkeypatch):
    def die(*_, **__):
        os._exit(3)

    monkeypatch.setattr(Image, "open", die)
    split = load_data(spec(made, workers=1)).val
    with pytest.raises(DataError, match=r"worker process.*data\.workers"):
        list(split.batches(BatchPlan(batch_size=3)))


CHANGES = {
    "no folder": (lambda root: shutil.rmtree(root), r"no folder .*images"),
    "the number of classes": (lambda root: {"num_classes": 2}, "num_classes is 2, but folder has 3"),
    "a split is missing": (lambda root: shutil.rmtree(root / "val"), r"no folder .*val \(expected"),
    "no classes": (lambda root: [shutil.rmtree(folder) for folder in root.glob("*/*")], "no class folders"),
    "a class without images": (
        lambda root: [(root / part / "dog").mkdir() for part in ("train", "val")],
        r"dog holds no images \(.*\.jpg",
    ),
    "splits of other classes": (
        lambda root: (root / "val" / "bee").rename(root / "val" / "wasp"),
        "only in train bee, only in val wasp",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_folders_that_are_no_splits_of_classes(root, made, case):
    change, words = CHANGES[case]
    options = change(root)
    with pytest.raises(DataError, match=words):
        load_data(spec(root, **(options if isinstance(options, dict) else {})))
    assert load_data(spec(made, num_classes=3)).train.num_classes == 3


def test_sixteen_bit_images_keep_their_greys(tmp_path):
    greys = np.arange(0, 65536, 257, dtype=np.uint16).reshape(16, 16)  # 257 i of 65,535 is i of 255
    Image.fromarray(greys).save(tmp_path / "deep.png")
    with Image.open(tmp_path / "deep.png") as file:
        pixels = np.asarray(rgb(file))
    np.testing.assert_array_equal(pixels, np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2))


@pytest.mark.parametrize("pixels", [np.full((9, 9), 120, np.int32), np.full((9, 9), 0.5, np.float32)])
def test_pixels_without_a_fixed_range_are_refused(root, pixels):
    Image.fromarray(pixels).save(root / "val" / "ant" / "00.tif")
    with pytest.raises(DataError, match=r"00\.tif is not a readable image .*32 bits.*8 or 16 bits"):
        whole(load_data(spec(root)).val)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_stand_upright(tmp_path, orientation):
    # EXIF 2.32, tag 274: where row 0 and column 0 of the stored pixels are in the scene.
    rows, columns = {
        1: ("top", "left"),
        2: ("top", "right"),
        3: ("bottom", "right"),
        4: ("bottom", "left"),
        5: ("left", "top"),
        6: ("right", "top"),
        7: ("right", "bottom"),
        8: ("left", "bottom"),
    }[orientation]
    scene = np.arange(6, dtype=np.uint8).reshape(2, 3) * 40
    stored = scene if rows in ("top", "bottom") else scene.T
    stored = stored[::-1] if rows in ("bottom", "right") else stored
    stored = stored[:, ::-1] if columns in ("bottom", "right") else stored
    exif = Image.Exif()
    exif[274] = orientation
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / "a.png", exif=exif)
    with Image.open(tmp_path / "a.png") as image:
        np.testing.assert_array_equal(np.asarray(rgb(image))[..., 0], scene)


@pytest.mark.parametrize("size", [(60, 90), (11, 170), (40, 40)])
def test_evaluation_takes_the_whole_image_where_asked(root, size):
    first = load_data(spec(root)).val.files[0]
    write_image(first.with_suffix(".bmp"), seed=1, size=size)
    pixels = Image.open(first.with_suffix(".bmp").rename(first)).convert("RGB")
    wanted = {
        "squash": pixels.resize((32, 32), Image.Resampling.BILINEAR),
        "pad": ImageOps.pad(pixels, (32, 32), Image.Resampling.BILINEAR),
    }
    for resize, expected in wanted.items():
        split = load_data(dataclasses.replace(spec(root), resize=resize, image_size=32)).val
        (images, _) = split.load([0], epoch=None, device=CPU)
        np.testing.assert_array_equal(split.preprocessing.pixels(images)[0].permute(1, 2, 0).numpy(), expected)
        assert Preprocessing.from_json(split.preprocessing.to_json()) == split.preprocessing


def test_of_a_long_strip_only_the_middle_is_resized():
    strip = Image.new("L", (1, 30_000), 7).convert("RGB")
    assert preprocessed(strip, Preprocessing(image_size=224, crop_ratio=0.875)).unique().tolist() == [7]
    short, long = (torch.arange(n, dtype=torch.uint8) for n in (40, 240))
    image = Image.fromarray(long.expand(40, -1).contiguous().numpy()).convert("RGB")
    (row,) = preprocessed(image, Preprocessing(image_size=40, crop_ratio=1.0))[0].unique(dim=0)
    assert torch.equal(row, short + 100)


def test_links_to_folders_above_do_not_multiply_images(root):
    alone = load_data(spec(root)).train.files
    (root / "train" / "ant" / "loop").symlink_to(root / "train", target_is_directory=True)
    (root / "train" / "bee" / "loop").symlink_to(root / "train" / "bee", target_is_directory=True)
    assert load_data(spec(root)).train.files == alone
    write_image(root / "more" / "x.png", seed=1)
    (root / "train" / "ant" / "more").symlink_to(root / "more", target_is_directory=True)
    assert len(load_data(spec(root)).train.files) == len(alone) + 1


def test_worker_processes_stay_for_the_next_pass(made):
    gc.collect()
    others = set(multiprocessing.active_children())
    split = load_data(spec(made, workers=2)).train
    pids = []
    for epoch in (0, 1, None):
        passes = split.batches(BatchPlan(batch_size=4, epoch=epoch))
        first = next(passes)[0]
        pids.append(set(multiprocessing.active_children()) - others)
        alone = next(load_data(spec(made)).train.batches(BatchPlan(batch_size=4, epoch=epoch)))[0]
        assert torch.equal(first, alone) and len(list(passes)) == 3
    assert len(pids[0]) == 2 and pids[0] == pids[1] == pids[2]
    left, beside = (split.batches(BatchPlan(batch_size=4, epoch=5)) for _ in range(2))
    assert torch.equal(next(left)[1], next(beside)[1])  # two passes at once have processes of their own
    del left, beside  # and those of a pass that is left end with it
    gc.collect()
    assert set(multiprocessing.active_children()) <= others
    assert len(list(copy.deepcopy(split).batches(BatchPlan(batch_size=4)))) == 4


# `data.max_pixels`: every reader of pictures keeps to it, and Pillow's own limit does not count.

WIDTH, HEIGHT = 60, 40


def in_form(pixels, form):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def encoded():
    return in_form(np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8), "PNG")


def folder(root, **values):
    write_images(root, "a", 1, size=(WIDTH, HEIGHT), ending="jpg")
    return DataSpec(name="folder", root=str(root), image_size=8, workers=0, **values)


def masks(root, **values):
    test_boxes.write_masks(root)
    return DataSpec(
        name="masks", root=str(root), image_size=8, workers=0, classes=test_boxes.SIDES, ignore_index=11, **values
    )


def boxes(root, **values):
    test_boxes.write_voc(root)
    return DataSpec(name="voc", root=str(root), image_size=8, workers=0, classes=test_boxes.CLASSES, **values)


@pytest.mark.parametrize("write", [folder, masks, boxes])
def test_an_image_at_the_limit_is_read_and_a_larger_one_named(tmp_path, write):
    spec, plan = write(tmp_path), BatchPlan(batch_size=2)
    sizes = [Image.open(file).size for file in tmp_path.rglob("*.[jp][pn]g")]
    limit = max(width * height for width, height in sizes)
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
    for form in (Preprocessing(image_size=8), Preprocessing(image_size=8, resize="squash")):
        assert read_picture(path, form, max_pixels=WIDTH * HEIGHT).shape == (3, 8, 8)
        with pytest.raises(DataError, match=r"a\.png is not a readable image .*60 x 40 pixels"):
            read_picture(path, form, max_pixels=WIDTH * HEIGHT - 1)
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)
    start, _, last = in_form(noise, "PNG").rpartition(b"IDAT")  # the second part of the pixels, or a later one
    path.write_bytes(start + b"\xcfKO\xec" + last)
    with pytest.raises(DataError, match=r"a\.png is not a readable image .*broken PNG"):
        read_picture(path, Preprocessing(image_size=8))
    assert len(decode([encoded()], max_pixels=WIDTH * HEIGHT)) == 1
    with pytest.raises(DataError, match="image 7 is not a readable image .*60 x 40 pixels"):
        decode([encoded()], first=7, max_pixels=WIDTH * HEIGHT - 1)


def test_a_file_that_says_it_is_huge_is_refused_before_it_is_decoded(tmp_path):
    header = bytearray(in_form(np.zeros((8, 8, 3), np.uint8), "BMP"))
    header[18:26] = (60_000).to_bytes(4, "little") * 2  # BITMAPINFOHEADER: width and height
    (tmp_path / "huge.bmp").write_bytes(header)
    with pytest.raises(DataError, match=r"60,000 x 60,000 pixels, and at most 178,956,970 are decoded"):
        read_input(tmp_path / "huge.bmp", Preprocessing(image_size=8))


def test_pillows_limit_neither_counts_nor_changes(monkeypatch):
    # Its limit is made small, so that the pictures need not be large; parts of them are cut out, too.
    image = Image.open(io.BytesIO(encoded())).convert("RGB")
    strip = Image.fromarray(np.random.default_rng(1).integers(0, 256, (700, 20, 3), dtype=np.uint8))
    draws = torch.rand(41, generator=torch.Generator().manual_seed(0)).tolist()

    def all_of():
        with open_image(io.BytesIO(encoded())) as file:
            assert file.size == (WIDTH, HEIGHT)
        return [
            random_crop(image, (8, 8), draws),
            preprocessed(image, Preprocessing(image_size=8, crop_ratio=0.875)),
            preprocessed(strip, Preprocessing(image_size=8, crop_ratio=1.0)),
        ]

    expected = all_of()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64)
    assert all(map(torch.equal, all_of(), expected))
    assert Image.MAX_IMAGE_PIXELS == 64


# The number of classes that is found without the images is the one that the loaded data have.


@pytest.mark.parametrize(
    "values", [{"name": "digits"}, {"name": "shapes"}, {"name": "shapes", "num_classes": 7}, {"name": "folder"}]
)
def test_it_is_the_count_of_the_loaded_data(values, made):
    spec = DataSpec(**values, root=str(made))
    assert class_count(spec) == load_data(spec).train.num_classes


@pytest.mark.parametrize(("name", "count"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_need_not_be_here(name, count):
    # The published counts of both data sets; tests of the reader compare them with files.
    assert class_count(DataSpec(name=name, root="nowhere")) == count


def test_a_folder_that_is_not_here_needs_a_number():
    with pytest.raises(DataError, match=r"no folder .*nowhere/train: set data.root .*data.num_classes"):
        class_count(DataSpec(name="folder", root="nowhere"))
    assert class_count(DataSpec(name="folder", root="nowhere", num_classes=37)) == 37


@pytest.mark.parametrize("values", [{"name": "digits"}, {"name": "folder"}, {"name": "cifar10"}])
def test_another_number_is_refused(values, made):
    with pytest.raises(DataError, match="num_classes is 9, but"):
        class_count(DataSpec(**values, root=str(made), num_classes=9))


def test_commands_see_the_recipes_classes(tmp_path, monkeypatch):
    # The classifier of ResNet-18 has 512 weights for each of the ten digits.
    monkeypatch.chdir(tmp_path)
    arguments = ["--recipe", "resnet18", "--set", "data.image_size=32", "--json"]

    def document(*command: str):
        done = CliRunner().invoke(app, [*command, *arguments])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    assert document("inspect", "model")["layers"][-1]["weight_elements"] == 5120
    bound = document("roofline", "--device", "a100", "--batch-size", "1")["roofline"]
    assert bound["rows"][-1]["macs"] == 5120
    assert document("receptive-field")["rows"]


def test_the_network_is_that_of_the_recipe_or_has_the_classes_of_imagenet():
    small = ["data.image_size=32"]
    assert network_of(Network(recipe="resnet18", set_=small).read()).fc.out_features == 10
    assert network_of(Network(recipe="resnet18", set_=small).read("data.name=shapes")).fc.out_features == 20
    assert network_of(Network(model="resnet18").read()).fc.out_features == 1000
    assert network_of(Network(model="resnet18", set_=["model.num_classes=5"]).read()).fc.out_features == 5
    assert network_of(Network(recipe="resnet50-imagenet").read(), weights=False).fc.out_features == 1000


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_every_prefix_holds_the_classes_in_proportion(classes):
    targets = torch.tensor(classes)
    order = stratified_order(targets)
    assert sorted(order.tolist()) == list(range(len(classes)))
    share = torch.bincount(targets, minlength=5) / len(classes)
    for length in range(1, len(classes) + 1):
        held = torch.bincount(targets[order[:length]], minlength=5)
        # rounding puts each class half an image off at most, and the prefix itself 5 halves
        assert ((held - length * share).abs() <= 0.5 + 2.5 * share + 1e-6).all()


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
