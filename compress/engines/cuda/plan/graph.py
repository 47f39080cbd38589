"""An ONNX file as a small graph with static shapes and folded constants: what the planner works on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper
from torch import Tensor

from compress.engines.base import OnnxFile, read_onnx, shape_text
from compress.engines.cuda.onnx_ops import apply, is_read_by_the_host, pads_of
from compress.errors import EngineError
from compress.onnx_graph import free_name, opset_of, sort_nodes
from compress.support.libraries import library_errors

QUANTIZERS = frozenset({"QuantizeLinear", "DequantizeLinear"})
_FOUR_BITS = {onnx.TensorProto.INT4: "int4", onnx.TensorProto.UINT4: "uint4"}
# Types of integers by ONNX's number, where a quantizer has no zero point that says it.
_TYPES = {0: torch.uint8, onnx.TensorProto.UINT8: torch.uint8, onnx.TensorProto.INT8: torch.int8}
_DOMAINS = frozenset({"", "ai.onnx", "com.microsoft"})


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operation, an ONNX operator or one of the planner's own. An input that is left out is "".

    Attributes:
        origins: names of the file's nodes that it was made of.
    """

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    origins: tuple[str, ...] = ()

    def given(self, index: int) -> str:
        return self.inputs[index] if index < len(self.inputs) else ""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A network with static shapes. Passes return a changed copy.

    Attributes:
        nodes: in an order in which they can run.
        constants: values known beforehand, on the CPU.
    """

    nodes: tuple[Node, ...]
    constants: Mapping[str, Tensor]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def producers(self) -> dict[str, Node]:
        return {name: node for node in self.nodes for name in node.outputs if name}

    def consumers(self) -> dict[str, list[Node]]:
        """The nodes that read each tensor, in order; a node that reads it twice is there twice."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in node.inputs:
                if name:
                    found.setdefault(name, []).append(node)
        return found


def read_graph(path: Path | str, sizes: Mapping[str, Sequence[int]] | None = None, *, batch_size: int = 1) -> Graph:
    """Read an ONNX file; `sizes` are shapes by input, `batch_size` is of inputs whose first dimension is open."""
    outside = read_onnx(path)
    with library_errors(EngineError, f"{path}: its weights cannot be read (", ")"):
        proto = onnx.load(str(outside.path))
        initializers = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    sort_nodes(proto.graph)
    shapes = _input_shapes(outside, sizes or {}, batch_size)
    nodes = tuple(_nodes(proto, path))
    values: dict[str, Tensor] = {name: _tensor(array) for name, array in initializers.items()}
    for info in outside.inputs:
        dtype = getattr(torch, info.dtype, None)
        if dtype is None:
            raise EngineError(f"{path}: input {info.name!r} is of type {info.dtype}; run the file with 'onnxruntime'")
        values[info.name] = torch.empty(shapes[info.name], dtype=dtype, device="meta")
    kept = _infer(nodes, values, path)
    missing = [value.name for value in proto.graph.output if value.name not in values]
    if missing:
        raise EngineError(f"{path}: nothing computes the output {missing[0]!r}; export the file again")
    graph = Graph(
        nodes=tuple(kept),
        constants={name: value for name, value in values.items() if not value.is_meta},
        shapes={name: tuple(value.shape) for name, value in values.items()},
        dtypes={name: value.dtype for name, value in values.items()},
        inputs=tuple(info.name for info in outside.inputs),
        outputs=tuple(value.name for value in proto.graph.output),
    )
    return without_casts(without_dead(graph))


def without_dead(graph: Graph, nodes: Iterable[Node] | None = None) -> Graph:
    """`graph` (of other nodes, if given) without nodes and constants that no output depends on."""
    wanted, kept = set(graph.outputs), []
    for node in reversed(tuple(graph.nodes if nodes is None else nodes)):
        if wanted.intersection(node.outputs):
            kept.append(node)
            wanted.update(name for name in node.inputs if name)
    constants = {name: value for name, value in graph.constants.items() if name in wanted}
    return replace(graph, nodes=tuple(reversed(kept)), constants=constants)


def without_casts(graph: Graph) -> Graph:
    same: dict[str, str] = {}
    nodes: list[Node] = []
    consumers = graph.consumers()
    for node in graph.nodes:
        node = replace(node, inputs=tuple(same.get(name, name) for name in node.inputs))
        if not _is_float_cast(graph, node):
            nodes.append(node)
            continue
        source, result = node.inputs[0], node.outputs[0]
        if result not in graph.outputs:
            same[result] = source
            continue
        maker = next((i for i, n in enumerate(nodes) if source in n.outputs), None)
        if maker is None or source in graph.outputs or len(consumers[source]) > 1:
            nodes.append(node)
            continue
        renamed = tuple(result if name == source else name for name in nodes[maker].outputs)
        nodes[maker] = replace(nodes[maker], outputs=renamed)
    return without_dead(graph, nodes)


def _is_float_cast(graph: Graph, node: Node) -> bool:
    if node.op != "Cast":
        return False
    types = [graph.dtypes[name] for name in (node.inputs[0], node.outputs[0])]
    return all(dtype.is_floating_point for dtype in types)


def sorted_nodes(nodes: Sequence[Node], known: Iterable[str]) -> list[Node]:
    """In an order in which they can run, as near to the given one as possible; `known` are there before."""
    producers = {name: node for node in nodes for name in node.outputs}
    done, ready, result = set(known), set(), []
    for node in nodes:
        stack = [node]
        while stack:
            top = stack[-1]
            needed = [producers[n] for n in top.inputs if n and n not in done and n in producers]
            if id(top) in ready:
                stack.pop()
            elif needed:
                stack.extend(reversed(needed))
            else:
                result.append(top)
                done.update(top.outputs)
                ready.add(id(top))
                stack.pop()
    return result


def _input_shapes(outside: OnnxFile, sizes: Mapping[str, Sequence[int]], batch_size: int) -> dict[str, tuple[int, ...]]:
    names = [info.name for info in outside.inputs]
    for name in sizes:
        if name not in names:
            raise EngineError(f"{outside.path}: there is no input {name!r} (inputs: {', '.join(names)})")
    shapes = {}
    for info in outside.inputs:
        shape = list(sizes.get(info.name, info.shape))
        if info.name not in sizes and shape and shape[0] == -1:
            shape[0] = batch_size
        fits = len(shape) == len(info.shape) and all(w in (-1, n) for n, w in zip(shape, info.shape, strict=True))
        if not fits or any(n < 1 for n in shape):
            raise EngineError(
                f"{outside.path}: input {info.name!r} has shape {shape_text(info.shape)} and was asked for as "
                f"{shape_text(shape)}: every dimension must be a number; give the option shapes, such as "
                f"shapes='{info.name}:1x3x224x224', or `inspect engine` a --size"
            )
        shapes[info.name] = tuple(shape)
    return shapes


def _nodes(proto: onnx.ModelProto, path: Path | str) -> Iterable[Node]:
    softmax_axis = 1 if opset_of(proto) < 13 else -1
    types, taken = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}, set[str]()
    for node in proto.graph.node:
        if node.domain not in _DOMAINS:
            raise EngineError(
                f"{path}: {node.name or node.op_type} is an operator of the domain {node.domain!r}, which only its own "
                "runtime knows; export the file with standard operators"
            )
        narrow = _FOUR_BITS.get(types.get(node.input[2], 0)) if node.input[2:] else None
        if narrow and node.op_type == "QuantizeLinear":
            raise EngineError(
                f"{path}: {node.name or node.output[0]}: it quantizes to {narrow}: the cuda engine computes in INT8; "
                "quantize to 8 bits, or run the file with 'onnxruntime'"
            )
        attributes = {a.name: _attribute(a, node, path) for a in node.attribute}
        if node.op_type in {"Softmax", "LogSoftmax"}:
            attributes.setdefault("axis", softmax_axis)
        if node.op_type == "Split":
            attributes["outputs"] = len(node.output)
        name = node.name or node.output[0]
        yield Node(
            op=node.op_type,
            name=free_name(name, taken),
            inputs=tuple(node.input),
            outputs=tuple(node.output),
            attributes=attributes,
            origins=(name,),
        )


def _attribute(attribute: onnx.AttributeProto, node: onnx.NodeProto, path: Path | str) -> object:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        return _tensor(numpy_helper.to_array(value))
    if isinstance(value, onnx.GraphProto):
        raise EngineError(
            f"{path}: {node.name or node.op_type} is a {node.op_type} with a graph of its own; control flow is not "
            "supported: run the file with 'onnxruntime'"
        )
    return value.decode() if isinstance(value, bytes) else value


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind not in "fiub" or array.dtype.name in {"uint16", "uint32", "uint64"}:
        name = array.dtype.name
        if name not in {"bfloat16", "int4", "uint4"}:
            raise EngineError(
                f"a constant of type {name} is not supported: INT8, FP16, BF16, FP32 and indices are; run the file "
                "with 'onnxruntime'"
            )
        array = (
            array.astype(np.float32) if name == "bfloat16" else array.astype(np.int8 if name == "int4" else np.uint8)
        )
    return torch.from_numpy(np.array(array))  # a copy that is writable and contiguous, () included


def _infer(nodes: Sequence[Node], values: dict[str, Tensor], path: Path | str) -> list[Node]:
    """Run what is known, and all else without data; add results to `values`, return what must run."""
    kept = []
    for node in nodes:
        inputs = [values[name] if name else None for name in _checked(node, values, path)]
        if node.op in QUANTIZERS:
            values[node.outputs[0]] = _quantized(node, inputs)
            kept.append(node)
            continue
        constant = all(value is None or not value.is_meta for value in inputs)
        try:
            results = apply(node.op, node.attributes, inputs if constant else _on_meta(node.op, inputs))
        except EngineError as error:
            raise EngineError(f"{path}: {node.name}: {error}") from error
        except (RuntimeError, LookupError, TypeError, ValueError, ArithmeticError) as error:  # torch, on such shapes
            raise EngineError(f"{path}: {node.name} ({node.op}) cannot be run on the given shapes: {error}") from error
        values.update(zip(node.outputs, results, strict=False))
        if any(value.is_meta for value in results):
            kept.append(replace(node, op="Identity", inputs=node.inputs[:1]) if _pads_nothing(node, inputs) else node)
    return kept


def _pads_nothing(node: Node, inputs: Sequence[Tensor | None]) -> bool:
    if node.op != "Pad" or inputs[0] is None:
        return False
    return all(pair == (0, 0) for pair in pads_of(node.attributes, tuple(inputs), inputs[0].dim()))


def _checked(node: Node, values: Mapping[str, Tensor], path: Path | str) -> tuple[str, ...]:
    for name in node.inputs:
        if name and name not in values:
            raise EngineError(f"{path}: {node.name} reads {name!r}, which nothing computes; export the file again")
    return node.inputs


def _quantized(node: Node, inputs: Sequence[Tensor | None]) -> Tensor:
    x, scale = inputs[0], inputs[1]
    zero = inputs[2] if len(inputs) > 2 else None
    if x is None or scale is None:
        raise EngineError(f"{node.name}: a quantizer without data or scale is not valid ONNX")
    if node.op == "QuantizeLinear":
        asked = int(node.attributes.get("output_dtype", 0))
        if zero is None and asked not in _TYPES:
            raise EngineError(f"{node.name}: it quantizes to ONNX's type {asked}, and the cuda engine computes in INT8")
        return torch.empty(x.shape, dtype=_TYPES[asked] if zero is None else zero.dtype, device="meta")
    return torch.empty(x.shape, dtype=scale.dtype, device="meta")


def _on_meta(op: str, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """`inputs` for a run without data: those that shapes depend on keep theirs."""
    if op == "Shape":
        return list(inputs)
    return [
        x if x is None or (op, i) == ("Gather", 1) or is_read_by_the_host(op, i, x) else x.to("meta")
        for i, x in enumerate(inputs)
    ]
