"""What stops being trained on the way: BatchNorm's statistics, and learned ranges.

Statistics of small batches keep moving the ranges of a network whose scales have settled, and late steps of a learned
range throw weights from one integer to the next; so quantization-aware training ends better with both at rest (Jacob et
al., arXiv 1712.05877, section 3.1; Krishnamoorthi, arXiv 1806.08342, section 3.2.2). What is frozen follows from the
spec and the epoch alone, so that a resumed training does the same.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from compress.quantization.learned import LearnedQuantizer
from compress.training.spec import QATSpec, TrainSpec


def freeze_batchnorm(model: nn.Module, spec: TrainSpec, epoch: int) -> None:
    """Put BatchNorm into evaluation mode where `spec` says so for `epoch`, counted from 0; call behind `model.train()`.

    Its weight and bias are still trained; its statistics are those that it has gathered.
    """
    if isinstance(spec, QATSpec) and spec.freeze_batchnorm_epoch is not None and epoch >= spec.freeze_batchnorm_epoch:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()


def drop_frozen_gradients(model: nn.Module, spec: TrainSpec, epoch: int) -> None:
    """Take the gradients of learned ranges away where `spec` freezes them in `epoch`; the optimizer then skips them."""
    if isinstance(spec, QATSpec) and spec.freeze_ranges_epoch is not None and epoch >= spec.freeze_ranges_epoch:
        for module in model.modules():
            if isinstance(module, LearnedQuantizer):
                module.amax.grad = None
