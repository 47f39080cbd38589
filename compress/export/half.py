"""Scales in float16, for files whose float part is in half precision."""

from __future__ import annotations

import torch
from torch import Tensor

from compress.errors import ExportError


def half_or_more(scale: Tensor) -> Tensor:
    """Round scales up where float16 is coarse, so that the scale of a nearly zero channel stays above zero."""
    step = 2.0**-24  # the smallest float16, and the distance of those below 2**-14
    return torch.where(scale < 2.0**-14, (scale / step).ceil() * step, scale)


def held_by_half(scale: Tensor, precision: str, *, of_weight: bool) -> Tensor:
    """Return a float32 scale in the form that a file gets, so that a cast of the file to a precision changes nothing.

    A scale that float16 does not hold stays as it is, and its pair float32. For weights all are held: the integers
    follow the scale.
    """
    if precision == "fp32":
        return scale
    if precision == "bf16":
        return scale.bfloat16().float()
    held = (half_or_more(scale) if of_weight else scale).half().float()
    fine = held.isfinite() & ((held - scale).abs() <= 2.0**-10 * scale)
    return torch.where(fine | (held.isfinite() & of_weight), held, scale)


def half_scale(scale: Tensor, name: str) -> Tensor:
    """A scale in float16; `name` is the quantizer's, for the message."""
    written = scale.half()
    if not bool((torch.isfinite(written) & (written > 0)).all()):
        raise ExportError(
            f"{name}: a scale of {scale.min().item():.3g} to {scale.max().item():.3g} is zero or infinite in float16; "
            "export with precision fp32, or leave the layer float"
        )
    return written
