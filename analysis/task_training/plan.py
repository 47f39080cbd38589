"""How many epochs fit into a network's time on the GPU, from the time of an epoch with nothing else on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from analysis.task_training.networks import EVALUATIONS, QAT_EVALUATIONS
from compress.data.load import load_data
from compress.errors import CompressError
from compress.pipeline.run import task_of
from compress.pipeline.steps.float import build_float
from compress.recipe import Recipe
from compress.training import fit
from compress.training.evaluate import evaluate

PROBED = 3
QAT_COST = 2.5
"""Time of an epoch of QAT in fp32, as a multiple of one of float training in bf16 without CUDA graphs."""
QAT_SHARE, QAT_EPOCHS = 0.2, (3, 8)
"""Largest share of the time for QAT, and its least and most epochs."""
SAFE, CHECKPOINT_S = 0.9, 2.0
"""Share of the time that is planned, and seconds of a checkpoint."""
BETWEEN_S = 10.0
"""Seconds between the trainings: the trial before the first, calibration, placement."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Seconds of an epoch and of an evaluation.

    Attributes:
        plain: an epoch of float training.
        recorded: the same with CUDA graphs; None = they cannot be recorded.
        evaluation: of the evaluation split, with loss and metric.
    """

    plain: float
    recorded: float | None
    evaluation: float


def measured(recipe: Recipe, device: str) -> Speed:
    """Return the speed of a recipe's float training, each from the last of a few epochs."""
    data = load_data(recipe.data)
    task, size = task_of(recipe, data), recipe.data.batch_size
    quick = replace(recipe.train, epochs=PROBED, evaluate_every=PROBED)
    found: dict[bool, float] = {}
    evaluation = 0.0
    for recorded in (False, True) if device == "cuda" and recipe.task == "segmentation" else (False,):
        model = build_float(recipe).model.to(device)
        spec = replace(quick, cuda_graphs=recorded)
        try:
            report = fit(model, data, spec, batch_size=size, folder=None, task=task, device=device)
        except CompressError as error:
            print(f"no CUDA graphs: {error}", flush=True)
            continue
        found[recorded] = min(row.seconds for row in report.history[1:])
        if not recorded:
            began = time.perf_counter()
            evaluate(model, data.val, batch_size=size, task=task, device=device, precision=spec.precision)
            evaluation = time.perf_counter() - began
        del model
    return Speed(plain=found[False], recorded=found.get(True), evaluation=evaluation)


def planned(recipe: Callable[[int, int, bool], Recipe], whole: int, device: str, until: float) -> Recipe:
    """Return the recipe whose trainings end about at `until`, and before it.

    Args:
        recipe: makes it of epochs, epochs of QAT, and whether CUDA graphs are used.
        whole: most epochs of float training.
        device: `cuda` or `cpu`.
        until: time.time() at which QAT should be done.
    """
    speed = measured(recipe(PROBED, 1, False), device)
    stops = EVALUATIONS + QAT_EVALUATIONS + 1
    left = SAFE * (until - time.time() - BETWEEN_S - stops * (speed.evaluation + CHECKPOINT_S))
    graphs = speed.recorded is not None and speed.recorded < speed.plain
    one = speed.recorded if graphs and speed.recorded is not None else speed.plain
    of_qat = QAT_COST * speed.plain
    least, most = QAT_EPOCHS
    qat_epochs = int(min(most, max(least, QAT_SHARE * left / of_qat)))
    epochs = int(min(whole, max(4, (left - qat_epochs * of_qat) / one)))
    print(f"{speed}: {left:.0f} s left, {epochs} epochs and {qat_epochs} of QAT, graphs: {graphs}", flush=True)
    if device == "cuda":
        torch.cuda.empty_cache()
    return recipe(epochs, qat_epochs, graphs)


def decoded(recipe: Recipe) -> Any:
    """Decode all pictures of a resident data set now, before the GPU is free."""
    data = load_data(recipe.data)
    for split in (data.train, data.val):
        split.load([0], epoch=None, device=torch.device("cpu"))
    return data
