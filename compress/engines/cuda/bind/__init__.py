"""The launches of each kind of step, and the candidates to choose from."""

from __future__ import annotations

from collections.abc import Callable

from compress.engines.cuda.bind import others, products
from compress.engines.cuda.bind.common import Bindings
from compress.engines.cuda.bind.products import float_product
from compress.engines.cuda.executor import Candidate
from compress.engines.cuda.plan.layout import Copy, Layout
from compress.engines.cuda.plan.stem import PackImage
from compress.engines.cuda.plan.steps import (
    Attention,
    AveragePool,
    Convolution,
    Elementwise,
    FloatOperation,
    LayerNorm,
    Linear,
    MaxPool,
    Move,
    Step,
)

__all__ = ["Bindings", "Candidate", "candidates"]

_KINDS: dict[type[Step], Callable[..., list[Candidate]]] = {
    PackImage: others.bind_pack_image,
    Copy: others.bind_copy,
    Convolution: products.bind_convolution,
    Linear: products.bind_linear,
    MaxPool: others.bind_max_pool,
    AveragePool: others.bind_average_pool,
    Elementwise: others.bind_elementwise,
    LayerNorm: others.bind_layer_norm,
    Attention: others.bind_attention,
    Move: others.bind_operation,
    FloatOperation: others.bind_operation,
}


def candidates(step: Step, layout: Layout, bindings: Bindings) -> list[Candidate]:
    """All ways to compute a step; the first is the guess."""
    found = _KINDS[type(step)](step, layout, bindings)
    return found + (float_product(step, layout, bindings) if isinstance(step, (Convolution, Linear)) else [])
