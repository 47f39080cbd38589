"""What a newcomer meets: short names get the right one, usual files are taken, and no message is the system's own."""

import json

import pytest
import torch
import torchvision

from compress import ModelSpec, build_model, load_recipe
from compress.errors import ModelError, RecipeError
from compress.plots.style import WIDE, settle, styled
from compress.plots.tradeoff import Point, draw_tradeoff
from compress.roofline_model import DEVICE_NAMES


@pytest.mark.parametrize(
    ("setting", "meant"), [("quantization.target=trt", "tensorrt"), ("bench.engines=[ort]", "onnxruntime")]
)
def test_a_short_name_is_answered_with_the_whole_one(setting, meant):
    with pytest.raises(RecipeError, match=f"did you mean '{meant}'"):
        load_recipe("quickstart", [setting])


def test_an_out_that_cannot_be_written_is_named(compress, tmp_path):
    (tmp_path / "file").touch()
    settings = ("model.name=squeezenet1_1", "data.name=shapes", "data.train_images=32", "data.val_images=32")
    options = [word for setting in settings for word in ("--set", setting)]
    done = compress("train", "--recipe", "quickstart", *options, "--out", str(tmp_path / "file" / "run"))
    assert done.returncode == 2
    assert "Errno" not in done.stderr and str(tmp_path / "file") in done.stderr.replace("\n", "")
    assert (tmp_path / "file").read_bytes() == b""


def test_completion_for_shells_is_offered(compress):
    shown = compress("--help").stdout
    assert "--install-completion" in shown and "--show-completion" in shown


@pytest.mark.parametrize("suffix", [".th", ".ckpt", ".pth"])
def test_weights_may_have_any_usual_ending(tmp_path, suffix):
    network = torchvision.models.squeezenet1_1(num_classes=3)
    torch.save(network.state_dict(), tmp_path / f"weights{suffix}")
    spec = ModelSpec(name="squeezenet1_1", weights=str(tmp_path / f"weights{suffix}"))
    built = build_model(spec, num_classes=3)
    assert all(torch.equal(a, b) for a, b in zip(built.parameters(), network.parameters(), strict=True))


def test_a_detector_named_as_a_classifier_is_called_a_detector():
    with pytest.raises(ModelError, match="task: detection"):
        build_model(ModelSpec(name="retinanet_resnet50_fpn"), num_classes=3)


def test_rooflines_are_of_fused_kernels_unless_asked_otherwise(compress, tmp_path):
    command = ("roofline", "--model", "squeezenet1_1", "--json", "--out", str(tmp_path))
    fused, alone = (json.loads(compress(*command, *more).stdout)["roofline"]["rows"] for more in ((), ("--unfused",)))
    assert {row["name"] for row in fused} < {row["name"] for row in alone}


def test_devices_that_people_have():
    wanted = {"rtx5080", "rtx5090", "thor-t5000", "l40s", "b200", "xeon-8380", "xeon-8480", "xeon-8592"}
    assert wanted <= set(DEVICE_NAMES)


def test_no_tick_is_above_100_percent():
    points = [
        Point(variant=variant, engine="openvino", batch_size=1, score=score, p50_ms=time)
        for variant, score, time in (("float", 100.0, 4.0), ("ptq", 99.8, 1.0))
    ]
    with styled():
        axes = settle(draw_tradeoff(points, WIDE)).axes[0]
    assert max(axes.get_yticks()) <= 100.0
