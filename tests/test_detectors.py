import copy

import pytest
import torch
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign, box_convert, box_iou

import compress
from compress.detection import (
    DetectorHead,
    DetectorNetwork,
    ProposalNetwork,
    TwoStageHead,
    batch_loss,
    is_detector,
    is_two_stage,
    matches,
    padded,
)
from compress.errors import ModelError
from compress.tasks.detection import output_tuple
from compress.tasks.load import detector_head
from examples import scenes, yolo
from tests.networks import Net
from tests.tiny_detectors import FAMILIES, SIZE, UNCHANGED, Backbone, retinanet, ssd


def images(count=2):
    return torch.rand(count, 3, *SIZE, generator=torch.Generator().manual_seed(1))


def targets():
    boxes = torch.tensor([[2.0, 3, 14, 12], [20, 8, 36, 30]])
    labels = torch.tensor([0, 2])
    return [{"boxes": boxes, "labels": labels}, {"boxes": boxes[:0], "labels": labels[:0]}]


def detector(name):
    torch.manual_seed(0)
    model = FAMILIES[name]()
    for part in model.head.modules():
        if isinstance(part, torch.nn.Conv2d):  # so that some scores are above the threshold
            torch.nn.init.normal_(part.weight, std=0.3)
    model.score_thresh = 0.05
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_losses_and_boxes_are_those_of_the_whole_detector(name):
    model = detector(name).eval()
    network, head = DetectorNetwork(model), DetectorHead(model, SIZE, 3)
    as_whole(model, head, output_tuple(network(images())), background=name == "ssd")


def as_whole(model, head, outputs, *, background):
    # The loss, after a look that boxes and loss are those of the whole detector.
    for mine, theirs in zip(head.decode(outputs), model(list(images())), strict=True):
        assert len(theirs["boxes"]) > 3
        for key in ("boxes", "scores"):
            torch.testing.assert_close(mine[key], theirs[key])
        assert torch.equal(mine["labels"], theirs["labels"] - int(background))

    shifted = [{**target, "labels": target["labels"] + int(background)} for target in targets()]
    trained = copy.deepcopy(model).train()
    trained.backbone.eval()  # its BatchNorm as in the network
    torch.manual_seed(5)  # anchors and proposals of the loss of two stages are sampled
    wanted = sum(trained(list(images()), shifted).values())
    torch.manual_seed(5)
    loss = head.loss(outputs, targets())
    torch.testing.assert_close(loss, wanted)
    return loss


@pytest.mark.parametrize("name", FAMILIES)
def test_boxes_to_be_ignored_are_not_learned(name):
    model = detector(name).eval()
    head, outputs = DetectorHead(model, SIZE, 3), output_tuple(DetectorNetwork(model)(images()))
    marked = [{**target, "ignored": torch.tensor([False, True])[: len(target["labels"])]} for target in targets()]
    first = [{key: value[:1] for key, value in target.items()} for target in targets()]
    assert torch.equal(head.loss(outputs, marked), head.loss(outputs, first))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_trains_all_of_the_network(name):
    model = detector(name)
    network, head = DetectorNetwork(model).train(), DetectorHead(model, SIZE, 3)
    head.loss(output_tuple(network(images())), targets()).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in network.named_parameters() if "norm" not in n)


@pytest.mark.parametrize(
    ("name", "engine", "quantized"), [("retinanet", "onnxruntime", True), ("ssd", "openvino", False)]
)
def test_exported_detectors_find_the_boxes_that_torch_finds(name, engine, quantized, tmp_path):
    model = detector(name).eval()
    network, head = DetectorNetwork(model).eval(), DetectorHead(model, SIZE, 3)
    spec = compress.QuantSpec(target="onnxruntime")
    variant = compress.quantize(network, images(), [images(8)], spec=spec) if quantized else network
    file = compress.export_onnx(variant, images(), tmp_path / "model.onnx")
    with compress.build_engine(file, engine, precision=None if quantized else "f32") as built:
        assert_found(built, variant, head, images(3), least=0.9 if quantized else 0.999)


def assert_found(engine, model, head, x, *, least):
    # An engine finds that share of the better half of the boxes that its module finds.
    found = {name: torch.from_numpy(value) for name, value in engine.run({"input": x.numpy()}).items()}
    assert list(found) == list(head.shapes)
    head.check(output_tuple(found), x)
    for mine, theirs in zip(head.decode(output_tuple(found)), head.decode(output_tuple(model(x))), strict=True):
        near = (mine["boxes"][:, None] - theirs["boxes"]).abs().amax(-1) < 1.0
        same = near & (mine["labels"][:, None] == theirs["labels"])
        strong = theirs["scores"] > theirs["scores"].median()
        assert strong.any()
        assert same.any(0)[strong].float().mean() > least


def test_a_factory_of_the_users_own_detector_gives_its_network():
    model = built("tests.tiny_detectors:retinanet")
    assert isinstance(model, DetectorNetwork)
    assert {name.split(".")[0] for name in model.state_dict()} == {"backbone", "head"}
    assert not is_detector(model)


def built(name):
    return compress.build_model(compress.ModelSpec(name=name), num_classes=3, task="detection")


def of_another_size():
    wide = torch.rand(1, 3, 32, 64)
    DetectorHead(retinanet(), SIZE, 3).check(output_tuple(DetectorNetwork(retinanet())(wide)), wide)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (of_another_size, "anchors are made for 32 x 48 pixels"),
        (lambda: DetectorHead(ssd(2), SIZE, 3), "has 3 classes: the data need 4, one of them for the background"),
        (lambda: built("maskrcnn_resnet50_fpn"), "no detector of boxes 'maskrcnn_resnet50_fpn'"),
        (
            lambda: built("fasterrcnn_mobilenet_v3_large_320_fpn"),
            r"model\.weights is null.*set model\.weights to those of the whole detector",
        ),
        (lambda: TwoStageHead(faster_rcnn(), SIZE, 3).boxes_and_scores(), "set export.nms to false"),
        (lambda: TwoStageHead(faster_rcnn(3), SIZE, 3), "has 3 classes: the data need 4"),
    ],
)
def test_what_cannot_be_is_refused_in_words(call, words):
    with pytest.raises(ModelError, match=words):
        call()


# The losses of a whole batch against torchvision's own, image by image.

BATCHED = ("retinanet", "ssd")


def random_targets(generator, counts, classes=3):
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
    torch.testing.assert_close(torch.autograd.grad(mine, outputs), torch.autograd.grad(theirs, outputs))


@pytest.mark.parametrize("name", BATCHED)
def test_images_without_boxes_learn_the_background(name):
    mine, theirs, _ = both_losses(name, [0, 0], 0)
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("make", [retinanet, ssd])
def test_matches_do_not_depend_on_how_many_images_are_matched_at_a_time(make, monkeypatch):
    detector = make()
    targets = random_targets(torch.Generator().manual_seed(9), [3, 0, 6, 1])
    given = detector.proposal_matcher, padded(targets), DetectorHead(detector, SIZE, 3).anchors(torch.device("cpu"))
    whole = matches(*given)
    monkeypatch.setattr("compress.detection._LARGEST", 1)
    assert torch.equal(matches(*given), whole)
    for row, target in zip(whole, targets, strict=True):
        learned = row[row >= 0].unique()
        assert not target["ignored"][learned].any()


@pytest.mark.parametrize("name", BATCHED)
def test_the_host_reads_nothing_from_the_device(name):
    # On the meta device there is nothing to read: a selection by a mask or a number of the host's fails.
    head, loss = DetectorHead(FAMILIES[name](), SIZE, 3), batch_loss(FAMILIES[name]())
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


# Faster R-CNN in two parts, against torchvision's own detector on whole pictures.


def faster_rcnn(num_classes=4, kind=FasterRCNN, **changes):
    torch.manual_seed(0)
    anchors = AnchorGenerator(((8,), (16,)), ((0.5, 1.0),) * 2)
    pool = MultiScaleRoIAlign(["0", "1"], output_size=3, sampling_ratio=2)
    head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8 * 9, 16), torch.nn.ReLU())
    predictor = torch.nn.ModuleDict()  # replaced below: torchvision makes its own for a box head of 1,024 channels
    model = kind(
        Backbone(),
        None,
        rpn_anchor_generator=anchors,
        box_roi_pool=pool,
        box_head=head,
        box_predictor=predictor,
        min_size=min(SIZE),
        max_size=64,
        **UNCHANGED,
        **changes,
    )
    model.roi_heads.box_predictor = Net(
        lambda net, x: (net.cls_score(x), net.bbox_pred(x)),
        cls_score=torch.nn.Linear(16, num_classes),
        bbox_pred=torch.nn.Linear(16, num_classes * 4),
    )
    model.transform.size_divisible = 1
    for part in model.rpn.head.modules():
        if isinstance(part, torch.nn.Conv2d):
            torch.nn.init.normal_(part.weight, std=0.3)
    return model.eval()


def test_losses_and_boxes_are_those_of_the_whole_detector_of_two_stage():
    model = faster_rcnn()
    network, head = ProposalNetwork(model), TwoStageHead(model, SIZE, 3)
    outputs = output_tuple(network(images()))
    head.check(outputs, images())
    as_whole(model, head, outputs, background=True).backward()
    assert all(p.grad.abs().sum() > 0 for name, p in network.named_parameters())
    assert all(p.grad is None for p in model.roi_heads.parameters())


def test_the_quantized_part_in_an_engine_finds_the_boxes_that_torch_finds(tmp_path):
    model = faster_rcnn()
    network, head = ProposalNetwork(model), TwoStageHead(model, SIZE, 3)
    spec = compress.QuantSpec(target="onnxruntime")
    qmodel = compress.quantize(network, images(), [images(8)], spec=spec)
    assert {site.path for site in qmodel.placement.weights} >= {"backbone.last.0", "rpn.head.conv.0.0"}
    file = compress.export_onnx(qmodel, images(), tmp_path / "model.onnx")
    with compress.build_engine(file, "onnxruntime", batch_size=2) as engine:
        assert_found(engine, qmodel, head, images(), least=0.9)


def test_a_users_trained_detector_is_taken_with_its_box_head(tmp_path):
    model = faster_rcnn()
    model.roi_heads.box_predictor.cls_score.bias.data[2] += 1.0
    torch.save(model.state_dict(), tmp_path / "whole.pth")
    spec = compress.ModelSpec(
        name="tests.test_detectors:faster_rcnn", weights=str(tmp_path / "whole.pth"), num_classes=4
    )
    network = compress.build_model(spec, num_classes=3, task="detection").eval()
    assert isinstance(network, ProposalNetwork) and not is_two_stage(network)
    head = detector_head(spec, num_classes=3, image_size=SIZE)
    for mine, theirs in zip(head.decode(output_tuple(network(images()))), model(list(images())), strict=True):
        torch.testing.assert_close(mine["scores"], theirs["scores"])


def test_a_detector_of_masks_is_no_detector_of_two_stages():
    masks = MultiScaleRoIAlign(["0"], output_size=3, sampling_ratio=2)
    assert not is_two_stage(
        faster_rcnn(kind=MaskRCNN, mask_roi_pool=masks, mask_head=Backbone(), mask_predictor=Backbone())
    )


# The detectors of examples/: a YOLO in sizes without suppression, a DETR, and the scenes that they learn.


def scattered(seed=3, counts=(3, 0, 5)):
    return random_targets(torch.Generator().manual_seed(seed), counts)


def test_a_yolo_of_a_size_has_the_channels_of_ultralytics_and_one_head_when_it_is_deployed():
    model = yolo.Yolo(3, size="n", end_to_end=True)
    assert [stage[1].join[0].out_channels for stage in model.down] == [64, 128, 256]  # yolo11n.yaml: 0.25 of P3 to P5
    x = torch.rand(2, 3, 32, 64)
    assert len(model.train()(x)) == 6
    single = yolo.Yolo(3, size="n").eval()
    single.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("many_")})
    assert all(map(torch.equal, model.eval()(x), single(x)))


def test_the_head_without_suppression_leaves_the_features_to_the_other_one():
    model = yolo.Yolo(3, width=4, end_to_end=True).train()
    maps = model(torch.rand(3, 3, 32, 64))
    stem = next(model.stem.parameters())
    ours = torch.autograd.grad(yolo.loss(maps[:3], scattered(), top=1), stem, retain_graph=True, allow_unused=True)
    assert ours == (None,)
    yolo.end_to_end_loss(maps, scattered()).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert stem.grad.abs().sum() > 0 and model.many_boxes[0][1].bias.grad.abs().sum() > 0


def test_one_cell_learns_a_box_without_suppression():
    truth, labels, known = yolo.padded(scattered(), torch.device("cpu"))
    points, strides = yolo.cells([(32 // s, 64 // s) for s in yolo.STRIDES])
    centres = points * strides
    boxes = torch.cat([centres - 8, centres + 8], 1).expand(3, -1, -1)
    scores = torch.rand(3, len(centres), 3, generator=torch.Generator().manual_seed(1))
    chosen, quality = yolo.assigned(scores, boxes, centres, truth, labels, known, top=1)
    for image, (cells, target) in enumerate(zip(chosen, scattered(), strict=True)):
        learned = cells[cells >= 0].tolist()
        assert len(learned) == len(set(learned))
        assert not target["ignored"][learned].any()
        for cell in (cells >= 0).nonzero().flatten():
            box = target["boxes"][cells[cell]]
            assert (box[:2] < centres[cell]).all() and (centres[cell] < box[2:]).all()
            assert quality[image, cell] <= box_iou(boxes[0, cell : cell + 1], box[None]).max() + 1e-5
    assert (chosen >= 0).any()


def test_overlaps_are_those_of_torchvision():
    boxes = [torch.cat([one["boxes"] for one in scattered(seed, (4, 3))]) for seed in (1, 2)]
    found = 1 - yolo._overlap_loss(boxes[0][:, None], boxes[1][None], enclosing=False)
    torch.testing.assert_close(found, box_iou(*boxes))


def test_boxes_of_a_head_without_suppression_are_the_best_by_score():
    maps = [
        torch.randn(2, 4 * yolo.BINS + 3, 4 // s, 6 // s, generator=torch.Generator().manual_seed(s)) for s in (1, 2)
    ]
    maps.append(torch.randn(2, 4 * yolo.BINS + 3, 1, 2))
    everything = yolo.suppressed(
        *(yolo.flattened(maps)[2], yolo.flattened(maps)[1].sigmoid()), (32, 48), overlap=1.0, score=0.0
    )
    for mine, every in zip(yolo.decode_single(maps, most=20), everything, strict=True):
        torch.testing.assert_close(mine["scores"], every["scores"][:20])
        torch.testing.assert_close(mine["boxes"], every["boxes"][:20])


def test_scenes_are_a_data_set_of_boxes_that_hold_their_shapes(tmp_path):
    image, rows = scenes.scene(5, 7)
    again = scenes.scene(5, 7)
    assert (image.tobytes(), rows) == (again[0].tobytes(), again[1])
    found, owners = (
        [(0, 4, 6, scenes.np.ones((3, 5), bool)), (1, 5, 6, scenes.np.ones((3, 4), bool))],
        scenes.np.zeros((20, 20), int),
    )
    owners[6:9, 4:9], owners[6:9, 5:9] = 1, 2
    assert [(row["bbox"], row["iscrowd"]) for row in scenes._rows(found, owners)] == [
        ([4, 6, 5, 3], 1),
        ([5, 6, 4, 3], 0),
    ]
    spec = compress.DataSpec(name="coco", root=str(scenes.write(tmp_path, train=2, val=1)), image_size=(64, 64))
    data = compress.load_data(spec)
    assert data.val.labels == scenes.CLASSES and len(data.train) == 2
    _, targets = data.val.load([0], epoch=None, device=torch.device("cpu"))
    wanted = [row["bbox"] for row in scenes.scene(0, 1_000_000)[1]]
    torch.testing.assert_close(targets[0]["boxes"], box_convert(torch.tensor(wanted).float(), "xywh", "xyxy") / 5)


@pytest.mark.release
def test_the_loss_of_the_detr_is_that_of_transformers():
    pytest.importorskip("transformers")
    from examples import detr

    model = detr.Detr(3, width=32, layers=2, queries=20).eval()  # BatchNorm as in evaluation
    model.training = model.detector.training = True
    x = torch.rand(3, 3, detr.SIDE, detr.SIDE)
    labels = [
        {
            "class_labels": one["labels"][~one["ignored"]],
            "boxes": box_convert(one["boxes"][~one["ignored"]], "xyxy", "cxcywh") / 320,
        }
        for one in scattered()
    ]
    torch.testing.assert_close(detr.loss(model(x), scattered()), model.detector(x, labels=labels).loss)


@pytest.mark.parametrize("family", ["rt_detr_v2", "d_fine"])
def test_a_detr_finds_the_boxes_that_transformers_does_and_learns_all_layers(family):
    transformers = pytest.importorskip("transformers")
    from examples import detr

    model = detr.Detr(3, width=32, layers=2, queries=20, family=family).eval()
    x = torch.rand(2, 3, 64, 64)
    mine, found = detr.decode(model(x)), model.detector(x)
    sizes = torch.full((2, 2), detr.SIDE)
    others = transformers.RTDetrImageProcessor().post_process_object_detection(found, 0.0, sizes)
    for one, other in zip(mine, others, strict=True):
        torch.testing.assert_close(one["scores"][:20], other["scores"])
        torch.testing.assert_close(one["boxes"][:20], other["boxes"].clamp(0, detr.SIDE))
        assert torch.equal(one["labels"][:20], other["labels"])
    detr.loss(model.train()(x), scattered(counts=(3, 2))).backward()
    still = {name for name, p in model.named_parameters() if p.grad is None}
    assert not [name for name in still if not name.endswith((".up", ".reg_scale"))]  # constants of D-FINE
