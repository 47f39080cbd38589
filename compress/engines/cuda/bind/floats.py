"""Products in fp16 by torch's libraries, where the file asks for values and no kernel of ours is faster.

Codes are whole numbers that fp16 holds, so only the scaled weights and the sums are rounded, as those of any
fp16 network. Where a result is quantized again that rounding would change codes, and the product stays one of integers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.engines.cuda.bind.common import Bindings
from compress.engines.cuda.executor import Candidate, Tensors
from compress.engines.cuda.plan.layout import Layout
from compress.engines.cuda.plan.steps import Convolution, Linear
from compress.engines.cuda.runtime_layers import FLOAT_KERNEL

_TYPES = {torch.float16: "f16", torch.bfloat16: "bf16"}


def float_product(step: Convolution | Linear, layout: Layout, bindings: Bindings) -> list[Candidate]:
    """The candidate of a product whose result is values alone, with all conversions; none for others."""
    e, dtype = step.epilogue, layout.plan.dtype
    if not bindings.floats or dtype not in _TYPES or e.out.codes or e.residual.name:
        return []
    zero = step.x.grid.zero if step.x.grid else 0

    def make() -> tuple[Tensor, Tensor]:
        factor = e.factor.expand(len(step.weight)).reshape(-1, *[1] * (step.weight.dim() - 1))
        weight = (step.weight.double() * factor).to(bindings.device, dtype)
        last = torch.channels_last if weight.dim() == 4 else torch.contiguous_format
        return weight.contiguous(memory_format=last), e.bias.to(bindings.device, dtype)

    weight, bias = bindings.keep((step.name, "floats"), make)

    def run(tensors: Tensors) -> None:
        x = tensors[step.x.name].to(dtype)
        x = x - zero if zero else x
        y = _convolved(step, x, weight, bias) if isinstance(step, Convolution) else F.linear(x, weight, bias)
        y = y.movedim(-1, step.axis) if isinstance(step, Linear) else y
        tensors[e.out.value].copy_(e.first(y))

    return [Candidate(f"{FLOAT_KERNEL}{_TYPES[dtype]}", run)]


def _convolved(step: Convolution, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    (above, below), (left, right) = step.padding
    if (above, left) != (below, right):
        x = F.pad(x, (left, right, above, below))
        above = left = 0
    return F.conv2d(x, weight, bias, step.stride, (above, left), step.dilation, step.groups)
