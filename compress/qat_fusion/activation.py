"""Activations x * s(x) and the rounding of their result as one operation: GELU, SiLU and hard swish.

Unlike a ReLU's, their gradient is no mask of what comes in: it needs the layer's result, which is kept (as torch keeps
it for the activation alone), and from which everything else is computed again. So forward reads the layer's result
once and writes the quantized tensor; backward reads both gradient and result once, writes the gradient, and sums the
bias's gradient on the way. One by one, the sum alone reads the gradient again.

Computed by Triton kernels on a GPU (`fused_gate_triton`), eager and compiled, where layout and type fit, and by torch's
operations elsewhere. In half precision the kernels take s of GELU, the integral of the normal distribution, from
Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: at most 7.5e-8 off, and what lies within this of a
tie may round to the other neighbour. In float32 they call the library's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from compress.graph.ops import node_kind, node_module
from compress.kernels.epilogue import (
    BITS,
    Epilogue,
    Kernels,
    by_hand,
    dense,
    fits,
    fused_quantize,
    in_graph,
)
from compress.quantization.numerics import along_axis

GATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "hardswish": F.hardswish,
}
"""By name."""


def gate_of(node: fx.Node) -> str:
    """Which of `GATES` a node computes; "" = none."""
    kind = node_kind(node)
    if kind != "gelu":
        return kind if kind in GATES else ""
    if node.op == "call_module":
        approximate = getattr(node_module(node), "approximate", None)
    else:
        approximate = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none")
    return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(approximate), "")


def gated_quantize(
    y: Tensor,
    amax: Tensor,
    epilogue: Epilogue,
    gate: str,
    *,
    bias: Tensor | None = None,
    kernels: Kernels | None = None,
) -> Tensor:
    """Fake quantization of gate(y + bias), computed in float32 (float64 for float64).

    Args:
        y: any shape, floating point: what a layer computed without its bias.
        amax: () or (C,): the largest magnitudes kept.
        epilogue: the grid; its bounds are infinite.
        gate: one of `GATES`.
        bias: (C,), C the size of `y` along `epilogue.bias_dim`.
        kernels: which implementation; None = Triton on a GPU, where layout and type fit.

    Returns:
        Shape, type and memory format of `y`.
    """
    if in_graph(y, kernels) or by_hand(y, kernels):
        y = dense(y)
        if bias is not None and not gate_fits(y, epilogue, bias):
            y, bias = y + along_axis(bias.to(y.dtype), y, epilogue.bias_dim), None
        if gate_fits(y, epilogue, bias):
            from compress.kernels.triton import activation as fused_gate_triton  # Triton is not installed everywhere

            e = epilogue
            return cast(Tensor, fused_gate_triton.GatedQuantize.apply(y, bias, amax, gate, e.low, e.high, e.bias_dim))
    work = y if y.dtype == torch.float64 else y.float()
    if bias is not None:
        work = work + along_axis(bias.to(work.dtype), y, epilogue.bias_dim)
    return fused_quantize(GATES[gate](work), amax, epilogue, dtype=y.dtype, kernels=kernels, again=True)


def gate_fits(y: Tensor, epilogue: Epilogue, bias: Tensor | None) -> bool:
    """Whether type and layout of a dense `y` are those of the kernels: what `fits`, with one range, in eights."""
    return epilogue.axis is None and y.numel() > 0 and y.numel() % BITS == 0 and fits(y, epilogue, bias)
