"""Faster R-CNN in two parts, against torchvision's own detector on whole pictures."""

import copy

import pytest
import torch
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign

import compress
from compress import ModelSpec, build_model
from compress.detection.two_stage import ProposalNetwork, TwoStageHead, is_two_stage
from compress.errors import ModelError
from compress.tasks.detection import output_tuple
from compress.tasks.load import detector_head
from tests.test_detectors import images, targets
from tests.tiny_detectors import SIZE, UNCHANGED, Backbone


def faster_rcnn(num_classes=4, kind=FasterRCNN, **changes):
    """Two maps, a box head of 16 channels, scores of all sizes; one class is the background."""
    torch.manual_seed(0)
    anchors = AnchorGenerator(((8,), (16,)), ((0.5, 1.0),) * 2)
    pool = MultiScaleRoIAlign(["0", "1"], output_size=3, sampling_ratio=2)
    head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8 * 9, 16), torch.nn.ReLU())
    predictor = torch.nn.ModuleDict()  # replaced below: torchvision makes its own for a box head of 1,024 channels
    model = kind(
        Backbone(), None, rpn_anchor_generator=anchors, box_roi_pool=pool, box_head=head, box_predictor=predictor,
        min_size=min(SIZE), max_size=64, **UNCHANGED, **changes,
    )  # fmt: skip
    model.roi_heads.box_predictor = Predictor(16, num_classes)
    model.transform.size_divisible = 1
    for part in model.rpn.head.modules():
        if isinstance(part, torch.nn.Conv2d):
            torch.nn.init.normal_(part.weight, std=0.3)
    return model.eval()


class Predictor(torch.nn.Module):
    """Scores and box codes of each class."""

    def __init__(self, inputs, classes):
        super().__init__()
        self.cls_score = torch.nn.Linear(inputs, classes)
        self.bbox_pred = torch.nn.Linear(inputs, classes * 4)

    def forward(self, x):
        return self.cls_score(x), self.bbox_pred(x)


def test_losses_and_boxes_are_those_of_the_whole_detector():
    model = faster_rcnn()
    network, head = ProposalNetwork(model), TwoStageHead(model, SIZE, 3)
    outputs = output_tuple(network(images()))
    head.check(outputs, images())
    for mine, theirs in zip(head.decode(outputs), model(list(images())), strict=True):
        assert len(theirs["boxes"]) > 3
        assert torch.equal(mine["labels"], theirs["labels"] - 1)
        for key in ("boxes", "scores"):
            torch.testing.assert_close(mine[key], theirs[key])
    shifted = [{**target, "labels": target["labels"] + 1} for target in targets()]
    trained = copy.deepcopy(model).train()
    trained.backbone.eval()
    torch.manual_seed(5)  # anchors and proposals of the loss are sampled
    wanted = sum(trained(list(images()), shifted).values())
    torch.manual_seed(5)
    loss = head.loss(outputs, targets())
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    assert all(p.grad.abs().sum() > 0 for name, p in network.named_parameters())
    assert all(p.grad is None for p in model.roi_heads.parameters())


def test_the_quantized_part_in_an_engine_finds_the_boxes_that_torch_finds(tmp_path):
    model = faster_rcnn()
    network, head = ProposalNetwork(model), TwoStageHead(model, SIZE, 3)
    spec = compress.QuantSpec(target="onnxruntime")
    qmodel = compress.quantize(network, images(), [images(8)], spec=spec)
    assert {site.path for site in qmodel.placement.weights} >= {"backbone.last.0", "rpn.head.conv.0.0"}
    file = compress.export_onnx(qmodel, images(), tmp_path / "model.onnx")
    with torch.no_grad(), compress.build_engine(file, "onnxruntime", batch_size=2) as engine:
        found = {name: torch.from_numpy(value) for name, value in engine.run({"input": images().numpy()}).items()}
        assert list(found) == list(head.shapes)
        rows = zip(head.decode(output_tuple(found)), head.decode(output_tuple(qmodel(images()))), strict=True)
    for mine, theirs in rows:
        near = (mine["boxes"][:, None] - theirs["boxes"]).abs().amax(-1) < 1.0
        same = near & (mine["labels"][:, None] == theirs["labels"])
        assert same.any(0)[theirs["scores"] > theirs["scores"].median()].float().mean() > 0.9


def test_a_users_trained_detector_is_taken_with_its_box_head(tmp_path):
    model = faster_rcnn()
    with torch.no_grad():
        model.roi_heads.box_predictor.cls_score.bias[2] += 1.0
    torch.save(model.state_dict(), tmp_path / "whole.pth")
    spec = ModelSpec(name="tests.test_two_stage:faster_rcnn", weights=str(tmp_path / "whole.pth"), num_classes=4)
    network = build_model(spec, num_classes=3, task="detection").eval()
    assert isinstance(network, ProposalNetwork) and not is_two_stage(network)
    head = detector_head(spec, num_classes=3, image_size=SIZE)
    for mine, theirs in zip(head.decode(output_tuple(network(images()))), model(list(images())), strict=True):
        torch.testing.assert_close(mine["scores"], theirs["scores"])


def test_what_cannot_be_is_refused_in_words():
    with pytest.raises(ModelError, match=r"model\.weights is null.*set model\.weights to those of the whole detector"):
        build_model(ModelSpec(name="fasterrcnn_mobilenet_v3_large_320_fpn"), num_classes=3, task="detection")
    head = TwoStageHead(faster_rcnn(), SIZE, 3)
    with pytest.raises(ModelError, match="set export.nms to false"):
        head.boxes_and_scores()
    with pytest.raises(ModelError, match="has 3 classes: the data need 4"):
        TwoStageHead(faster_rcnn(3), SIZE, 3)
    masks = MultiScaleRoIAlign(["0"], output_size=3, sampling_ratio=2)
    assert not is_two_stage(
        faster_rcnn(kind=MaskRCNN, mask_roi_pool=masks, mask_head=Backbone(), mask_predictor=Backbone())
    )
