"""The kind of an operation, however torch or ONNX spells it, and all that the package knows of each kind.

Two tables: `TRAITS` has a row for each kind, `SPELLINGS` the modules, functions, operators and methods that spell it.
Adding an operation is a row in each; kinds that differ in a trait are kinds of their own. An operation without a row is
`unknown`, never guessed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compress.graph.modules import ByMode, InTraining

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

# As `data_inputs`: any number.
MANY = -1


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

# The traits of every kind.
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
        "contraction": _PRODUCT,  # of two tensors over axes of both
        "recurrent": replace(_PRODUCT, data_inputs=MANY),
        "deform_conv": replace(_PRODUCT, data_inputs=MANY),
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
        "glu": Traits(
            category="activation", keeps_zero=True, needs_float=True
        ),  # of a half by the sigmoid of the other
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
        "abs": replace(_FUNCTION, scales_linearly=True, non_negative="always"),
        "round": replace(_FUNCTION, keeps_zero=True, non_negative="if inputs are"),
        "function": _FUNCTION,  # any other of one operand, of which nothing more is needed
        "functions": replace(_FUNCTION, data_inputs=MANY),  # of several
        "logic": Traits(category="lookup", data_inputs=MANY, elementwise=True, needs_float=True),
        "mean": replace(_REDUCTION, idempotent=True),
        "max": replace(_REDUCTION, idempotent=True),
        "min": replace(_REDUCTION, idempotent=True),
        "sum": _REDUCTION,
        "var": Traits(category="reduction", keeps_zero=True, non_negative="always", needs_float=True),
        "reduce": Traits(category="reduction", needs_float=True),  # any other along one axis or all
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
        "gather": Traits(category="lookup", data_inputs=MANY),
        "scatter": Traits(category="lookup", data_inputs=MANY),
        "count": Traits(category="lookup", data_inputs=MANY),  # which values there are, how many, and where
        "sample": Traits(category="lookup", data_inputs=MANY, needs_float=True),  # values at places that others give
        "search": Traits(category="lookup", data_inputs=MANY),  # where values are in a sorted row
        "scan": Traits(category="lookup", needs_float=True),  # sums, products or extremes up to each position
        "sort": Traits(category="lookup"),  # values of an axis in their order, all or some
        # Multiplies no matrices; no more is known.
        "other": Traits(category="lookup", data_inputs=MANY, needs_float=True),
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


def kinds(condition: Callable[[Traits], bool]) -> frozenset[str]:
    """The kinds whose traits meet a condition.

    >>> sorted(kinds(lambda t: t.clips))
    ['clamp', 'relu', 'relu6']
    """
    return frozenset(kind for kind, traits in TRAITS.items() if condition(traits))


# Operations with a weight of their own.
WEIGHTED = kinds(lambda t: t.category == "weighted")

# Operations that return their input in evaluation mode.
PASSING = kinds(lambda t: t.category == "passing")

# Operations whose result is a mean of elements of their input.
AVERAGES = frozenset({"avg_pool", "adaptive_avg_pool", "mean"})

# Operations that compute with sizes, not with the values of activations.
SHAPES = kinds(lambda t: t.category == "shape")

# Torch's classes of batch normalization.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

Spelling = type[nn.Module] | Callable[..., object] | str

# Every spelling of each kind: classes of modules (their subclasses too), functions, and names of tensor methods.
# Operations in place (`add_`, `F.elu_`) and torch's functions of a method's name (`torch.narrow`) follow from these.
SPELLINGS: dict[str, tuple[Spelling, ...]] = {
    "conv": (nn.Conv1d, nn.Conv2d, nn.Conv3d, F.conv1d, F.conv2d, F.conv3d),
    "conv_transpose": (
        *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    ),
    "linear": (nn.Linear, F.linear),
    "matmul": (operator.matmul, "matmul", "bmm", "mm", "__matmul__"),
    "addmm": ("addmm", "baddbmm"),
    "einsum": (torch.einsum,),
    "attention": (nn.MultiheadAttention, F.scaled_dot_product_attention, F.multi_head_attention_forward),
    "contraction": (torch.tensordot, "inner", "mv", "dot"),
    "recurrent": (nn.RNNBase, nn.RNNCellBase),
    "batch_norm": (*BATCH_NORMS, F.batch_norm),
    "layer_norm": (nn.LayerNorm, nn.RMSNorm, F.layer_norm, F.rms_norm),
    "group_norm": (nn.GroupNorm, F.group_norm),
    "instance_norm": (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, F.instance_norm),
    "local_response_norm": (nn.LocalResponseNorm, F.local_response_norm),
    "normalize": (F.normalize,),
    "softmax": (nn.Softmax, nn.Softmax2d, F.softmax, "softmax"),
    "log_softmax": (nn.LogSoftmax, F.log_softmax, "log_softmax"),
    "relu": (nn.ReLU, F.relu, "relu"),
    "relu6": (nn.ReLU6, F.relu6),
    "clamp": (nn.Hardtanh, F.hardtanh, "clamp", "clip"),
    "leaky_relu": (nn.LeakyReLU, nn.PReLU, nn.RReLU, F.leaky_relu, F.prelu),
    "silu": (nn.SiLU, F.silu),
    "gelu": (nn.GELU, F.gelu),
    "hardswish": (nn.Hardswish, F.hardswish),
    "hardsigmoid": (nn.Hardsigmoid, F.hardsigmoid),
    "sigmoid": (nn.Sigmoid, F.sigmoid, "sigmoid"),
    "tanh": (nn.Tanh, F.tanh, "tanh"),
    "elu": (nn.ELU, nn.CELU, nn.SELU, F.elu, F.selu, F.celu),
    "mish": (nn.Mish, F.mish),
    "glu": (nn.GLU, F.glu),
    "softplus": (nn.Softplus, F.softplus),
    "add": (operator.add, operator.iadd, "add", "__add__", "__radd__"),
    "sub": (operator.sub, operator.isub, torch.rsub, "sub", "subtract"),
    "mul": (operator.mul, operator.imul, "mul", "multiply"),
    "div": (operator.truediv, operator.itruediv, "div", "divide", "true_divide"),
    "neg": (operator.neg, "neg", "negative"),
    "maximum": ("maximum",),
    "minimum": ("minimum",),
    "where": ("where",),
    "masked_fill": ("masked_fill",),
    "pow": (operator.pow, "pow"),
    "square": ("square",),
    "sqrt": ("sqrt",),
    "rsqrt": ("rsqrt",),
    "exp": ("exp",),
    "log": ("log", "log1p", "log2", "log10"),
    "sin": ("sin",),
    "cos": ("cos",),
    "abs": (operator.abs, "abs", "absolute"),
    "round": ("round", "floor", "ceil", "trunc", "sign"),
    "function": (
        *(nn.Softsign, nn.LogSigmoid, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Threshold, F.softsign),
        *(F.logsigmoid, F.hardshrink, F.softshrink, F.tanhshrink, F.threshold),
        *("erf", "erfc", "erfinv", "reciprocal", "expm1", "exp2", "frac", "nan_to_num", "sinc", "logit", "lgamma"),
        *("tan", "atan", "arctan", "sinh", "asinh", "arcsinh", "cosh", "acosh", "acos", "arccos", "asin"),
        *("arcsin", "atanh", "digamma", "deg2rad", "rad2deg", "clamp_min", "clamp_max"),
    ),
    "functions": (
        *("atan2", "hypot", "lerp", "addcmul", "fmod", "remainder", "logaddexp", "logaddexp2", "addcdiv", "arctan2"),
        *("copysign", "fmax", "fmin", "heaviside", "ldexp", "xlogy", "floor_divide"),
    ),
    "logic": (
        *(operator.and_, operator.or_, operator.xor, operator.invert),
        *("eq", "ne", "lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal", "not_equal", "isclose"),
        *("logical_and", "logical_or", "logical_xor", "logical_not", "isnan", "isfinite", "isinf"),
        *("long", "int", "bool"),
        *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
    ),
    "mean": ("mean",),
    "sum": ("sum",),
    "max": ("max", "amax"),
    "min": ("min", "amin"),
    "var": ("var", "std"),
    "reduce": (
        *("prod", "logsumexp", "nansum", "nanmean", "median", "argmax", "argmin"),
        *("any", "all", "count_nonzero"),
    ),
    "vector_norm": (torch.linalg.vector_norm, "norm"),
    "max_pool": (
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
        *(F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool2d, F.max_pool1d_with_indices),
        *(F.max_pool2d_with_indices, F.max_pool3d_with_indices),
    ),
    "avg_pool": (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    "adaptive_avg_pool": (
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        *(F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    ),
    "adaptive_max_pool": (
        *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        *(F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    ),
    "resize": (nn.Upsample, F.interpolate),
    "pad": (
        *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
        *(nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.CircularPad1d, nn.CircularPad2d),
        *(nn.CircularPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d, F.pad),
    ),
    "flatten": (nn.Flatten, nn.Unflatten, "flatten", "unflatten"),
    "reshape": ("reshape", "view", "view_as", "reshape_as", "ravel"),
    "transpose": ("transpose", "permute", "t", "swapaxes", "swapdims", "movedim", "moveaxis"),
    "squeeze": ("squeeze", "unsqueeze"),
    "repeat": ("repeat_interleave", "tile", "expand", "expand_as", "repeat", "broadcast_to"),
    "split": ("split", "chunk", "unbind", "tensor_split"),
    "getitem": (operator.getitem, "select", "narrow", "index_select", "__getitem__"),
    "getattr": (getattr,),
    "pixel_shuffle": (nn.PixelShuffle, F.pixel_shuffle),
    "pixel_unshuffle": (nn.PixelUnshuffle, F.pixel_unshuffle),
    "channel_shuffle": (nn.ChannelShuffle, F.channel_shuffle),
    "roll": ("roll",),
    "flip": ("flip", "fliplr", "flipud", "rot90"),
    "unfold": (nn.Unfold, F.unfold, "unfold"),
    "concat": (torch.cat, torch.concat, torch.concatenate),
    "stack": (torch.stack,),
    "identity": (
        *(nn.Identity, "contiguous", "to", "float", "half", "double", "bfloat16", "cpu"),
        *("type_as", "clone", "detach", "type"),
    ),
    "dropout": (
        *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, InTraining),
    ),
    "embedding": (nn.Embedding,),
    "scatter": ("scatter", "scatter_add", "scatter_reduce", "index_add", "index_put", "index_copy"),
    "gather": ("gather", "take_along_dim"),
    "count": ("bincount", "histc", "unique", "nonzero"),
    "sample": (
        *(nn.MaxUnpool1d, nn.MaxUnpool2d, nn.MaxUnpool3d, F.max_unpool1d, F.max_unpool2d, F.max_unpool3d),
        F.grid_sample,
    ),
    "search": (torch.searchsorted, torch.bucketize),
    "other": (
        *(nn.CosineSimilarity, nn.PairwiseDistance, nn.Fold, nn.LPPool1d, nn.LPPool2d, nn.LPPool3d, nn.EmbeddingBag),
        *(F.cosine_similarity, F.pairwise_distance, F.fold, F.lp_pool1d, F.lp_pool2d, F.lp_pool3d, F.embedding_bag),
        *(F.embedding, F.one_hot, F.gumbel_softmax, F.softmin, nn.Softmin, nn.FractionalMaxPool2d, torch.meshgrid),
        *(torch.var_mean, torch.std_mean),
        *(torch.view_as_complex, torch.view_as_real, torch.complex, torch.polar, torch.real, torch.imag),
        *("tril", "triu", "diag_embed", "diagonal", "diff", "cross", "take", "outer", "renorm", "trace", "index_fill"),
        *("masked_scatter", "masked_select"),
    ),
    "scan": ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"),
    "sort": ("sort", "argsort", "topk", "kthvalue"),
    "shape": (
        len,
        ByMode,
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
    ),
    "floordiv": (operator.floordiv, operator.mod),
    "zeros": (torch.zeros_like, "new_zeros"),
    "compare": (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    "assert": (torch._assert,),
}

# Modules and functions that torch.fx does not enter, by their bare name. They are of torchvision, timm, `graph.trace`
# and `graph.spelled`.
_BY_NAME = {
    "StochasticDepth": "dropout",
    "DropPath": "dropout",
    "DropBlock2d": "dropout",
    "stochastic_depth": "dropout",
    "FrozenBatchNorm2d": "batch_norm",
    "shifted_window_attention": "window_attention",
    "_get_relative_position_bias": "position_bias",
    "_patch_merging_pad": "patch_merging",
    "nms": "nms",
    **dict.fromkeys(("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool"), "sample"),
    "deform_conv2d": "deform_conv",
    "quick_gelu": "quick_gelu",
    "new_zeros": "zeros",
    "with_item": "scatter",
}

_ATTRIBUTES = {
    **dict.fromkeys(("shape", "ndim", "device", "dtype"), "shape"),
    **dict.fromkeys(("T", "mT", "H", "mH"), "transpose"),
}

_MODULES = {s: kind for kind, row in SPELLINGS.items() for s in row if isinstance(s, type)}
_METHODS = {s: kind for kind, row in SPELLINGS.items() for s in row if isinstance(s, str)}
_FUNCTIONS: dict[object, str] = {
    getattr(torch, s): kind for s, kind in _METHODS.items() if callable(getattr(torch, s, None))
} | {s: kind for kind, row in SPELLINGS.items() for s in row if not isinstance(s, (type, str))}

# Methods whose result depends on a tensor's shape and type alone.
METHODS_OF_SHAPE = frozenset(method for method, kind in _METHODS.items() if kind in SHAPES)


def altered(module: nn.Module) -> str:
    """Why a call of a module is more than its class's forward (hooks, or a `forward` set on it); "" if it is not."""
    if "forward" in vars(module):
        return "has a forward of its own, set on the instance: make it a method of a subclass, or take it off"
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(module, name, None) for name in hooks):
        return "has hooks, which no layer in its place would run: remove them before (handle.remove())"
    return ""


def calls_alike(one: type[nn.Module], other: type[nn.Module]) -> bool:
    names = ("__call__", "forward", "_conv_forward", "_output_padding")
    return all(getattr(one, name, None) is getattr(other, name, None) for name in names)


def module_kind(module: nn.Module) -> str:
    """Kind of a module, subclasses included (`QuantConv2d` is a `conv`).

    `unknown` if no table names it, or if a call of it does more than its class's forward (`altered`).
    """
    if altered(module):
        return "unknown"
    for base in type(module).__mro__:
        if base in _MODULES:
            return _MODULES[base]
    return _BY_NAME.get(type(module).__name__, "unknown")


def node_kind(node: fx.Node) -> str:
    """Kind of a node: of its operation, or `input`, `output`, `constant` (get_attr) or `quantizer`."""
    if node.op in {"placeholder", "output"}:
        return "input" if node.op == "placeholder" else "output"
    if node.op == "get_attr":
        return "constant"
    if node.op == "call_module":
        module = node_module(node)
        return "quantizer" if getattr(module, "is_quantizer", False) else module_kind(module)
    if node.op == "call_method":
        return _METHODS.get(str(out_of_place(node.target)), "unknown")
    if node.target is getattr and len(node.args) > 1:
        return _ATTRIBUTES.get(str(node.args[1]), "getattr")
    if isinstance(node.target, type) and node.users and all(node_kind(user) == "output" for user in node.users):
        return "output"  # torch.fx calls the class of a dataclass or NamedTuple that the network returns
    function = out_of_place(node.target)
    return _FUNCTIONS.get(function) or _BY_NAME.get(getattr(function, "__name__", ""), "unknown")


def out_of_place(target: Callable[..., object] | str) -> Callable[..., object] | str:
    # The method or function of torch that returns what one with a name such as `add_` writes into its input.
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    plain = name.removesuffix("_")
    if plain == name or plain.endswith("_"):
        return target
    if isinstance(target, str):
        return plain if callable(getattr(Tensor, plain, None)) else target
    own = [place for place in (F, torch) if getattr(place, name, None) is target]
    return next((getattr(place, plain) for place in own if hasattr(place, plain)), target)


def value_users(node: fx.Node) -> list[fx.Node]:
    # x.shape and x.ndim take no value of x.
    return [user for user in node.users if node_kind(user) not in SHAPES]


def node_module(node: fx.Node) -> nn.Module:
    owner = node.graph.owning_module
    if owner is None or node.op != "call_module":
        raise ValueError(f"node {node.name} ({node.op}) calls no module of a GraphModule")
    return owner.get_submodule(str(node.target))


def called_module(node: fx.Node) -> Any:  # Any: callers ask for attributes of many classes
    return node_module(node) if node.op == "call_module" else None


def asks_shape(node: fx.Node) -> bool:
    return (node.target is getattr and node.args[1:] == ("shape",)) or node.target in {"size", "dim"}


def walk(starts: Iterable[fx.Node], further: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """Yield nodes and those that `further` leads to from each, nearest first, each once."""
    found = list(dict.fromkeys(starts))
    seen = set(found)
    for node in found:
        yield node
        new = [other for other in dict.fromkeys(further(node)) if other not in seen]
        seen.update(new)
        found += new


def producer_past(node: fx.Node, through: Container[str]) -> fx.Node:
    """The node that computes a tensor, through nodes that forward it."""
    while node_kind(node) in through and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def consumers_past(node: fx.Node, through: Container[str]) -> list[fx.Node]:
    """The nodes that read a tensor, through nodes that forward it."""
    after = ((consumers_past(user, through) if node_kind(user) in through else [user]) for user in value_users(node))
    return [user for users in after for user in users]


def replace_node(node: fx.Node, new: fx.Node) -> None:
    """Let a new node have the meta and the users of one, which is erased."""
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def modules_above(path: str) -> list[str]:
    """The modules that hold a module: a.b.c -> a, a.b."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def layer_name(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_module" else node.name


def tensor_of(module: nn.Module, name: str = "weight") -> Tensor:
    """A parameter or buffer of a module; torch types it as a tensor or a module."""
    found = getattr(module, name)
    return found


def attribute_of(module: nn.Module, path: str) -> Any:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


class Watching(fx.Interpreter):
    """Runs a graph, and shows `look` the name and the result of each of some nodes as they are computed."""

    def __init__(
        self, graph_module: fx.GraphModule, names: Collection[str], look: Callable[[str, Tensor], None]
    ) -> None:
        super().__init__(graph_module)
        self.names, self.look = names, look

    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        if n.name in self.names:
            self.look(n.name, result)
        return result


def run_node(root: nn.Module, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute one node, not `placeholder` or `output`, without gradients from the values of its arguments.

    `root` holds the modules and parameters that the graph names.
    """
    with torch.no_grad():
        if node.op == "get_attr":
            return attribute_of(root, str(node.target))
        if node.op == "call_module":
            return root.get_submodule(str(node.target))(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


ONNX_KINDS = {
    "Conv": "conv",
    "ConvTranspose": "conv_transpose",
    "Gemm": "linear",
    "MatMul": "matmul",
    "Einsum": "einsum",
    "BatchNormalization": "batch_norm",
    "LayerNormalization": "layer_norm",
    "RMSNormalization": "layer_norm",
    "GroupNormalization": "group_norm",
    "InstanceNormalization": "instance_norm",
    "LRN": "local_response_norm",
    "LpNormalization": "normalize",
    "Softmax": "softmax",
    "LogSoftmax": "log_softmax",
    "Relu": "relu",
    "Clip": "clamp",
    "LeakyRelu": "leaky_relu",
    "PRelu": "leaky_relu",
    "Gelu": "gelu",
    "HardSwish": "hardswish",
    "Mish": "mish",
    "Tanh": "tanh",
    "Elu": "elu",
    "Selu": "elu",
    "Celu": "elu",
    "Sigmoid": "sigmoid",
    "HardSigmoid": "hardsigmoid",
    "Softplus": "softplus",
    "Add": "add",
    "Sub": "sub",
    "Mul": "mul",
    "Div": "div",
    "Neg": "neg",
    "Max": "maximum",
    "Min": "minimum",
    "Where": "where",
    "Pow": "pow",
    "Sqrt": "sqrt",
    "Exp": "exp",
    "Log": "log",
    "Sin": "sin",
    "Cos": "cos",
    "Abs": "abs",
    **dict.fromkeys(("Round", "Floor", "Ceil", "Sign"), "round"),
    **dict.fromkeys(("Softsign", "Shrink", "Erf", "Reciprocal", "Tan", "Atan"), "function"),
    "ReduceMean": "mean",
    "ReduceSum": "sum",
    "ReduceMax": "max",
    "ReduceMin": "min",
    "ReduceL2": "vector_norm",
    **dict.fromkeys(("ReduceProd", "ReduceLogSumExp", "ArgMax", "ArgMin"), "reduce"),
    "CumSum": "scan",
    "TopK": "sort",
    "GatherElements": "gather",
    "MaxPool": "max_pool",
    "AveragePool": "avg_pool",
    "GlobalMaxPool": "adaptive_max_pool",
    "GlobalAveragePool": "adaptive_avg_pool",
    "Resize": "resize",
    "Pad": "pad",
    "Flatten": "flatten",
    "Reshape": "reshape",
    "Transpose": "transpose",
    "Squeeze": "squeeze",
    "Unsqueeze": "squeeze",
    "Expand": "repeat",
    "Tile": "repeat",
    "Split": "split",
    "Slice": "getitem",
    "Gather": "getitem",
    **dict.fromkeys(("ScatterElements", "ScatterND"), "scatter"),
    "GatherND": "getitem",
    "DepthToSpace": "pixel_shuffle",
    "SpaceToDepth": "pixel_unshuffle",
    "Concat": "concat",
    "Identity": "identity",
    "Cast": "identity",
    "Dropout": "dropout",
    "Shape": "shape",
}


def onnx_operators(condition: Callable[[Traits], bool]) -> frozenset[str]:
    """The ONNX operators whose traits meet a condition.

    >>> sorted(onnx_operators(lambda t: t.category in {"weighted", "product"}))
    ['Conv', 'ConvTranspose', 'Einsum', 'Gemm', 'MatMul']
    """
    return frozenset(name for name, kind in ONNX_KINDS.items() if condition(TRAITS[kind]))
