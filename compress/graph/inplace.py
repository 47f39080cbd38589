"""Operations in place: later consumers of a changed tensor consume the operation that changed it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from compress.errors import ModelError
from compress.graph.compare import same_results
from compress.graph.inputs import Inputs, as_inputs, copies_of
from compress.graph.ops import node_module

_OVERWRITING: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    torch.relu_: torch.relu,
}


def follow_changes(graph_module: fx.GraphModule, example_inputs: Inputs) -> None:
    """Let every node consume a tensor from the last operation that changed it, as observed in a run; in place.

    Raises:
        ModelError: a tensor is changed through a view of it and read afterwards, which no edge can express.
    """
    inputs = as_inputs(example_inputs)
    watcher = _Watcher(graph_module)
    expected = watcher.on(inputs)
    for current, by in watcher.changes:
        for consumer in _consumers_after(current, by):
            consumer.replace_input_with(current, by)
    for placeholder in watcher.changed_inputs():  # the caller's own tensor
        consumers = list(placeholder.users)
        with graph_module.graph.inserting_after(placeholder):
            own = graph_module.graph.call_method("clone", (placeholder,))
        own.meta.update(placeholder.meta)
        for consumer in consumers:
            consumer.replace_input_with(placeholder, own)
    graph_module.graph.lint()
    graph_module.recompile()
    if watcher.stale and not same_results(expected, _Apart(graph_module).on(inputs)):
        names = ", ".join(dict.fromkeys(f"{node.name} ({node.target})" for node in watcher.stale))
        raise ModelError(
            f"{type(graph_module).__name__} changes a tensor in place through a view of it and reads it afterwards: "
            f"{names}; write y = f(y) in place of f_(y) there"
        )


def may_overwrite(node: fx.Node) -> bool:
    """True if an operation may overwrite its first argument."""
    if node.op == "call_module":
        return bool(getattr(node_module(node), "inplace", False))
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    return bool(node.kwargs.get("inplace")) or name.endswith("_") or node.target in _OVERWRITING


def preserve_input(owner: fx.GraphModule, node: fx.Node) -> None:
    """Replace an operation that overwrites its input by one that returns a new tensor; in place.

    `owner` holds the node's module, if it has one, whose `inplace` is switched off.
    """
    if node.op == "call_module":
        module = owner.get_submodule(str(node.target))
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
    elif node.op == "call_function":
        node.target = _OVERWRITING.get(node.target, node.target)
        if node.kwargs.get("inplace"):
            node.update_kwarg("inplace", False)
    elif node.op == "call_method":
        plain = str(node.target).removesuffix("_")
        if plain != node.target and not plain.endswith("_") and hasattr(Tensor, plain):
            node.target = plain


def _consumers_after(node: fx.Node, line: fx.Node) -> list[fx.Node]:
    return [user for user in node.users if line < user]


class _Runs(fx.Interpreter):
    def on(self, inputs: tuple[Tensor, ...]) -> object:
        with torch.inference_mode(False), torch.no_grad():
            self.copies = copies_of(inputs)
            return self.run(*self.copies)


class _Watcher(_Runs):
    """Notes the nodes that change their inputs.

    Attributes:
        changes: (the node whose tensor later nodes consume, the node that changed the tensor and returned it).
        stale: nodes that changed a tensor which is read afterwards, itself or through a view.
        first: the first node that returned the very tensor that a node returns.
        latest: the last node that changed the tensor of such a first node.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.changes: list[tuple[fx.Node, fx.Node]] = []
        self.stale: list[fx.Node] = []
        self.first: dict[fx.Node, fx.Node] = {}
        self.latest: dict[fx.Node, fx.Node] = {}

    def changed_inputs(self) -> list[fx.Node]:
        """Placeholders whose tensors were changed."""
        placeholders = [node for node in self.module.graph.nodes if node.op == "placeholder"]  # type: ignore[union-attr]
        return [node for node, copy in zip(placeholders, self.copies, strict=False) if _changes(copy)]

    def run_node(self, n: fx.Node) -> object:
        before = {m: _changes(value) for m in n.all_input_nodes if isinstance(value := self.env[m], Tensor)}
        result = super().run_node(n)
        for node in (m for m, count in before.items() if _changes(self.env[m]) != count):
            self._note(node, n, result)
        return result

    def _note(self, node: fx.Node, by: fx.Node, result: Any) -> None:
        memory = self.env[node].untyped_storage().data_ptr()
        held = [m for m, v in self.env.items() if isinstance(v, Tensor) and v.untyped_storage().data_ptr() == memory]
        if any(_consumers_after(m, by) for m in held):
            self.stale.append(by)
        if result is self.env[node]:
            first = self.first.get(node, node)
            self.changes.append((self.latest.get(first, first), by))
            self.first[by], self.latest[first] = first, by


class _Apart(_Runs):
    """Runs a graph with every node on copies of its own."""

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, super().fetch_args_kwargs_from_env(n))


def _changes(tensor: Tensor) -> int:
    """Number of changes in place of a tensor; 0 for one made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version
