"""One name for each operation, however it was written: module, function, operator or tensor method.

`x + y`, `torch.add(x, y)` and `x.add(y)` are all `add`; `nn.ReLU`, `F.relu` and `x.relu_()` are all `relu`. Placement,
costs and receptive fields read these names, so that what is known of an operation is said once. An operation
that stands in no table is `unknown`, never guessed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

WEIGHTED = frozenset({"conv", "conv_transpose", "linear"})
"""Operations with a weight of their own."""

_MODULES: dict[str, tuple[type[nn.Module], ...]] = {
    "conv_transpose": (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    "conv": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "linear": (nn.Linear,),
    "attention": (nn.MultiheadAttention,),
    "embedding": (nn.Embedding,),
    "batch_norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
    "layer_norm": (nn.LayerNorm, nn.RMSNorm),
    "group_norm": (nn.GroupNorm,),
    "instance_norm": (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    "local_response_norm": (nn.LocalResponseNorm,),
    "relu": (nn.ReLU,),
    "relu6": (nn.ReLU6,),
    "leaky_relu": (nn.LeakyReLU, nn.PReLU, nn.RReLU),
    "silu": (nn.SiLU,),
    "gelu": (nn.GELU,),
    "hardswish": (nn.Hardswish,),
    "hardsigmoid": (nn.Hardsigmoid,),
    "sigmoid": (nn.Sigmoid,),
    "tanh": (nn.Tanh,),
    "elu": (nn.ELU, nn.CELU, nn.SELU),
    "mish": (nn.Mish,),
    "softplus": (nn.Softplus,),
    "clamp": (nn.Hardtanh,),
    "softmax": (nn.Softmax, nn.Softmax2d, nn.LogSoftmax),
    "dropout": (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    "identity": (nn.Identity,),
    "max_pool": (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
    "avg_pool": (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    "adaptive_avg_pool": (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    "adaptive_max_pool": (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    "flatten": (nn.Flatten, nn.Unflatten),
    "pixel_shuffle": (nn.PixelShuffle,),
    "pixel_unshuffle": (nn.PixelUnshuffle,),
    "channel_shuffle": (nn.ChannelShuffle,),
    "resize": (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
    "pad": (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ReflectionPad2d, nn.ReplicationPad2d, nn.ConstantPad2d),
}

_FUNCTIONS: dict[str, tuple[Callable[..., Any], ...]] = {
    "conv": (F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d),
    "conv_transpose": (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    "linear": (F.linear,),
    "matmul": (torch.matmul, operator.matmul, torch.bmm, torch.mm, torch.baddbmm, torch.addmm),
    "einsum": (torch.einsum,),
    "attention": (F.scaled_dot_product_attention, F.multi_head_attention_forward),
    "batch_norm": (F.batch_norm,),
    "layer_norm": (F.layer_norm, F.rms_norm),
    "group_norm": (F.group_norm,),
    "instance_norm": (F.instance_norm,),
    "local_response_norm": (F.local_response_norm,),
    "normalize": (F.normalize, torch.rsqrt, torch.linalg.vector_norm, torch.norm),
    "add": (operator.add, operator.iadd, torch.add),
    "sub": (operator.sub, operator.isub, torch.sub, torch.rsub),
    "mul": (operator.mul, operator.imul, torch.mul, torch.multiply),
    "div": (operator.truediv, operator.itruediv, torch.div),
    "floordiv": (operator.floordiv, operator.mod),
    "neg": (operator.neg, torch.neg),
    "pow": (operator.pow, torch.pow, torch.square, torch.sqrt),
    "exp": (torch.exp, torch.log),
    "relu": (F.relu, torch.relu, F.relu_, torch.relu_),
    "relu6": (F.relu6,),
    "leaky_relu": (F.leaky_relu, F.prelu),
    "silu": (F.silu,),
    "gelu": (F.gelu,),
    "hardswish": (F.hardswish,),
    "hardsigmoid": (F.hardsigmoid,),
    "sigmoid": (torch.sigmoid, F.sigmoid),
    "tanh": (torch.tanh, F.tanh),
    "elu": (F.elu, F.selu, F.celu),
    "mish": (F.mish,),
    "softplus": (F.softplus,),
    "clamp": (torch.clamp, F.hardtanh),
    "softmax": (F.softmax, torch.softmax, F.log_softmax, torch.log_softmax),
    "dropout": (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
    "max_pool": (F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool2d),
    "avg_pool": (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d),
    "adaptive_avg_pool": (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
    "adaptive_max_pool": (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    "mean": (torch.mean,),
    "sum": (torch.sum,),
    "max": (torch.max, torch.amax, torch.min, torch.amin),
    "concat": (torch.cat, torch.concat, torch.concatenate),
    "stack": (torch.stack,),
    "split": (torch.split, torch.chunk, torch.unbind, torch.tensor_split),
    "getitem": (operator.getitem,),
    "getattr": (getattr,),
    "flatten": (torch.flatten, torch.unflatten),
    "reshape": (torch.reshape,),
    "transpose": (torch.transpose, torch.permute, torch.swapaxes, torch.movedim),
    "squeeze": (torch.squeeze, torch.unsqueeze),
    "roll": (torch.roll,),
    "pad": (F.pad,),
    "pixel_shuffle": (F.pixel_shuffle,),
    "pixel_unshuffle": (F.pixel_unshuffle,),
    "channel_shuffle": (F.channel_shuffle,),
    "resize": (F.interpolate,),
    "assert": (torch._assert,),
    "compare": (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
}

_METHODS: dict[str, tuple[str, ...]] = {
    "matmul": ("matmul", "bmm", "mm", "__matmul__"),
    "add": ("add", "add_", "__add__", "__radd__"),
    "sub": ("sub", "sub_"),
    "mul": ("mul", "mul_", "multiply"),
    "div": ("div", "div_"),
    "pow": ("pow", "square", "sqrt"),
    "exp": ("exp", "log"),
    "relu": ("relu", "relu_"),
    "sigmoid": ("sigmoid", "sigmoid_"),
    "tanh": ("tanh",),
    "clamp": ("clamp", "clamp_", "clip"),
    "softmax": ("softmax", "log_softmax"),
    "mean": ("mean",),
    "sum": ("sum",),
    "max": ("max", "amax", "min", "amin"),
    "split": ("split", "chunk", "unbind"),
    "flatten": ("flatten", "unflatten"),
    "reshape": ("reshape", "view", "view_as", "reshape_as"),
    "transpose": ("transpose", "permute", "t", "swapaxes", "movedim", "mT"),
    "squeeze": ("squeeze", "unsqueeze"),
    "roll": ("roll",),
    "repeat": ("expand", "expand_as", "repeat", "broadcast_to"),
    "identity": ("contiguous", "to", "float", "half", "type_as", "clone", "detach", "type"),
    "shape": ("size", "dim", "numel"),
    "getitem": ("select", "narrow", "__getitem__"),
}

METHODS_OF_SHAPE = frozenset({*_METHODS["shape"], "is_floating_point", "is_contiguous", "ndimension"})
"""Methods whose result depends on a tensor's shape and type alone."""

KINDS = frozenset(_MODULES) | frozenset(_FUNCTIONS) | frozenset(_METHODS)
"""Every kind that an operation can have, `unknown` apart."""

_BY_FUNCTION = {function: kind for kind, functions in _FUNCTIONS.items() for function in functions}
_BY_METHOD = {method: kind for kind, methods in _METHODS.items() for method in methods}


def module_kind(module: nn.Module) -> str:
    """Kind of a module, subclasses included (`QuantConv2d` is a `conv`); `unknown` when it stands in no table."""
    for kind, types in _MODULES.items():
        if isinstance(module, types):
            return kind
    if type(module).__name__ in {"StochasticDepth", "DropPath", "DropBlock2d"}:
        return "dropout"
    if type(module).__name__ == "FrozenBatchNorm2d":
        return "batch_norm"
    return "unknown"


def node_kind(node: fx.Node) -> str:
    """Kind of a node of a GraphModule's graph.

    Besides the operations: `input`, `output`, `constant` (get_attr) and `quantizer`.
    """
    if node.op in {"placeholder", "output"}:
        return "input" if node.op == "placeholder" else "output"
    if node.op == "get_attr":
        return "constant"
    if node.op == "call_module":
        module = node_module(node)
        return "quantizer" if getattr(module, "is_quantizer", False) else module_kind(module)
    if node.op == "call_method":
        return _BY_METHOD.get(str(node.target), "unknown")
    if node.target is getattr and len(node.args) > 1:
        return "shape" if node.args[1] in {"shape", "ndim", "device", "dtype"} else "getattr"
    if node.target in _BY_FUNCTION:
        return _BY_FUNCTION[node.target]
    return "dropout" if getattr(node.target, "__name__", "") == "stochastic_depth" else "unknown"


def node_module(node: fx.Node) -> nn.Module:
    """The module that a `call_module` node calls."""
    owner = node.graph.owning_module
    if owner is None or node.op != "call_module":
        raise ValueError(f"node {node.name} ({node.op}) calls no module of a GraphModule")
    return owner.get_submodule(str(node.target))


def layer_name(node: fx.Node) -> str:
    """Name that people know the node by: the module's path, or the node's own name."""
    return str(node.target) if node.op == "call_module" else node.name
