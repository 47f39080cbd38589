"""A torch.fx graph under construction, from the nodes of an ONNX graph in their order."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import fx, nn

from compress.errors import QuantizationError
from compress.onnx_graph import attribute, free_name
from compress.onnx_ptq.index import Index, Shapes, Types

_UNSAFE = r"[^A-Za-z0-9_./:+-]"
"""What a name of a file may not bring into a path of modules, which torch.fx writes into Python as it is."""
_TAKEN = frozenset(dir(nn.Module())) | {"self", "Self", "_self"}
"""Names of modules themselves, and what torch.fx makes the name of a module's result, beside its own `self`."""
Size = int | fx.Node
"""A size: a number, or the batch times a number."""
Value = fx.Node | float | list[fx.Node]
"""What computes a tensor of the file: an operation or a number; for several outputs a list."""


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
        self._prefixes = {prefix for node in index.graph.node for prefix in _prefixes(_safe(node.name))}
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
        key = _identifier(name)
        key = free_name(key, self._names)
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
        nested = ".".join(parts) == name and not _prefixes(name) & self._paths
        path = name if nested and name not in self._prefixes else name.replace(".", "_")
        if path.partition(".")[0] in self._names or not path:
            path = f"layer_{path}"
        path = free_name(path, self._paths)
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


def _prefixes(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:i]) for i in range(1, len(parts))}
