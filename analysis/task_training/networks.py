"""The networks of the study, and how each is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compress.recipe import Recipe, load_recipe

EVALUATIONS, QAT_EVALUATIONS = 2, 1
"""During float training and QAT; checkpoints are written as often."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network of the study.

    Attributes:
        base: recipe that is extended.
        changes: keys of it that differ.
        share: of the GPU's time, relative to those of the others.
        pixels: height and width of the input.
    """

    base: str
    pixels: tuple[int, int]
    changes: tuple[str, ...] = ()
    share: float = 1.0


NETWORKS: dict[str, Network] = {
    "retinanet_resnet50_fpn": Network(base="retinanet-bccd", pixels=(384, 512), share=1.2),
    "fcn_resnet50": Network(base="fcn_resnet50-camvid", pixels=(240, 320), share=0.9),
    "deeplabv3_mobilenet_v3_large": Network(base="deeplabv3-camvid", pixels=(360, 480), share=1.1),
    "ssdlite320_mobilenet_v3_large": Network(base="ssdlite-bccd", pixels=(320, 320)),
    "lraspp_mobilenet_v3_large": Network(base="lraspp-camvid", pixels=(360, 480), share=1.2),
    "yolo": Network(base="yolo-bccd", pixels=(384, 512)),
    "deeplabv3_resnet50": Network(
        base="fcn_resnet50-camvid", pixels=(240, 320), changes=("model.name=deeplabv3_resnet50",), share=1.5
    ),
}
"""Those first whose work after the GPU's takes longest: the others are trained meanwhile."""


def recipe_of(
    name: str,
    data: str,
    *,
    epochs: int,
    qat_epochs: int,
    pixels: Sequence[int] | None,
    engines: Sequence[str],
    resident: bool,
    overrides: Sequence[str] = (),
) -> Recipe:
    """Return the recipe of a network, with the lengths of its trainings.

    Args:
        name: key of `NETWORKS`.
        data: folder of CamVid or of BCCD.
        epochs: of the float training.
        qat_epochs: of quantization-aware training.
        pixels: height and width; None = the study's.
        engines: that accuracy is measured on.
        resident: keep the decoded pictures on the device.
        overrides: further `key=value`, the last to be applied.
    """
    network = NETWORKS[name]
    height, width = network.pixels if pixels is None else pixels
    built_in = "masks" if network.base.endswith("camvid") else "voc"
    return load_recipe(
        network.base,
        [
            f"data.root={data}",
            f"data.name={f'analysis.task_training.resident:{built_in}' if resident else built_in}",
            f"data.image_size=[{height},{width}]",
            f"train.epochs={epochs}",
            f"train.warmup_epochs={min(5, epochs / 4)}",
            f"train.evaluate_every={max(1, epochs // EVALUATIONS)}",
            f"train.checkpoint_every={max(1, epochs // EVALUATIONS)}",
            f"qat.epochs={qat_epochs}",
            f"qat.evaluate_every={max(1, qat_epochs // QAT_EVALUATIONS)}",
            f"qat.checkpoint_every={max(1, qat_epochs // QAT_EVALUATIONS)}",
            f"bench.engines=[{','.join(engines)}]",
            "bench.batch_sizes=[1]",
            *network.changes,
            *overrides,
        ],
    )
