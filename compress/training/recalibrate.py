"""New statistics for BatchNorm, after weights were taken away and nothing was trained.

A mask changes the mean and the variance of every layer's output, while BatchNorm still normalizes by those of the
dense network: the error grows layer by layer, until a network with useful weights classifies at chance. Measuring the
statistics on a few hundred images needs no labels and no gradient (adaptive BatchNorm, Li et al., arXiv 2007.02491,
section 3.2). Training updates the statistics anyway, so a network that is fine-tuned needs none of this.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from compress.errors import DataError
from compress.graph.batches import model_inputs
from compress.graph.inputs import run_with
from compress.training.evaluate import modes_restored


def recalibrate_batchnorm(model: nn.Module, batches: Iterable[Any]) -> int:
    """Replace the running statistics of every BatchNorm by their means over `batches`, in place.

    Args:
        model: a network with BatchNorm layers that are not folded; its modes are restored afterwards.
        batches: images of the training split, preprocessed as for evaluation, many of all classes in each batch:
            tensors, or whatever else `compress.calibrate` takes.

    Returns:
        Number of layers whose statistics were replaced; 0 = the model has none, and the batches were not read.

    Raises:
        DataError: there is no batch, or one does not fit the model; the statistics are as they were.

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
