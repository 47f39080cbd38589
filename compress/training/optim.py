"""The optimizer and its learning rate, a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

import torch
from torch import nn

from compress.training.spec import TrainSpec

WARMUP_START = 0.01  # of the peak


def learning_rate(step: int, *, steps: int, warmup_steps: int, peak: float, schedule: str) -> float:
    """Return the learning rate of optimizer step `step`, counted from 0.

    It rises linearly from peak / 100 over `warmup_steps` (Goyal et al., arXiv 1706.02677, section 2.2), then falls as
    half a cosine to zero at step `steps` (Loshchilov and Hutter, arXiv 1608.03983, equation 5) or stays at `peak`.

    >>> learning_rate(50, steps=100, warmup_steps=0, peak=0.1, schedule="cosine")
    0.05
    """
    if step < warmup_steps:
        return peak * (WARMUP_START + (1 - WARMUP_START) * step / warmup_steps)
    if schedule == "constant":
        return peak
    return peak / 2 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Return trainable parameters in two groups: those of two and more dimensions with weight decay, others without."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter for parameter in trainable if parameter.ndim >= 2]
    others = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [{"params": weights, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(model: nn.Module, spec: TrainSpec) -> torch.optim.Optimizer:
    """Return SGD with Nesterov momentum, or AdamW (arXiv 1711.05101) with torch's default betas.

    On GPUs the step is one fused kernel.
    """
    groups = parameter_groups(model, spec.weight_decay)
    fused = all(parameter.is_cuda for parameter in model.parameters()) or None
    if spec.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=spec.lr, fused=fused)
    return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.momentum > 0, fused=fused)
