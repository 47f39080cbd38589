"""Which implementation computes an operation: Triton's kernels, or torch's operations."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from compress.errors import QuantizationError
from compress.kernels.triton.language import HAS_TRITON

Kernels = Literal["triton", "torch"]


def use_triton_eager(x: Tensor, kernels: Kernels | None) -> bool:
    """Whether Triton kernels are launched for `x`: if asked for, or on a GPU; never while torch compiles a graph."""
    return (kernels == "triton" or (kernels is None and HAS_TRITON and x.is_cuda)) and not torch.compiler.is_compiling()


def use_triton_compiled(x: Tensor, kernels: Kernels | None) -> bool:
    """Whether the graph that torch is compiling calls Triton kernels for `x`: on a GPU, unless torch is asked for."""
    return kernels != "torch" and HAS_TRITON and x.is_cuda and torch.compiler.is_compiling()


def use_triton(x: Tensor, kernels: Kernels | None) -> bool:
    """Whether Triton kernels compute on `x`, eager or compiled."""
    return use_triton_compiled(x, kernels) or use_triton_eager(x, kernels)


def refuse_second_derivative(*grads: Tensor | None) -> None:
    """Refuse the gradient of a gradient, which Triton kernels do not compute.

    Raises:
        QuantizationError: a gradient requires a gradient.
    """
    if not torch.compiler.is_compiling() and any(grad is not None and grad.requires_grad for grad in grads):
        raise QuantizationError(
            "our Triton kernels have no second derivative; for one, fuse with forward='float', kernels='torch' "
            "(fuse_for_training)"
        )
