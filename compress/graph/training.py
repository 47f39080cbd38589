"""Regularization kept alive: what a model does in training only is brought into the graph traced in evaluation mode.

The graphs of both modes are aligned, and a module that follows the mode (`InTraining`, `ByMode`) stands where
they differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from compress.graph.compare import relative_error
from compress.graph.inputs import copies_of, device_of, named_tensors, run_with
from compress.graph.isolation import equal, restored
from compress.graph.modules import ByMode, InTraining
from compress.graph.ops import node_kind

_SAME = 1e-4
LEFT_OUT = (
    "in training the model does more than its graph, which was traced in evaluation mode (auxiliary outputs, a "
    "branch under `if self.training:`, or buffers that it updates): training the quantized network leaves that out"
)


@contextlib.contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in training mode, BatchNorm in evaluation mode; restored afterwards."""
    with restored(model):  # modes are attributes
        model.train()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        yield


def same_in_training(model: nn.Module, graph_module: fx.GraphModule, inputs: tuple[Tensor, ...]) -> bool:
    """True if a graph computes in training mode what the model does, random numbers and written buffers included."""
    device = device_of(model)
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    results = []
    for network in (model, graph_module):
        with training_mode(network), torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(0)
            try:
                result = run_with(network.forward, copies_of(inputs))
            except Exception:  # a model can fail in any way
                return False
            if network is model:
                written = [name for name, value in before.items() if not equal(value, model.get_buffer(name))]
            buffers = dict(network.named_buffers())
            results.append((result, [buffers[name].clone() for name in written if name in buffers]))
    names = [[name for name, _ in named_tensors(result)] for result, _ in results]
    return names[0] == names[1] and relative_error(*results) <= _SAME


def add_training_parts(graph_module: fx.GraphModule, training: fx.Graph, root: nn.Module) -> bool:
    """Bring the parts that only the graph traced in training mode has into the one traced in evaluation; in place.

    Returns:
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
    inside: set[fx.Node] = set()
    waiting = [result]
    while waiting:
        node = waiting.pop()
        if node not in inside and node not in twins:
            inside.add(node)
            waiting += node.all_input_nodes
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
