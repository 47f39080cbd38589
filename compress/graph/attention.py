"""Attention opened into linear, matmul and softmax operations, so that each can be INT8."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from compress.graph.inputs import device_of
from compress.graph.modules import ByMode
from compress.graph.ops import SHAPES, node_kind, node_module


def open_attention(graph_module: fx.GraphModule, *, exportable: bool = True) -> tuple[str, ...]:
    """Open every attention of a graph made by `trace`, in place; return the names of the opened nodes.

    Nodes need shapes, which are stale afterwards. An attention that stays has the reason in `node.meta["whole"]`. The
    shift mask of a window attention is for the image size of the trace. `exportable` opens also attention with four
    axes.
    """
    opened = []
    tracer = fx.proxy.GraphAppendingTracer(graph_module.graph)

    def wrap(value: Any) -> Any:
        return fx.Proxy(value, tracer) if isinstance(value, fx.Node) else value

    for node in list(graph_module.graph.nodes):
        opener = _opener(node)
        if opener is None or not (exportable or _refused(node)):
            continue
        last = node.prev
        with graph_module.graph.inserting_before(node):
            reason = opener(node, wrap)
        if reason:
            node.meta["whole"] = reason
            continue
        part = node.prev
        while part is not last:  # the inserted nodes belong to the same modules
            part.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
            part = part.prev
        opened.append(node.name)
        sources = node.all_input_nodes
        graph_module.graph.erase_node(node)
        for source in sources:
            # the rate of a dropout, and biases that are concatenated for the call alone
            if not source.users and (node_kind(source) in SHAPES or source.target is torch.cat):
                graph_module.graph.erase_node(source)
    graph_module.delete_all_unused_submodules()
    graph_module.recompile()
    return tuple(opened)


# Turns a node into a proxy that records operations on it in the graph, and returns other values as they are.
Wrap = Callable[[Any], Any]


def _opener(node: fx.Node) -> Callable[[fx.Node, Wrap], str] | None:
    if node.op == "call_module":
        return _open_multihead if type(node_module(node)) is nn.MultiheadAttention else None
    if node.target is F.scaled_dot_product_attention:
        return _open_scaled_dot_product
    if node.target is F.multi_head_attention_forward:
        return _open_function
    return _open_windows if node_kind(node) == "window_attention" else None


def _refused(node: fx.Node) -> bool:
    """True if torch.onnx refuses an attention ("only 4D query, key, and value are supported", torch 2.15)."""
    query = node.args[0] if node.args else node.kwargs.get("query")
    return node.target is F.scaled_dot_product_attention and len(getattr(query, "meta", {}).get("shape") or ()) != 4


def _attend(
    query: Any,
    key: Any,
    value: Any,
    scale: float,
    finish: Callable[[Any], Any],
    drop: Callable[[Any], Any] = lambda weights: weights,
) -> tuple[Any, Any]:
    """Return (drop(softmax(finish(scale q k^T))) v, the weights that multiply v)."""
    # the scale is applied after the product, so that both its inputs are results of linear layers
    scores = torch.matmul(query, key.transpose(-2, -1)) * scale
    weights = drop(F.softmax(finish(scores), dim=-1))
    return torch.matmul(weights, value), weights


# --- nn.MultiheadAttention -----------------------------------------------------------------------------------------


def _open_multihead(node: fx.Node, wrap: Wrap) -> str:
    module: Any = node_module(node)
    bound = inspect.signature(nn.MultiheadAttention.forward).bind(None, *node.args, **node.kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    reason = _why_whole(node, module, arguments)
    if reason:
        return reason
    path, heads = str(node.target), module.num_heads
    query, key, value = _projected(node, wrap, arguments)
    added = (module.bias_k is not None) + bool(module.add_zero_attn)
    if added:
        key, value = _with_rows(module, path, key, "bias_k"), _with_rows(module, path, value, "bias_v")

    def masked(scores: Any) -> fx.Proxy:
        rows = scores[..., -added:] if added and _masks(arguments) else None  # which no mask hides
        scores = _with_masks(scores if rows is None else scores[..., :-added], wrap, arguments, heads)
        return scores if rows is None else _concat([scores, rows], -1)

    def dropped(weights: Any) -> fx.Proxy:
        return _drop(node, weights, module.dropout) if module.dropout else weights

    tracer = query.tracer
    y, weights = _attend(query, key, value, module.head_dim**-0.5, masked, dropped)
    y = y.transpose(1, 2).flatten(2)
    y = tracer.create_proxy("call_module", f"{path}.out_proj", (y,), {})
    if not module.batch_first:
        y = y.transpose(0, 1)
    users = list(node.users)
    asked = any(user.users if user.target is operator.getitem else user.op == "output" for user in users)
    if asked and arguments["need_weights"] and arguments["average_attn_weights"]:
        weights = weights.mean(1)
    whole = (y.node, weights.node if arguments["need_weights"] else None)
    for user in users:
        if user.op == "output":  # the pair is a result of the network
            user.args = fx.node.map_arg(user.args, lambda n: whole if n is node else n)
        else:
            user.replace_all_uses_with(whole[user.args[1]])  # type: ignore[index, arg-type]
            node.graph.erase_node(user)
    return ""


def _projected(node: fx.Node, wrap: Wrap, arguments: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Query, key and value of each head, (N, heads, tokens, width): as torch, one layer for those of one tensor."""
    module: Any = node_module(node)
    sources = [arguments[name] for name in ("query", "key", "value")]
    path, heads, width = str(node.target), module.num_heads, module.head_dim
    x, y, z = ((wrap(n) if module.batch_first else wrap(n).transpose(0, 1)) for n in sources)

    def of_heads(result: Any, count: int) -> Any:
        return result.unflatten(-1, (count, heads, width)).permute(2, 0, 3, 1, 4)

    if sources[0] is sources[1] is sources[2] and module._qkv_same_embed_dim:
        bias = (
            None if module.in_proj_bias is None else x.tracer.create_proxy("get_attr", f"{path}.in_proj_bias", (), {})
        )
        weight = x.tracer.create_proxy("get_attr", f"{path}.in_proj_weight", (), {})
        qkv = of_heads(F.linear(x, weight, bias), 3)
        return qkv[0], qkv[1], qkv[2]
    weights, biases = _input_layers(module)

    def layer(name: str, source: Any, first: int, count: int = 1) -> Any:
        weight = torch.cat(weights[first : first + count])
        made = nn.Linear(weight.shape[1], weight.shape[0], biases is not None, device=weight.device, dtype=weight.dtype)
        made.weight = nn.Parameter(weight.detach().clone(), weights[first].requires_grad)
        if biases is not None:
            made.bias = nn.Parameter(torch.cat(biases[first : first + count]).detach().clone(), biases[0].requires_grad)
        module.add_module(name, made.train(module.training))
        return of_heads(source.tracer.create_proxy("call_module", f"{path}.{name}", (source,), {}), count)

    query = layer("query", x, 0)[0]
    if sources[1] is sources[2] and module._qkv_same_embed_dim:
        both = layer("key_value", y, 1, 2)
        key, value = both[0], both[1]
    else:
        key, value = layer("key", y, 1)[0], layer("value", z, 2)[0]
    for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias"):
        setattr(module, name, None)
    return query, key, value


def _concat(parts: list[Any], axis: int) -> fx.Proxy:
    whole: fx.Proxy = parts[0].tracer.create_proxy("call_function", torch.cat, (parts, axis), {})
    return whole


def _with_rows(module: Any, path: str, x: Any, name: str) -> fx.Proxy:
    # keys or values (N, heads, tokens, width) with a row that is learned, a row of zeros, or both
    rows = [x]
    if module.bias_k is not None:
        row = x.tracer.create_proxy("get_attr", f"{path}.{name}", (), {})  # (1, 1, heads * width)
        row = row.unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)
        rows.append(row.expand(x.shape[0], -1, -1, -1))
    if module.add_zero_attn:
        rows.append(torch.zeros_like(x[:, :, :1]))
    return _concat(rows, 2)


def _input_layers(module: Any) -> tuple[list[Tensor], list[Tensor] | None]:
    if module._qkv_same_embed_dim:
        weights = list(module.in_proj_weight.chunk(3))
    else:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    return weights, None if module.in_proj_bias is None else list(module.in_proj_bias.chunk(3))


def _masks(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: arguments[name] for name in ("attn_mask", "key_padding_mask") if arguments[name] is not None}


def _with_masks(scores: Any, wrap: Wrap, arguments: dict[str, Any], heads: int) -> fx.Proxy:
    for name, mask in _masks(arguments).items():
        scores = _with_mask(scores, wrap(mask), heads, padding=name == "key_padding_mask")
    return scores


def _with_mask(scores: Any, mask: Any, heads: int, *, padding: bool) -> fx.Proxy:
    """Scores (N, heads, tokens, keys) with a mask: added if it holds numbers, -inf where it is true."""
    shape, dtype = mask.node.meta["shape"], mask.node.meta["dtype"]
    if padding and len(shape) == 2:
        mask = mask.unsqueeze(1).unsqueeze(1)  # (N, keys)
    elif len(shape) == 3:
        mask = mask.unflatten(0, (-1, heads))  # (N * heads, tokens, keys)
    return scores.masked_fill(mask, float("-inf")) if dtype == torch.bool else scores + mask


def _drop(node: fx.Node, weights: Any, rate: float) -> fx.Proxy:
    name = f"dropouts.{node.name}"
    owner: Any = node.graph.owning_module
    owner.add_submodule(name, nn.Dropout(rate).train(owner.training))
    return weights.tracer.create_proxy("call_module", name, (weights,), {})


def _why_unfit(arguments: dict[str, Any]) -> str:
    if not all(isinstance(mask, fx.Node) and mask.meta.get("shape") for mask in _masks(arguments).values()):
        return "it has a mask that is no tensor"
    return "its input has no batch dimension" if len(arguments["query"].meta["shape"]) != 3 else ""


def _why_whole(node: fx.Node, module: Any, arguments: dict[str, Any]) -> str:
    if reason := _why_unfit(arguments):
        return reason
    read = [user for user in node.users if user.users or user.target is not operator.getitem]
    used = {user.args[1] for user in read if user.target is operator.getitem}
    if (
        any(user.target is not operator.getitem and user.op != "output" for user in read)
        or not used <= {0, 1}
        or (1 in used and not arguments["need_weights"])
    ):
        return "its result is passed on as a tuple"
    calls = [n for n in node.graph.nodes if n.op == "call_module" and n.target == node.target]
    return "it is called more than once" if len(calls) > 1 else ""


# --- F.multi_head_attention_forward --------------------------------------------------------------------------------


def attention_arguments(node: fx.Node) -> dict[str, Any]:
    bound = inspect.signature(F.multi_head_attention_forward).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _open_function(node: fx.Node, wrap: Wrap) -> str:
    # It is called with the weights of layers, as CLIP's ResNets pool: each projection becomes a layer again.
    given = attention_arguments(node)
    sources = [given[name] for name in ("query", "key", "value")]
    rows = any(given[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v"))
    read = {user.args[1] for user in node.users if user.target is operator.getitem and user.users}
    if any(user.target is not operator.getitem for user in node.users) or 1 in read:
        return "its result is passed on as a tuple, or its weights are read"
    if rows or given["add_zero_attn"] or (given["dropout_p"] and given["training"]):
        return "it drops attention weights, or has rows beside its keys"
    if reason := _why_unfit(given):
        return reason
    heads, width = given["num_heads"], sources[0].meta["shape"][-1]
    if not isinstance(heads, int):
        return "the number of its heads is computed"

    def part(whole: Any, i: int) -> fx.Proxy | None:
        # the i-th third of the weights or biases, which may be three parameters in a row
        if whole is None:
            return None
        if whole.target is torch.cat and len(whole.args[0]) == 3:
            return wrap(whole.args[0][i])
        return wrap(whole)[i * width : (i + 1) * width]

    def projected(i: int, name: str) -> fx.Proxy:
        own = given["use_separate_proj_weight"]
        weight: Any = wrap(given[f"{name}_proj_weight"]) if own else part(given["in_proj_weight"], i)
        bias: Any = part(given["in_proj_bias"], i)
        y: Any = F.linear(wrap(sources[i]).transpose(0, 1), weight, bias)
        return y.unflatten(-1, (heads, width // heads)).transpose(1, 2)

    def masked(scores: Any) -> fx.Proxy:
        return _with_masks(scores, wrap, given, heads)

    whole = given["in_proj_weight"]
    if sources[0] is sources[1] is sources[2] and getattr(whole, "op", "") == "get_attr":  # in nn.MultiheadAttention
        qkv = F.linear(wrap(sources[0]).transpose(0, 1), wrap(whole), wrap(given["in_proj_bias"]))
        qkv = qkv.unflatten(-1, (3, heads, width // heads)).permute(2, 0, 3, 1, 4)
        query, key, value = qkv[0], qkv[1], qkv[2]
    else:
        query, key, value = (projected(i, name) for i, name in enumerate("qkv"))
    y, _ = _attend(query, key, value, (width // heads) ** -0.5, masked)
    y = y.transpose(1, 2).flatten(2)
    result: Any = F.linear(y, wrap(given["out_proj_weight"]), wrap(given["out_proj_bias"])).transpose(0, 1)
    for user in list(node.users):
        user.replace_all_uses_with(result.node)
        node.graph.erase_node(user)
    return ""


# --- F.scaled_dot_product_attention --------------------------------------------------------------------------------


def _open_scaled_dot_product(node: fx.Node, wrap: Wrap) -> str:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    arguments: dict[str, Any] = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    arguments |= dict(zip(names, node.args, strict=False)) | node.kwargs
    rate = arguments["dropout_p"]
    if (rate and not isinstance(rate, fx.Node)) or arguments.get("enable_gqa"):
        return "it drops attention weights, or groups its heads"
    query, key, value = (wrap(arguments[name]) for name in names[:3])
    scale, mask = arguments["scale"], arguments["attn_mask"]
    if scale is None:
        scale = 1 / math.sqrt(arguments["query"].meta["shape"][-1])

    def masked(scores: Any) -> fx.Proxy:
        if arguments["is_causal"]:
            sizes = [arguments[key].meta["shape"][-2] for key in ("query", "key")]
            name = _mask_of(node, torch.ones(sizes, dtype=torch.bool).triu(1))
            later = scores.tracer.create_proxy("get_attr", name, (), {})
            return scores.masked_fill(later, float("-inf"))
        if mask is None:
            return scores
        if mask.meta["dtype"] == torch.bool:
            return scores.masked_fill(torch.logical_not(wrap(mask)), float("-inf"))
        return scores + wrap(mask)

    def dropped(weights: Any) -> fx.Proxy:
        module = node_module(rate) if isinstance(rate, fx.Node) and rate.op == "call_module" else None
        return _drop(node, weights, module.values[0]) if isinstance(module, ByMode) else weights

    y, _ = _attend(query, key, value, wrap(scale), masked, dropped)
    node.replace_all_uses_with(y.node)
    return ""


def _mask_of(node: fx.Node, mask: Tensor) -> str:
    """The name of a buffer with the values of `mask`: equal masks of several layers are one, also in files."""
    owner = cast(fx.GraphModule, node.graph.owning_module)
    mask = mask.to(device_of(owner))
    for name, held in owner.named_buffers(recurse=False):
        if name.endswith("_mask") and held.dtype == mask.dtype and torch.equal(held, mask):
            return name
    owner.register_buffer(f"{node.name}_mask", mask)
    return f"{node.name}_mask"


# --- torchvision's shifted_window_attention (Swin and Swin v2) -----------------------------------------------------


def _open_windows(node: fx.Node, wrap: Wrap) -> str:
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    bound.apply_defaults()
    a = bound.arguments
    if (a["attention_dropout"] or a["dropout"]) and a["training"]:
        return "it drops values in training"
    x, heads, window = wrap(a["input"]), int(a["num_heads"]), [int(side) for side in a["window_size"]]
    _, height, width, channels = a["input"].meta["shape"]
    padded = [-(-side // step) * step for side, step in zip((height, width), window, strict=True)]
    shift = [0 if step >= side else int(s) for s, step, side in zip(a["shift_size"], window, padded, strict=True)]
    windows, tokens = (padded[0] // window[0]) * (padded[1] // window[1]), window[0] * window[1]
    grid = (-1, padded[0] // window[0], window[0], padded[1] // window[1], window[1], channels)
    if padded != [height, width]:
        x = F.pad(x, (0, 0, 0, padded[1] - width, 0, padded[0] - height))
    if any(shift):
        x = torch.roll(x, shifts=(-shift[0], -shift[1]), dims=(1, 2))
    x = x.reshape(grid).permute(0, 1, 3, 2, 4, 5).reshape(-1, tokens, channels)
    bias, scale = wrap(a["qkv_bias"]), (channels // heads) ** -0.5
    if a["logit_scale"] is not None and bias is not None:  # Swin v2: keys have no bias
        bias = torch.cat([bias[:channels], bias[channels : 2 * channels] * 0, bias[2 * channels :]])
    qkv = F.linear(x, wrap(a["qkv_weight"]), bias).unflatten(-1, (3, heads, channels // heads))
    query, key, value = (qkv.permute(2, 0, 3, 1, 4)[i] for i in range(3))
    if a["logit_scale"] is not None:
        query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
        scale = torch.clamp(wrap(a["logit_scale"]), max=math.log(100.0)).exp()

    def finish(scores: Any) -> fx.Proxy:
        scores = scores + wrap(a["relative_position_bias"])
        if not any(shift):
            return scores
        mask = x.tracer.create_proxy("get_attr", _mask_of(node, _shift_mask(padded, window, shift)), (), {})
        return (scores.reshape(-1, windows, heads, tokens, tokens) + mask).reshape(-1, heads, tokens, tokens)

    y, _ = _attend(query, key, value, scale, finish)
    y = F.linear(y.transpose(1, 2).flatten(2), wrap(a["proj_weight"]), wrap(a["proj_bias"]))
    y = y.reshape(-1, grid[1], grid[3], window[0], window[1], channels).permute(0, 1, 3, 2, 4, 5)
    y = y.reshape(-1, padded[0], padded[1], channels)
    if any(shift):
        y = torch.roll(y, shifts=(shift[0], shift[1]), dims=(1, 2))
    if padded != [height, width]:
        y = y[:, :height, :width, :]
    result: Any = y
    node.replace_all_uses_with(result.node)
    return ""


def _shift_mask(sides: list[int], window: list[int], shift: list[int]) -> Tensor:
    """Return (windows, 1, tokens, tokens): 0 where two pixels of a window were neighbours before the shift, else -100.

    Liu et al., "Swin Transformer", arXiv 2103.14030, section 3.2 (cyclic shift).
    """
    region = torch.zeros(sides)
    for axis, (step, moved) in enumerate(zip(window, shift, strict=True)):
        line = torch.zeros(sides[axis])
        if moved:
            line[-step:-moved], line[-moved:] = 1, 2
        else:
            line[-step:] = 1
        region = region * 3 + (line[:, None] if axis == 0 else line[None, :])
    tokens = region.unfold(0, window[0], window[0]).unfold(1, window[1], window[1]).flatten(2).flatten(0, 1)
    apart = tokens.unsqueeze(1) != tokens.unsqueeze(2)
    return torch.where(apart, -100.0, 0.0)[:, None]
