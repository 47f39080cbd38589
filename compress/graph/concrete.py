"""Values while tracing: the example inputs decide control flow on sizes; control flow on pixels stops the trace.

Each node is computed as it is recorded. Sizes that nothing asks for stay symbolic.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute, TraceError
from torch.utils._pytree import tree_leaves

from compress.graph.ops import METHODS_OF_SHAPE, run_node


class _Known:
    """Conversions of a proxy whose value depends on sizes alone."""

    node: fx.Node
    tracer: Any
    __array_priority__ = 1000  # as torch's tensors: a number of numpy leaves `number * x` to the proxy

    def __len__(self) -> int:
        return len(self.tracer.sized(self))

    def __index__(self) -> int:
        return self.tracer.known(self).__index__()

    def __int__(self) -> int:
        return int(self.tracer.known(self))

    def __float__(self) -> float:
        return float(self.tracer.known(self))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.tracer.known(self), dtype)


class _KnownProxy(_Known, fx.Proxy):
    def __setitem__(self, key: Any, value: Any) -> None:
        # Everyone who holds the proxy must see the change, as with a tensor.
        self.node = _call(with_item, (self, key, value), {}).node

    def __getattr__(self, k: str) -> _KnownAttribute:
        _check_attribute(self, k)
        return _KnownAttribute(self, k)


class _KnownAttribute(_Known, Attribute):
    def __getattr__(self, k: str) -> Any:
        _check_attribute(self, k)
        if (self.attr, k) == ("device", "type"):  # an autocast asks for it; devices stay symbolic
            return self.tracer.sized(self.root).device.type
        return _KnownAttribute(self, k)


def _check_attribute(proxy: Any, name: str) -> None:
    value = proxy.tracer.value_of(proxy)
    if name.startswith("__array_") or (isinstance(value, (tuple, int, float)) and not hasattr(value, name)):
        raise AttributeError(name)


class Values:
    """The value of every node of a graph under construction."""

    def __init__(self, root: nn.Module, inputs: Iterable[Tensor]) -> None:
        self.root = root
        self.inputs = iter(inputs)
        self.values: dict[fx.Node, Any] = {}
        self.from_pixels: set[fx.Node] = set()
        self.busy = False

    def add(self, node: fx.Node) -> None:
        """Compute `node` from the values of its arguments."""
        if node.op == "output":
            return
        if node.op == "placeholder":
            if not str(node.target).startswith("*"):  # *args: each of the inputs it holds gets a node of its own
                self.values[node] = next(self.inputs, None)
            return
        args = fx.node.map_arg(node.args, self._value)
        kwargs = fx.node.map_arg(node.kwargs, self._value)
        self.busy = True  # modules that run now must not be recorded
        try:
            self.values[node] = run_node(self.root, node, args, kwargs)
        finally:
            self.busy = False
        read = any(isinstance(self.values[n], Tensor) for n in node.all_input_nodes)
        number = not isinstance(self.values[node], (Tensor, tuple, list, dict)) and not _is_shape(node)
        if (read and number) or any(n in self.from_pixels for n in node.all_input_nodes):
            self.from_pixels.add(node)

    def _value(self, node: fx.Node) -> Any:
        value = self.values[node]
        return copy.copy(value) if isinstance(value, (list, dict)) else value

    def sized(self, node: fx.Node) -> Any:
        """The value, tensors included, whose length a node returns."""
        value = self.values.get(node)
        return value if isinstance(value, Tensor) else self.known(node)

    def known(self, node: fx.Node) -> Any:
        """The value of a node that depends on shapes alone.

        Raises:
            TraceError: the value is a tensor, or was computed from one.
        """
        value = self.values.get(node)
        if isinstance(value, Tensor) or node in self.from_pixels or node not in self.values:
            raise TraceError("symbolically traced variables cannot be used as inputs to control flow")
        return value


def _is_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target) in METHODS_OF_SHAPE
    return node.target in {getattr, len}


def with_item(tensor: Tensor, key: Any, value: Any) -> Tensor:
    result = tensor.clone()
    result[key] = value
    return result


def known_proxy(node: fx.Node, tracer: Any) -> fx.Proxy:
    return _KnownProxy(node, tracer)


def unrolled(proxy: Any, value: Any) -> Iterator[Any]:
    return iter([proxy[i] for i in range(len(value))])


@contextmanager
def answered(root: nn.Module) -> Iterator[None]:
    """Let builtins and functions of torch that refuse symbolic values take proxies; restores them afterwards.

    Builtins are replaced in the packages that define the classes of `root`, but not in torch's own.
    """
    modules = {type(module).__module__ for module in root.modules()}
    packages = {name.partition(".")[0] for name in modules} - {"torch", __name__.partition(".")[0]}
    modules |= {name for name in sys.modules if name.partition(".")[0] in packages}
    places = [vars(sys.modules[name]) for name in modules if name in sys.modules and name.split(".")[0] != "torch"]
    changed = [(place, name, function) for place in places for name, function in _BUILTINS.items() if name not in place]
    tensors = {name: _recorded(name) for name in _MAKERS} | {name: _Limits(name) for name in ("finfo", "iinfo")}
    tensors |= {name: _unchecked(name) for name in _CHECKS} | {"is_tensor": _is_tensor}
    before = {name: getattr(torch, name) for name in tensors}
    scripted = torch.jit.isinstance

    def is_instance(value: Any, kind: Any) -> bool:
        return bool(scripted(value.tracer.value_of(value) if isinstance(value, _Known) else value, kind))

    try:
        for place, name, function in changed:
            place[name] = function
        vars(torch).update(tensors)
        vars(torch.jit)["isinstance"] = is_instance
        yield
    finally:
        vars(torch.jit)["isinstance"] = scripted
        vars(torch).update(before)
        for place, name, _ in changed:
            del place[name]


def _recorded(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(torch, name)

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        symbolic = any(isinstance(value, fx.Proxy) for value in tree_leaves((args, kwargs)))
        if not symbolic:
            return function(*args, **kwargs)
        return _call(new_zeros, args, kwargs) if name == "zeros" else _call(new_tensor, (name, *args), kwargs)

    return recorded


class _Limits:
    """`torch.finfo` or `torch.iinfo`, which also take the type of a symbolic tensor."""

    def __init__(self, name: str) -> None:
        self._kind = getattr(torch, name)

    def __call__(self, *dtype: Any) -> Any:
        return self._kind(*(value.tracer.known(value) if isinstance(value, _Known) else value for value in dtype))

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._kind)


def _unchecked(name: str) -> Callable[..., Any]:
    """A check of torch that symbolic conditions pass."""
    function: Callable[..., Any] = getattr(torch, name)

    def check(*args: Any, **kwargs: Any) -> None:
        if not any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values())):
            function(*args, **kwargs)

    return check


def new_tensor(name: str, *args: Any, **kwargs: Any) -> Tensor:
    """Call the factory of torch of that name; unpickling traces a graph over, where torch.zeros takes no proxy."""
    made: Tensor = getattr(torch, name)(*args, **kwargs)
    return made


def new_zeros(*args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros(*args, **kwargs)


def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy:
    """Record a node that calls `function`, also when unpickling traces the graph over."""
    tracer = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, fx.Proxy)).tracer
    made: fx.Proxy = tracer.create_proxy("call_function", function, args, kwargs)
    made.node.meta["is_wrapped"] = True
    return made


def _length(value: Any) -> Any:
    return value.size(0) if isinstance(value, fx.Proxy) and _is_tensor(value) else len(value)


def _is_instance(value: Any, kind: Any) -> bool:
    if isinstance(value, kind):
        return True
    return isinstance(value, _Known) and isinstance(value.tracer.value_of(value), kind)


def _is_callable(value: Any) -> bool:
    return callable(value) and not isinstance(value, fx.Proxy)


def _is_tensor(value: Any) -> bool:
    return _is_instance(value, Tensor)


_BUILTINS: dict[str, Callable[..., Any]] = {"len": _length, "isinstance": _is_instance, "callable": _is_callable}
_CHECKS = ("_check", "_check_with", "_check_value", "_check_tensor_all", "_check_tensor_all_with")
_MAKERS = ("zeros", "ones", "full", "tensor")
