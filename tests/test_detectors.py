import copy

import pytest
import torch

from compress import ModelSpec, QuantSpec, build_engine, build_model, export_onnx, quantize
from compress.detection.detectors import DetectorHead, DetectorNetwork, is_detector
from compress.errors import ModelError
from compress.tasks.detection import output_tuple
from tests.tiny_detectors import FAMILIES, SIZE, retinanet, ssd


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
    outputs = output_tuple(network(images()))
    background = name == "ssd"

    whole = model(list(images()))
    for mine, theirs in zip(head.decode(outputs), whole, strict=True):
        assert len(theirs["boxes"]) > 3
        for key in ("boxes", "scores"):
            torch.testing.assert_close(mine[key], theirs[key])
        assert torch.equal(mine["labels"], theirs["labels"] - int(background))

    shifted = [{**target, "labels": target["labels"] + int(background)} for target in targets()]
    trained = copy.deepcopy(model).train()
    trained.backbone.eval()  # its BatchNorm as in the network above
    torch.testing.assert_close(head.loss(outputs, targets()), sum(trained(list(images()), shifted).values()))


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
    variant = quantize(network, images(), [images(8)], spec=QuantSpec(target="onnxruntime")) if quantized else network
    file = export_onnx(variant, images(), tmp_path / "model.onnx")
    with torch.no_grad(), build_engine(file, engine, precision=None if quantized else "f32") as built:
        expected = output_tuple(variant(images(3)))
        got = output_tuple({k: torch.from_numpy(v) for k, v in built.run({"input": images(3).numpy()}).items()})
    assert built_names(file) == list(head.shapes)
    head.check(got, images(3))
    for mine, theirs in zip(head.decode(got), head.decode(expected), strict=True):
        near = (mine["boxes"][:, None] - theirs["boxes"]).abs().amax(-1) < 1.0
        same = near & (mine["labels"][:, None] == theirs["labels"])
        strong = theirs["scores"] > theirs["scores"].median()
        assert strong.any()
        assert same.any(0)[strong].float().mean() > (0.9 if quantized else 0.999)


def built_names(file):
    import onnx

    return [output.name for output in onnx.load(file).graph.output]


def test_a_factory_of_the_users_own_detector_gives_its_network():
    model = build_model(ModelSpec(name="tests.tiny_detectors:retinanet"), num_classes=3, task="detection")
    assert isinstance(model, DetectorNetwork)
    assert {name.split(".")[0] for name in model.state_dict()} == {"backbone", "head"}
    assert not is_detector(model)


def test_outputs_of_another_size_are_refused():
    head = DetectorHead(retinanet(), SIZE, 3)
    wide = torch.rand(1, 3, 32, 64)
    with pytest.raises(ModelError, match="anchors are made for 32 x 48 pixels"):
        head.check(output_tuple(DetectorNetwork(retinanet())(wide)), wide)


def test_too_few_classes_are_refused():
    with pytest.raises(ModelError, match="has 3 classes: the data need 4, one of them for the background"):
        DetectorHead(ssd(2), SIZE, 3)


def test_detectors_of_masks_are_refused():
    with pytest.raises(ModelError, match="no detector of boxes 'maskrcnn_resnet50_fpn'"):
        build_model(ModelSpec(name="maskrcnn_resnet50_fpn"), num_classes=3, task="detection")
