"""The kind of an operation, however torch or ONNX spells it: module, function, operator or tensor method.

An operation without a row in the table is `unknown`, never guessed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compress.graph.modules import ByMode, InTraining
from compress.graph.traits import SHAPES, TRAITS, Traits

Spelling = type[nn.Module] | Callable[..., object] | str

SPELLINGS: dict[str, tuple[Spelling, ...]] = {
    "conv": (nn.Conv1d, nn.Conv2d, nn.Conv3d, F.conv1d, F.conv2d, F.conv3d),
    "conv_transpose": (
        *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    ),
    "linear": (nn.Linear, F.linear),
    "matmul": (torch.matmul, operator.matmul, torch.bmm, torch.mm, "matmul", "bmm", "mm", "__matmul__"),
    "addmm": (torch.addmm, torch.baddbmm, "addmm", "baddbmm"),
    "einsum": (torch.einsum,),
    "attention": (nn.MultiheadAttention, F.scaled_dot_product_attention, F.multi_head_attention_forward),
    "batch_norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, F.batch_norm),
    "layer_norm": (nn.LayerNorm, nn.RMSNorm, F.layer_norm, F.rms_norm),
    "group_norm": (nn.GroupNorm, F.group_norm),
    "instance_norm": (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, F.instance_norm),
    "local_response_norm": (nn.LocalResponseNorm, F.local_response_norm),
    "normalize": (F.normalize,),
    "softmax": (nn.Softmax, nn.Softmax2d, F.softmax, torch.softmax, "softmax"),
    "log_softmax": (nn.LogSoftmax, F.log_softmax, torch.log_softmax, "log_softmax"),
    "relu": (nn.ReLU, F.relu, torch.relu, torch.relu_, "relu", "relu_"),
    "relu6": (nn.ReLU6, F.relu6),
    "clamp": (nn.Hardtanh, F.hardtanh, torch.clamp, torch.clip, "clamp", "clamp_", "clip"),
    "leaky_relu": (nn.LeakyReLU, nn.PReLU, nn.RReLU, F.leaky_relu, F.prelu),
    "silu": (nn.SiLU, F.silu),
    "gelu": (nn.GELU, F.gelu),
    "hardswish": (nn.Hardswish, F.hardswish),
    "hardsigmoid": (nn.Hardsigmoid, F.hardsigmoid),
    "sigmoid": (nn.Sigmoid, torch.sigmoid, F.sigmoid, "sigmoid", "sigmoid_"),
    "tanh": (nn.Tanh, torch.tanh, F.tanh, "tanh", "tanh_"),
    "elu": (nn.ELU, nn.CELU, nn.SELU, F.elu, F.selu, F.celu),
    "mish": (nn.Mish, F.mish),
    "softplus": (nn.Softplus, F.softplus),
    "add": (operator.add, operator.iadd, torch.add, "add", "add_", "__add__", "__radd__"),
    "sub": (operator.sub, operator.isub, torch.sub, torch.rsub, "sub", "sub_"),
    "mul": (operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_", "multiply"),
    "div": (operator.truediv, operator.itruediv, torch.div, "div", "div_"),
    "neg": (operator.neg, torch.neg, "neg"),
    "maximum": (torch.maximum, "maximum"),
    "minimum": (torch.minimum, "minimum"),
    "where": (torch.where, "where"),
    "masked_fill": (torch.masked_fill, "masked_fill", "masked_fill_"),
    "pow": (operator.pow, torch.pow, "pow"),
    "square": (torch.square, "square"),
    "sqrt": (torch.sqrt, "sqrt"),
    "rsqrt": (torch.rsqrt, "rsqrt"),
    "exp": (torch.exp, "exp"),
    "log": (torch.log, "log"),
    "sin": (torch.sin, "sin"),
    "cos": (torch.cos, "cos"),
    "mean": (torch.mean, "mean"),
    "sum": (torch.sum, "sum"),
    "max": (torch.max, torch.amax, "max", "amax"),
    "min": (torch.min, torch.amin, "min", "amin"),
    "vector_norm": (torch.linalg.vector_norm, torch.norm, "norm"),
    "max_pool": (
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
        *(F.max_pool1d, F.max_pool2d, F.max_pool3d, torch.max_pool2d),
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
    "pad": (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ReflectionPad2d, nn.ReplicationPad2d, nn.ConstantPad2d, F.pad),
    "flatten": (nn.Flatten, nn.Unflatten, torch.flatten, torch.unflatten, "flatten", "unflatten"),
    "reshape": (torch.reshape, "reshape", "view", "view_as", "reshape_as"),
    "transpose": (
        *(torch.transpose, torch.permute, torch.swapaxes, torch.movedim),
        *("transpose", "permute", "t", "swapaxes", "movedim"),
    ),
    "squeeze": (torch.squeeze, torch.unsqueeze, "squeeze", "unsqueeze"),
    "repeat": (torch.repeat_interleave, "repeat_interleave", "expand", "expand_as", "repeat", "broadcast_to"),
    "split": (torch.split, torch.chunk, torch.unbind, torch.tensor_split, "split", "chunk", "unbind", "tensor_split"),
    "getitem": (operator.getitem, torch.index_select, "select", "narrow", "index_select", "__getitem__"),
    "getattr": (getattr,),
    "pixel_shuffle": (nn.PixelShuffle, F.pixel_shuffle),
    "pixel_unshuffle": (nn.PixelUnshuffle, F.pixel_unshuffle),
    "channel_shuffle": (nn.ChannelShuffle, F.channel_shuffle),
    "roll": (torch.roll, "roll"),
    "flip": (torch.flip, "flip"),
    "unfold": (nn.Unfold, F.unfold, "unfold"),
    "concat": (torch.cat, torch.concat, torch.concatenate),
    "stack": (torch.stack,),
    "identity": (nn.Identity, "contiguous", "to", "float", "half", "type_as", "clone", "detach", "type"),
    "dropout": (
        *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, InTraining),
    ),
    "embedding": (nn.Embedding,),
    "shape": (len, ByMode, "size", "dim", "ndimension", "numel", "is_floating_point", "is_contiguous"),
    "floordiv": (operator.floordiv, operator.mod),
    "zeros": (torch.zeros_like, "new_zeros"),
    "compare": (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    "assert": (torch._assert,),
}
"""Every spelling of each kind: classes of modules (their subclasses too), functions, and names of tensor methods."""

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
    "quick_gelu": "quick_gelu",
    "new_zeros": "zeros",
}
"""Modules and functions that torch.fx does not enter, by their bare name.

They are of torchvision, timm, `graph.trace` and `graph.spelled`."""

_ATTRIBUTES = {
    **dict.fromkeys(("shape", "ndim", "device", "dtype"), "shape"),
    **dict.fromkeys(("T", "mT", "H", "mH"), "transpose"),
}

_MODULES = {s: kind for kind, row in SPELLINGS.items() for s in row if isinstance(s, type)}
_METHODS = {s: kind for kind, row in SPELLINGS.items() for s in row if isinstance(s, str)}
_FUNCTIONS: dict[object, str] = {
    s: kind for kind, row in SPELLINGS.items() for s in row if not isinstance(s, (type, str))
}

METHODS_OF_SHAPE = frozenset(method for method, kind in _METHODS.items() if kind in SHAPES)
"""Methods whose result depends on a tensor's shape and type alone."""


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
        return _METHODS.get(str(node.target), "unknown")
    if node.target is getattr and len(node.args) > 1:
        return _ATTRIBUTES.get(str(node.args[1]), "getattr")
    return _FUNCTIONS.get(node.target) or _BY_NAME.get(getattr(node.target, "__name__", ""), "unknown")


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


def replace_node(node: fx.Node, new: fx.Node) -> None:
    """Let a new node have the meta and the users of one, which is erased."""
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


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
    "ReduceMean": "mean",
    "ReduceSum": "sum",
    "ReduceMax": "max",
    "ReduceMin": "min",
    "ReduceL2": "vector_norm",
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
