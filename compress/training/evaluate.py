"""Accuracy of a module over a split. Each process takes a share of every batch; sums are reduced once, at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compress.data.base import BatchPlan, Split
from compress.errors import DataError, RecipeError
from compress.progress import NoProgress, Progress
from compress.training.distributed import SINGLE, Processes
from compress.training.outputs import LogitsOf, check_logits, logits_of
from compress.training.spec import Precision

QUIET = NoProgress()


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Accuracy of a classifier.

    Attributes:
        top1: share of images whose highest logit is the target's, 0 to 1.
        top5: share of images whose target is among the 5 highest logits (among all, if there are fewer), 0 to 1.
        loss: mean cross entropy, without smoothing.
        images: number of evaluated images.
    """

    top1: float
    top5: float
    loss: float
    images: int


def evaluate(
    model: nn.Module,
    split: Split,
    *,
    batch_size: int,
    device: torch.device | str | None = None,
    processes: Processes = SINGLE,
    precision: Precision = "fp32",
    limit: int | None = None,
    progress: Progress = QUIET,
    name: str = "evaluate",
) -> Accuracy:
    """Measure the accuracy of `model` on `split` in evaluation mode; every module's mode is restored afterwards.

    Args:
        model: moved to `device`; images (N, C, H, W) to logits (N, classes).
        split: images and targets, in their stored order.
        batch_size: images of one step over all processes together.
        device: device on which to compute; None = the process's own.
        processes: all processes; each must call, and gets the same result.
        precision: `fp32`, or autocast in `bf16` or `fp16`.
        limit: evaluate only this many images; None = the whole split.
        progress: is informed of every batch.
        name: name of the progress bar.

    Raises:
        DataError: no image to evaluate on, or fewer images a batch than processes.
        ModelError: the model fails on the images, or its output is not one row of logits for each image.
        RecipeError: fp16 on the CPU.
    """
    device = processes.on(device)
    progress = progress if processes.is_main else QUIET
    plan = BatchPlan(batch_size=batch_size, rank=processes.rank, world_size=processes.world_size, limit=limit)
    forward = LogitsOf(model.to(device))
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    progress.start(name, split.steps(plan))
    with modes_restored(model), torch.no_grad(), autocast(device, precision):
        model.eval()
        for images, targets in split.batches(plan, device=device):
            logits = logits_of(forward, images)
            check_logits(logits, images=len(targets), num_classes=split.num_classes)
            sums += _sums(logits.float(), targets)
            progress.advance(name)
    progress.finish(name)
    top1, top5, loss, count = processes.all_reduce_sum(sums).tolist()
    if not count:
        unread = f", or none of {len(split.skipped)} files could be read" if split.skipped else ""
        raise DataError(f"there is no image to evaluate on: the split is empty, or the limit is 0{unread}")
    return Accuracy(top1=top1 / count, top5=top5 / count, loss=loss / count, images=int(count))


@contextmanager
def modes_restored(*models: nn.Module | None) -> Iterator[None]:
    """Restore the training or evaluation mode of every submodule at the end."""
    modes = [(module, module.training) for model in models if model is not None for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the autocast context of `precision`, which does nothing for fp32.

    Raises:
        RecipeError: fp16 on the CPU.
    """
    if precision == "fp16" and device.type == "cpu":
        raise RecipeError("precision is 'fp16' on the CPU, which computes it slowly: use 'fp32' or 'bf16', or a GPU")
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=precision != "fp32")


def _sums(logits: Tensor, targets: Tensor) -> Tensor:
    """[correct, correct in 5, summed loss, images] of a batch, float64 on the logits' device."""
    ranked = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
    loss = F.cross_entropy(logits, targets, reduction="sum")
    return torch.stack([ranked[:, 0].sum(), ranked.sum(), loss.double(), loss.new_full((), len(targets))])
