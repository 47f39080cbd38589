"""Tidies torch's ONNX: nodes are named by module, known patterns get their usual form, stack traces are removed."""

from __future__ import annotations

import ast
from collections import Counter

import onnx

from compress.export.names import node_name, tensor_name
from compress.export.onnx_graph import OnnxGraph, attribute, drop_unread

_SCOPES = "pkg.torch.onnx.name_scopes"


def clean(proto: onnx.ModelProto) -> None:
    """Tidy a model in place; what it computes stays the same."""
    graph = proto.graph
    _global_average_pools(graph)
    averages_without_padding(graph)
    _rename_nodes(graph)
    for node in graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for tensor in graph.initializer:
        tensor.doc_string = ""
    del graph.metadata_props[:]
    del graph.value_info[:]  # engines infer shapes themselves; stale symbolic ones can contradict them
    drop_unread(graph)


def averages_without_padding(graph: onnx.GraphProto) -> None:
    """Let averages over images without padding count what is there, which is the same in torch and in ONNX.

    A window that reaches over the edge (`ceil_mode`) is divided by its part in the image. ONNX Runtime's integer kernel
    divides by the whole window if padding is to be counted (1.31): an average over the whole image by a larger window,
    as in transformers' EfficientNet, is near zero.
    """
    for node in graph.node:
        over_the_edge = node.op_type == "AveragePool" and attribute(node, "ceil_mode", 0)
        if over_the_edge and not any(attribute(node, "pads", [])):
            kept = [one for one in node.attribute if one.name != "count_include_pad"]
            del node.attribute[:]
            node.attribute.extend(kept)


def _rename_nodes(graph: onnx.GraphProto) -> None:
    """Name nodes after the module that they come from, and inner tensors after the node that writes them."""
    seen: Counter[tuple[str, str]] = Counter()
    renamed: dict[str, str] = {}
    fixed = {value.name for value in graph.output}
    for node in graph.node:
        origin = _module_path(node), node.op_type
        node.name = node_name(*origin, seen[origin])
        seen[origin] += 1
        for i, output in enumerate(node.output):
            if output and output not in fixed:
                renamed[output] = tensor_name(node.name, i)
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]


def _module_path(node: onnx.NodeProto) -> str:
    for prop in node.metadata_props:
        if prop.key == _SCOPES:
            scopes = ast.literal_eval(prop.value)
            return str(scopes[-2]).removeprefix("model.") if len(scopes) > 1 else ""
    return ""


def _global_average_pools(graph: onnx.GraphProto) -> None:
    """Turn a ReduceMean over the last two axes of an image into GlobalAveragePool, which engines fuse and quantize."""
    view = OnnxGraph(graph)
    for node in graph.node:
        axes = view.array(node.input[1]) if node.op_type == "ReduceMean" and len(node.input) == 2 else None
        # torch writes adaptive pooling in this form, and only that of images
        if axes is not None and attribute(node, "keepdims", 1) == 1 and sorted(axes.tolist()) == [-2, -1]:
            node.op_type = "GlobalAveragePool"
            del node.input[1:]
            del node.attribute[:]
