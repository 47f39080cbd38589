"""The optimizer, its learning rate, a pure function of the step, and what is frozen or measured again."""

from __future__ import annotations

import copy
import fnmatch
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from compress.errors import DataError, RecipeError, near_misses
from compress.graph.inputs import model_inputs, run_with
from compress.graph.modules import modes_restored
from compress.quantization.learned import LearnedQuantizer
from compress.support.imports import any_failure, described, imported, is_import_path
from compress.training import QATSpec, TrainSpec

WARMUP_START = 0.01  # of the peak
_MILESTONES = (2 / 3, 8 / 9)  # shares of the steps after which `step` divides the rate by ten


def learning_rate(step: int, *, steps: int, warmup_steps: int, peak: float, schedule: str) -> float:
    """The learning rate of `step`, from 0.

    Linear from peak / 100 over `warmup_steps` (arXiv 1706.02677, section 2.2), then half a cosine to zero (arXiv
    1608.03983, equation 5), constant, or `step`: a tenth after 2/3, a hundredth after 8/9. `one_cycle`, without
    warm-up, rises from peak / 25 over 30 % and falls to peak / 250,000 by half cosines (arXiv 1708.07120; torch's
    OneCycleLR). `package.module:function` of (step, steps) without warm-up returns a share of `peak`.

    >>> learning_rate(50, steps=100, warmup_steps=0, peak=0.1, schedule="cosine")
    0.05
    """
    if schedule == "one_cycle":
        return _one_cycle(step, steps, peak)
    if step < warmup_steps:
        return peak * (WARMUP_START + (1 - WARMUP_START) * step / warmup_steps)
    if schedule == "constant":
        return peak
    if is_import_path(schedule):
        return peak * _own_share(schedule, step - warmup_steps, max(1, steps - warmup_steps))
    if schedule == "step":
        return peak * 0.1 ** sum(step >= share * steps for share in _MILESTONES)
    return peak / 2 * (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps)))


def _own_share(schedule: str, step: int, steps: int) -> float:
    function = imported(schedule, key="schedule", error=RecipeError, what="a function of (step, steps)")
    with any_failure(lambda e: RecipeError(f"schedule {schedule} fails at ({step}, {steps}) ({described(e)})")):
        share = float(function(step, steps))
    if not (math.isfinite(share) and share >= 0):
        raise RecipeError(f"schedule {schedule} returned {share} at ({step}, {steps}): it must be a share, 0 or more")
    return share


def check_schedule(spec: TrainSpec, *, steps: int = 300) -> None:
    if is_import_path(spec.schedule):
        for step in (0, steps // 2, steps - 1):
            _own_share(spec.schedule, step, steps)


def _one_cycle(step: int, steps: int, peak: float) -> float:
    rise = max(1e-9, 0.3 * steps - 1)
    if step <= rise:
        return _half_cosine(peak / 25, peak, step / rise)
    return _half_cosine(peak, peak / 25 / 1e4, (step - rise) / max(1e-9, steps - 1 - rise))


def _half_cosine(start: float, end: float, share: float) -> float:
    return end + (start - end) / 2 * (1 + math.cos(math.pi * share))


def parameter_groups(
    model: nn.Module, weight_decay: float, lr_scale: Mapping[str, float] | None = None
) -> list[dict[str, object]]:
    """Those of two and more dimensions have weight decay; the last match of `lr_scale` counts."""
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale = next((f for p, f in reversed([*(lr_scale or {}).items()]) if fnmatch.fnmatch(name, p)), 1.0)
            groups.setdefault((scale, parameter.ndim < 2), []).append(parameter)
    order = sorted(groups, key=lambda key: (key[0] != 1.0, key))
    made: list[dict[str, object]] = [
        {"params": groups[key], "weight_decay": 0.0 if key[1] else weight_decay} for key in order
    ]
    for group, (scale, _) in zip(made, order, strict=True):
        if scale != 1.0:
            group["lr_scale"] = scale
    return made


def matched(model: nn.Module, patterns: Iterable[str], *, key: str) -> set[str]:
    names = [name for name, _ in model.named_parameters()]
    found = {pattern: fnmatch.filter(names, pattern) for pattern in patterns}
    for pattern, hits in found.items():
        if not hits:
            known = near_misses(pattern, names) or f"; the first is {names[0]}" if names else ""
            raise RecipeError(f"{key} {pattern!r} matches no parameter{known}; a pattern is such as layer1.*")
    return {name for hits in found.values() for name in hits}


def check_optimizer(spec: TrainSpec) -> None:
    make_optimizer(nn.Linear(1, 1), replace(spec, lr_scale={}))


def make_optimizer(model: nn.Module, spec: TrainSpec) -> torch.optim.Optimizer:
    """SGD with Nesterov momentum, AdamW (arXiv 1711.05101), or the user's class."""
    matched(model, spec.lr_scale, key="lr_scale")
    groups = parameter_groups(model, spec.weight_decay, spec.lr_scale)
    if is_import_path(spec.optimizer):
        maker = imported(spec.optimizer, key="optimizer", error=RecipeError, what="a class of optimizers")
        try:
            made = maker(groups, lr=spec.lr, **spec.optimizer_options)
        except (TypeError, ValueError) as error:
            raise RecipeError(
                f"optimizer {spec.optimizer} cannot be made with lr={spec.lr} and optimizer_options "
                f"{spec.optimizer_options} ({type(error).__name__}: {error})"
            ) from error
        if not isinstance(made, torch.optim.Optimizer):
            raise RecipeError(f"optimizer {spec.optimizer} made a {type(made).__name__}, not a torch.optim.Optimizer")
        return made
    fused = all(parameter.is_cuda for parameter in model.parameters()) or None
    if spec.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=spec.lr, fused=fused)
    return torch.optim.SGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.momentum > 0, fused=fused)


@contextmanager
def frozen(model: nn.Module, patterns: Sequence[str]) -> Iterator[None]:
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
    """Call after `model.train()`; weight and bias are trained, unless all parameters of a layer are frozen."""
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
    if isinstance(spec, QATSpec) and spec.freeze_ranges_epoch is not None and epoch >= spec.freeze_ranges_epoch:
        for module in model.modules():
            if isinstance(module, LearnedQuantizer):
                for parameter in module.parameters():
                    parameter.grad = None


def recalibrate_batchnorm(model: nn.Module, batches: Iterable[Any]) -> int:
    """Replace the running statistics of every BatchNorm by their means over `batches`, in place.

    For masked networks (Li et al., arXiv 2007.02491, section 3.2).

    Args:
        model: its BatchNorm layers are not folded; its modes are restored.
        batches: training images, preprocessed as for evaluation: whatever `compress.calibrate` takes.

    Returns:
        Number of layers whose statistics were replaced; with 0 the batches were not read.

    Raises:
        DataError: no batch, or one does not fit; nothing is changed.

    Examples:
        >>> compress.recalibrate_batchnorm(model, batches)  # the layers whose statistics were measured again
        1
    """
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not layers:
        return 0
    before = [(layer, layer.momentum, copy.deepcopy(layer.state_dict())) for layer in layers]
    count = 0
    try:
        with modes_restored(model), torch.no_grad():
            model.eval()
            for layer in layers:
                layer.reset_running_stats()
                layer.momentum = None  # the plain mean of all batches
                layer.train()
            for batch in batches:
                run_with(model, model_inputs(model, batch))
                count += 1
        if not count:
            raise DataError("BatchNorm cannot be recalibrated from no batches: give images of the training split")
    except BaseException:
        for layer, _, state in before:
            layer.load_state_dict(state)
        raise
    finally:
        for layer, momentum, _ in before:
            layer.momentum = momentum
    return len(layers)
