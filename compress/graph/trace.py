"""Tracing: a model becomes a torch.fx graph; what cannot be traced becomes a leaf and is reported.

The example inputs decide control flow on sizes: each node is computed as it is recorded (`Values`), and control flow on
pixels stops the trace. Sizes that nothing asks for stay symbolic.

What a model does in training only is brought into the graph traced in evaluation mode: the graphs of both modes are
aligned, and a module that follows the mode (`InTraining`, `ByMode`) is put where they differ.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import keyword
import operator
import os
import random
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from difflib import SequenceMatcher
from opcode import opmap
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.proxy import Attribute, TraceError
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from compress.errors import CompressWarning, ModelError
from compress.graph.compare import (
    alone,
    check_stateless,
    equal,
    first_difference,
    fresh,
    own_copy,
    relative_error,
    restored,
    run_model,
    same_results,
)
from compress.graph.inputs import (
    Inputs,
    KeywordInputs,
    as_inputs,
    copies_of,
    device_of,
    each_input,
    hooked,
    named_tensors,
    run_with,
    shapes_text,
)
from compress.graph.modules import ByMode, InTraining
from compress.graph.ops import METHODS_OF_SHAPE, SHAPES, altered, node_kind, run_node, walk
from compress.graph.report import (
    ATTRIBUTES,
    GraphReport,
    Leaf,
    ReportedModule,
    attach_report,
    leaves_of,
    name_blocks,
    report_of,
)

_ASKS_FOR_CLASS = frozenset(opmap[name] for name in ("LOAD_ATTR", "LOAD_METHOD", "MATCH_CLASS") if name in opmap)


class _Known:
    """Conversions of a proxy whose value depends on sizes alone."""

    node: fx.Node
    tracer: Any

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the value for `x.__class__` and `case Tensor():`; C++ takes a proxy that says so for one."""
        frame = sys._getframe(1)
        return type(_seen(self) if frame.f_code.co_code[frame.f_lasti] in _ASKS_FOR_CLASS else self)

    __array_priority__ = 1000  # as torch's tensors: a number of numpy leaves `number * x` to the proxy

    def __len__(self) -> int:
        return len(self.tracer.values.sized(self.node))

    def __contains__(self, item: object) -> bool:
        return item in self._known()

    def __index__(self) -> int:
        return self._known().__index__()

    def __int__(self) -> int:
        return int(self._known())

    def __float__(self) -> float:
        return float(self._known())

    def __format__(self, spec: str) -> str:
        value = _seen(self)
        return str(self) if isinstance(value, (Tensor, fx.Proxy)) else format(value, spec)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self._known(), dtype)

    def _known(self) -> Any:
        return self.tracer.values.known(self.node)


class _KnownProxy(_Known, fx.Proxy):
    def __setitem__(self, key: Any, value: Any) -> None:
        # Everyone who holds the proxy must see the change, as with a tensor.
        self.node = _record_call(with_item, (self, key, value), {}).node

    def __getattr__(self, k: str) -> Any:
        _check_attribute(self, k)
        if k == "ndim" and isinstance(value := self.tracer.values.values.get(self.node), Tensor):
            return value.ndim  # the same for any batch; einops looks it up in a dictionary
        return (_KnownShape if k == "shape" else _KnownAttribute)(self, k)


class _KnownAttribute(_Known, Attribute):
    def __getattr__(self, k: str) -> Any:
        _check_attribute(self, k)
        if (self.attr, k) == ("device", "type"):  # an autocast asks for it; devices stay symbolic
            return self.tracer.values.sized(self.root.node).device.type
        return _KnownAttribute(self, k)


class _KnownItems(_KnownProxy):
    """A symbolic tuple or list."""


class _KnownShape(_KnownAttribute):
    """`x.shape`."""


Sequence.register(_KnownItems)  # for `case (height, width):`
Sequence.register(_KnownShape)


def _check_attribute(proxy: Any, name: str) -> None:
    value = proxy.tracer.values.values.get(proxy.node)
    lacks = value is not None and not hasattr(type(value), name) and name not in getattr(value, "__dict__", {})
    if name.startswith("__array_") or lacks:
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
        """The value of a node that depends on shapes alone."""
        value = self.values.get(node)
        if isinstance(value, Tensor) or node in self.from_pixels or node not in self.values:
            raise TraceError("symbolically traced variables cannot be used as inputs to control flow")
        return value


def _is_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target) in METHODS_OF_SHAPE or (node.target == "type" and len(node.args) == 1)
    return node.target in {getattr, len, torch.is_floating_point, torch.is_complex, torch.numel}


def with_item(tensor: Tensor, key: Any, value: Any) -> Tensor:
    result = tensor.clone()
    result[key] = value
    return result


@contextmanager
def answered(root: nn.Module, *, integers: bool = False) -> Iterator[None]:
    """Let builtins and functions of torch that refuse symbolic values take proxies; restores them afterwards.

    Functions are replaced in every loaded module but those of Python, torch and numpy: a model calls code of others,
    and other threads see no difference. Classes are replaced in the packages that define the classes of `root` alone:
    in other code `origin is type` would be False.
    """
    loaded = {name: vars(module) for name, module in list(sys.modules.items()) if isinstance(module, ModuleType)}
    own = sys.stdlib_module_names | {"torch", "numpy", __name__.partition(".")[0]}
    kept = {id(place) for name, place in loaded.items() if name.partition(".")[0] in own}  # also under other names
    packages = {type(module).__module__.partition(".")[0] for module in root.modules()}
    classes = {"type": _Type()} | ({"int": _Int()} if integers else {})
    changed = [
        (place, key, function)
        for name, place in loaded.items()
        if id(place) not in kept
        for key, function in (_BUILTINS | (classes if name.partition(".")[0] in packages else {})).items()
        if key not in place
    ]
    tensors = {name: _recorded(name) for name in _MAKER_NAMES} | {name: _Limits(name) for name in ("finfo", "iinfo")}
    tensors |= {name: _converted(name) for name in ("as_tensor", "asarray")}
    tensors |= {name: _unchecked(name) for name in _CHECKS} | {"is_tensor": lambda value: _is_instance(value, Tensor)}
    scripted, compiled = torch.jit.isinstance, torch.jit.ScriptFunction.__call__
    changed += [(vars(torch), name, function) for name, function in tensors.items()]
    imported = {id(getattr(torch, name)): function for name, function in tensors.items()}  # `from torch import zeros`
    changed += [
        (place, key, imported[id(value)])
        for place in loaded.values()
        if id(place) not in kept
        for key, value in list(place.items())
        if id(value) in imported
    ]
    changed += [(place, name, _of_masks(place[name], symbolic)) for place, name, symbolic in _OF_MASKS]
    changed.append((vars(torch.jit), "isinstance", lambda value, kind: scripted(_seen(value), kind)))
    before = [(place, name, place[name]) for place, name, _ in changed if name in place]

    def called(function: Any, *args: Any, **kwargs: Any) -> object:
        symbolic = any(isinstance(value, fx.Proxy) for value in tree_leaves((args, kwargs)))
        return function._torchdynamo_inline(*args, **kwargs) if symbolic else compiled(function, *args, **kwargs)

    moved = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:  # the example is where the modules are
        symbolic = any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values()))
        return module if symbolic else moved(module, *args, **kwargs)

    try:
        nn.Module.to = to  # type: ignore[method-assign, assignment]
        torch.jit.ScriptFunction.__call__ = called  # type: ignore[method-assign, assignment]
        for place, name, function in changed:
            place[name] = function
        yield
    finally:
        nn.Module.to = moved  # type: ignore[method-assign]
        torch.jit.ScriptFunction.__call__ = compiled  # type: ignore[method-assign]
        for place, name, _ in changed:
            place.pop(name, None)  # a module under two names is changed twice
        for place, name, function in before:
            place[name] = function


_UNBOUND = re.compile(r"descriptor '(\w+)' for 'torch._C.TensorBase' objects doesn't apply")


@contextmanager
def _unbound(name: str) -> Iterator[None]:
    """Let `torch.Tensor.relu(x)` take symbolic values."""
    function = getattr(Tensor, name)

    @functools.wraps(function)
    def call(x: Any, *args: Any, **kwargs: Any) -> object:
        return (getattr(x, name) if isinstance(x, fx.Proxy) else functools.partial(function, x))(*args, **kwargs)

    setattr(Tensor, name, call)
    try:
        yield
    finally:
        delattr(Tensor, name)  # it is the base class's


def _recorded(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(torch, name)

    @functools.wraps(function)
    def recorded(*args: Any, **kwargs: Any) -> object:
        symbolic = any(isinstance(value, fx.Proxy) for value in tree_leaves((args, kwargs)))
        if not symbolic:
            return function(*args, **kwargs)
        return (
            _record_call(new_zeros, args, kwargs)
            if name == "zeros"
            else _record_call(new_tensor, (name, *args), kwargs)
        )

    return recorded


def _converted(name: str) -> Callable[..., Any]:
    """`torch.as_tensor`, or `asarray`, which leaves a symbolic tensor as it is, but for its type."""
    recorded = _recorded(name)

    def convert(data: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> object:
        if isinstance(data, fx.Proxy) and isinstance(_seen(data), Tensor):
            return data if dtype is None else data.to(dtype)
        return recorded(data, *args, dtype=dtype, **kwargs)

    return convert


# What torch's transformers do with masks, and the result for symbolic ones: they stay as they are, since
# `open_attention` takes each type, and a causal one is not looked for, which would save torch time.
_OF_MASKS: tuple[tuple[dict[str, Any], str, Callable[..., Any]], ...] = (
    (vars(F), "_canonical_mask", lambda mask, **_: mask),
    (vars(F), "_none_or_dtype", lambda _: None),
    (vars(nn.modules.transformer), "_detect_is_causal_mask", lambda _mask, is_causal, _size: is_causal is True),
)


def _of_masks(function: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> object:
        known = not any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values()))
        return (function if known else symbolic)(*args, **kwargs)

    return call


class _Limits:
    """`torch.finfo` or `torch.iinfo`, which also take the type of a symbolic tensor."""

    def __init__(self, name: str) -> None:
        self._kind = getattr(torch, name)

    def __call__(self, *dtype: Any) -> torch.finfo | torch.iinfo:
        return self._kind(*(value._known() if isinstance(value, _Known) else value for value in dtype))

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


def _record_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Proxy:
    """Record a node that calls `function`, also when unpickling traces the graph over."""
    tracer = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, fx.Proxy)).tracer
    made: fx.Proxy = tracer.create_proxy("call_function", function, args, kwargs)
    made.node.meta["is_wrapped"] = True
    return made


def _seen(value: Any) -> object:
    """The value of a symbolic value where it is known; C++ takes a proxy that calls itself a tensor for one."""
    found = value.tracer.values.values.get(value.node) if isinstance(value, _Known) else None
    return value if found is None else found


def _is_instance(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) or isinstance(_seen(value), kind)


class _Class:
    """A class of Python whose calls take symbolic values."""

    kind: type

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self.kind)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self.kind)

    def __getattr__(self, name: str) -> object:
        return getattr(self.kind, name)


class _Type(_Class):
    kind = type

    def __call__(self, *args: Any, **kwargs: Any) -> type:
        return type(_seen(args[0])) if len(args) == 1 else type(*args, **kwargs)


class _Int(_Class):
    """`int`, which leaves symbolic sizes as they are; where torch and numpy ask for a type, they do not know it."""

    kind = int

    def __call__(self, *args: Any, **kwargs: Any) -> int | fx.Proxy:
        found = _whole(args[0]) if len(args) == 1 and isinstance(args[0], fx.Proxy) else None
        return int(*args, **kwargs) if found is None else found


def _whole(value: Any) -> Any:
    """A size by operations of integers, such as `x.shape[0] // 4` for `x.shape[0] / 4`; None if it is no whole one."""
    seen = _seen(value)
    if isinstance(seen, int):
        return value
    if not isinstance(seen, float) or not seen.is_integer():
        return None
    if not isinstance(value, fx.Proxy):
        return int(seen)
    node = value.node
    if node.op != "call_function" or node.target not in (operator.truediv, operator.mul):
        return None
    exact = operator.floordiv if node.target is operator.truediv else operator.mul
    parts = [_whole(value.tracer.proxy(arg) if isinstance(arg, fx.Node) else arg) for arg in node.args]
    return None if any(part is None for part in parts) else exact(*parts)


_BUILTINS: dict[str, Any] = {
    "len": lambda x: x.size(0) if isinstance(_seen(x), Tensor) and isinstance(x, fx.Proxy) else len(x),
    "isinstance": _is_instance,
    "callable": lambda x: callable(x) and not isinstance(x, fx.Proxy),
}
_CHECKS = ("_check", "_check_with", "_check_value", "_check_tensor_all", "_check_tensor_all_with")
_MAKER_NAMES = ("zeros", "ones", "full", "tensor")


_SAME = 1e-4
LEFT_OUT = (
    "in training the model does more than its graph, which was traced in evaluation mode (auxiliary outputs, a "
    "branch under `if self.training:`, or buffers that it updates): training the quantized network leaves that out"
)


@contextlib.contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in training mode, BatchNorm in evaluation mode; restored afterwards."""
    values = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    with restored(model):  # modes are attributes
        model.train()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        try:
            yield
        finally:
            for parameter, value in values:
                if not equal(parameter, value):  # an averaged codebook or teacher, which training writes
                    parameter.data.copy_(value)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def same_in_training(model: nn.Module, graph_module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> bool:
    """True if graph and model agree in training mode: in results, random numbers, and the tensors that they write."""
    before = {name: tensor.detach().clone() for name, tensor in _tensors(model)}
    results = []
    for network in (model, graph_module):
        with training_mode(network), torch.no_grad():
            torch.manual_seed(0)  # the numbers of numpy and Python go on: a branch that they decide is seen
            try:
                result = run_with(network.forward, copies_of(inputs))
            except Exception:  # a model can fail in any way
                return False
            after = dict(_tensors(network))
            if network is model:
                written = [name for name, value in before.items() if not equal(value, after[name])]
            results.append((result, [after[name].clone() for name in written if name in after]))
    names = [[name for name, _ in named_tensors(result)] for result, _ in results]
    return names[0] == names[1] and relative_error(*results) <= _SAME


def add_training_parts(graph_module: fx.GraphModule, training: fx.Graph, root: nn.Module) -> bool:
    """Bring the parts that only the graph traced in training mode has into the one traced in evaluation; in place.

    False if a part cannot be brought in: it has parameters of its own, or the results have another structure.
    """
    twins = _aligned(training, graph_module.graph)
    order = {node: i for i, node in enumerate(training.nodes)}
    arguments = {}
    for node, twin in twins.items():
        own, theirs = tree_flatten((twin.args, twin.kwargs)), tree_flatten((node.args, node.kwargs))
        if own[1] != theirs[1]:
            return False
        if node_kind(twin) != "batch_norm":  # always as in evaluation
            arguments[twin] = (list(zip(own[0], theirs[0], strict=True)), own[1])
    nodes = [(a, b) for pairs, _ in arguments.values() for a, b in pairs if isinstance(b, fx.Node)]
    parts: dict[tuple[Any, Any], fx.Node] = {}
    for mine, other in sorted({pair for pair in nodes if twins.get(pair[1]) is not pair[0]}, key=lambda p: order[p[1]]):
        part = _part(other, mine, twins, root) if isinstance(mine, fx.Node) else None
        if part is None:
            return False
        following = next(twins[node] for node in training.nodes if node in twins and order[node] > order[other])
        with graph_module.graph.inserting_before(following):  # random numbers are drawn in the model's order
            parts[mine, other] = _call(graph_module, "training_only", InTraining(part[0]), part[1])
    for twin, (pairs, structure) in arguments.items():
        with graph_module.graph.inserting_before(twin):
            values = [_argument(graph_module, parts, mine, other) for mine, other in pairs]
        twin.args, twin.kwargs = tree_unflatten(values, structure)
    graph_module.graph.lint()
    graph_module.recompile()
    return True


def _argument(graph_module: fx.GraphModule, parts: dict[tuple[Any, Any], fx.Node], mine: Any, other: Any) -> object:
    if isinstance(mine, fx.Node) or isinstance(other, fx.Node):
        return parts.get((mine, other), mine)
    if mine == other and type(mine) is type(other):
        return mine
    return _call(graph_module, "mode", ByMode(other, mine), ())


def _call(graph_module: fx.GraphModule, name: str, module: nn.Module, args: tuple[fx.Node, ...]) -> fx.Node:
    path = next(p for i in range(10**6) if not hasattr(graph_module, p := f"{name}_{i}"))
    graph_module.add_submodule(path, module.eval())
    return graph_module.graph.call_module(path, args)


def _aligned(training: fx.Graph, evaluation: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The node of the second graph for each of the first that it shares, in order."""
    left, right = list(training.nodes), list(evaluation.nodes)
    keys = [[f"{node.op} {node.target}" for node in nodes] for nodes in (left, right)]
    blocks = SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()
    return {left[b.a + i]: right[b.b + i] for b in blocks for i in range(b.size)}


def _part(
    result: fx.Node, instead_of: fx.Node, twins: dict[fx.Node, fx.Node], root: nn.Module
) -> tuple[fx.GraphModule, tuple[fx.Node, ...]] | None:
    """The nodes of a training graph that only `result` needs, as a module, and its inputs in the evaluation graph."""
    inside = set(walk([result], lambda node: () if node in twins else node.all_input_nodes)).difference(twins)
    nodes = list(result.graph.nodes)
    for node in nodes[: nodes.index(result)]:  # operations in place, whose results nobody reads
        if node not in twins and not node.users and inside.intersection(node.all_input_nodes):
            inside.add(node)
    ordered = [node for node in nodes if node in inside]
    if not inside or any(not _stateless(node, root) for node in ordered):
        return None
    sources = dict.fromkeys(twins[n] for node in ordered for n in node.all_input_nodes if n in twins)
    inputs = (instead_of, *(n for n in sources if n is not instead_of))
    graph = fx.Graph()
    holders = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(inputs)}
    copied: dict[fx.Node, fx.Node] = {}
    for node in ordered:
        copied[node] = graph.node_copy(node, lambda n: copied[n] if n in copied else holders[twins[n]])
    graph.output(copied[result])
    return fx.GraphModule(root, graph), inputs


def _stateless(node: fx.Node, root: nn.Module) -> bool:
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return not any(True for _ in (*module.parameters(), *module.buffers()))
    return node.op in {"call_function", "call_method"}


# Modules of torch.nn that are traced into, because they are networks and not layers.
_NETWORKS = (
    *(nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
)


class Tracer(fx.Tracer):
    """fx's tracer with leaves of our choice.

    Attributes:
        inputs: the example; None keeps the signature of `forward`.
        values: the values of all nodes, by which it decides control flow on sizes; None traces without them.
        proxy_buffer_attributes: True makes buffers and new tensors symbolic, which `buffer.expand(x.shape[0], -1)` and
            `torch.ones(1, 4).expand(x.shape[0], -1)` need.
        failed: path of the innermost module in which tracing failed.
    """

    def __init__(  # no argument when pickle builds one
        self,
        leaves: Iterable[str] = (),
        inputs: tuple[Tensor, ...] | None = None,
        values: Values | None = None,
        *,
        buffers: bool = True,
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
        with restored(root), _Factories(self) if self.proxy_buffer_attributes else contextlib.nullcontext():
            return super().trace(root, concrete_args)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Make an argument for each input of the example; all others keep their defaults."""
        if self.inputs is None:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        by_keyword = isinstance(self.inputs, KeywordInputs)
        names = self.inputs.names if isinstance(self.inputs, KeywordInputs) else _names(root_fn, len(self.inputs))
        made = [self.create_proxy("placeholder", name, (), {}) for name in names]

        def called(root: nn.Module, *inputs: Any) -> object:
            return root_fn(root, **dict(zip(names, inputs, strict=True))) if by_keyword else root_fn(root, *inputs)

        called.__annotations__ = {}  # fx would write them into its code, and torch 2.11 cannot pickle texts there
        return called, [self.root, *made]

    def create_arg(self, a: Any) -> fx.node.Argument:
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
        node = super().create_node(*args, **kwargs)
        if self.values is not None:
            self.values.add(node)
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        if self.values is None:
            return super().proxy(node)
        items = isinstance(self.values.values.get(node), (tuple, list))
        return (_KnownItems if items else _KnownProxy)(node, self)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> object:
        """An attribute of a module: symbolic, but not while values are computed."""
        if self._elsewhere() or (self.values is not None and self.values.busy):
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def _elsewhere(self) -> bool:
        """True if another thread has called a method that fx replaced."""
        return threading.get_ident() != self._thread

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Decide an `if` by the value of the example, if that follows from sizes alone."""
        return super().to_bool(obj) if self.values is None else bool(self.values.known(obj.node))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        proxy: Any = obj
        if self.values is None:
            return super().iter(obj)
        given = obj.node.op == "placeholder"  # an input: the size of its first axis, the batch, differs between calls
        value = self.values.known(obj.node) if given else self.values.sized(obj.node)
        return iter([proxy[i] for i in range(len(value))])

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            module_qualified_name in self.leaves
            or getattr(m, "is_quantizer", False)
            or (type(m) not in _NETWORKS and super().is_leaf_module(m, module_qualified_name))
        )

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> object:
        """Enter a module or record its call, and note where that fails."""
        if self._elsewhere() or (self.values is not None and self.values.busy):
            return forward(*args, **kwargs)
        if self._made_in_forward(m):
            if any(self._made_in_forward(part) and (part._parameters or part._buffers) for part in m.modules()):
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
        """True for `nn.ReLU()(x)` and `self.layers[:2](x)`, a module that the network does not hold."""
        if self._own is None or self._own[0] is not self.root:
            self._own = self.root, {id(module) for module in self.root.modules()}
        return id(m) not in self._own[1]


class _Factories(TorchFunctionMode):
    """Makes the tensors that a forward creates nodes of the graph."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if func in _MAKERS and not (self.tracer.values is not None and self.tracer.values.busy):
            return self.tracer.create_proxy("call_function", func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


_MAKERS = frozenset(
    {
        *(torch.ones, torch.zeros, torch.full, torch.empty, torch.ones_like, torch.zeros_like, torch.full_like),
        *(torch.arange, torch.linspace, torch.eye, torch.tensor, torch.as_tensor),
    }
)


def _names(function: Callable[..., Any], count: int) -> list[str]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    names = [p.name for p in parameters if p.kind in positional][:count]
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), "input")
    return names + [f"{rest}_{i}" for i in range(count - len(names))]


_LIBRARIES = frozenset({"torch", "transformers", "timm", "accelerate", "peft"})


def check_module(model: object) -> None:
    """Refuse (ModelError) anything that is not a module, and weights without a shape or on the meta device."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"the model is a {type(model).__name__}: it must be a torch.nn.Module")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(f"{name} has no shape yet (a lazy module): run the model once before")
        if tensor.is_meta:
            raise ModelError(
                f"{name} is on the meta device, where tensors have no values: give the model its weights first "
                "(model.to_empty(device='cpu') and model.load_state_dict)"
            )


def unwrapped(model: nn.Module) -> str:
    """Which module to give instead of one that torch.fx cannot enter; "" for any other."""
    if isinstance(model, torch.jit.ScriptModule):
        return "the module that it was scripted or traced from"
    if "_original_forward" in vars(model):  # accelerate's mixed precision
        return "accelerator.unwrap_model(model, keep_fp32_wrapper=False), and prepare what is made of it"
    return "its ._orig_mod, and compile what is made of it" if hasattr(model, "_orig_mod") else ""


class _Attention(nn.Module):
    """Holds an attention that is the whole model, so that it is a layer of the graph."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.attention = attention

    @functools.wraps(nn.MultiheadAttention.forward)
    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:  # type: ignore[override]
        return self.attention(*inputs, **named)


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Restore the generators of torch, numpy and Python, from which a model's forward may draw."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices), contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        yield


@alone
@_random_numbers_kept()
def trace(model: nn.Module, example_inputs: Inputs, *, leaves: Iterable[str] = ()) -> fx.GraphModule:
    """Trace `model` in evaluation mode into a graph whose nodes carry `meta["shape"]` and `meta["dtype"]`.

    The graph module holds copies of the submodules under their own names. The example inputs decide Python code that
    depends on sizes. A submodule whose code depends on values becomes a leaf, one opaque node (`leaves_of`). An
    autocast inside `forward` is not part of the graph; put it around the calls.

    Args:
        model: any module that returns tensors.
        example_inputs: its input, or inputs in order; a batch of two or more shows the batch dimension better.
        leaves: paths of submodules that become leaves.

    Raises:
        ModelError: the model fails on its inputs, gives other results in its second call, fx cannot trace its own
            forward, or the graph computes something else.

    Examples:
        >>> graph = compress.trace(model, images).graph
        >>> [tuple(node.meta["shape"]) for node in graph.nodes if node.name in ("input_1", "_0")]
        [(16, 3, 16, 16), (16, 8, 14, 14)]
    """
    check_module(model)
    inside = unwrapped(model)
    if inside:
        raise ModelError(f"the model is a {type(model).__name__}, which cannot be traced: give {inside}")
    inputs = as_inputs(example_inputs)
    if isinstance(model, fx.GraphModule) and not tuple(leaves):
        graph_module = ReportedModule.of(copy.deepcopy(model)).eval()
        propagate_shapes(graph_module, inputs)
        return graph_module
    _check_names(model)
    model = own_copy(_Attention(model) if type(model) is nn.MultiheadAttention else model)
    reference = _results_and_hooks(model, inputs)
    _check_padding(model, inputs, reference)
    models = [model]
    if check_stateless(model, inputs):
        models.append(fresh(model))
        run_model(models[1], inputs)  # as its first call leaves it, with a table of positions or a mask of that size
    modules = dict(model.named_modules())
    kept = {path: unwrapped(module) for path, module in modules.items()}
    asked = {path: f"it cannot be traced: give {instead}" for path, instead in kept.items() if instead}
    asked |= dict.fromkeys(leaves, "asked for")
    unknown = [path for path in asked if path not in modules]
    if unknown:
        raise ModelError(f"leaves names modules that the model does not have: {', '.join(unknown)}; give their paths")

    def checked(found: fx.GraphModule) -> fx.GraphModule:
        result = propagate_shapes(found, inputs)
        _check_equal(model, found, inputs, reference, result)
        return found

    return _with_training(model, _graph_of(models, inputs, asked, checked), inputs)


def _with_training(model: nn.Module, graph_module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    """The graph with what the model does in training only, or with a note that it lacks that."""
    if same_in_training(model, graph_module, inputs):
        return graph_module
    leaves = {leaf.path: leaf.reason for leaf in leaves_of(graph_module)}
    for concrete, buffers in itertools.product((False, True), repeat=2):
        values = Values(model, inputs) if concrete else None
        with contextlib.suppress(Exception):
            with training_mode(model), answered(model) if concrete else contextlib.nullcontext():
                training = Tracer(leaves, inputs, values, buffers=buffers).trace(model)
            whole = copy.deepcopy(graph_module)
            if add_training_parts(whole, training, model) and same_in_training(model, whole, inputs):
                propagate_shapes(whole, inputs)
                return whole
    attach_report(graph_module, replace(report_of(graph_module), training=LEFT_OUT))
    return graph_module


def _check_names(model: nn.Module) -> None:
    parts = (*model._modules, *model._parameters, *model._buffers)
    taken = [name for name in parts if name in ATTRIBUTES or hasattr(fx.GraphModule, name)]
    if taken:
        raise ModelError(
            f"{type(model).__name__} has a part {taken[0]!r}, a name that graph modules use themselves: rename it"
        )


class _Watched:
    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook, self.returned = hook, False

    def __deepcopy__(self, memo: object) -> _Watched:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> object:
        result = self.hook(*args, **kwargs)
        self.returned |= result is not None
        return result


def _block_hooks(model: nn.Module) -> Iterator[tuple[str, dict[int, Any], int]]:
    """Yield path, table and key of each hook of a user on a block."""
    for path, module in model.named_modules():
        if not (path and Tracer().is_leaf_module(module, path)):
            backward = (module._backward_hooks, module._backward_pre_hooks)
            for table in (module._forward_hooks, module._forward_pre_hooks, *backward):
                yield from ((path or "the model", table, key) for key in list(table) if not _of_library(table[key]))


def _results_and_hooks(model: nn.Module, inputs: tuple[Tensor, ...]) -> object:
    """The results of a model's first call; hooks on its blocks that only look are taken off, with a warning."""
    found = list(_block_hooks(model))
    for _, table, key in found:
        table[key] = _Watched(table[key])
    reference = run_model(fresh(model), inputs)
    looking = [(path, table, key, table.pop(key)) for path, table, key in found if not table[key].returned]
    for _, table, key in found:
        if key in table:
            table[key] = table[key].hook
    lost = [path for path, *_ in looking]
    if lost and not same_results(reference, run_model(fresh(model), inputs)):
        lost = []  # they change values in place
        for _, table, key, watched in looking:
            table[key] = watched.hook
    if lost:
        warnings.warn(
            f"hooks on {', '.join(dict.fromkeys(lost))} are not called in the quantized network: a traced graph calls "
            "layers and not the blocks around them; register them on layers of the result, such as the last of a block",
            CompressWarning,
            stacklevel=2,
        )
    return reference


def _check_padding(model: nn.Module, inputs: tuple[Tensor, ...], reference: object) -> None:
    # Warns if the results depend on tokens that are padding.
    padded = any(isinstance(m, nn.TransformerEncoder) and m.use_nested_tensor for m in model.modules())
    if padded and not same_results(reference, run_model(fresh(model), inputs, fast=True)):
        warnings.warn(
            f"the results of {type(model).__name__} depend on tokens that src_key_padding_mask hides: in evaluation "
            "torch makes them zeros where it takes its fast path, and the quantized network computes them, as torch "
            "does in training; leave them out of a mean or a loss",
            CompressWarning,
            stacklevel=3,
        )


def _of_library(hook: object) -> bool:
    return str(getattr(hook, "__module__", type(hook).__module__)).partition(".")[0] in _LIBRARIES


def _graph_of(
    models: Sequence[nn.Module],
    inputs: tuple[Tensor, ...],
    asked: dict[str, str],
    checked: Callable[[fx.GraphModule], fx.GraphModule],
) -> fx.GraphModule:
    """Trace without values; if that fails, with known shapes; if that fails too, with untraceable modules as leaves."""
    # `models` are the model before its first call and, if that call sets attributes on it, the model after the call.
    # Such attributes may hold values of one input size, so tracing without values begins with the model before it.
    # `checked` raises where a graph computes something else than the model.
    both = (False, True)
    attempts = [functools.partial(_without_values, m, inputs, asked, buffers=b) for m in models for b in both]
    unshaped = len(attempts)
    for model, buffers, integers in itertools.product(models[::-1], both, both):
        attempts.append(functools.partial(_with_shapes, model, inputs, asked, buffers=buffers, integers=integers))
    errors: list[Exception] = []
    for attempt in attempts:
        try:
            return checked(attempt())
        except _DrawsError:
            raise
        except Exception as error:  # the model's code meets proxies, and can fail in any way
            errors.append(error)
    try:
        return checked(_with_leaves(models[-1], inputs, asked, concrete=False))
    except ModelError:
        shaped = errors[unshaped]
        if isinstance(shaped, ModelError):
            raise shaped from shaped.__cause__  # tracing with shapes got further, so its reason is the better one
        raise


def _without_values(
    model: nn.Module, inputs: tuple[Tensor, ...], asked: dict[str, str], *, buffers: bool
) -> fx.GraphModule:
    return _graph_module(model, Tracer(asked, inputs, buffers=buffers).trace(model), asked)


def _with_shapes(
    model: nn.Module, inputs: tuple[Tensor, ...], asked: dict[str, str], *, buffers: bool, integers: bool
) -> fx.GraphModule:
    """Trace with known shapes; an error of the graph at another batch size is raised."""
    grown = each_input(lambda x: torch.cat([x, x[:1]]) if x.dim() else x, inputs)
    with answered(model, integers=integers):
        graph_module = _with_leaves(model, inputs, asked, concrete=True, buffers=buffers)
    with torch.no_grad():
        takes_more = False  # some models, such as vision towers that pack their images, take this batch size alone
        try:
            reference = run_with(fresh(model), copies_of(grown))
            takes_more = True
            result = graph_module.forward(*copies_of(grown))  # calling the module would print the error
            failed = "" if same_results(reference, result) else "computes something else"
        except Exception as error:  # as above
            failed = f"fails ({error})" if takes_more else ""
    if failed and same_results(run_model(model, inputs), run_model(graph_module, inputs)):
        raise ModelError(
            f"{type(model).__name__} makes a plain number of its batch size, so that its graph {failed} for another "
            "one: write its sizes without `if`, range(), int(), math and numpy, or write -1 for the batch"
        )
    return graph_module


def _by_position(graph_module: fx.GraphModule) -> None:
    for node in graph_module.graph.nodes:
        if node.op == "call_module" and node.kwargs:
            with contextlib.suppress(TypeError, ValueError):  # no signature, or not this one
                forward = graph_module.get_submodule(str(node.target)).forward
                bound = inspect.signature(forward).bind(*node.args, **node.kwargs)
                node.args, node.kwargs = bound.args, bound.kwargs


def _spelled(path: str) -> str:
    """A path without the words of Python, such as `class` in a ModuleDict, which fx cannot write into its code."""
    return ".".join(f"{part}_" if keyword.iskeyword(part) else part for part in path.split("."))


@contextlib.contextmanager
def _spelled_names(model: nn.Module, graph: fx.Graph) -> Iterator[None]:
    """Rename modules and tensors that a graph reads so that fx can write them; the model has both names meanwhile."""
    named = [node for node in graph.nodes if node.op in {"call_module", "get_attr"}]
    renamed = {str(node.target) for node in named if _spelled(str(node.target)) != node.target}
    tables = [table for m in model.modules() for table in (m._modules, m._parameters, m._buffers)] if renamed else []
    added: list[tuple[dict[str, Any], str]] = [(t, name) for t in tables for name in t if keyword.iskeyword(name)]
    for table, name in added:
        if f"{name}_" in table:
            raise ModelError(
                f"the model has modules or tensors named {name} and {name}_: {name} is a word of Python, which "
                f"torch.fx cannot write, and the traced network calls it {name}_; rename one of them"
            )
    for node in named:
        node.target = _spelled(str(node.target))
    if renamed:
        warnings.warn(
            f"{', '.join(sorted(renamed)[:3])}: words of Python have an underscore after them in the traced network, "
            "in its weights' names too",
            CompressWarning,
            stacklevel=2,
        )
    for table, name in added:
        table[f"{name}_"] = table[name]
    try:
        yield
    finally:
        for table, name in added:
            del table[f"{name}_"]


def _graph_module(model: nn.Module, graph: fx.Graph, leaves: dict[str, str]) -> fx.GraphModule:
    with _spelled_names(model, graph):
        graph_module = ReportedModule(model, graph, class_name=type(model).__name__).eval()
        leaves = {_spelled(path): reason for path, reason in leaves.items()}
        kinds = {path: type(model.get_submodule(path)).__name__ for path in leaves}
    name_blocks(graph_module)
    _by_position(graph_module)
    for node in reversed(list(graph_module.graph.nodes)):
        if not node.users and node_kind(node) in SHAPES - {"assert"}:
            graph_module.graph.erase_node(node)  # it decided a branch while tracing and has no other use
    graph_module.recompile()
    used = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    found = tuple(Leaf(path=p, kind=kinds[p], reason=r) for p, r in leaves.items() if p in used)
    attach_report(graph_module, GraphReport(leaves=found))
    return graph_module


# What to do, by a part of the message of torch or Python; the first is of a proxy as one of several sizes.
_ADVICE = {
    "takes 1 positional argument but": "give the sizes as one tuple, or register the tensor as a buffer",
    "Proxy' object has no attribute": "write x.shape for x.__getattribute__('shape')",
    "<class 'generator'>": "return a list of what it yields",
}


def _with_leaves(
    model: nn.Module, inputs: tuple[Tensor, ...], leaves: dict[str, str], *, concrete: bool, buffers: bool = False
) -> fx.GraphModule:
    """Trace until nothing fails, each time with the module that failed last as one more leaf."""
    leaves = dict(leaves)
    with contextlib.ExitStack() as stack:
        while True:
            tracer = Tracer(leaves, inputs, Values(model, inputs) if concrete else None, buffers=buffers)
            try:
                graph = tracer.trace(model)
            except Exception as error:  # as above
                method = _UNBOUND.match(str(error)) if concrete else None
                if method and method[1] not in vars(Tensor):
                    stack.enter_context(_unbound(method[1]))
                    continue
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                if not tracer.failed or tracer.failed in leaves:
                    usual = "move the part that depends on values into a submodule, which then becomes a leaf"
                    advice = next((advice for part, advice in _ADVICE.items() if part in reason), usual)
                    raise ModelError(
                        f"torch.fx cannot trace {type(model).__name__}.forward itself ({reason}{_line_of(error)}); "
                        f"{advice}{_parts_of(model)}"
                    ) from error
                leaves[tracer.failed] = reason
            else:
                return _graph_module(model, graph, leaves)


def _parts_of(model: nn.Module) -> str:
    """The networks that a model is made of, which may be traced alone."""
    networks = [name for name, child in model.named_children() if next(child.children(), None) is not None]
    return f", or take a part of the model alone: {', '.join(networks[:6])}" if networks else ""


def _line_of(error: Exception) -> str:
    """The line of the model's own code that raised an error; "" if none did."""
    libraries = tuple(f"{Path(module.__file__ or '').parent}{os.sep}" for module in (torch, sys.modules["compress"]))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith((*libraries, "<"))]
    return f", at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


class _DrawsError(ModelError):
    """A network that is random in evaluation, however it is traced."""


class _Shapes(fx.Interpreter):
    def run_node(self, n: fx.Node) -> object:
        before = torch.random.get_rng_state()
        result = super().run_node(n)
        n.meta["random"] = not torch.equal(before, torch.random.get_rng_state())
        n.meta["shape"] = tuple(result.shape) if isinstance(result, Tensor) else None
        n.meta["dtype"] = result.dtype if isinstance(result, Tensor) else None
        return result


def propagate_shapes(graph_module: fx.GraphModule, example_inputs: Inputs) -> object:
    """Run once, and set `meta["shape"]` (None if the value is no tensor) and `meta["dtype"]` of every node."""
    training = graph_module.training
    graph_module.eval()
    try:
        with torch.no_grad():
            return _Shapes(graph_module).run(*copies_of(as_inputs(example_inputs)))
    except Exception as error:  # a model can fail in any way
        raise ModelError(f"the model fails on inputs of {shapes_text(as_inputs(example_inputs))}: {error}") from error
    finally:
        graph_module.train(training)


def _in_autocast(model: nn.Module, inputs: tuple[Tensor, ...]) -> bool:
    """True if a module of the model runs within an autocast that the model's own code enters."""
    found: list[bool] = []
    kind = device_of(model).type
    with hooked(dict(model.named_modules()), lambda *_: found.append(torch.is_autocast_enabled(kind))):
        run_model(model, inputs)
    return any(found)


def _check_equal(
    model: nn.Module, graph_module: fx.GraphModule, inputs: tuple[Tensor, ...], reference: Any, result: Any
) -> None:
    for node in graph_module.graph.nodes:
        if node.meta["random"]:  # a difference is no measure: a rare draw changes nothing most of the time
            raise _DrawsError(
                f"{type(model).__name__} draws random numbers in evaluation too, at {node.name}, which no engine "
                "repeats: give F.dropout training=self.training, and make nn.Dropout in __init__, for eval() to reach"
            )
    if same_results(reference, result):
        return
    place = first_difference(model, graph_module, inputs)
    own = altered(model)
    raise ModelError(
        f"the traced graph of {type(model).__name__} computes something else than the model"
        f"{f', first at {place}' if place else ''}: "
        + (
            f"the model {own}; or wrap it in a module that does the same"
            if own
            else "its forward computes within an autocast, which is no part of a graph: take that out, and put one "
            "around the calls of the result"
            if _in_autocast(model, inputs)
            else "its forward depends on values, on random numbers or on buffers that it writes, or reads a tensor by "
            "another name after += changed it; make that part a leaf"
        )
    )
