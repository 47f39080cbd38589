"""The losses of a whole batch against torchvision's own, image by image."""

import pytest
import torch

from compress.detection.detectors import DetectorHead, batch_loss, matches, padded
from tests.tiny_detectors import FAMILIES, SIZE, retinanet, ssd

BATCHED = ("retinanet", "ssd")


def random_targets(generator, counts, classes=3):
    """Boxes of at least a pixel; some share their nearest anchor, some are ignored."""
    found = []
    for count in counts:
        corner = torch.rand(count, 2, generator=generator) * torch.tensor([SIZE[1] - 9.0, SIZE[0] - 9.0])
        size = 1 + torch.rand(count, 2, generator=generator) * 8
        boxes = torch.cat([corner, corner + size], 1)
        if count > 2:
            boxes[1] = boxes[0] + 0.25
        labels = torch.randint(classes, (count,), generator=generator)
        ignored = torch.rand(count, generator=generator) < 0.2
        found.append({"boxes": boxes, "labels": labels, "ignored": ignored})
    return found


def both_losses(name, counts, seed):
    """The loss of a random batch, torchvision's, and the outputs that both learn from."""
    generator = torch.Generator().manual_seed(seed)
    head = DetectorHead(FAMILIES[name](), SIZE, 3)
    targets = [
        {**target, "labels": target["labels"] + head.first_class} for target in random_targets(generator, counts)
    ]
    outputs = {
        key: torch.randn(len(counts), *shape, generator=generator).requires_grad_()
        for key, shape in head.shapes.items()
    }
    mine = batch_loss(FAMILIES[name]())(outputs, padded(targets), head.anchors(torch.device("cpu")))
    known = [{key: target[key][~target["ignored"]] for key in ("boxes", "labels")} for target in targets]
    return mine, sum(head._run(list(outputs.values()), known).values()), list(outputs.values())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_has_the_loss_and_the_gradients_of_torchvisions_own(name, seed):
    mine, theirs, outputs = both_losses(name, [3, 0, 6, 1, 4], seed)
    torch.testing.assert_close(mine, theirs)
    for got, expected in zip(torch.autograd.grad(mine, outputs), torch.autograd.grad(theirs, outputs), strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", BATCHED)
def test_images_without_boxes_learn_the_background(name):
    mine, theirs, _ = both_losses(name, [0, 0], 0)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("make", [retinanet, ssd])
def test_matches_do_not_depend_on_how_many_images_are_matched_at_a_time(make, monkeypatch):
    detector = make()
    head = DetectorHead(detector, SIZE, 3)
    truth = padded(random_targets(torch.Generator().manual_seed(9), [3, 0, 6, 1]))
    anchors = head.anchors(torch.device("cpu"))
    whole = matches(detector.proposal_matcher, truth, anchors)
    monkeypatch.setattr("compress.detection.detectors._LARGEST", 1)
    assert torch.equal(matches(detector.proposal_matcher, truth, anchors), whole)
    for row, target in zip(whole, random_targets(torch.Generator().manual_seed(9), [3, 0, 6, 1]), strict=True):
        learned = row[row >= 0].unique()
        assert not target["ignored"][learned].any()


@pytest.mark.parametrize("name", BATCHED)
def test_the_host_reads_nothing_from_the_device(name):
    """On the meta device there is nothing to read: a selection by a mask or a number of the host's fails."""
    head = DetectorHead(FAMILIES[name](), SIZE, 3)
    loss = batch_loss(FAMILIES[name]())
    outputs = {key: torch.empty(3, *shape, device="meta") for key, shape in head.shapes.items()}
    targets = [
        {key: value.to("meta") for key, value in t.items()} for t in random_targets(torch.Generator(), [2, 0, 3])
    ]
    assert loss(outputs, padded(targets), head.anchors(torch.device("cpu")).to("meta")).shape == ()


def test_a_detector_with_a_loss_of_its_own_keeps_it():
    class Own(type(retinanet())):
        def compute_loss(self, targets, head_outputs, anchors):
            return {"own": head_outputs["cls_logits"].sum()}

    detector = retinanet()
    detector.__class__ = Own
    assert batch_loss(detector) is None
    assert batch_loss(FAMILIES["fcos"]()) is None
