"""The tracer: torch.fx's own, with leaves of our choice, the arguments of an example, and known sizes."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from compress.graph.concrete import Values, known_proxy, unrolled
from compress.graph.inputs import KeywordInputs
from compress.graph.isolation import restored

_NETWORKS = (
    *(nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)
"""Modules of torch.nn that are traced into, because they are networks and not layers."""


class Tracer(fx.Tracer):
    """fx's tracer with leaves of our choice.

    Attributes:
        leaves: paths of the modules that it does not enter.
        inputs: the example; None keeps the signature of `forward`.
        values: the values of all nodes, by which it decides control flow on sizes; None traces without them.
        proxy_buffer_attributes: True makes buffers symbolic, which `buffer.expand(x.shape[0], -1)` needs.
        failed: path of the innermost module in which tracing failed.
    """

    def __init__(  # no argument when pickle builds one
        self,
        leaves: Iterable[str] = (),
        inputs: tuple[Tensor, ...] | None = None,
        values: Values | None = None,
        *,
        buffers: bool = False,
    ) -> None:
        super().__init__()
        self.leaves = frozenset(leaves)
        self.inputs = inputs
        self.values = values
        self.failed = ""
        self._own: tuple[nn.Module, set[int]] | None = None
        self.proxy_buffer_attributes = buffers
        self._thread = threading.get_ident()

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        """Trace the model, and restore what its code wrote on its modules."""
        self._thread = threading.get_ident()
        with restored(root):
            return super().trace(root, concrete_args)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Make an argument for each input of the example; all others keep their defaults."""
        if self.inputs is None:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        by_keyword = isinstance(self.inputs, KeywordInputs)
        names = self.inputs.names if isinstance(self.inputs, KeywordInputs) else _names(root_fn, len(self.inputs))
        made = [self.create_proxy("placeholder", name, (), {}) for name in names]

        def called(root: nn.Module, *inputs: Any) -> Any:
            return root_fn(root, **dict(zip(names, inputs, strict=True))) if by_keyword else root_fn(root, *inputs)

        called.__annotations__ = {}  # fx would write them into its code, and torch 2.11 cannot pickle texts there
        return called, [self.root, *made]

    def create_arg(self, a: Any) -> Any:
        """Take numbers of numpy; keep the class of an output that is a dataclass and a mapping."""
        if isinstance(a, np.generic):
            a = a.item()  # fx writes numbers into code, in which numpy is not known
        elif isinstance(a, np.ndarray):
            a = torch.from_numpy(a)
        if isinstance(a, Mapping) and is_dataclass(a):
            given = {key: self.create_arg(value) for key, value in a.items() if value is not None}
            return self.create_node("call_function", type(a), (), given)
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Record a node, and its value where values are kept."""
        node = super().create_node(*args, **kwargs)
        if self.values is not None:
            self.values.add(node)
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A proxy whose sizes are known where values are kept."""
        return super().proxy(node) if self.values is None else known_proxy(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        """An attribute of a module: symbolic, but not while values are computed."""
        if self._elsewhere() or (self.values is not None and self.values.busy):
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def _elsewhere(self) -> bool:
        """True if another thread has called a method that fx replaced."""
        return threading.get_ident() != self._thread

    def known(self, proxy: fx.Proxy) -> Any:
        """The value of a proxy that depends on sizes alone."""
        if self.values is None:
            raise fx.proxy.TraceError("no values are known")
        return self.values.known(proxy.node)

    def sized(self, proxy: fx.Proxy) -> Any:
        """The value whose length is that of a proxy."""
        if self.values is None:
            raise fx.proxy.TraceError("no values are known")
        return self.values.sized(proxy.node)

    def value_of(self, proxy: fx.Proxy) -> Any:
        """The value of a proxy; None if it is not known."""
        return None if self.values is None else self.values.values.get(proxy.node)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Decide an `if` by the value of the example, if that follows from sizes alone."""
        return super().to_bool(obj) if self.values is None else bool(self.known(obj))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """The items of a proxy whose length is known."""
        return super().iter(obj) if self.values is None else unrolled(obj, self.known(obj))

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """True for layers of torch.nn, quantizers and the leaves of our choice."""
        return (
            module_qualified_name in self.leaves
            or getattr(m, "is_quantizer", False)
            or (type(m) not in _NETWORKS and super().is_leaf_module(m, module_qualified_name))
        )

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Enter a module or record its call, and note where that fails."""
        if self._elsewhere() or (self.values is not None and self.values.busy):
            return forward(*args, **kwargs)
        if self._made_in_forward(m):
            if any(True for _ in (*m.parameters(), *m.buffers())):
                raise NameError(
                    f"it makes a {type(m).__name__} with weights of its own in each call: make it in __init__"
                )
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except BaseException:  # raised again
            self.failed = self.failed or self.path_of_module(m)  # the innermost module sees the error first
            raise

    def _made_in_forward(self, m: nn.Module) -> bool:
        """True for `nn.ReLU()(x)`, a module without a state that the network does not hold."""
        if self._own is None or self._own[0] is not self.root:
            self._own = self.root, {id(module) for module in self.root.modules()}
        return id(m) not in self._own[1]


def _names(function: Callable[..., Any], count: int) -> list[str]:
    """Names of the first `count` arguments of a `forward` after self; those of `*args` are numbered."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind in positional][:count]
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "input")
    return names + [f"{rest}_{i}" for i in range(count - len(names))]
