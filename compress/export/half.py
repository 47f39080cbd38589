"""Scales in float16, for files whose float part is in half precision."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.errors import ExportError

HALF_MAX = 65504.0
"""Largest float16."""


def half_or_more(scale: Tensor) -> Tensor:
    """Round scales up where float16 is coarse, so that the scale of a nearly zero channel stays above zero."""
    step = 2.0**-24  # the smallest float16, and the distance of those below 2**-14
    return torch.where(scale < 2.0**-14, (scale / step).ceil() * step, scale)


def half_scale(scale: Tensor, name: str) -> Tensor:
    """Return a scale in float16.

    Args:
        scale: any shape.
        name: of the quantizer, for the message.

    Raises:
        ExportError: it is zero or infinite there.
    """
    written = scale.half()
    if not bool((torch.isfinite(written) & (written > 0)).all()):
        raise ExportError(
            f"{name}: a scale of {scale.min().item():.3g} to {scale.max().item():.3g} is zero or infinite in float16; "
            "export with precision fp32, or leave the layer float"
        )
    return written
