"""Regional compilation: repeated parts of a network are compiled once."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass
from enum import Enum
from itertools import groupby
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

from compress.graph.layers import alive_after
from compress.graph.ops import node_kind, node_module

# Makes a compiled function of one whose first argument is a `Region`.
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]

# Attributes of modules that a training may change.
_STATES = (".training", ".enabled", ".calibrator", "._ready")

_APART = ("_parameters", "_buffers", "_modules", "name")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum)


def compile_regions(graph_module: fx.GraphModule, compiler: Compile | None = None) -> fx.GraphModule:
    """A second graph over the same modules whose parts are compiled, those that are alike together."""
    compiler = compiler or (lambda run: torch.compile(run, dynamic=False, options={"guard_filter_fn": few_guards}))
    parts = [_Part(graph_module, nodes) for nodes in _segments(graph_module)]
    often = Counter(part.kind for part in parts)
    functions: dict[Any, Callable[..., Any]] = {}
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(graph_module.graph, known))
    made = fx.GraphModule(graph_module, graph)
    for i, part in enumerate(_merged(graph_module, parts, often)):
        if part.kind not in functions:
            functions[part.kind] = compiler(part.function())
        made.add_submodule(f"regions.{i}", Region(part.modules, functions[part.kind]))
        _call(graph, f"regions.{i}", part, known)
    graph.lint()
    return fx.GraphModule(made, graph)


def few_guards(entries: Sequence[Any]) -> list[bool]:
    """Guards on the inputs and on what may change in a training."""
    # comparing settings and sizes of modules in each call costs the host 4 ms a pass of ResNet-50; these take 1 ms
    outside = torch.compiler.skip_guard_on_all_nn_modules_unsafe(entries)
    local = torch.compiler.skip_guard_on_globals_unsafe(entries)
    return [(a and b) or entry.name.endswith(_STATES) for entry, a, b in zip(entries, outside, local, strict=True)]


class Region(nn.Module):
    """A part of a network: `modules` m0, m1, ..., and `run`, called with it and shared by parts that are alike."""

    def __init__(self, modules: list[nn.Module], run: Callable[..., Any]) -> None:
        super().__init__()
        for i, module in enumerate(modules):
            self.add_module(f"m{i}", module)
        self.run = run

    def forward(self, *inputs: Any) -> object:
        return self.run(self, *inputs)


class _Part:
    """Neighbouring nodes of a graph as a function; `kind` is equal where operations, settings and sizes are."""

    def __init__(self, root: fx.GraphModule, nodes: list[fx.Node]) -> None:
        inside = set(nodes)
        self.nodes = nodes
        self.inputs = list(dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside))
        self.results = [node for node in nodes if any(user not in inside for user in node.users)]
        paths = list(dict.fromkeys(str(node.target) for node in nodes if node.op == "call_module"))
        self.modules = [root.get_submodule(path) for path in paths]
        self.graph = fx.Graph()
        names = {path: f"m{i}" for i, path in enumerate(paths)}
        copies: dict[fx.Node, fx.Node] = {n: self.graph.placeholder(f"x{i}") for i, n in enumerate(self.inputs)}
        for i, node in enumerate(nodes):
            target = names[str(node.target)] if node.op == "call_module" else node.target
            copy = self.graph.node_copy(node, copies.__getitem__)
            copy.target, copy.name = target, f"n{i}"
            copies[node] = copy
        found = [copies[node] for node in self.results]
        self.graph.output(found[0] if len(found) == 1 else tuple(found))
        sizes = tuple(str(node.meta.get("shape")) for node in (*self.inputs, *nodes))
        targets = tuple(node.target for node in nodes if node.op == "call_function")
        self.kind = (self.graph.python_code("self").src, targets, sizes, tuple(map(_settings, self.modules)))

    def function(self) -> Callable[..., Any]:
        holder = fx.GraphModule({f"m{i}": module for i, module in enumerate(self.modules)}, self.graph)
        return type(holder).forward


def _settings(module: nn.Module) -> tuple[Any, ...]:
    found: list[Any] = []
    for one in module.modules():
        own = {k: _value(v) for k, v in vars(one).items() if k not in _APART}
        found.append((type(one), tuple(sorted(own.items()))))
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return (*found, *((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in tensors))


def _value(value: Any) -> str:
    if isinstance(value, _PLAIN) or is_dataclass(value):
        return repr(value)
    if isinstance(value, (tuple, list, set)):
        return f"{type(value)}{[_value(one) for one in value]}"
    if isinstance(value, dict):
        return str({str(key): _value(one) for key, one in value.items()})
    return f"{type(value)} {id(value)}"


def _segments(graph_module: fx.GraphModule) -> Iterator[list[fx.Node]]:
    """Nodes that depend on the input, cut wherever one value alone is still to be read.

    Stochastic depth is left out; an empty list is in its place.
    """
    graph = graph_module.graph
    dependent: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "placeholder" or any(n in dependent for n in node.all_input_nodes):
            dependent[node] = None
    segment: list[fx.Node] = []
    for node, alive in alive_after(dependent):
        if node.op == "output":
            continue
        apart = _is_stochastic_depth(node)
        if node.op != "placeholder" and not apart:
            segment.append(node)
        if segment and (len(alive) == 1 or apart):
            yield segment
            segment = []
        if apart:
            yield []
    if segment:
        yield segment


def _is_stochastic_depth(node: fx.Node) -> bool:
    if node_kind(node) != "dropout":
        return False
    if node.op == "call_module":
        return not isinstance(node_module(node), _DropoutNd)
    return getattr(node.target, "__name__", "") == "stochastic_depth"


def _merged(root: fx.GraphModule, parts: list[_Part], often: Counter[Any]) -> Iterator[_Part]:
    """Yield the parts that have nodes; neighbours that occur once as one."""
    for once, group in groupby(parts, key=lambda part: len(part.nodes) and often[part.kind] == 1):
        if once:
            yield _Part(root, [node for part in group for node in part.nodes])
        else:
            yield from (part for part in group if part.nodes)


def _call(graph: fx.Graph, path: str, part: _Part, known: dict[fx.Node, fx.Node]) -> None:
    with graph.inserting_before(known[part.nodes[-1]]):
        called = graph.call_module(path, tuple(known[node] for node in part.inputs))
        if len(part.results) == 1:
            found = [called]
        else:
            found = [graph.call_function(operator.getitem, (called, i)) for i in range(len(part.results))]
    inside = {known[node] for node in part.nodes}
    for node, new in zip(part.results, found, strict=True):
        known[node].replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
        new.meta.update(node.meta)
    for node in reversed(part.nodes):
        graph.erase_node(known[node])
    known.update(zip(part.results, found, strict=True))
