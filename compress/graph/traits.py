"""One table of operator traits: all that the package knows of an operation, a row for each kind.

Adding an operation is a row here and its spellings in `graph.ops`; kinds that differ in a trait are kinds of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

Category = Literal[
    "weighted",  # a layer with a weight of its own that multiplies matrices
    "product",  # a matrix product of activations
    "normalization",
    "activation",
    "arithmetic",
    "reduction",
    "pool",
    "resampling",  # resize and pad
    "movement",  # the elements of one tensor, elsewhere
    "join",  # the elements of several tensors, side by side
    "passing",  # the identity in evaluation mode
    "quantizer",
    "lookup",
    "shape",  # computes with sizes, not with the values of activations
    "graph",  # inputs, outputs and constants
    "unknown",
]

MANY = -1
"""As `data_inputs`: any number."""


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Traits of a kind of operation in evaluation mode. A trait that is not certain is not claimed.

    Attributes:
        category: the group it belongs to.
        data_inputs: number of activations that it computes with, its parameters not counted; `MANY` = any number.
        elementwise: an element of the result depends only on the elements at its own place in the inputs (broadcast).
        moves_elements: every element of the result is an element of an input, or a padding zero.
        free: an engine needs no kernel for it.
        commutes_with_quantization: a per-tensor quantizer may be placed before it instead of after it.
        takes_apart: its result is a part of its input.
        passes_channels: a channel (axis 1 of an image) of the result depends on that channel of the input alone.
        scales_linearly: f(a x) = a f(x) for a > 0, all data inputs scaled alike.
        keeps_zero: the result is zero where all data inputs are zero; also where it scales linearly.
        multiplies: the result is zero where any data input is zero.
        non_negative: `always`, `if inputs are` (it has no negative result then), or "" (not known).
        lowest: the result is never lower; 0.0 if such a value is not known, or is not below 0.
        flat_below: inputs below this value, which is below 0, all give the same result, within 0.001; -inf if unknown.
        needs_float: it computes in floating point also where products run in 8 bits.
        clips: an activation that cuts its input off at constant bounds.
        idempotent: a reduction that returns the common value of equal elements.
    """

    category: Category
    data_inputs: int = 1
    elementwise: bool = False
    moves_elements: bool = False
    free: bool = False
    commutes_with_quantization: bool = False
    takes_apart: bool = False
    passes_channels: bool = False
    scales_linearly: bool = False
    keeps_zero: bool = False
    multiplies: bool = False
    non_negative: Literal["always", "if inputs are", ""] = ""
    lowest: float = 0.0
    flat_below: float = -math.inf
    needs_float: bool = False
    clips: bool = False
    idempotent: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "keeps_zero", self.keeps_zero or self.scales_linearly)


_WEIGHTED = Traits(category="weighted")
_PRODUCT = Traits(category="product", data_inputs=2)
_NORM = Traits(category="normalization", needs_float=True)
_ACTIVATION = Traits(category="activation", elementwise=True)
_ZERO_AT_ZERO = replace(_ACTIVATION, keeps_zero=True, non_negative="if inputs are")
_POSITIVE = replace(_ACTIVATION, non_negative="always")
_BINARY = Traits(category="arithmetic", data_inputs=2, elementwise=True)
_LINEAR = replace(_BINARY, scales_linearly=True)
_FUNCTION = Traits(category="arithmetic", elementwise=True, needs_float=True)
_REDUCTION = Traits(category="reduction", scales_linearly=True, non_negative="if inputs are")
_POOL = Traits(category="pool", passes_channels=True, scales_linearly=True, non_negative="if inputs are")
_COPY = Traits(category="movement", moves_elements=True, scales_linearly=True, non_negative="if inputs are")
_ROLL = replace(_COPY, commutes_with_quantization=True)
_VIEW = replace(_ROLL, free=True)
_JOIN = replace(_COPY, category="join", data_inputs=MANY)
_PASSING = replace(_VIEW, category="passing", elementwise=True)
_SHAPE = Traits(category="shape")
_GRAPH = Traits(category="graph", data_inputs=0)

TRAITS: Mapping[str, Traits] = MappingProxyType(
    {
        "conv": _WEIGHTED,
        "conv_transpose": _WEIGHTED,
        "linear": _WEIGHTED,
        "matmul": replace(_PRODUCT, multiplies=True),
        "addmm": replace(_PRODUCT, data_inputs=3, keeps_zero=True),  # a matrix added to a product
        "einsum": replace(_PRODUCT, data_inputs=MANY, multiplies=True),
        "attention": replace(_PRODUCT, data_inputs=3),
        "window_attention": replace(_PRODUCT, data_inputs=1),
        "batch_norm": Traits(category="normalization", elementwise=True, passes_channels=True),
        "layer_norm": _NORM,
        "group_norm": _NORM,
        "instance_norm": replace(_NORM, passes_channels=True),
        "local_response_norm": replace(_NORM, keeps_zero=True, non_negative="if inputs are"),
        "normalize": replace(_NORM, keeps_zero=True, non_negative="if inputs are"),
        "softmax": replace(_NORM, non_negative="always"),
        "log_softmax": _NORM,
        "relu": replace(_POSITIVE, scales_linearly=True, clips=True),
        "relu6": replace(_POSITIVE, keeps_zero=True, clips=True),
        "clamp": replace(_ACTIVATION, clips=True),  # its signs and zeros depend on its bounds
        "leaky_relu": replace(_ZERO_AT_ZERO, scales_linearly=True),
        "silu": replace(_ZERO_AT_ZERO, lowest=-0.2785, flat_below=-9.2),
        # the lowest value is that of GELU's approximation by tanh; -0.16997 of itself
        "gelu": replace(_ZERO_AT_ZERO, lowest=-0.1701, flat_below=-3.6),
        "quick_gelu": replace(_ZERO_AT_ZERO, lowest=-0.1637, flat_below=-5.1),
        "hardswish": replace(_ZERO_AT_ZERO, lowest=-0.375, flat_below=-3.0),
        "mish": replace(_ZERO_AT_ZERO, lowest=-0.3089, flat_below=-9.2),
        "tanh": _ZERO_AT_ZERO,
        "elu": _ZERO_AT_ZERO,
        "sigmoid": _POSITIVE,
        "hardsigmoid": _POSITIVE,
        "softplus": _POSITIVE,
        "add": replace(_LINEAR, non_negative="if inputs are"),
        "sub": _LINEAR,
        "maximum": replace(_LINEAR, non_negative="if inputs are"),
        "minimum": replace(_LINEAR, non_negative="if inputs are"),
        "mul": replace(_BINARY, multiplies=True, non_negative="if inputs are"),
        "div": replace(_BINARY, non_negative="if inputs are"),
        "neg": replace(_LINEAR, data_inputs=1),
        "where": replace(_BINARY, data_inputs=3),
        "masked_fill": _BINARY,
        "pow": replace(_FUNCTION, data_inputs=2, non_negative="if inputs are"),
        "square": replace(_FUNCTION, keeps_zero=True, non_negative="always"),
        "sqrt": replace(_FUNCTION, keeps_zero=True, non_negative="always"),
        "rsqrt": replace(_FUNCTION, non_negative="always"),
        "exp": replace(_FUNCTION, non_negative="always"),
        "log": _FUNCTION,
        "sin": replace(_FUNCTION, keeps_zero=True),
        "cos": _FUNCTION,
        "mean": replace(_REDUCTION, idempotent=True),
        "max": replace(_REDUCTION, idempotent=True),
        "min": replace(_REDUCTION, idempotent=True),
        "sum": _REDUCTION,
        "vector_norm": replace(_REDUCTION, non_negative="always", needs_float=True),
        "max_pool": replace(_POOL, commutes_with_quantization=True),
        "adaptive_max_pool": replace(_POOL, commutes_with_quantization=True),
        "avg_pool": _POOL,
        "adaptive_avg_pool": _POOL,
        "resize": replace(_POOL, category="resampling"),  # bicubic: positive inputs may give negative results
        "pad": Traits(category="resampling", passes_channels=True),  # the rest depends on the value that it pads with
        "zero_pad": replace(_ROLL, category="resampling", passes_channels=True),  # of images, for convolutions alone
        "flatten": _VIEW,
        "reshape": _VIEW,
        "transpose": _VIEW,
        "squeeze": _VIEW,
        "repeat": _VIEW,
        "split": replace(_VIEW, takes_apart=True),
        "getitem": replace(_VIEW, takes_apart=True),
        "pixel_shuffle": _VIEW,
        "pixel_unshuffle": _VIEW,
        "channel_shuffle": _VIEW,
        "getattr": Traits(category="movement", free=True),  # an attribute of a tensor that is no shape
        "roll": _ROLL,
        "flip": _COPY,
        "unfold": _COPY,
        "patch_merging": _COPY,  # torchvision's Swin: pads to even sizes and puts 2x2 neighbours side by side
        "concat": _JOIN,
        "stack": _JOIN,
        "identity": _PASSING,
        "dropout": _PASSING,
        "quantizer": Traits(
            category="quantizer", elementwise=True, free=True, keeps_zero=True, non_negative="if inputs are"
        ),
        "embedding": Traits(category="lookup"),
        "nms": Traits(category="lookup", data_inputs=2),  # which of some boxes are left
        "position_bias": Traits(category="lookup"),  # torchvision's Swin: biases of attention by relative position
        "shape": _SHAPE,
        "compare": replace(_SHAPE, data_inputs=2, elementwise=True),
        "floordiv": replace(_SHAPE, data_inputs=2, elementwise=True),
        "assert": _SHAPE,
        "input": _GRAPH,
        "output": replace(_GRAPH, data_inputs=MANY),
        "constant": _GRAPH,
        "zeros": Traits(category="graph", keeps_zero=True, multiplies=True, non_negative="always"),
        "unknown": Traits(category="unknown", data_inputs=MANY),
    }
)
"""The traits of every kind."""


def kinds(condition: Callable[[Traits], bool]) -> frozenset[str]:
    """The kinds whose traits meet a condition.

    >>> sorted(kinds(lambda t: t.clips))
    ['clamp', 'relu', 'relu6']
    """
    return frozenset(kind for kind, traits in TRAITS.items() if condition(traits))


WEIGHTED = kinds(lambda t: t.category == "weighted")
"""Operations with a weight of their own."""

PASSING = kinds(lambda t: t.category == "passing")
"""Operations that return their input in evaluation mode."""

AVERAGES = frozenset({"avg_pool", "adaptive_avg_pool", "mean"})
"""Operations whose result is a mean of elements of their input."""

SHAPES = kinds(lambda t: t.category == "shape")
"""Operations that compute with sizes, not with the values of activations."""
