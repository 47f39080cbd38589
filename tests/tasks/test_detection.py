import contextlib
import io

import numpy as np
import pytest
import torch
import torchvision
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from compress.data.boxes import annotation
from compress.errors import DataError, ModelError, RecipeError
from compress.tasks.detection import Detections, detection
from compress.tasks.load import make_task

LABELS = ("red cell", "white cell", "platelet")


def scene(seed, images=6):
    draw = np.random.default_rng(seed)
    found, truth = [], []
    for _ in range(images):
        count = int(draw.integers(0, 6))
        corner, side = draw.uniform(0, 60, (count, 2)), draw.uniform(4, 40, (count, 2))
        boxes, labels = np.concatenate([corner, corner + side], 1), draw.integers(0, 3, count)
        crowd = draw.random(count) < 0.2
        chosen = draw.random(count) < 0.8
        moved = boxes[chosen] + draw.normal(0, 2, (chosen.sum(), 4))
        moved[:, 2:] = np.maximum(moved[:, 2:], moved[:, :2] + 1)
        wrong = np.array([[1.0, 1, 9, 9]]).repeat(2, 0)
        pair = np.concatenate([moved, wrong]), np.concatenate([labels[chosen], draw.integers(0, 3, 2)])
        scores = draw.random(len(pair[0]))
        found.append({"boxes": tensor(pair[0]), "labels": torch.from_numpy(pair[1]), "scores": tensor(scores)})
        truth.append({"boxes": tensor(boxes), "labels": torch.from_numpy(labels), "ignored": torch.from_numpy(crowd)})
    return found, truth


def tensor(array):
    return torch.from_numpy(array.astype(np.float32)).reshape(*array.shape)


def reference(found, truth):
    annotations, results = [], []
    for image, (one, true) in enumerate(zip(found, truth, strict=True), 1):
        for box, label, crowd in zip(true["boxes"].tolist(), true["labels"].tolist(), true["ignored"], strict=True):
            w, h = box[2] - box[0], box[3] - box[1]
            row = {"id": len(annotations) + 1, "image_id": image, "category_id": label, "bbox": [*box[:2], w, h]}
            annotations.append({**row, "area": w * h, "iscrowd": int(crowd)})
        for box, label, score in zip(
            one["boxes"].tolist(), one["labels"].tolist(), one["scores"].tolist(), strict=True
        ):
            bbox = [*box[:2], box[2] - box[0], box[3] - box[1]]
            results.append({"image_id": image, "category_id": label, "bbox": bbox, "score": score})
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        categories = [{"id": i, "name": name} for i, name in enumerate(LABELS)]
        images = [{"id": i + 1} for i in range(len(found))]
        coco.dataset = {"images": images, "annotations": annotations, "categories": categories}
        coco.createIndex()
        run = COCOeval(coco, coco.loadRes(results), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    per_class = [run.eval["precision"][:, :, i, 0, 2] for i in range(3)]
    return run.stats, [p[p > -1].mean() if (p > -1).any() else None for p in per_class]


def meter(found, truth):
    one = Detections(LABELS, decode=lambda outputs: found)
    one.update((torch.zeros(len(found)),), truth)
    return one


@pytest.mark.parametrize("seed", range(6))
def test_map_is_that_of_the_reference_implementation(seed):
    found, truth = scene(seed)
    stats, per_class = reference(found, truth)
    figures = meter(found, truth).compute()
    assert [figures[name] for name in ("map", "map50", "map75")] == pytest.approx(stats[:3].tolist(), abs=1e-6)
    names = ("ap_red_cell", "ap_white_cell", "ap_platelet")
    occurs = [i for i in range(3) if any((t["labels"] == i).any() for t in truth)]
    assert [figures[names[i]] for i in occurs] == pytest.approx([per_class[i] for i in occurs], abs=1e-6)


def test_map_of_boxes_beyond_their_images_is_that_of_the_reference_for_cut_boxes(tmp_path):
    # The boxes of the first image are moved partly out of it, and found as far as they are in it.
    found, truth = scene(1)
    rows = [
        (box, label, False) for box, label in zip(truth[0]["boxes"] - 20.0, truth[0]["labels"].tolist(), strict=True)
    ]
    one = annotation(tmp_path, "it", (70, 70), [(box.tolist(), label, crowd) for box, label, crowd in rows])
    assert one.cut and len(one.boxes)
    truth[0] = {key: torch.from_numpy(getattr(one, key)) for key in ("boxes", "labels", "ignored")}
    cut = torchvision.ops.clip_boxes_to_image(torch.stack([box for box, *_ in rows]), (70, 70))
    cut, labels = cut[kept := torchvision.ops.remove_small_boxes(cut, 1e-3)], torch.tensor([r[1] for r in rows])[kept]
    found[0] = {"boxes": cut, "labels": labels, "scores": torch.linspace(0.9, 0.1, len(cut))}
    clipped = [{"boxes": cut, "labels": labels, "ignored": torch.zeros(len(cut), dtype=torch.bool)}, *truth[1:]]
    stats, _ = reference(found, clipped)
    figures = meter(found, truth).compute()
    assert [figures[name] for name in ("map", "map50", "map75")] == pytest.approx(stats[:3].tolist(), abs=1e-6)


def test_batches_and_processes_add_up():
    found, truth = scene(3)
    whole = meter(found, truth).compute()
    first, second = meter(found[:2], truth[:2]), meter(found[2:], truth[2:])
    first.merge_state(second)
    assert first.compute() == whole


def test_images_without_boxes_count_and_none_at_all_is_refused():
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    nothing = [{**empty, "scores": torch.zeros(0)}]
    with pytest.raises(DataError, match="no image that was evaluated has a box"):
        meter(nothing, [empty]).compute()
    found, truth = scene(1)
    wrong = [{"boxes": torch.tensor([[1.0, 1, 5, 5]]), "labels": torch.tensor([0]), "scores": torch.tensor([1.0])}]
    assert meter(found + wrong, [*truth, empty]).compute()["map"] < meter(found, truth).compute()["map"]


def test_a_class_of_crowds_alone_has_no_figure():
    found, truth = scene(2)
    crowded = [{**t, "ignored": t["ignored"] | (t["labels"] == 1)} for t in truth]
    stats, per_class = reference(found, crowded)
    figures = meter(found, crowded).compute()
    assert figures["map"] == pytest.approx(stats[0], abs=1e-6)
    assert "ap_white_cell" not in figures and per_class[1] is None
    everything = [{**t, "ignored": torch.ones_like(t["ignored"])} for t in truth]
    with pytest.raises(DataError, match="no image that was evaluated has a box that counts"):
        meter(found, everything).compute()


def task(decode):
    return detection(LABELS, loss=lambda outputs, targets: outputs[0].sum(), decode=decode)


@pytest.mark.parametrize(
    "returned", [torch.zeros(2, 6), [{}], [{"boxes": torch.zeros(2, 4), "scores": torch.zeros(2)}]]
)
def test_what_a_decode_returns_is_checked(returned):
    _, truth = scene(0, images=1)
    one = task(lambda outputs: returned).metric.make()
    with pytest.raises(ModelError, match="decode returned"):
        one.update((torch.zeros(1),), truth)


@pytest.mark.parametrize("channels", [1, 3])
def test_boxes_are_drawn_in_the_colour_of_their_class(channels):
    # A small picture is enlarged, so that the name on its colour can be read; it stays within the picture.
    images = torch.zeros(2, channels, 64, 96, dtype=torch.uint8)
    rows = [
        {"boxes": torch.tensor([[8.0, 28, 90, 60]]), "labels": torch.tensor([1]), "scores": torch.tensor([score])}
        for score in (0.9, 0.1)
    ]
    drawn = task(lambda outputs: rows).draw(images, (torch.zeros(2),), None)
    assert drawn.shape == (2, 3, 256, 384)
    colour = drawn[0, :, 4 * 60, 4 * 50]
    assert colour.any()
    assert not drawn[0, :, 4 * 44, 4 * 50].any()
    label = drawn[0, :, 4 * 28 - 10 : 4 * 28, 32:60]
    assert (label == colour[:, None, None]).all(0).any() and (label != colour[:, None, None]).all(0).any()
    assert not drawn[1].any(), "a box of a low score is left out"


def test_the_name_of_a_box_at_the_edge_is_drawn_within_the_picture():
    images = torch.zeros(1, 3, 256, 256, dtype=torch.uint8)
    widths = [
        int(task(None).draw(images, None, [{"boxes": box, "labels": torch.tensor([1])}])[0, :, 4].any(0).sum())
        for box in (torch.tensor([[250.0, 0, 270, 20]]), torch.tensor([[100.0, 0, 120, 20]]))
    ]
    assert widths[0] == pytest.approx(widths[1], abs=1) and widths[0] > 20


def test_a_network_that_is_no_detector_needs_loss_and_decode():
    with pytest.raises(RecipeError, match="decode is not set"):
        make_task("detection", LABELS, loss="tests.tasks.test_detection:scene")
    with pytest.raises(RecipeError, match="loss is not set"):
        make_task("detection", LABELS, decode="tests.tasks.test_detection:scene")
    own = make_task("detection", LABELS, loss=lambda o, t: o[0].mean(), decode=lambda outputs: [])
    assert own.loss((torch.ones(2),), [], label_smoothing=0.1).item() == 1
