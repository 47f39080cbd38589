"""A network of a search as a recipe's model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compress.models.by_name import build_model
from compress.models.spec import ModelSpec
from compress.search.network import apply
from compress.search.structure import analyse


def network(
    *,
    num_classes: int,
    model: Mapping[str, Any],
    image: Sequence[int],
    configuration: Mapping[str, str],
    task: str = "classification",
) -> nn.Module:
    """Return the network that a configuration leaves of `model`, a `ModelSpec` without weights.

    `image` is channels, height and width of an input.
    """
    whole = build_model(ModelSpec(**{**model, "weights": None}), num_classes=num_classes, task=task)
    example = torch.randn(2, *image, generator=torch.Generator().manual_seed(0))
    return apply(analyse(whole, example), configuration).train()
