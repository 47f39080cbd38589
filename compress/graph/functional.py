"""Functions that are layers become modules: F.linear, F.conv2d and F.batch_norm over parameters of the model.

A module stands at its parameter's path, so the state_dict keeps its names.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compress.graph.modules import NamedLinear
from compress.graph.ops import (
    altered,
    attribute_of,
    calls_alike,
    node_kind,
    node_module,
    replace_node,
    run_node,
    walk,
)

_CONVOLUTIONS: dict[Any, type[nn.Module]] = {
    F.conv1d: nn.Conv1d,
    F.conv2d: nn.Conv2d,
    F.conv3d: nn.Conv3d,
    F.conv_transpose1d: nn.ConvTranspose1d,
    F.conv_transpose2d: nn.ConvTranspose2d,
    F.conv_transpose3d: nn.ConvTranspose3d,
}
_NORMS: dict[int, type[nn.Module]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
_ORDER = {
    "conv": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv_transpose": ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation"),
    "linear": ("input", "weight", "bias"),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
}


_RESHAPES = frozenset({"reshape", "view", torch.reshape})


def functions_to_modules(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """Replace functional layers of a traced graph by modules, in place; return their paths.

    A weight that is computed from parameters is computed once, and trained directly from then on. A function that
    cannot become a module has the reason in `node.meta["whole"]`.
    """
    made: dict[str, fx.Node] = {}
    for node in list(graph_module.graph.nodes):
        kind = node_kind(node)
        if (
            node.target in _RESHAPES
            and is_constant(node.args[0])
            and not is_constant(node.args)
            and "shape" in node.meta
        ):
            node.args, node.kwargs = (node.args[0], node.meta["shape"]), {}  # it has the elements of a parameter
        if node.op != "call_function" or kind not in _ORDER:
            continue
        arguments = dict(zip(_ORDER[kind], node.args, strict=False)) | node.kwargs
        reason = _replace(graph_module, node, kind, arguments, made)
        if reason:
            node.meta["whole"] = reason
    _drop_unread(graph_module, made)
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return tuple(made)


# Names of the arguments of a product, in order.
_FACTORS = ("input", "mat1", "batch1", "other", "mat2", "batch2")


def products_to_linear(graph_module: fx.GraphModule) -> None:
    """Write `x @ weight`, `x @ weight.T` and addmm with a matrix that is a parameter as F.linear; in place.

    A matrix that is not transposed is computed once, as a weight (out, in), if nothing else reads it.
    """
    for node in list(graph_module.graph.nodes):
        kind = node_kind(node)
        named = [node.kwargs[name] for name in _FACTORS if name in node.kwargs]
        arguments, count = [*node.args, *named], {"matmul": 2, "addmm": 3}.get(kind)
        if len(arguments) != count or len(named) != len(node.kwargs):
            continue
        *bias, x, turned = arguments
        weight = _transposed_parameter(graph_module, turned)
        own = weight is None and _is_own_matrix(graph_module, turned)
        rows = bias and (not is_constant(bias[0]) or constant_value(graph_module, bias[0]).dim() != 1)
        if (weight is None and not own) or rows or is_constant(x):
            continue
        with graph_module.graph.inserting_before(node):
            weight = graph_module.graph.call_method("t", (turned,)) if weight is None else weight
            linear = graph_module.graph.call_function(F.linear, (x, weight, *bias))
        replace_node(node, linear)
    graph_module.recompile()


def _is_own_matrix(graph_module: fx.GraphModule, node: Any) -> bool:
    """True for a parameter of two axes that one operation alone reads."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return False
    weight = _attribute(graph_module, node)
    readers = sum(len(n.users) for n in graph_module.graph.nodes if n.op == "get_attr" and n.target == node.target)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2 and readers == 1


def _transposed_parameter(graph_module: fx.GraphModule, node: Any) -> fx.Node | None:
    if not isinstance(node, fx.Node) or node_kind(node) != "transpose" or not is_constant(node):
        return None
    source = node.all_input_nodes[0]
    weight = _attribute(graph_module, source) if source.op == "get_attr" else None
    if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
        return None
    value: Tensor = constant_value(graph_module, node)
    return source if value.shape == weight.T.shape and torch.equal(value, weight.T) else None


def open_paddings(graph_module: fx.GraphModule) -> tuple[str, ...]:
    """Let convolutions that pad other than with zeros read what F.pad returns, in place; return their paths.

    Shapes are stale afterwards.
    """
    opened: dict[str, tuple[list[int], str]] = {}
    for node in list(graph_module.graph.nodes):
        layer: Any = node_module(node) if node.op == "call_module" and node_kind(node) == "conv" else None
        path = str(node.target)
        if path not in opened and (layer is None or not _pads_by_mode(layer)):
            continue
        amounts, mode = opened.setdefault(path, (list(layer._reversed_padding_repeated_twice), layer.padding_mode))
        with graph_module.graph.inserting_before(node):
            padded = graph_module.graph.call_function(F.pad, (node.args[0], amounts), {"mode": mode})
        padded.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
        node.args = (padded,)
        layer.padding, layer.padding_mode = (0,) * len(layer.kernel_size), "zeros"
        layer._reversed_padding_repeated_twice = [0] * len(amounts)
    graph_module.recompile()
    return tuple(opened)


def _pads_by_mode(layer: Any) -> bool:
    """True for a convolution that pads with other than zeros and runs as torch's own class."""
    plain = any(isinstance(layer, kind) and calls_alike(type(layer), kind) for kind in _CONVOLUTIONS.values())
    return plain and not altered(layer) and layer.padding_mode != "zeros"


def _replace(
    graph_module: fx.GraphModule, node: fx.Node, kind: str, arguments: dict[str, Any], made: dict[str, fx.Node]
) -> str:
    """Replace `node` by a call of a module; return the reason if that is not possible, else ""."""
    path, name, reason = _owner(graph_module, arguments.get("running_mean" if kind == "batch_norm" else "weight"))
    if reason:
        return reason
    settings = {k: v for k, v in arguments.items() if k != "input"}
    weight = f"{path}.{name}".lstrip(".")
    if _is_part(graph_module, weight, node, arguments):
        path = next(part for i in itertools.count() if (part := f"{weight}_layer_{i}") not in made)
    another = path in made and made[path].meta["weight"] != weight
    if not path or another or _hides(graph_module, path, node, settings):
        path = f"{weight}_layer"  # the model's own, one of several of a module, or beside another that is called `bias`
    if path in made:
        if made[path].meta["arguments"] != settings:
            return f"{path} is used before with other settings"
    else:
        if any(n.op == "call_module" and n.target == path for n in graph_module.graph.nodes):
            return f"the module {path} that holds its weight is called too"
        if not is_constant(arguments.get("bias")):
            return "its bias is computed from the input"
        layer = (_norm if kind == "batch_norm" else _weighted)(graph_module, node, arguments)
        if isinstance(layer, str):
            return layer
        _take_place(graph_module, path, layer)
    with graph_module.graph.inserting_before(node):
        call = graph_module.graph.call_module(path, (arguments["input"],))
    replace_node(node, call)
    constants = [v for v in settings.values() if isinstance(v, fx.Node) and is_constant(v)]
    call.meta.update(arguments=settings, weight=weight, own={str(n.target) for v in constants for n in _sources(v)})
    made.setdefault(path, call)
    return ""


def _is_part(graph_module: fx.GraphModule, weight: str, node: fx.Node, arguments: dict[str, Any]) -> bool:
    """True if a layer computes its weight from a parameter that others read too, such as one expert of several."""
    held = arguments.get("weight")
    if not isinstance(held, fx.Node) or held.op == "get_attr":
        return False
    return _read_elsewhere(graph_module, {weight}, node)


def _hides(graph_module: fx.GraphModule, path: str, node: fx.Node, settings: dict[str, Any]) -> bool:
    """True if a layer at `path` has the name of another tensor of the module there, which others read."""
    names = {"weight", "bias", *(_names(settings).values() if node.target is F.linear else ())}
    taken = {str(v.target) for v in settings.values() if isinstance(v, fx.Node) and v.op == "get_attr"}
    return _read_elsewhere(graph_module, {f"{path}.{name}" for name in names} - taken, node)


def _read_elsewhere(graph_module: fx.GraphModule, names: set[str], node: fx.Node) -> bool:
    starts = [n for n in graph_module.graph.nodes if n.op == "get_attr" and n.target in names]
    reached = walk(starts, lambda n: n.users if is_constant(n) else ())
    return any(n is not node and not is_constant(n) for n in reached)


def _owner(graph_module: fx.GraphModule, weight: Any) -> tuple[str, str, str]:
    """(path of the module that holds a weight, its name there, the reason why there is none)."""
    if not isinstance(weight, fx.Node) or not is_constant(weight):
        return "", "", "its weight is computed from the input"
    shape = tuple(constant_value(graph_module, weight).shape)
    kept = [n for n in _sources(weight) if isinstance(_attribute(graph_module, n), Tensor)]
    same = [n for n in kept if tuple(_attribute(graph_module, n).shape) == shape] or kept
    if not same:
        return "", "", "its weight belongs to no module"
    path, _, name = str(same[0].target).rpartition(".")
    if name != "running_mean" and not isinstance(_attribute(graph_module, same[0]), nn.Parameter):
        return "", "", "its weight is a fixed filter, a buffer"
    return path, name, ""


def _weighted(graph_module: fx.GraphModule, node: fx.Node, arguments: dict[str, Any]) -> nn.Module | str:
    weight = _parameter(graph_module, arguments["weight"])
    bias = _parameter(graph_module, arguments["bias"]) if arguments.get("bias") is not None else None
    settings = {k: v for k, v in arguments.items() if k not in {"input", "weight", "bias"}}
    if any(isinstance(v, fx.Node) for v in settings.values()):
        return "its settings are computed"
    names = _names(arguments)
    if node.target is F.linear:
        if names == {"weight": "weight", "bias": "bias"}:
            layer: nn.Module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        else:
            layer = NamedLinear(weight.shape[1], weight.shape[0], bias=False, device="meta")
            layer._parameters.clear()
            layer.__dict__["names"] = names
            layer._parameters.update({names["weight"]: weight, names["bias"]: bias})
            return layer
    elif node.target in _CONVOLUTIONS:
        groups = settings.get("groups", 1)
        transposed = node_kind(node) == "conv_transpose"
        inputs = weight.shape[0] if transposed else weight.shape[1] * groups
        outputs = weight.shape[1] * groups if transposed else weight.shape[0]
        made: Any = _CONVOLUTIONS[node.target]
        layer = made(inputs, outputs, tuple(weight.shape[2:]), **settings, bias=False, device="meta")
    else:
        return "there is no layer of this kind"
    layer.weight, layer.bias = weight, bias  # type: ignore[assignment]
    return layer


def _names(arguments: dict[str, Any]) -> dict[str, str]:
    weight, bias = arguments["weight"], arguments.get("bias")
    if weight.op != "get_attr":
        return {"weight": "weight", "bias": "bias"}
    path, _, name = str(weight.target).rpartition(".")
    names = {"weight": name, "bias": f"{name.removesuffix('weight')}bias"}
    if isinstance(bias, fx.Node) and bias.op == "get_attr":
        owner, _, own = str(bias.target).rpartition(".")
        names["bias"] = own if owner == path else names["bias"]
    return names


def _norm(graph_module: fx.GraphModule, node: fx.Node, arguments: dict[str, Any]) -> nn.Module | str:
    keys = ("running_mean", "running_var", "weight", "bias")
    values = [constant_value(graph_module, arguments[k]) if arguments.get(k) is not None else None for k in keys]
    if values[0] is None or values[1] is None or arguments.get("training"):
        return "it normalizes with the statistics of the batch"
    if any(isinstance(arguments.get(k), fx.Node) and arguments[k].op != "get_attr" for k in keys):
        return "its statistics are computed"
    momentum, eps = arguments.get("momentum", 0.1), arguments.get("eps", 1e-5)
    made: Any = _NORMS[len(arguments["input"].meta["shape"])]
    layer: nn.Module = made(len(values[0]), eps=eps, momentum=momentum, affine=values[2] is not None).eval()
    for key, value in zip(keys, values, strict=True):
        setattr(layer, key, value)
    return layer


def _take_place(graph_module: fx.GraphModule, path: str, layer: nn.Module) -> None:
    if path not in dict(graph_module.named_modules()):  # the weight is the model's own
        graph_module.add_submodule(path, layer.train(graph_module.training))
        return
    old = graph_module.get_submodule(path)
    layer.train(old.training)
    for name, child in old._modules.items():
        layer.add_module(name, child)
    for name, parameter in old._parameters.items():
        layer._parameters.setdefault(name, parameter)  # a layer with names of its own has the attribute `bias` already
    for name, buffer in old._buffers.items():
        if name not in layer._buffers:
            layer.register_buffer(name, buffer, persistent=name not in old._non_persistent_buffers_set)
    graph_module.set_submodule(path, layer)


def _drop_unread(graph_module: fx.GraphModule, made: dict[str, fx.Node]) -> None:
    for node in reversed(list(graph_module.graph.nodes)):
        if not node.users and node.op != "output" and node.op != "placeholder" and is_constant(node):
            graph_module.graph.erase_node(node)
    read = {str(n.target) for n in graph_module.graph.nodes if n.op == "get_attr"}
    called = {n.target for n in graph_module.graph.nodes if n.op == "call_module"}
    moved = {name for node in made.values() for name in node.meta["own"]}
    for owner in {"", *(path.rpartition(".")[0] for path in made)} - called:
        tensors = graph_module.get_submodule(owner)._parameters
        held = {id(p) for path, m in graph_module.named_modules() if path != owner for p in m._parameters.values()}
        for name, parameter in list(tensors.items()):
            path = f"{owner}.{name}".lstrip(".")
            if path not in read and (id(parameter) in held or path in moved):
                del tensors[name]
    for path, module in list(graph_module.named_modules()):
        own = {"weight", "bias", *getattr(module, "names", {}).values()}
        if type(module) in {*_CONVOLUTIONS.values(), nn.Linear, NamedLinear}:
            for name in [n for n in module._parameters if n not in own and f"{path}.{n}" not in read]:
                del module._parameters[name]  # such as the gain of a standardized weight, which the new weight includes


# --- constants -----------------------------------------------------------------------------------------------------


def is_constant(value: Any) -> bool:
    """True if a value, also of several, holds no node, or is computed from parameters, buffers and numbers alone."""
    starts = list[fx.Node]()
    fx.node.map_arg(value, starts.append)
    return all(
        node.op == "get_attr" or (node.op not in {"placeholder", "output"} and node.all_input_nodes)
        for node in walk(starts, lambda node: node.all_input_nodes)
    )


def _sources(node: fx.Node) -> list[fx.Node]:
    """The get_attr nodes that a constant is computed from, `weight` first."""
    if node.op == "get_attr":
        return [node]
    found = [source for n in node.all_input_nodes for source in _sources(n)]
    return sorted(dict.fromkeys(found), key=lambda n: str(n.target).rpartition(".")[2] != "weight")


def _attribute(graph_module: fx.GraphModule, node: fx.Node) -> Any:
    return attribute_of(graph_module, str(node.target))


def constant_value(graph_module: fx.GraphModule, node: fx.Node) -> Any:
    """The value of a node that depends on constants alone; for a get_attr node the very parameter or buffer."""
    args = fx.node.map_arg(node.args, lambda n: constant_value(graph_module, n))
    kwargs = fx.node.map_arg(node.kwargs, lambda n: constant_value(graph_module, n))
    return run_node(graph_module, node, args, kwargs)


def _parameter(graph_module: fx.GraphModule, node: fx.Node) -> nn.Parameter:
    """A weight as a parameter: the model's own, or a new one that holds the computed value."""
    value = constant_value(graph_module, node)
    if isinstance(value, nn.Parameter):
        return value
    trained = any(_attribute(graph_module, n).requires_grad for n in _sources(node))
    return nn.Parameter(value.detach().clone(), requires_grad=trained)
