# Detectors with non-maximum suppression in the file, against torchvision's own decoding of whole pictures.

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch
from torchvision.models.detection import RetinaNet

import compress
from compress.detection import DetectorHead, DetectorNetwork
from compress.errors import ExportError, ModelError
from compress.export.nms import NMS_OUTPUTS, export_with_nms
from tests.further import further
from tests.tiny_detectors import FAMILIES, SIZE

CLASSES = 3
# Fewer than there are anchors, so that the choice of candidates counts.
CANDIDATES = {"retinanet": 60, "fcos": 40, "ssd": 50}


@cache
def detector(name):
    torch.manual_seed(3)
    made = FAMILIES[name](CLASSES).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.5 * parameter[0].numel() ** -0.5)
        for path, parameter in made.head.named_parameters():
            if parameter.dim() == 1 and "cls" in path:
                parameter.normal_(-1, 1)
    made.topk_candidates, made.detections_per_img, made.score_thresh = CANDIDATES[name], 30, 0.1
    return made, DetectorNetwork(made), torch.randn(2, 3, *SIZE)


@cache
def files(name):
    # The files of a detector without and with suppression.
    made, network, pictures = detector(name)
    folder = Path(mkdtemp())
    plain = compress.export_onnx(network, pictures, folder / "plain.onnx")
    return plain, export_with_nms(plain, DetectorHead(made, SIZE, CLASSES).boxes_and_scores(), folder / "nms.onnx")


def found(engine, pictures):
    # The boxes that an engine returns, place by place.
    boxes, scores, labels = (torch.from_numpy(engine.run({"input": pictures.numpy()})[n]) for n in NMS_OUTPUTS)
    assert boxes.shape == (len(pictures), scores.shape[1], 4)
    return [
        {"boxes": b[s > 0], "scores": s[s > 0], "labels": n[s > 0]}
        for b, s, n in zip(boxes, scores, labels, strict=True)
    ]


@pytest.mark.parametrize("engine_name", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("name", further(FAMILIES, ["ssd"]))
def test_boxes_are_those_of_torchvisions_decoding(name, engine_name):
    made, network, pictures = detector(name)
    precision = "f32" if engine_name == "openvino" else None
    with compress.build_engine(files(name)[1], engine_name, batch_size=2, precision=precision) as engine:
        got = found(engine, pictures)
    with torch.no_grad():
        wanted = DetectorHead(made, SIZE, CLASSES).decode(tuple(network(pictures).values()))
    for one, other in zip(got, wanted, strict=True):
        assert len(one["scores"]) == len(other["scores"]) > 10
        torch.testing.assert_close(one["scores"], other["scores"], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(one["boxes"], other["boxes"], rtol=1e-3, atol=0.05)
        assert torch.equal(one["labels"], other["labels"])


def test_a_file_of_another_detector_is_refused(tmp_path):
    made, _, _ = detector("retinanet")
    decoding = DetectorHead(made, SIZE, CLASSES).boxes_and_scores()
    with pytest.raises(ExportError, match="the decoding takes cls_logits, bbox_regression of 240 anchors"):
        export_with_nms(files("fcos")[0], decoding, tmp_path / "nms.onnx")
    assert not list(tmp_path.iterdir())


def test_a_decoding_of_ones_own_is_refused():
    class Own(RetinaNet):
        def postprocess_detections(self, *outputs):
            return super().postprocess_detections(*outputs)

    made, _, _ = detector("retinanet")
    own = Own(made.backbone, CLASSES, anchor_generator=made.anchor_generator)
    with pytest.raises(ModelError, match="decodes its boxes in another way"):
        DetectorHead(own, SIZE, CLASSES).boxes_and_scores()
