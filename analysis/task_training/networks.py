"""The networks of the study, and how each is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compress.recipe import Recipe, load_recipe


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network of the study.

    Attributes:
        base: recipe that is extended.
        changes: keys of it that differ.
        cores: share of the CPU's cores while several networks are trained at the same time.
        after: seconds for everything after the trainings: calibration, files, evaluation on engines.
        pixels: height and width of the input.
    """

    base: str
    pixels: tuple[int, int]
    changes: tuple[str, ...] = ()
    cores: int = 2
    after: float = 80.0


NETWORKS: dict[str, Network] = {
    "fcn_resnet50": Network(base="fcn_resnet50-camvid", pixels=(240, 320), cores=5, after=110.0),
    "deeplabv3_mobilenet_v3_large": Network(
        base="lraspp-camvid", pixels=(360, 480), changes=("model.name=deeplabv3_mobilenet_v3_large",)
    ),
    "lraspp_mobilenet_v3_large": Network(base="lraspp-camvid", pixels=(360, 480)),
    "retinanet_resnet50_fpn": Network(base="retinanet-bccd", pixels=(384, 512), cores=3, after=100.0),
    "ssdlite320_mobilenet_v3_large": Network(base="ssdlite-bccd", pixels=(320, 320)),
    "yolo": Network(base="yolo-bccd", pixels=(384, 512)),
    "deeplabv3_resnet50": Network(
        base="fcn_resnet50-camvid", pixels=(240, 320), changes=("model.name=deeplabv3_resnet50",), cores=5, after=120.0
    ),
}


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
            f"train.evaluate_every={max(1, epochs // 8)}",
            f"qat.epochs={qat_epochs}",
            f"qat.evaluate_every={max(1, qat_epochs // 3)}",
            f"bench.engines=[{','.join(engines)}]",
            "bench.batch_sizes=[1]",
            *network.changes,
            *overrides,
        ],
    )
