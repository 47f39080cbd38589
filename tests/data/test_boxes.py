import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from compress import DataSpec, load_data
from compress.data.base import BatchPlan
from compress.data.load import class_count
from compress.errors import CompressWarning, DataError

CLASSES = ("dark", "bright")
SIZE = (40, 60)
BOXES = {"a": [(10, 8, 30, 20, 1)], "b": [(4, 4, 24, 36, 1), (40, 10, 56, 30, 0)], "c": [(20, 12, 44, 34, 1)]}


def picture(boxes):
    pixels = np.full((*SIZE, 3), 128, np.uint8)
    for left, top, right, bottom, label in boxes:
        pixels[top:bottom, left:right] = 255 if label else 0
    return Image.fromarray(pixels)


def xml(boxes, size=SIZE):
    objects = "".join(
        f"<object><name>{CLASSES[label]}</name><difficult>{int(label == 0)}</difficult><bndbox><xmin>{left}</xmin>"
        f"<ymin>{top}</ymin><xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
        for left, top, right, bottom, label in boxes
    )
    return f"<annotation><size><width>{size[1]}</width><height>{size[0]}</height></size>{objects}</annotation>"


def write_voc(root):
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    for name, boxes in BOXES.items():
        picture(boxes).save(root / "JPEGImages" / f"{name}.png")
        (root / "Annotations" / f"{name}.xml").write_text(xml(boxes))
    (root / "ImageSets/Main/train.txt").write_text("a\nb\n")
    (root / "ImageSets/Main/val.txt").write_text("c\n")


def write_coco(root):
    for split, names in (("train", "ab"), ("val", "c")):
        (root / split).mkdir(parents=True)
        images, annotations = [], []
        for number, name in enumerate(names):
            picture(BOXES[name]).save(root / split / f"{name}.png")
            images.append({"id": number, "file_name": f"{name}.png", "width": SIZE[1], "height": SIZE[0]})
            for left, top, right, bottom, label in BOXES[name]:
                box = {"bbox": [left, top, right - left, bottom - top], "category_id": 7 + label, "image_id": number}
                annotations.append({"id": len(annotations), "iscrowd": int(label == 0), **box})
        categories = [{"id": 8, "name": "bright"}, {"id": 7, "name": "dark"}]
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / "annotations").mkdir(exist_ok=True)
        (root / f"annotations/instances_{split}.json").write_text(json.dumps(content))


WRITE = {"voc": write_voc, "coco": write_coco}


def spec(root, name="voc", **options):
    of_kind = {"image_size": SIZE, "classes": CLASSES}
    if name == "masks":
        of_kind = {"image_size": MASK_SIZE, "classes": SIDES, "ignore_index": 11}
    return DataSpec(name=name, root=str(root), **{**of_kind, "workers": 0, "batch_size": 2, **options})


def loaded(root, name="voc", **options):
    # Data of a kind, which is written first.
    WRITE[name](root)
    return load_data(spec(root, name, **options))


def whole(split, *indices):
    return split.load(list(indices or range(len(split))), epoch=None, device=torch.device("cpu"))


@pytest.mark.parametrize("name", WRITE)
def test_boxes_classes_and_crowds_are_read(tmp_path, name):
    data = loaded(tmp_path, name)
    images, targets = whole(data.train)
    assert images.shape == (2, 3, *SIZE)
    assert [t["boxes"].tolist() for t in targets] == [[list(b[:4]) for b in BOXES[k]] for k in "ab"]
    assert [t["labels"].tolist() for t in targets] == [[1], [1, 0]]
    assert [t["ignored"].tolist() for t in targets] == [[False], [False, True]]
    assert (len(data.val), data.val.labels) == (1, CLASSES)


@pytest.mark.parametrize("name", WRITE)
def test_a_detector_of_one_class_learns_the_others_as_background(tmp_path, name):
    WRITE[name](tmp_path)
    with pytest.raises(DataError, match="dark.*data.other_classes: background"):
        load_data(spec(tmp_path, name, classes=("bright",)))
    data = load_data(spec(tmp_path, name, classes=("bright",), other_classes="background"))
    _, (_, target) = whole(data.train)
    assert target["boxes"].tolist() == [[4, 4, 24, 36]] and target["labels"].tolist() == [0]
    with pytest.raises(DataError, match="brigt|none of 2 images has a box"):
        load_data(spec(tmp_path, name, classes=("brigt",), other_classes="background"))


@pytest.mark.parametrize("name", WRITE)
def test_boxes_are_resized_with_their_image(tmp_path, name):
    _, (target,) = whole(loaded(tmp_path, name, image_size=(80, 30)).val)
    assert target["boxes"].tolist() == [[10, 24, 22, 68]]


def test_training_images_move_with_their_boxes_alike_on_every_call(tmp_path):
    split, seen = loaded(tmp_path).train, set()
    for epoch in range(8):
        plan = BatchPlan(batch_size=2, epoch=epoch)
        (images, targets), (again, _) = next(split.batches(plan)), next(split.batches(plan))
        assert torch.equal(images, again)
        for pixels, target in zip(split.preprocessing.pixels(images), targets, strict=True):
            for box, label in zip(target["boxes"], target["labels"], strict=True):
                rows, columns = ((pixels[0] > 230) if label else (pixels[0] < 25)).nonzero().unbind(1)
                edges = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
                assert (box - torch.tensor(edges)).abs().max() <= 1.5
                seen.add(tuple(box.tolist()))
    assert len(seen) > 8, "epochs differ"


def test_workers_change_nothing(tmp_path):
    write_voc(tmp_path)
    plan = BatchPlan(batch_size=2, epoch=1)
    alone, helped = (load_data(spec(tmp_path, workers=n)).train.batches(plan) for n in (0, 1))
    torch.testing.assert_close(list(alone), list(helped), rtol=0, atol=0)


def test_the_classes_of_coco_are_its_categories_by_id(tmp_path):
    write_coco(tmp_path)
    unnamed = spec(tmp_path, "coco", classes=None)
    assert load_data(unnamed).train.labels == CLASSES
    assert class_count(unnamed) == 2


BAD_VOC = {
    "turned": (lambda: xml([(10, 8, 9, 20, 1)]), r"a\.xml: the box \[10, 8, 9, 20\] .* ends before it begins"),
    "corrupt": (lambda: xml([(10, 8, 30, 20, 1)])[:-20], r"a\.xml is not readable XML"),
    "empty": (lambda: "", r"a\.xml is not readable XML"),
    "class": (lambda: xml([(1, 1, 9, 9, 1)]).replace("bright", "brigt"), r"a\.xml names the class 'brigt'.*bright"),
    "number": (lambda: xml([("x", 1, 9, 9, 1)]), r"a\.xml: bndbox/xmin is 'x'; it must be a finite number"),
    "NaN": (lambda: xml([("nan", 1, 9, 9, 1)]), r"a\.xml: bndbox/xmin is 'nan'; it must be a finite number"),
    "width": (lambda: xml([(1, 1, 9, 9, 1)], size=("1e999", 40)), r"a\.xml: size/\w+ is '1e999'"),
    "encoding": (lambda: '<?xml version="1.0" encoding="hex"?>' + xml([]), r"a\.xml is not readable XML"),
}


@pytest.mark.parametrize("case", BAD_VOC)
def test_a_wrong_annotation_is_named_or_left_out(tmp_path, case):
    write_voc(tmp_path)
    text, message = BAD_VOC[case]
    (tmp_path / "Annotations/a.xml").write_text(text())
    with pytest.raises(DataError, match=message):
        load_data(spec(tmp_path))
    train = load_data(spec(tmp_path, on_error="skip")).train
    assert len(train) == 1
    assert [file.rsplit("/", 1)[1] for file in train.skipped] == ["a.xml"]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("JPEGImages/a.png", None, "1 images are not in .*JPEGImages: a"),
        ("Annotations/a.xml", None, r"there is no annotation .*a\.xml"),
        ("ImageSets/Main/val.txt", None, r"there is no file .*val\.txt"),
        ("ImageSets/Main/val.txt", "c\nc\n", r"val\.txt lists 1 images more than once: c"),
        ("Annotations/c.xml", xml([]), "none of 1 images has a box"),
        ("Annotations/c.xml", xml([(4, 4, 24, 36, 0)]), "none of 1 images has a box that counts: all are crowds"),
    ],
)
def test_a_file_of_voc_that_is_missing_or_says_too_little_is_named(tmp_path, file, text, message):
    write_voc(tmp_path)
    (tmp_path / file).unlink() if text is None else (tmp_path / file).write_text(text)
    with pytest.raises(DataError, match=message):
        load_data(spec(tmp_path))


@pytest.mark.parametrize("name", WRITE)
def test_lists_that_windows_wrote_are_read_alike(tmp_path, name):
    WRITE[name](tmp_path)
    for file in (*tmp_path.glob("*/Main/*.txt"), *tmp_path.glob("annotations/*.json")):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n\r\n") + b"\r\n")
    data = load_data(spec(tmp_path, name))
    assert [one.image.stem for one in (*data.train.annotations, *data.val.annotations)] == ["a", "b", "c"]


def test_an_image_of_another_size_than_annotated_is_named(tmp_path):
    write_voc(tmp_path)
    (tmp_path / "Annotations/a.xml").write_text(xml(BOXES["a"], size=(50, 60)))
    words = r"a\.png has \(60, 40\) pixels \(width, height\), and .*a\.xml says \(60, 50\)"
    with pytest.raises(DataError, match=words):
        whole(load_data(spec(tmp_path)).train)


BEYOND = [(-8, 8, 30, 20, 1), (40, 30, 90, 70, 1), (10, 10, 10, 20, 1), (70, 1, 80, 9, 1), (-0.6, 0, 5, 9, 1)]
WITHIN = [(0, 8, 30, 20), (40, 30, 60, 40), (0, 0, 5, 9)]


@pytest.mark.parametrize("name", WRITE)
@pytest.mark.parametrize("sized", [True, False])
def test_boxes_end_at_the_border_of_their_image(tmp_path, name, sized, monkeypatch):
    # Oracle: torchvision's clipping of boxes to an image.
    monkeypatch.setitem(BOXES, "a", [(1, 1, 3, 3, 1)])
    WRITE[name](tmp_path)
    if name == "voc":
        (tmp_path / "Annotations/a.xml").write_text(xml(BEYOND, SIZE if sized else (0, 0)))
    else:
        file = tmp_path / "annotations/instances_train.json"
        content = json.loads(file.read_text())
        content["images"][0].update({} if sized else {"width": 0})
        del content["annotations"][0]
        for left, top, right, bottom, _ in BEYOND:
            box = {"bbox": [left, top, right - left, bottom - top], "category_id": 8, "image_id": 0}
            content["annotations"].append({"id": 9, "iscrowd": 0, **box})
        file.write_text(json.dumps(content))
    with pytest.warns(CompressWarning, match=r"of \d boxes, 2 reach beyond .* and 2 have no area") as told:
        _, (target,) = whole(load_data(spec(tmp_path, name)).train, 0)
    assert len([one for one in told if "reach beyond" in str(one.message)]) == 1
    boxes = torchvision.ops.clip_boxes_to_image(torch.tensor(BEYOND)[:, :4], SIZE)
    expected = boxes[torchvision.ops.remove_small_boxes(boxes, 1e-3)]
    assert expected.tolist() == [list(box) for box in WITHIN]
    torch.testing.assert_close(target["boxes"], expected)
    assert target["labels"].tolist() == [1, 1, 1] and not target["ignored"].any()


BAD_COCO = {
    "corrupt": (lambda c: None, "instances_train.json is not readable JSON"),
    "deep": (lambda c: None, "instances_train.json is not readable JSON .nested more than 64 deep"),
    "no list": (lambda c: c.pop("annotations"), "instances_train.json has no list of annotations"),
    "empty": (lambda c: c["annotations"].clear(), "instances_train.json has no annotations"),
    "category": (lambda c: c["annotations"][0].update(category_id=9), "image a.png: annotation 0 has category_id 9"),
    "turned": (
        lambda c: c["annotations"][0].update(bbox=[1, 1, 5, -1]),
        "image a.png: the box .* ends before it begins",
    ),
    "no box": (lambda c: c["annotations"][0].pop("bbox"), "image a.png: KeyError: 'bbox'"),
    "stray": (lambda c: c["annotations"][0].update(image_id=99), "images that it does not list: image_id 99"),
    "twice": (lambda c: c["images"].append(c["images"][0]), "lists 1 image ids more than once: 0"),
    "two ids": (lambda c: c["images"].append({**c["images"][0], "id": 7}), "lists 1 images more than once: a.png"),
    "one name": (lambda c: c["categories"].append({**c["categories"][0], "id": 6}), "1 categories more than once: "),
    "image id": (lambda c: c["images"][0].update(id=[1]), "images that it does not list: image_id"),
    "image_id": (lambda c: c["annotations"][0].update(image_id={}), "images that it does not list: image_id None"),
    "width": (lambda c: c["images"][0].update(width=float("inf")), "image a.png: OverflowError"),
    "text": (lambda c: c["annotations"][0].update(bbox="1155"), "image a.png: annotation .* has bbox '1155'"),
    "mapping": (lambda c: c["annotations"][0].update(bbox={"1": 1, "2": 2, "5": 3, "6": 4}), "has bbox {"),
    "large": (lambda c: c["annotations"][0].update(bbox=[1, 1, 10**400, 1]), "image a.png: OverflowError"),
    "category id": (lambda c: c["categories"][0].update(id=float("inf")), "a category has no id or name"),
    "long name": (lambda c: c["images"][0].update(file_name="z" * 10**6), "image z{200}: OSError"),
    "file": (lambda c: c["images"][0].update(file_name="z.png"), r"image z.png: there is no file .*z\.png"),
}


@pytest.mark.parametrize("case", BAD_COCO)
def test_a_wrong_file_of_coco_is_named(tmp_path, case):
    write_coco(tmp_path)
    change, message = BAD_COCO[case]
    file = tmp_path / "annotations/instances_train.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text({"corrupt": "{", "deep": "[" * 100_000}.get(case, json.dumps(content)))
    with pytest.raises(DataError, match=message):
        load_data(spec(tmp_path, "coco"))


def test_categories_of_one_name_are_told_apart_by_their_supercategory(tmp_path):
    write_coco(tmp_path)
    write_coco(tmp_path / "plain")
    for file in (tmp_path / "annotations").glob("*.json"):
        content = json.loads(file.read_text())
        first = content["categories"][0]
        content["categories"].append({**first, "id": 0, "supercategory": "none"})  # as Roboflow writes its root
        first["supercategory"] = "own"
        file.write_text(json.dumps(content))
    data, plain = load_data(spec(tmp_path, "coco", classes=None)), load_data(spec(tmp_path / "plain", "coco"))
    assert len(set(data.train.labels)) == 3 and f"own/{first['name']}" in data.train.labels
    names = [
        [split.labels[i].rpartition("/")[2] for target in whole(split)[1] for i in target["labels"]]
        for split in (data.train, plain.train)
    ]
    assert names[0] == names[1]


MASK_SIZE = (24, 32)
SIDES = ("left", "right")


def write_masks(root, *, images="{split}", masks="{split}annot", count=5):
    for split in ("train", "val"):
        for number in range(count):
            column = 8 + 4 * number  # the class changes here, and the image is brighter
            pixels = np.full((*MASK_SIZE, 3), 40, np.uint8)
            pixels[:, column:] = 200
            classes = (np.arange(MASK_SIZE[1]) >= column).astype(np.uint8)[None].repeat(MASK_SIZE[0], 0)
            classes[:2] = 11
            for folder, array in ((images, pixels), (masks, classes)):
                path = root / folder.format(split=split) / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(path)


@pytest.mark.parametrize(
    ("images", "masks"),
    [("{split}", "{split}annot"), ("images/{split}", "masks/{split}"), ("{split}/images", "{split}/masks")],
)
def test_each_layout_is_read(tmp_path, images, masks):
    write_masks(tmp_path, images=images, masks=masks)
    data = load_data(spec(tmp_path, "masks"))
    pictures, targets = whole(data.val, 0, 4)
    assert pictures.shape == (2, 3, *MASK_SIZE) and targets.shape == (2, *MASK_SIZE)
    assert torch.equal(data.val.preprocessing.pixels(pictures)[:, 0, 2:] == 200, targets[:, 2:] == 1)
    assert (targets[:, :2] == 255).all()
    assert data.train.labels == SIDES


def test_images_and_masks_are_augmented_together_and_alike_on_every_call(tmp_path):
    write_masks(tmp_path)
    data = load_data(spec(tmp_path, "masks"))
    batches, again, other = (list(data.train.batches(BatchPlan(batch_size=2, epoch=e))) for e in (3, 3, 4))
    torch.testing.assert_close(batches, again, rtol=0, atol=0)
    assert not torch.equal(batches[0][0], other[0][0])
    pictures, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    bright = data.train.preprocessing.pixels(pictures)[:, 0]
    certain = (targets != 255) & ((bright < 60) | (bright > 180))  # not where resizing blended both
    assert certain.float().mean() > 0.3
    assert torch.equal((bright > 180)[certain], (targets == 1)[certain])


def test_resized_masks_hold_classes_alone(tmp_path):
    write_masks(tmp_path)
    _, targets = whole(load_data(spec(tmp_path, "masks", image_size=(12, 20))).val, 1)
    assert set(targets.unique().tolist()) <= {0, 1, 255}


@pytest.mark.parametrize("mode", ["P", "RGB"])
def test_masks_hold_the_same_classes_with_a_palette_and_as_grey_pixels_in_rgb(tmp_path, mode):
    write_masks(tmp_path, count=1)
    wanted = whole(load_data(spec(tmp_path, "masks")).val)[1]
    path = tmp_path / "valannot" / "0.png"
    grey = Image.open(path)
    mask = Image.merge("RGB", [grey] * 3)
    if mode == "P":
        mask = grey.copy()
        mask.putpalette([(37 * i) % 256 for i in range(768)])
        assert mask.mode == "P"
    mask.save(path)
    assert torch.equal(whole(load_data(spec(tmp_path, "masks")).val)[1], wanted)


def mask_of(array):
    return lambda path: Image.fromarray(np.asarray(array, np.uint8)).save(path)


DAMAGE = {
    "size": (mask_of(np.zeros((10, 10))), r"valannot/1.png is 10 x 10 pixels and its image 32 x 24"),
    "class": (
        mask_of(np.full(MASK_SIZE, 7)),
        r"valannot/1.png holds the classes 7; data.classes names 0 to 1, and data.ignore_index is 11",
    ),
    "colour": (mask_of(np.full((*MASK_SIZE, 3), (128, 0, 0))), r"colour image \(mode RGB\)"),
    "file": (lambda path: path.write_bytes(b"no image"), r"valannot/1.png is not a readable image"),
    "missing": (Path.unlink, r"1 images of .*val have no mask NAME.png in .*valannot: 1.png"),
    "empty": (lambda path: [file.unlink() for file in (path.parents[1] / "val").iterdir()], "val holds no images"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_bad_masks_are_named(tmp_path, kind):
    write_masks(tmp_path)
    damage, message = DAMAGE[kind]
    damage(tmp_path / "valannot" / "1.png")
    with pytest.raises(DataError, match=message):
        list(load_data(spec(tmp_path, "masks")).val.batches(BatchPlan(batch_size=5)))


def test_bad_masks_are_left_out_if_the_recipe_says_so(tmp_path):
    write_masks(tmp_path)
    DAMAGE["class"][0](tmp_path / "valannot" / "1.png")
    split = load_data(spec(tmp_path, "masks", on_error="skip")).val
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
        load_data(spec(tmp_path, "masks", **options))
