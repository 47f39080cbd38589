"""Masks: boolean tensors of a weight's shape, True where the weight stays. All functions are pure.

An n:m mask keeps n of every m consecutive *input channels* (axis 1), each group at one kernel position, as NVIDIA's
sparse tensor cores read a weight (Mishra et al., arXiv 2104.08378).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.errors import SparsityError
from compress.sparsity.spec import Pattern


def nm_mask(weight: Tensor, n: int, m: int, *, scores: Tensor | None = None) -> Tensor:
    """Keep the n best of every m consecutive input channels; of equal scores the lower channel.

    The weight is (out, in, ...), the scores have its shape (None = magnitudes); `m` divides the input channels.

    Raises:
        SparsityError: n and m do not fit each other or the weight, or a score is NaN or infinite.

    >>> nm_mask(torch.tensor([[0.1, -3.0, 2.0, 0.5]]), 2, 4)
    tensor([[False,  True,  True, False]])
    """
    if not 1 <= n < m:
        raise SparsityError(f"pattern {n}:{m} keeps {n} of every {m}: n must be at least 1 and below m")
    if weight.ndim < 2 or weight.shape[1] % m:
        raise SparsityError(
            f"pattern {n}:{m} needs input channels (axis 1) that are a multiple of {m}, and the weight is "
            f"{tuple(weight.shape)}: leave this layer dense"
        )
    groups = _scores(weight, scores).movedim(1, -1).unflatten(-1, (-1, m))  # (out, ..., in / m, m)
    # The rank is the number of better elements, which needs no sort; of equal elements the lower channel is better.
    rank = torch.zeros(groups.shape, dtype=torch.int16, device=weight.device)
    index = torch.arange(m, device=weight.device)
    for j in range(m):
        other = groups[..., j : j + 1]
        rank += (other > groups) | ((other == groups) & (j < index))
    return (rank < n).flatten(-2).movedim(-1, 1).contiguous()


def unstructured_mask(weight: Tensor, ratio: float, *, scores: Tensor | None = None) -> Tensor:
    """Remove the share `ratio`, rounded to whole elements, with the smallest scores (None = magnitudes).

    Raises:
        SparsityError: ratio is not between 0 and 1, or a score is NaN or infinite.
    """
    if not 0 <= ratio <= 1:
        raise SparsityError(f"the share taken away is {ratio}: it must be between 0 and 1")
    order = _scores(weight, scores).flatten().sort(descending=True, stable=True).indices
    mask = torch.zeros(weight.numel(), dtype=torch.bool, device=weight.device)
    mask[order[: weight.numel() - round(ratio * weight.numel())]] = True
    return mask.view(weight.shape)


def pattern_mask(weight: Tensor, pattern: Pattern, *, scores: Tensor | None = None) -> Tensor:
    """Mask of `weight` by an n:m or unstructured pattern; errors as in those functions, or for a channel pattern."""
    if pattern.kind == "nm":
        return nm_mask(weight, pattern.n, pattern.m, scores=scores)
    if pattern.kind == "unstructured":
        return unstructured_mask(weight, pattern.ratio, scores=scores)
    raise SparsityError(f"pattern {pattern} removes whole channels and has no mask: call compress.prune_channels")


def partial_mask(weight: Tensor, mask: Tensor, level: float) -> Tensor:
    """A step on the way to `mask`: it removes only the share `level` of its elements, smallest magnitudes first."""
    masked = int(mask.numel() - mask.sum())
    spared = masked - round(level * masked)
    order = weight.detach().abs().masked_fill(mask, -1.0).flatten().sort(descending=True, stable=True).indices
    partial = mask.clone().flatten()
    partial[order[:spared]] = True
    return partial.view(mask.shape)


def kept_magnitude(weight: Tensor, mask: Tensor) -> float:
    """Share of the weight's L1 norm that stays; 1 for zeros."""
    magnitudes = weight.detach().abs().double()
    total = magnitudes.sum().item()
    return (magnitudes * mask).sum().item() / total if total else 1.0


def verify_nm(weight: np.ndarray[Any, Any], n: int, m: int, *, axis: int = 1) -> int:
    """Count the groups of m consecutive values along `axis` with more than n non-zeros; 0 = the pattern holds.

    Integer weights must have zero point 0. `axis` is that of the input channels: 1 for Conv, and Gemm with transB; 0
    for MatMul's right operand.

    Raises:
        SparsityError: the axis does not exist or m does not divide it.
    """
    if not -weight.ndim <= axis < weight.ndim or weight.shape[axis] % m:
        raise SparsityError(f"{n}:{m} needs a multiple of {m} along axis {axis}, and the weight is {weight.shape}")
    nonzero = np.moveaxis(weight != 0, axis, -1)
    groups = nonzero.reshape(*nonzero.shape[:-1], -1, m)
    return int((groups.sum(axis=-1) > n).sum())


def _scores(weight: Tensor, scores: Tensor | None) -> Tensor:
    chosen = weight.detach().abs() if scores is None else scores.detach()
    if chosen.shape != weight.shape:
        raise SparsityError(f"scores of {tuple(chosen.shape)} do not fit a weight of {tuple(weight.shape)}")
    if not bool(torch.isfinite(chosen).all()):
        raise SparsityError("the weight (or its scores) holds NaN or infinite values, which have no rank")
    return chosen
