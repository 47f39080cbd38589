"""An ONNX file as a torch.fx network: what needs gradients or quantizers in torch works on files through it.

Operators are in the spelling that `graph.ops` knows; those with parameters are modules at the path of the node's name.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from keyword import iskeyword
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx import TensorProto
from torch import Tensor, fx, nn

from compress.engines.base import Arrays, TensorInfo
from compress.errors import CompressError, ModelError, QuantizationError
from compress.graph.inputs import flat_tensors
from compress.graph.ops import modules_above
from compress.graph.spelled import KNOWN
from compress.onnx_graph import (
    AVERAGE_POOLS,
    INTERPOLATIONS,
    MAX_POOLS,
    Window,
    attribute,
    attributes_of,
    free_name,
    read_window,
)
from compress.onnx_ptq.canonical import canonical, change_of
from compress.onnx_ptq.read import Compound, Span, find_compounds, find_parts
from compress.onnx_ptq.source import (
    FloatSession,
    Index,
    Shapes,
    SourceFile,
    Types,
    check_bounds,
    feeds,
    inferred,
    inputs_of_file,
    load_source,
    open_batch,
)
from compress.support.libraries import library_errors

# What a name of a file may not bring into a path of modules, which torch.fx writes into Python as it is.
_UNSAFE = r"[^A-Za-z0-9_./:+-]"
# Names of modules themselves, and what torch.fx makes the name of a module's result, beside its own `self`.
_TAKEN = frozenset(dir(nn.Module())) | {"self", "Self", "_self"}
# A size: a number, or the batch times a number.
Size = int | fx.Node
# What computes a tensor of the file: an operation or a number; for several outputs a list.
Value = fx.Node | float | list[fx.Node]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the file holds a parameter of a layer: the node that reads it, and the index of that input.

    `transposed`: the file holds (in, out) of a linear layer, where torch has (out, in).
    """

    node: str
    input: int
    transposed: bool = False


class Builder:
    """Tensors by the names that they have in the file, and what operators need to know of the file.

    Attributes:
        wider: index of the same graph for a batch that is larger by one image, which shows the sizes that depend on the
            batch; None if the file takes this batch size alone.
        root: holds the layers and constants.
        origin: name of the file's tensor by name of the fx node that computes it.
        path: path of each layer by name of the file's node.
        places: where the file holds the parameters of each layer, by the layer's path and the parameter's name.
    """

    convert: Callable[[onnx.NodeProto], Value]

    def __init__(self, index: Index, shapes: Shapes, types: Types, wider: Index | None) -> None:
        self.index, self.shapes, self.types, self.wider = index, shapes, types, wider
        self.root, self.graph = nn.Module(), fx.Graph()
        self.origin: dict[str, str] = {}
        self.path: dict[str, str] = {}
        self.places: dict[str, dict[str, Place]] = {}
        self._made: dict[str, Value] = {}
        self._names: set[str] = set(dir(fx.GraphModule)) | {"placement", "report"}
        self._paths: set[str] = set()
        self._prefixes = {prefix for node in index.graph.node for prefix in modules_above(_safe(node.name))}
        self._used = set(self._prefixes)
        self._inputs: list[fx.Node] = []

    def input(self, name: str) -> None:
        node = self.graph.placeholder(_identifier(name))
        node.target = node.name  # which fx keeps apart from keywords, builtins and the names that its code uses
        self._inputs.append(node)
        self.set(name, node)

    def set(self, name: str, value: Value) -> None:
        """Name the value that computes a tensor of the file; an identity gives one value several names."""
        self._made[name] = value
        if isinstance(value, fx.Node):
            self.origin.setdefault(value.name, name)

    def tensor(self, name: str) -> Value:
        """The node that computes a tensor; what follows from constants and sizes is made when it is asked for."""
        if name not in self._made:
            value, producer = self._fixed(name), self.index.producers.get(name)
            if value is not None:
                self.set(name, self.constant(name, value))
            elif producer is not None and name in self.index.fixed:
                self.set(name, self.convert(producer))
            else:
                raise QuantizationError(f"tensor {name!r} is not computed by the graph")
        return self._made[name]

    def _fixed(self, name: str) -> NDArray[Any] | None:
        value = self.index.value(name) if name in self.index.fixed else None
        if value is None or name in self.index.unchanging or self.wider is None:
            return value
        after = self.wider.value(name)
        return value if after is not None and np.array_equal(value, after) else None

    def known(self, name: str) -> bool:
        return name in self._made

    def constant(self, name: str, value: NDArray[Any]) -> fx.Node:
        """Add a constant tensor, which training leaves as it is."""
        key = free_name(_identifier(name), self._names)
        tensor = torch.from_numpy(np.array(value))
        self.root.register_buffer(key, tensor.float() if tensor.is_floating_point() else tensor)
        return self.graph.get_attr(key)

    def operand(self, name: str) -> Value:
        value = None if self.known(name) else self._fixed(name)
        number = float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None
        if number is None or self.types.get(name) == onnx.TensorProto.BOOL:
            return self.tensor(name)
        return number

    def layer(self, node: onnx.NodeProto, module: nn.Module, x: Value, **places: Place) -> fx.Node:
        """Add a module under the name of a node, and a call of it; `places` are those of its parameters."""
        name = _safe(node.name)
        parts = [part for part in name.split(".") if part]
        nested = ".".join(parts) == name and self._paths.isdisjoint(modules_above(name))
        path = name if nested and name not in self._prefixes else name.replace(".", "_")
        if path.partition(".")[0] in self._names or not path:
            path = f"layer_{path}"
        path = free_name(path, self._used)
        self._paths.add(path)
        self.path[node.name] = path
        *parents, last = path.split(".")
        holder = self.root
        for part in parents:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        holder.add_module(last, module)
        own = {"weight": Place(node=node.name, input=1), "bias": Place(node=node.name, input=2)}
        self.places[path] = own | places
        return self.graph.call_module(path, (x,))

    def call(self, function: Callable[..., Any] | str, *args: Any, **kwargs: Any) -> fx.Node:
        if isinstance(function, str):
            return self.graph.call_method(function, args, kwargs)
        return self.graph.call_function(function, args, kwargs)

    def integers(self, name: str) -> list[Size]:
        """Return the values of an integer tensor; one that grows with the batch is computed from its size."""
        value = self.index.value(name)
        if value is None:
            raise QuantizationError(
                f"tensor {name!r}, which decides about a shape, depends on the values of activations"
            )
        here = [int(number) for number in value.reshape(-1)]
        after = None if self.wider is None else self.wider.value(name)
        if after is None or after.size != len(here):
            return list(here)
        return [self._size(name, a, int(b)) for a, b in zip(here, after.reshape(-1), strict=True)]

    def whole(self, name: str) -> list[int]:
        found = self.integers(name)
        if not all(isinstance(size, int) for size in found):
            raise QuantizationError(f"tensor {name!r} depends on the batch size, where a fixed number is needed")
        return [size for size in found if isinstance(size, int)]

    def _size(self, name: str, here: int, after: int) -> Size:
        if here == after:
            return here
        images = self.shapes[self.index.graph.input[0].name][0]
        factor = after - here
        if here != factor * images:
            raise QuantizationError(f"tensor {name!r} depends on the batch size in a way that is not known")
        size = self.call("size", self._inputs[0], 0)
        return size if factor == 1 else self.call(operator.mul, size, factor)


def axes_of(builder: Builder, node: onnx.NodeProto) -> list[int] | None:
    """Return the axes of an operator, an attribute before opset 13 and an input after; None = all."""
    if len(node.input) > 1 and node.input[1]:
        return builder.whole(node.input[1])
    found = attribute(node, "axes", None)
    return None if found is None else [int(axis) for axis in found]


def _identifier(name: str) -> str:
    found = re.sub(r"\W", "_", name, flags=re.ASCII).strip("_") or "tensor"  # fx drops the leading ones itself
    return f"x_{found}" if found[0].isdigit() or found in {"self", "forward"} or iskeyword(found) else found


def _safe(name: str) -> str:
    """Return the name of a node with none but characters, and parts, that a module may have."""
    parts = re.sub(_UNSAFE, "_", name).split(".")
    return ".".join(f"layer_{part}" if iskeyword(part) or part in _TAKEN else part for part in parts)


Layer = TypeVar("Layer", bound=nn.Module)

_CONVOLUTIONS: dict[int, Callable[..., Any]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED: dict[int, Callable[..., Any]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_NORMS: dict[int, Callable[..., Any]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_INSTANCE: dict[int, Callable[..., Any]] = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}


def convolution(b: Builder, node: onnx.NodeProto) -> Value:
    weight, x = constant(b, node.input[1]), b.tensor(node.input[0])
    form, groups = window(b, node, weight.shape[2:]), attribute(node, "group", 1)
    padding = form.padding
    if padding is None:
        x, padding = b.call(F.pad, x, form.sides), (0,) * len(form.pads)
    module = _CONVOLUTIONS[len(form.kernel)](
        weight.shape[1] * groups,
        weight.shape[0],
        form.kernel,
        form.strides,
        padding,
        form.dilations,
        groups,
        bias=_has(node, 2),
    )
    return b.layer(node, _filled(module, weight, _optional(b, node, 2)), x)


def transposed(b: Builder, node: onnx.NodeProto) -> Value:
    weight = constant(b, node.input[1])
    form, groups = window(b, node, weight.shape[2:]), attribute(node, "group", 1)
    if form.padding is None or attribute(node, "output_shape", None):
        raise QuantizationError("its padding differs from side to side")
    extra = attribute(node, "output_padding", [0] * len(form.kernel))
    module = _TRANSPOSED[len(form.kernel)](
        weight.shape[0],
        weight.shape[1] * groups,
        form.kernel,
        form.strides,
        form.padding,
        tuple(extra),
        groups,
        bias=_has(node, 2),
        dilation=form.dilations,
    )
    return b.layer(node, _filled(module, weight, _optional(b, node, 2)), b.tensor(node.input[0]))


def product(b: Builder, node: onnx.NodeProto) -> Value:
    """Convert Gemm and MatMul: a linear layer if one side is a matrix of constants, else a product of activations."""
    x, w = node.input[0], node.input[1]
    gemm = node.op_type == "Gemm"
    if gemm and (attribute(node, "transA", 0) or any(attribute(node, key, 1.0) != 1.0 for key in ("alpha", "beta"))):
        raise QuantizationError("it transposes its first input, or has a factor")
    matrix = w in b.index.unchanging and x not in b.index.unchanging and len(b.shapes.get(w, ())) == 2
    if matrix:
        weight, flipped = constant(b, w), not (gemm and attribute(node, "transB", 0))
        module = linear(weight.T if flipped else weight, _optional(b, node, 2))
        return b.layer(node, module, b.tensor(x), weight=Place(node=node.name, input=1, transposed=flipped))
    second = b.tensor(w)
    if gemm and attribute(node, "transB", 0):
        second = b.call("transpose", second, -2, -1)
    if _has(node, 2):
        return b.call(torch.addmm, b.tensor(node.input[2]), b.tensor(x), second)
    return b.call(torch.matmul, b.tensor(x), second)


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with these parameters, (out, in) and (out,)."""
    out = weight.shape[0]
    module = nn.Linear(weight.shape[1], out, bias=bias is not None)
    return _filled(module, weight, None if bias is None else bias.reshape(-1).expand(out))


def linear_with_sum(b: Builder, found: Compound) -> Value:
    node, add = found.nodes[:2]
    place = 1 - list(add.input).index(node.output[0])
    return b.layer(
        node,
        linear(constant(b, node.input[1]).T, constant(b, add.input[place])),
        b.tensor(found.input),
        weight=Place(node=node.name, input=1, transposed=True),
        bias=Place(node=add.name, input=place),
    )


def channel_norm(b: Builder, node: onnx.NodeProto) -> Value:
    """Convert BatchNormalization that was not folded, and InstanceNormalization, which has no statistics."""
    if len(node.output) > 1:
        raise QuantizationError("it is in training mode, and takes the statistics of each batch")
    scale, shift, *statistics = (constant(b, name) for name in node.input[1:5])
    kind = (_NORMS if statistics else _INSTANCE)[len(b.shapes[node.input[0]])]
    module = _filled(kind(len(scale), eps=attribute(node, "epsilon", 1e-5), affine=True), scale, shift)
    if statistics:
        module.running_mean, module.running_var = (values.clone() for values in statistics)
    return b.layer(node, module, b.tensor(node.input[0]))


def group_norm(b: Builder, node: onnx.NodeProto) -> Value:
    """Convert GroupNormalization, whose factors are of channels from opset 21 on."""
    scale, shift = (constant(b, name) for name in node.input[1:3])
    groups = attribute(node, "num_groups", 1)
    if len(scale) != b.shapes[node.input[0]][1]:
        scale, shift = (v.repeat_interleave(b.shapes[node.input[0]][1] // groups) for v in (scale, shift))
    module = nn.GroupNorm(groups, len(scale), eps=attribute(node, "epsilon", 1e-5))
    return b.layer(node, _filled(module, scale, shift), b.tensor(node.input[0]))


def layer_norm(b: Builder, node: onnx.NodeProto) -> Value:
    shape = b.shapes[node.input[0]]
    weight, bias = constant(b, node.input[1]), _optional(b, node, 2)
    axis, epsilon = attribute(node, "axis", -1), attribute(node, "epsilon", 1e-5)
    return b.layer(node, _layer_norm(shape[axis % len(shape) :], weight, bias, epsilon), b.tensor(node.input[0]))


def rms_norm(b: Builder, node: onnx.NodeProto) -> Value:
    shape, weight = b.shapes[node.input[0]], constant(b, node.input[1])
    normalized = shape[attribute(node, "axis", -1) % len(shape) :]
    module = nn.RMSNorm(normalized, eps=attribute(node, "epsilon", 1e-5))
    return b.layer(node, _filled(module, weight.expand(normalized), None), b.tensor(node.input[0]))


def written_layer_norm(b: Builder, found: Compound) -> Value:
    """Convert a LayerNorm that is written as means, a root and a quotient."""
    after = found.nodes[[part.op_type for part in found.nodes].index("Sqrt") + 2 :]
    places = {}
    for part in after:
        place = next(i for i, name in enumerate(part.input) if name in b.index.unchanging)
        places["weight" if part.op_type == "Mul" else "bias"] = Place(node=part.name, input=place)
    values = {name: constant(b, after[i].input[place.input]) for i, (name, place) in enumerate(places.items())}
    root = next(part for part in found.nodes if part.op_type == "Add" and part not in after)
    epsilon = next(number for name in root.input if (number := b.index.number(name)) is not None)
    module = _layer_norm(b.shapes[found.input][-1:], values.get("weight"), values.get("bias"), epsilon)
    return b.layer(found.nodes[0], module, b.tensor(found.input), **places)


def plain_layer_norm(b: Builder, found: Compound) -> bool:
    node = found.nodes[0]
    shape = b.shapes.get(found.input)
    given = b.index.value(node.input[1]) if len(node.input) > 1 else attribute(node, "axes", None)
    return (
        shape is not None and given is not None and [int(a) % len(shape) for a in np.asarray(given)] == [len(shape) - 1]
    )


def _layer_norm(shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, epsilon: float) -> nn.LayerNorm:
    module = nn.LayerNorm(shape, eps=epsilon, elementwise_affine=weight is not None, bias=bias is not None)
    if weight is not None:
        given = [part.reshape(part.shape[-len(shape) :]).expand(shape) for part in (weight, bias) if part is not None]
        _filled(module, given[0], given[1] if len(given) > 1 else None)
    return module


def prelu(b: Builder, node: onnx.NodeProto) -> Value:
    slope = constant(b, node.input[1]).reshape(-1)
    return b.layer(node, _filled(nn.PReLU(len(slope)), slope, None), b.tensor(node.input[0]))


def window(b: Builder, node: onnx.NodeProto, kernel: Sequence[int] | None = None) -> Window:
    return read_window(attributes_of(node), b.shapes.get(node.input[0], ())[2:], kernel)


def constant(b: Builder, name: str) -> Tensor:
    value: NDArray[Any] | None = b.index.value(name) if name in b.index.unchanging else None
    if value is None:
        raise QuantizationError(f"its parameter {name!r} is computed when the file runs")
    return torch.from_numpy(np.array(value, np.float32))


def _optional(b: Builder, node: onnx.NodeProto, place: int) -> Tensor | None:
    return constant(b, node.input[place]) if _has(node, place) else None


def _has(node: onnx.NodeProto, place: int) -> bool:
    return len(node.input) > place and bool(node.input[place])


def _filled(module: Layer, weight: Tensor, bias: Tensor | None) -> Layer:
    with torch.no_grad():
        module.get_parameter("weight").copy_(weight)
        if bias is not None:
            own = module.get_parameter("bias")
            own.copy_(bias.reshape(own.shape))
    return module


# Converters of operators with parameters.
LAYERS: dict[str, Callable[[Builder, onnx.NodeProto], Value]] = {
    "Conv": convolution,
    "ConvTranspose": transposed,
    "Gemm": product,
    "MatMul": product,
    "BatchNormalization": channel_norm,
    "InstanceNormalization": channel_norm,
    "GroupNormalization": group_norm,
    "LayerNormalization": layer_norm,
    "RMSNormalization": rms_norm,
    "PRelu": prelu,
}


Converter = Callable[[Builder, onnx.NodeProto], Value]

_TYPES = {TensorProto.INT64: torch.int64, TensorProto.INT32: torch.int32, TensorProto.BOOL: torch.bool}
_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
_GLOBAL: dict[str, dict[int, Callable[..., Any]]] = {
    "GlobalAveragePool": {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d},
    "GlobalMaxPool": {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d},
}


def _one(function: Any, **attributes: tuple[str, float]) -> Converter:
    """Return the converter of a function of one tensor; `attributes` are (ONNX name, default) by torch's name."""

    def convert(b: Builder, node: onnx.NodeProto) -> Value:
        named = {key: float(attribute(node, name, value)) for key, (name, value) in attributes.items()}
        return b.call(function, b.tensor(node.input[0]), **named)

    return convert


def _many(function: Any) -> Converter:
    """Return the converter of a function of two tensors or numbers, applied in turn to more."""

    def convert(b: Builder, node: onnx.NodeProto) -> Value:
        operands = [b.operand(name) for name in node.input if name]
        if function in {torch.maximum, torch.minimum}:
            operands = [b.tensor(name) for name in node.input if name]
        return functools.reduce(lambda x, y: b.call(function, x, y), operands)

    return convert


def _reduction(function: Any) -> Converter:
    def convert(b: Builder, node: onnx.NodeProto) -> Value:
        x, axes = b.tensor(node.input[0]), axes_of(b, node)
        axes = list(range(len(b.shapes[node.input[0]]))) if axes is None else axes
        return b.call(function, x, dim=axes, keepdim=bool(attribute(node, "keepdims", 1)))

    return convert


def _along(function: Any, axis: int) -> Converter:
    """Return the converter of a function along one axis, which has a default; searches keep it with size 1."""
    searches = function in {torch.argmax, torch.argmin}

    def convert(b: Builder, node: onnx.NodeProto) -> Value:
        options = {"keepdim": bool(attribute(node, "keepdims", 1))} if searches else {}
        return b.call(function, b.tensor(node.input[0]), dim=int(attribute(node, "axis", axis)), **options)

    return convert


def _clip(b: Builder, node: onnx.NodeProto) -> Value:
    low, high = (
        b.index.number(node.input[i]) if len(node.input) > i and node.input[i] else attribute(node, key, None)
        for i, key in ((1, "min"), (2, "max"))
    )
    x = b.tensor(node.input[0])
    if (low, high) == (0.0, 6.0):
        return b.call(F.relu6, x)
    if low is high is None:
        return x
    return b.call(F.relu, x) if low == 0 and high is None else b.call(torch.clamp, x, min=low, max=high)


def _hard_sigmoid(b: Builder, node: onnx.NodeProto) -> Value:
    alpha, beta = attribute(node, "alpha", 0.2), attribute(node, "beta", 0.5)
    x = b.tensor(node.input[0])
    if abs(alpha - 1 / 6) < 1e-6 and beta == 0.5:
        return b.call(F.hardsigmoid, x)
    return b.call(
        torch.clamp, b.call(operator.add, b.call(operator.mul, x, float(alpha)), float(beta)), min=0.0, max=1.0
    )


def _pool(b: Builder, node: onnx.NodeProto) -> Value:
    form, x = window(b, node), b.tensor(node.input[0])
    padding, counted = form.pool_padding, bool(attribute(node, "count_include_pad", 0))
    highest = node.op_type == "MaxPool"
    if not highest and ((padding is None and (not counted or form.ceil)) or set(form.dilations) != {1}):
        raise QuantizationError("its padding differs from side to side, or it is dilated")
    if padding is None:
        x = b.call(F.pad, x, form.sides, *(("constant", float("-inf")) if highest else ()))
        padding = (0,) * len(form.pads)
    if highest:
        pool = MAX_POOLS[len(form.kernel)]
        return b.call(pool, x, form.kernel, form.strides, padding, form.dilations, form.ceil)
    return b.call(AVERAGE_POOLS[len(form.kernel)], x, form.kernel, form.strides, padding, form.ceil, counted)


def _resize(b: Builder, node: onnx.NodeProto) -> Value:
    shape, after = b.shapes[node.input[0]], b.shapes[node.output[0]]
    mode = attribute(node, "mode", b"nearest").decode()
    where = attribute(node, "coordinate_transformation_mode", b"half_pixel").decode()
    rounded = attribute(node, "nearest_mode", b"round_prefer_floor").decode()
    if node.op_type == "Upsample":
        where, rounded = "asymmetric", "floor"
    if shape[:2] != after[:2]:
        raise QuantizationError("it resizes batch or channels")
    x, size = b.tensor(node.input[0]), list(after[2:])
    whole = all(new % old == 0 for old, new in zip(shape[2:], size, strict=True))
    if mode == "nearest" and ((where == "asymmetric" and rounded == "floor") or (whole and where == "half_pixel")):
        return b.call(F.interpolate, x, size=size, mode="nearest")
    modes = INTERPOLATIONS.get(mode, {})
    if len(size) in modes and where in {"half_pixel", "pytorch_half_pixel", "align_corners"}:
        corners = where == "align_corners"
        return b.call(F.interpolate, x, size=size, mode=modes[len(size)], align_corners=corners)
    raise QuantizationError(f"it has mode {mode}, {where}, {rounded}")


def _pad(b: Builder, node: onnx.NodeProto) -> Value:
    pads = b.whole(node.input[1]) if len(node.input) > 1 else [int(p) for p in attribute(node, "pads", [])]
    mode = {"edge": "replicate"}.get(found := attribute(node, "mode", b"constant").decode(), found)
    value = b.index.number(node.input[2]) if len(node.input) > 2 and node.input[2] else attribute(node, "value", 0.0)
    rank, given = len(b.shapes[node.input[0]]), len(pads) // 2
    axes = b.whole(node.input[3]) if len(node.input) > 3 and node.input[3] else range(given)
    both = {axis % rank: (pads[i], pads[given + i]) for i, axis in enumerate(axes)}
    sides = [size for axis in reversed(range(rank)) for size in both.get(axis, (0, 0))]
    while len(sides) > 2 and sides[-2:] == [0, 0]:
        sides = sides[:-2]
    return b.call(F.pad, b.tensor(node.input[0]), sides, mode, *([value] if mode == "constant" and value else []))


def _reshape(b: Builder, node: onnx.NodeProto) -> Value:
    sizes = b.integers(node.input[1])
    if not attribute(node, "allowzero", 0):
        shape = b.shapes[node.input[0]]
        for i, size in enumerate(sizes):
            if size == 0:
                sizes[i] = b.call("size", b.tensor(node.input[0]), 0) if i == 0 else shape[i]
    moving = [i for i, size in enumerate(sizes) if not isinstance(size, int)]
    if len(moving) == 1 and -1 not in [size for size in sizes if isinstance(size, int)]:
        sizes[moving[0]] = -1
    return b.call(torch.reshape, b.tensor(node.input[0]), tuple(sizes))


def _flatten(b: Builder, node: onnx.NodeProto) -> Value:
    axis, rank = attribute(node, "axis", 1), len(b.shapes[node.input[0]])
    if axis % max(rank, 1) != 1:
        raise QuantizationError(f"its axis is {axis}")
    return b.call(torch.flatten, b.tensor(node.input[0]), 1)


def _transpose(b: Builder, node: onnx.NodeProto) -> Value:
    default = list(reversed(range(len(b.shapes[node.input[0]]))))
    return b.call("permute", b.tensor(node.input[0]), *(int(axis) for axis in attribute(node, "perm", default)))


def _squeeze(b: Builder, node: onnx.NodeProto) -> Value:
    axes, shape = axes_of(b, node), b.shapes[node.input[0]]
    axes = [i for i, size in enumerate(shape) if size == 1] if axes is None else [axis % len(shape) for axis in axes]
    return functools.reduce(
        lambda x, axis: b.call("squeeze", x, axis), sorted(axes, reverse=True), b.tensor(node.input[0])
    )


def _unsqueeze(b: Builder, node: onnx.NodeProto) -> Value:
    axes, rank = axes_of(b, node) or [], len(b.shapes[node.output[0]])
    ordered = sorted(axis % rank for axis in axes)
    return functools.reduce(lambda x, axis: b.call("unsqueeze", x, axis), ordered, b.tensor(node.input[0]))


def _expand(b: Builder, node: onnx.NodeProto) -> Value:
    sizes, shape = b.integers(node.input[1]), b.shapes[node.input[0]]
    new = len(sizes) - len(shape)
    wanted: list[Size] = [-1] * max(-new, 0)
    for i, size in enumerate(sizes):
        wanted.append(-1 if size == 1 and i >= new else size)
    return b.call("expand", b.tensor(node.input[0]), *wanted)


def _split(b: Builder, node: onnx.NodeProto) -> Value:
    axis = attribute(node, "axis", 0)
    sizes = [b.shapes[name][axis] for name in node.output]
    whole = b.call(torch.split, b.tensor(node.input[0]), sizes, dim=axis)
    return [b.call(operator.getitem, whole, i) for i in range(len(sizes))]


def part(b: Builder, node: onnx.NodeProto, parts: Mapping[str, Span]) -> Value:
    """Convert one of several slices or gathers that take a tensor apart to an item of `split` or `unbind`."""
    axis, start, _ = parts[node.output[0]]
    siblings = {other.output[0] for other in b.index.consumers[node.input[0]]}
    spans = sorted({span for name, span in parts.items() if name in siblings and span[0] == axis})
    whole = f"parts of {node.input[0]} along {axis} by {node.op_type}"
    if not b.known(whole):
        x = b.tensor(node.input[0])
        sizes = [end - begin for _, begin, end in spans]
        split = (torch.unbind, x, axis) if node.op_type == "Gather" else (torch.split, x, sizes, axis)
        b.set(whole, b.call(*split))
    item = b.call(operator.getitem, b.tensor(whole), [begin for _, begin, _ in spans].index(start))
    indices = b.index.value(node.input[1]) if node.op_type == "Gather" else None
    return b.call("unsqueeze", item, axis) if indices is not None and indices.ndim == 1 else item


def _slice(b: Builder, node: onnx.NodeProto) -> Value:
    rank = len(b.shapes[node.input[0]])
    starts, ends = (b.whole(node.input[i]) for i in (1, 2))
    axes = b.whole(node.input[3]) if len(node.input) > 3 and node.input[3] else list(range(len(starts)))
    steps = b.whole(node.input[4]) if len(node.input) > 4 and node.input[4] else [1] * len(starts)
    if min(steps) < 1:
        raise QuantizationError("it goes backwards")
    cut = [slice(None)] * rank
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        far = end >= b.shapes[node.input[0]][axis]
        cut[axis % rank] = slice(start, None if far else end, step if step > 1 else None)
    return b.call(operator.getitem, b.tensor(node.input[0]), tuple(cut))


def _gather(b: Builder, node: onnx.NodeProto) -> Value:
    axis = attribute(node, "axis", 0)
    value = b.index.value(node.input[1]) if node.input[1] in b.index.unchanging else None
    if value is None:
        raise QuantizationError("its indices are computed when the file runs")
    x = b.tensor(node.input[0])
    if value.ndim == 0:
        return b.call("select", x, axis, int(value))
    if value.ndim > 1:
        raise QuantizationError("its indices have several axes")
    positive = np.where(value < 0, value + b.shapes[node.input[0]][axis], value)
    return b.call(torch.index_select, x, axis, b.constant(f"{node.output[0]}_indices", positive.astype(np.int64)))


def _shuffle(b: Builder, node: onnx.NodeProto) -> Value:
    if attribute(node, "mode", b"DCR") != b"CRD":
        raise QuantizationError("its mode is DCR, which torch does not have")
    return b.call(F.pixel_shuffle, b.tensor(node.input[0]), int(attribute(node, "blocksize", 1)))


def _cast(b: Builder, node: onnx.NodeProto) -> Value:
    to, x = attribute(node, "to", 0), b.tensor(node.input[0])
    if to == TensorProto.BFLOAT16:
        x = b.call("to", x, torch.bfloat16)  # rounded, and float32 as everything here
    if to in _FLOATS:
        given = isinstance(x, fx.Node) and x.op == "placeholder"  # an input keeps the type that the file states
        plain = to != TensorProto.BFLOAT16 and not given and b.types.get(node.input[0]) in _FLOATS
        return x if plain else b.call("to", x, torch.float32)
    if to not in _TYPES:
        raise QuantizationError(f"it converts to {TensorProto.DataType.Name(to)}")
    return b.call("to", x, _TYPES[to])


def _cumulative(b: Builder, node: onnx.NodeProto) -> Value:
    if attribute(node, "exclusive", 0) or attribute(node, "reverse", 0):
        raise QuantizationError("it leaves out the number itself, or begins at the end")
    return b.call(torch.cumsum, b.tensor(node.input[0]), b.integers(node.input[1])[0])


def _pair(operator_name: str) -> Converter:
    """Return the converter of one half of a Q/DQ pair: PT2E's operator, on signed integers as backends want."""

    def convert(b: Builder, node: onnx.NodeProto) -> Value:
        scale = b.index.number(node.input[1])
        zero = b.index.value(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros((), np.uint8)
        if scale is None or zero is None or zero.size != 1 or zero.dtype not in _INTEGERS:
            raise QuantizationError("it is not one scale and one zero point of 8 or 16 bits for the tensor")
        kind = np.dtype(f"int{8 * zero.itemsize}")
        shift = 0 if zero.dtype == kind else np.iinfo(kind).min  # uint8 q is int8 q - 128: the same numbers
        bounds = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
        function = getattr(torch.ops.quantized_decomposed, operator_name).default
        place = int(zero.reshape(-1)[0]) + int(shift)
        return b.call(function, b.tensor(node.input[0]), scale, place, *bounds, getattr(torch, kind.name))

    return convert


_INTEGERS = {np.dtype(kind) for kind in ("int8", "uint8", "int16", "uint16")}

# Converters of operators without parameters.
OPERATORS: dict[str, Converter] = {
    "QuantizeLinear": _pair("quantize_per_tensor"),
    "DequantizeLinear": _pair("dequantize_per_tensor"),
    **{
        name: _many(getattr(operator, function))
        for name, function in (
            ("Add", "add"),
            ("Sum", "add"),
            ("Sub", "sub"),
            ("Mul", "mul"),
            ("Div", "truediv"),
            ("Equal", "eq"),
            ("Less", "lt"),
            ("LessOrEqual", "le"),
            ("Greater", "gt"),
            ("GreaterOrEqual", "ge"),
            ("And", "and_"),
            ("Or", "or_"),
            ("Xor", "xor"),
        )
    },
    **{
        name: _one(function)
        for name, function in (
            ("Relu", F.relu),
            ("Sigmoid", torch.sigmoid),
            ("Tanh", torch.tanh),
            ("HardSwish", F.hardswish),
            ("Mish", F.mish),
            ("Softplus", F.softplus),
            ("Selu", F.selu),
            ("Erf", torch.erf),
            ("Exp", torch.exp),
            ("Log", torch.log),
            ("Sqrt", torch.sqrt),
            ("Neg", torch.neg),
            ("Abs", torch.abs),
            ("Floor", torch.floor),
            ("Ceil", torch.ceil),
            ("Round", torch.round),
            ("Softsign", F.softsign),
            ("Tan", torch.tan),
            ("Atan", torch.atan),
            ("Sin", torch.sin),
            ("Cos", torch.cos),
            ("Not", torch.logical_not),
            ("IsNaN", torch.isnan),
            ("Sign", torch.sign),
        )
    },
    **{
        name: _reduction(function)
        for name, function in (
            ("ReduceMean", torch.mean),
            ("ReduceSum", torch.sum),
            ("ReduceMax", torch.amax),
            ("ReduceMin", torch.amin),
            ("ReduceL2", torch.linalg.vector_norm),
        )
    },
    "LeakyRelu": _one(F.leaky_relu, negative_slope=("alpha", 0.01)),
    "Elu": _one(F.elu, alpha=("alpha", 1.0)),
    "Celu": _one(F.celu, alpha=("alpha", 1.0)),
    "Gelu": lambda b, node: b.call(
        F.gelu, b.tensor(node.input[0]), approximate=attribute(node, "approximate", b"none").decode()
    ),
    "HardSigmoid": _hard_sigmoid,
    "Clip": _clip,
    "Softmax": _along(torch.softmax, -1),
    "LogSoftmax": _along(F.log_softmax, -1),
    "Pow": _many(torch.pow),
    "Max": _many(torch.maximum),
    "Min": _many(torch.minimum),
    "Where": lambda b, node: b.call(torch.where, b.tensor(node.input[0]), *map(b.operand, node.input[1:])),
    "Einsum": lambda b, node: b.call(
        torch.einsum, attribute(node, "equation", b"").decode(), *map(b.tensor, node.input)
    ),
    "ArgMax": _along(torch.argmax, 0),
    "ArgMin": _along(torch.argmin, 0),
    "CumSum": _cumulative,
    **dict.fromkeys(
        _GLOBAL,
        lambda b, node: b.call(_GLOBAL[node.op_type][len(b.shapes[node.input[0]]) - 2], b.tensor(node.input[0]), 1),
    ),
    "MaxPool": _pool,
    "AveragePool": _pool,
    "Resize": _resize,
    "Upsample": _resize,
    "Pad": _pad,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "Concat": lambda b, node: b.call(torch.cat, [*map(b.tensor, node.input)], dim=int(attribute(node, "axis", 0))),
    "Tile": lambda b, node: b.call("repeat", b.tensor(node.input[0]), *b.integers(node.input[1])),
    "DepthToSpace": _shuffle,
    "Cast": _cast,
    **dict.fromkeys(("Identity", "Dropout"), lambda b, node: b.tensor(node.input[0])),
    "Reciprocal": lambda b, node: b.call(operator.truediv, 1.0, b.tensor(node.input[0])),
}


# The lowest opset whose operators are known; files of older ones are raised.
OPSET = 13

# Largest difference between network and file, relative to an output's largest value.
_CHANGED = 1e-3


@dataclass(frozen=True, kw_only=True)
class Converted:
    """A file as a torch network that computes its outputs, in order, in evaluation mode; names as in `Builder`."""

    network: fx.GraphModule
    origin: dict[str, str]
    path: dict[str, str]
    places: dict[str, dict[str, Place]]


def from_onnx(file: str | Path, batch: Any = None, *, size: tuple[int, int] | None = None) -> fx.GraphModule:
    """Return an ONNX file as a torch network, compared with the file on ONNX Runtime.

    Args:
        file: float ONNX file of opset 6 to 25.
        batch: one batch of its inputs; None = random numbers of the shapes that the file states.
        size: height and width for open sides, with `batch` None.

    Returns:
        A GraphModule in evaluation mode, whose layers have the names of the file's nodes. Sizes follow the batch; all
        others are those of `batch`.

    Raises:
        AuditError: the file is missing, truncated or not valid ONNX.
        QuantizationError: it is quantized already.
        ModelError: an operator has no counterpart, which the message names, or the network computes something else.

    Examples:
        >>> network = compress.from_onnx("float.onnx")
        >>> torch.allclose(network(images), model(images), atol=1e-4)
        True
    """
    source = load_source(file)
    given = random_feed(source, size=size) if batch is None else next(feeds([batch], inputs_of_file(source)))
    check_bounds(source, given)
    return converted(canonical(source, opset=OPSET)[0], given).network


def converted(source: SourceFile, feed: Arrays) -> Converted:
    found = network_of(source, feed)
    compare_network(source, found.network, feed)
    return found


def network_of(source: SourceFile, feed: Arrays) -> Converted:
    """Convert a file as `converted` does, without comparing; Q/DQ pairs become PT2E's operators."""
    index, shapes, types = inferred(source, feed)
    builder = _built(index, shapes, types, _wider(source, feed))
    network = fx.GraphModule(builder.root, builder.graph, class_name="OnnxNetwork").eval()
    return Converted(network=network, origin=builder.origin, path=builder.path, places=builder.places)


def _wider(source: SourceFile, feed: Arrays) -> Index | None:
    """Return the index of a graph for one more image; None if the file states the size of its batch."""
    if any(not open_batch(value) for value in source.proto.graph.input if value.name in feed):
        return None
    try:
        return inferred(source, {name: np.concatenate([value, value[:1]]) for name, value in feed.items()})[0]
    except QuantizationError:
        return None


def _built(index: Index, shapes: Shapes, types: Types, wider: Index | None) -> Builder:
    builder = Builder(index, shapes, types, wider)
    for value in index.graph.input:
        if value.name not in index.constants:
            builder.input(value.name)
    compounds = [
        found
        for found in find_compounds(index)
        if found.kind != "roll" and (found.kind != "layer_norm" or plain_layer_norm(builder, found))
    ]
    last = {found.nodes[-1].output[0]: found for found in compounds}
    inside = {part.output[0] for found in compounds for part in found.nodes[:-1]}
    parts = find_parts(index, shapes)
    builder.convert = partial(_convert, builder, compound=None)
    for node in index.graph.node:
        results = [name for name in node.output if name]
        if not results or results[0] in inside or index.fixed.issuperset(results):
            continue
        made = part(builder, node, parts) if results[0] in parts else _convert(builder, node, last.get(results[0]))
        for name, value in zip(node.output, made if isinstance(made, list) else [made], strict=False):
            builder.set(name, value)
    outputs = [builder.tensor(value.name) for value in index.graph.output]
    builder.graph.output(outputs[0] if len(outputs) == 1 else tuple(outputs))
    builder.graph.lint()
    return builder


def _convert(builder: Builder, node: onnx.NodeProto, compound: Compound | None) -> Value:
    try:
        if compound is not None:
            return _compound(builder, compound)
        convert = LAYERS.get(node.op_type) or OPERATORS.get(node.op_type)
        if convert is None or node.domain not in {"", "ai.onnx"}:
            raise QuantizationError("torch has no counterpart that is known here")
        return convert(builder, node)
    except QuantizationError as error:
        domain = f" of the domain {node.domain}" if node.domain else ""
        raise ModelError(
            f"{builder.index.source.path} cannot become a torch network: operator {node.op_type}{domain} at "
            f"{node.name or node.output[0]!r}: {error}. Calibration alone (ptq --onnx) does not need this"
        ) from error


def _compound(builder: Builder, found: Compound) -> Value:
    if found.kind == "linear":
        return linear_with_sum(builder, found)
    if found.kind == "layer_norm":
        return written_layer_norm(builder, found)
    if found.kind == "gelu":
        tanh = any(part.op_type == "Tanh" for part in found.nodes)
        return builder.call(F.gelu, builder.tensor(found.input), approximate="tanh" if tanh else "none")
    return builder.call(KNOWN[found.kind], builder.tensor(found.input))


def compare_network(source: SourceFile, network: nn.Module, feed: Arrays) -> None:
    names = [value.name for value in source.proto.graph.output]
    expected = FloatSession(source, names).run(feed)
    inputs = [torch.from_numpy(np.asarray(feed[v.name])) for v in source.proto.graph.input if v.name in feed]
    with library_errors(ModelError, f"{source.path} as a torch network does not run: "), torch.no_grad():
        got = flat_tensors(network(*(x.float() if x.is_floating_point() else x for x in inputs)))
    limit = 20 * _CHANGED if any(expected[name].dtype == np.float16 for name in names) else _CHANGED
    for name, value in zip(names, got, strict=True):
        change, largest = change_of(np.asarray(expected[name]), value.double().numpy())
        if not change <= limit * largest + 1e-6:
            raise ModelError(
                f"{source.path} as a torch network differs from the file on ONNX Runtime: output {name!r} by "
                f"{change:.3g}, more than {limit:g} of its largest value. Calibration alone (ptq --onnx) does not need "
                "this network"
            )


def _without_sides(path: Path, tensor: TensorInfo) -> ModelError:
    return ModelError(
        f"{path}: input {tensor.name!r} has open sides {tensor.shape}; give a batch, or a height and a "
        "width for images (size=; in a recipe model.options: {size: [224, 224]})"
    )


def random_feed(
    source: SourceFile,
    *,
    batch_size: int = 2,
    size: tuple[int, int] | None = None,
    refusal: Callable[[Path, TensorInfo], CompressError] = _without_sides,
) -> Arrays:
    """Normal numbers for the inputs, an open batch of `batch_size`; `refusal` is raised for sides that stay open."""
    generator, found = np.random.default_rng(0), {}
    for tensor in inputs_of_file(source):
        shape = [batch_size if i == 0 and side < 0 else side for i, side in enumerate(tensor.shape)]
        if size is not None and len(shape) == 4:
            shape[2:] = [given if side < 0 else side for given, side in zip(size, shape[2:], strict=True)]
        if min(shape, default=1) < 1:
            raise refusal(source.path, tensor)
        found[tensor.name] = generator.standard_normal(shape).astype(tensor.dtype)
    return found
