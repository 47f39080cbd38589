"""Freezing of BatchNorm's statistics and of learned ranges during quantization-aware training.

Statistics of small batches still change the ranges of a network whose scales have converged, and late steps of a
learned range move weights from one integer to the next; so the result is better if both are frozen towards the end
(Jacob et al., arXiv 1712.05877, section 3.1; Krishnamoorthi, arXiv 1806.08342, section 3.2.2). Freezing depends on the
spec and the epoch alone, so that a resumed training does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from compress.quantization.learned import LearnedQuantizer
from compress.training.optim import matched
from compress.training.spec import QATSpec, TrainSpec


@contextmanager
def frozen(model: nn.Module, patterns: Sequence[str]) -> Iterator[None]:
    """Leave the parameters whose names match out of training while the block runs.

    Raises:
        RecipeError: a pattern that matches none.
    """
    names = matched(model, patterns, key="frozen")
    parameters = [p for name, p in model.named_parameters() if name in names and p.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def freeze_batchnorm(model: nn.Module, spec: TrainSpec, epoch: int) -> None:
    """Put BatchNorm into evaluation mode if `spec` freezes it in `epoch`, counted from 0; call after `model.train()`.

    Its weight and bias are still trained; its statistics stay as they are. The layers whose parameters are all frozen
    are put into evaluation mode too.
    """
    if spec.frozen:
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if isinstance(module, _BatchNorm) and own and not any(p.requires_grad for p in own):
                module.eval()
    if isinstance(spec, QATSpec) and spec.freeze_batchnorm_epoch is not None and epoch >= spec.freeze_batchnorm_epoch:
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()


def drop_frozen_gradients(model: nn.Module, spec: TrainSpec, epoch: int) -> None:
    """Delete the gradients of learned ranges if `spec` freezes them in `epoch`, so that the optimizer skips them."""
    if isinstance(spec, QATSpec) and spec.freeze_ranges_epoch is not None and epoch >= spec.freeze_ranges_epoch:
        for module in model.modules():
            if isinstance(module, LearnedQuantizer):
                for parameter in module.parameters():
                    parameter.grad = None
