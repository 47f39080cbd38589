"""The form of a graph that placement works on, and checks of the model before.

Attention and paddings are opened, activations are one node, functions are layers, BatchNorm is folded, and later
consumers of a tensor that is changed in place consume the operation that changed it.
"""

from __future__ import annotations

import operator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from compress.errors import ModelError, QuantizationError
from compress.graph.attention import open_attention
from compress.graph.compare import Reference, same_results
from compress.graph.fold import fold_batchnorm, fold_constants
from compress.graph.functional import (
    constant_value,
    functions_to_modules,
    is_constant,
    open_paddings,
    products_to_linear,
)
from compress.graph.inputs import Inputs, as_inputs, copies_of
from compress.graph.ops import SHAPES, node_kind, node_module, out_of_place, replace_node
from compress.graph.spelled import activations_in_one, open_einsums
from compress.graph.trace import check_module, propagate_shapes, trace, unwrapped

_OVERWRITING: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def follow_changes(graph_module: fx.GraphModule, example_inputs: Inputs) -> None:
    """Let every node consume a tensor from the last operation that changed it, as observed in a run; in place."""
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
        node.target = _OVERWRITING.get(node.target) or out_of_place(node.target)
        if node.kwargs.get("inplace"):
            node.update_kwarg("inplace", False)
    elif node.op == "call_method":
        node.target = out_of_place(node.target)


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
        first: the first node that returned the very tensor that a node returns; `latest`: the last that changed it.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__(graph_module)
        self.changes: list[tuple[fx.Node, fx.Node]] = []
        self.stale: list[fx.Node] = []
        self.first: dict[fx.Node, fx.Node] = {}
        self.latest: dict[fx.Node, fx.Node] = {}

    def changed_inputs(self) -> list[fx.Node]:
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


_TAKE_FLOAT = "quantize the float model"
_TAKES_OVER = "compress.from_pytorch_quantization takes it over with its ranges"
# Packages whose modules quantize, and whose ranges cannot be taken over.
_OTHERS = (
    "modelopt.torch.quantization",
    "torchao.quantization",
    "torch.ao.quantization",
    "torch.ao.nn.qat",
    "torch.ao.nn.intrinsic.qat",
    "bitsandbytes",
    "brevitas",
    "optimum.quanto",
)

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
# Modules of torch.ao that compute in float; what prepares them for quantization adds observers, which are refused.
_STUBS = frozenset({"QuantStub", "DeQuantStub", "QuantWrapper", "FloatFunctional", "FXFloatFunctional"})


def check_float_model(model: nn.Module) -> None:
    """Refuse anything but a plain float32 module."""
    check_module(model)
    wrapped = _unwrapped(model)
    if wrapped:
        raise ModelError(f"the model is a {type(model).__name__}, which cannot be traced: give {wrapped}")
    for name, module in model.named_modules():
        advice = _quantizes(type(module))
        if advice:
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise QuantizationError(f"{name or 'the model'} is a {kind}: the model is quantized already; {advice}")
        if isinstance(module, _PARALLEL):
            raise ModelError(
                f"{name} is a {type(module).__name__}, which cannot be traced: put its .module in its place"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"{name} is a {type(module).__name__}, which is not Python and cannot be copied and compared: put the "
                "module that it was scripted or traced from in its place"
            )
        _check_hooks(name, module)
        _check_forward(name, module)
    _check_parameters(dict(model.named_parameters()))


def _unwrapped(model: nn.Module) -> str:
    """Say which module to give instead of a wrapper; "" for a plain module."""
    if isinstance(model, _PARALLEL):
        return "its .module, and wrap the quantized model"
    if isinstance(model, fx.GraphModule) and any(
        isinstance(n.target, torch._ops.OpOverload) for n in model.graph.nodes
    ):
        return "the module that torch.export exported: its layers are calls of aten here"
    return unwrapped(model)


def _quantizes(kind: type) -> str:
    path = kind.__module__
    if kind.__name__ in _STUBS and _is_of(path, "torch.ao"):
        return ""
    if ".quantized" in path:  # torch.ao.nn.quantized and similar
        return _TAKE_FLOAT
    if _is_of(path, "pytorch_quantization"):
        return _TAKES_OVER
    return _TAKE_FLOAT if any(_is_of(path, package) for package in _OTHERS) else ""


def _is_of(path: str, package: str) -> bool:
    return path == package or path.startswith(f"{package}.")


def _check_hooks(name: str, module: nn.Module) -> None:
    for hook in module._forward_pre_hooks.values():
        kind = type(hook).__module__
        if kind == "torch.nn.utils.prune":
            raise ModelError(
                f"{name or 'the model'} has parameters pruned by a hook of {kind}, which computes them in every call: "
                "take it off with torch.nn.utils.prune.remove (the zeros stay)"
            )
        if kind in {"torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm"}:
            made = kind.rpartition(".")[2]
            raise ModelError(
                f"the weight of {name or 'the model'} is computed by a hook of {kind}: take it off with "
                f"torch.nn.utils.remove_{made}, or use torch.nn.utils.parametrizations.{made}, which is followed"
            )


def _check_forward(name: str, module: nn.Module) -> None:
    """Refuse a `forward` that is a plain function set on an instance, which no copy runs."""
    if name and hasattr(module, "_orig_mod"):
        raise ModelError(f"{name} is compiled (torch.compile): set its ._orig_mod in its place, and compile afterwards")
    if isinstance(vars(module).get("forward"), FunctionType):
        raise ModelError(
            f"{name or 'the model'} has a forward of its own, a function set on the instance, which calls the module "
            "that it was made for, also in a copy: quantizing the copy would change nothing. Take it off, or make it a "
            "method of a subclass"
        )


def _check_parameters(parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if type(parameter) is not nn.Parameter:
            kind = f"{type(parameter).__module__}.{type(parameter).__name__}"
            raise QuantizationError(
                f"{name} is a {kind}, not a plain tensor: quantize the model before its weights are packed or spread"
            )
    other = [n for n, p in parameters.items() if p.is_floating_point() and p.dtype != torch.float32]
    if other:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        raise QuantizationError(
            f"the model's parameters are {parameters[other[0]].dtype} ({other[0]}{more}); quantize it in float32 "
            "(model.float()); the remainder can be written in half precision at export (precision='fp16')"
        )


def canonical_graph(model: nn.Module, example_inputs: Inputs, *, fold: bool = True) -> fx.GraphModule:
    """The graph that quantization works on, in evaluation mode, with shapes on its nodes.

    The model is not changed; a GraphModule is taken as its own trace.
    """
    check_module(model)
    reference = Reference.of(model, example_inputs)
    graph_module = trace(model, example_inputs)
    drop_assertions(graph_module)
    follow_changes(graph_module, example_inputs)
    opened = open_attention(graph_module) + open_einsums(graph_module) + open_paddings(graph_module)
    opened += activations_in_one(graph_module) + select_by_index(graph_module)
    products_to_linear(graph_module)
    made = functions_to_modules(graph_module)
    if fold:
        fold_batchnorm(graph_module)
    folded = fold_constants(graph_module, trained=fold)
    if opened or made or folded:
        propagate_shapes(graph_module, example_inputs)
    reference.check(graph_module, "bringing the graph to the form that is quantized")
    return graph_module


def select_by_index(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """Write `x[:, [2, 1, 0]]`, by a list or a tensor of the model, as torch.index_select, in place; return the names.

    Exporters write the other form as GatherND, after which engines compute in float.
    """
    made = []
    for node in list(graph_module.graph.nodes):
        if node.target is not operator.getitem or node.args[0].meta.get("shape") is None:
            continue
        source, parts = node.args
        parts = parts if isinstance(parts, tuple) else (parts,)
        chosen = [axis for axis, part in enumerate(parts) if not isinstance(part, slice) or part != slice(None)]
        if len(chosen) != 1 or not is_constant(parts[chosen[0]]):
            continue
        index = parts[chosen[0]]
        value = constant_value(graph_module, index) if isinstance(index, fx.Node) else index
        rows = torch.as_tensor(value) if isinstance(value, (list, Tensor)) else torch.zeros(0)
        if rows.dim() != 1 or rows.dtype not in {torch.int64, torch.int32} or not rows.numel():
            continue
        axis, name = chosen[0], f"{node.name}_index"
        graph_module.register_buffer(name, rows.to(torch.int64) % source.meta["shape"][axis], persistent=False)
        with graph_module.graph.inserting_before(node):
            rows_node = graph_module.graph.get_attr(name)
            selected = graph_module.graph.call_function(torch.index_select, (source, axis, rows_node))
        replace_node(node, selected)
        made.append(selected.name)
    graph_module.recompile()
    return tuple(made)


def drop_assertions(graph_module: fx.GraphModule) -> None:
    """Erase assertions about shapes, which as consumers would keep layers from fusing; in place."""
    for node in reversed(list(graph_module.graph.nodes)):
        if not node.users and node_kind(node) in SHAPES | {"getattr"}:
            graph_module.graph.erase_node(node)
    graph_module.recompile()
