"""What is done to torch's ONNX: names of nodes by module, known patterns in their usual form, no stack traces."""

from __future__ import annotations

import ast
from collections import Counter

import onnx
from onnx import numpy_helper

_SCOPES = "pkg.torch.onnx.name_scopes"


def clean(proto: onnx.ModelProto) -> None:
    """Tidy a model in place; what it computes stays the same."""
    graph = proto.graph
    _global_average_pools(graph)
    _rename_nodes(graph)
    for node in graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    for tensor in graph.initializer:
        tensor.doc_string = ""
    del graph.metadata_props[:]
    del graph.value_info[:]  # engines infer shapes; stale symbolic ones only get in the way
    drop_unused(graph)


def _rename_nodes(graph: onnx.GraphProto) -> None:
    """`/layer1/0/conv1/Conv`: the module that a node comes from, its kind, and a number where that is not unique."""
    seen: Counter[str] = Counter()
    renamed: dict[str, str] = {}
    fixed = {value.name for value in graph.output}
    for node in graph.node:
        name = f"{_module_path(node)}/{node.op_type}"
        seen[name] += 1
        node.name = name if seen[name] == 1 else f"{name}_{seen[name] - 1}"
        for i, output in enumerate(node.output):
            if output and output not in fixed:
                renamed[output] = f"{node.name}_output_{i}"
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]


def _module_path(node: onnx.NodeProto) -> str:
    for prop in node.metadata_props:
        if prop.key == _SCOPES:
            scopes = ast.literal_eval(prop.value)
            path = str(scopes[-2]) if len(scopes) > 1 else ""
            return "/" + path.removeprefix("model.").replace(".", "/") if path else ""
    return ""


def _global_average_pools(graph: onnx.GraphProto) -> None:
    """ReduceMean over the last two axes of an image is GlobalAveragePool, which engines fuse and quantize."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type != "ReduceMean" or len(node.input) != 2 or node.input[1] not in constants:
            continue
        axes = numpy_helper.to_array(constants[node.input[1]]).tolist()
        keep = next((a.i for a in node.attribute if a.name == "keepdims"), 1)
        if keep == 1 and sorted(axes) == [-2, -1]:  # torch writes adaptive pooling so, and only of images
            node.op_type = "GlobalAveragePool"
            del node.input[1:]
            del node.attribute[:]


def drop_unused(graph: onnx.GraphProto) -> None:
    """Remove constants that nothing reads; ONNX Runtime warns of each."""
    used = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    del graph.initializer[:]
    graph.initializer.extend(kept)
