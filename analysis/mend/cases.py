"""Networks that quantization ruins, each for a reason that is known."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import compress
from analysis.ptq_ablation.cases import NETWORKS, PER_TENSOR, WHOLE, widen, with_outliers
from compress.data.base import BatchPlan
from compress.imports import imported
from compress.meters import TaskMetric
from compress.pipeline.folder import recipe_of
from compress.pipeline.studies.mend import Goal
from compress.tasks.detection import MeanPrecision, output_tuple
from compress.training import fit, load_model, save_model
from compress.variants import Variant

CALIBRATED, JUDGED, BATCH = 32, 64, 8
"""Pictures that the YOLO is calibrated with and judged by, and pictures of a batch."""


GOAL = Goal(drop=0.5)


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A float network with its fault put in.

    Attributes:
        model: the network.
        batches: to calibrate with.
        images: batches with targets to judge by.
        metric: of the task; None = top-1.
    """

    model: nn.Module
    batches: list[Tensor]
    images: list[Any]
    metric: TaskMetric | None = None


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network with a fault.

    Attributes:
        title: what is wrong with it.
        make: from the study's arguments to the network; None if they do not give what it needs.
        spec: how it is quantized.
        goal: when it is mended.
    """

    title: str
    make: Callable[[argparse.Namespace], Ready | None]
    spec: compress.QuantSpec
    goal: Goal = GOAL


def digits(network: str, change: Callable[[nn.Module, Tensor, int], nn.Module], arguments: argparse.Namespace) -> Ready:
    """Return a network of `ptq_ablation`, trained once, with its fault put in."""
    torch.manual_seed(0)
    model, data_spec, training = NETWORKS[network]()
    data, path = compress.load_data(data_spec), arguments.cache / f"{network}-0-{training.epochs}.safetensors"
    if path.is_file():
        load_model(model, path)
    else:
        arguments.cache.mkdir(parents=True, exist_ok=True)
        fit(model, data, training, batch_size=64, folder=arguments.cache, resume=True, name=path.stem)
        save_model(model, path)
    train, val = (list(split.batches(BatchPlan(batch_size=64))) for split in (data.train, data.val))
    model = change(model.eval(), train[0][0][:2], 0).eval()
    return Ready(model=model, batches=[x for x, _ in train[:4]], images=val)


def yolo(arguments: argparse.Namespace) -> Ready | None:
    """Return the trained network of a run of recipes/yolo-bccd.yaml, with the decoding of its boxes inside."""
    run, pictures = arguments.yolo, arguments.bccd
    if run is None or pictures is None:
        return None
    recipe = recipe_of(run)
    network: Any = imported("examples.yolo:Yolo", key="network", error=compress.CompressError, what="a network")
    suppressed = imported("examples.yolo:suppressed", key="decode", error=compress.CompressError)
    data = compress.load_data(replace(recipe.data, name="voc", root=str(pictures), augment=False))
    size, classes = data.val.preprocessing.height_width, len(data.val.labels)
    trained = network(classes, **recipe.model.options)
    load_model(trained, run / Variant.FLOAT.weights_file)
    model = network(classes, **recipe.model.options, decoded=size)
    model.load_state_dict(trained.state_dict(), strict=False)  # all but the constants of the decoding

    def decode(outputs: tuple[Tensor, ...]) -> Any:
        return suppressed(*outputs, size)

    plans = (BatchPlan(batch_size=BATCH, limit=limit) for limit in (CALIBRATED, JUDGED))
    train, val = (list(split.batches(plan)) for split, plan in zip((data.train, data.val), plans, strict=True))
    meter = partial(MeanPrecision, data.val.labels, decode)
    metric = TaskMetric(name="map", make=meter, select=output_tuple)
    return Ready(model=model.eval(), batches=[x for x, _ in train], images=val, metric=metric)


CASES = {
    "MobileNetV2, one scale a weight tensor": Case(
        title="channels rescaled (sigma 1), one scale for each weight tensor",
        make=partial(digits, "mobilenet_v2", widen),
        spec=replace(PER_TENSOR, target="openvino", insist=False),
    ),
    "ViT with outlier channels": Case(
        title="3 channels of each LayerNorm times 100", make=partial(digits, "vit", with_outliers),
        spec=compress.QuantSpec(target="openvino", activations=WHOLE),
    ),
    "YOLO, head quantized": Case(
        title="last convolutions, DFL and decoding of boxes quantized (head: quantize), ranges by entropy", make=yolo,
        spec=compress.QuantSpec(
            target="onnxruntime", head="quantize", activations=compress.ActivationSpec(calibrator="entropy")
        ),
    ),
}  # fmt: skip
