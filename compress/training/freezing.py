"""BatchNorm's statistics and learned ranges, frozen or remeasured.

Late changes move weights between integers (arXiv 1712.05877, section 3.1; 1806.08342, section 3.2.2).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from compress.errors import DataError
from compress.graph.inputs import model_inputs, run_with
from compress.quantization.learned import LearnedQuantizer
from compress.training.evaluate import modes_restored
from compress.training.optim import matched
from compress.training.spec import QATSpec, TrainSpec


@contextmanager
def frozen(model: nn.Module, patterns: Sequence[str]) -> Iterator[None]:
    """Leave matching parameters untrained.

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

    Weight and bias are trained, unless all parameters of a layer are frozen.
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
    """Delete the gradients of learned ranges that `spec` freezes in `epoch`."""
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
