"""Forms of layers that OpenVINO (2026.4) computes right, where it computes those of other files wrong.

**Convolutions without a bias whose result has several consumers.** OpenVINO computes an INT8 convolution in integers
and dequantizes its result. Of two consumers, a quantizer merges the dequantization into its own ranges, and the other
keeps it as a product; the plugin then moves that product into the convolution, and the quantizer gets values that are
dequantized already: the signal to noise is 0 dB. With a bias both consumers read the result of one sum. A bias of zeros
would be removed, so it is the smallest positive number.

**Linear layers without a bias.** Two of them in a row are one kernel of the plugin (`SNIPPETS_MODE`), which returns
zeros or noise. With a bias it is right; one number for all channels would be removed as well, so there are two.

**1 x 1 convolutions with a stride and padding.** A pass moves the stride to the operation before, and the padding is
then counted at the wrong resolution, in float too. A second row of zeros in the kernel keeps the stride where it is.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from compress.export.names import added_tensor
from compress.export.onnx_graph import OnnxGraph, attribute

_SMALLEST = {np.dtype(np.float32): np.finfo(np.float32).tiny, np.dtype(np.float16): np.float16(2**-24)}


def bias_shared_convolutions(proto: onnx.ModelProto) -> int:
    """Add a bias to every convolution of an INT8 weight that has none and has several consumers; in place.

    Returns:
        Number of convolutions that were changed.
    """
    view = OnnxGraph(proto.graph)
    results = {value.name for value in proto.graph.output}
    changed = 0
    for node in proto.graph.node:
        output = node.output[0]
        weight = view.dequantizer(node.input[1]) if node.op_type == "Conv" and len(node.input) == 2 else None
        if weight is None or len(view.consumers.get(output, ())) + (output in results) < 2:
            continue
        channels, scale = view.constants[weight.input[0]].dims[0], view.array(weight.input[1])
        dtype = scale.dtype if scale is not None else np.dtype(np.float32)
        bias = np.full(channels, _SMALLEST[dtype], dtype)
        node.input.append(view.add_constant(added_tensor(output, "bias"), bias))
        changed += 1
    return changed


def bias_products(proto: onnx.ModelProto) -> int:
    """Add a bias that changes no value to every product with an INT8 weight that has none; in place.

    Returns:
        Number of products that were changed.
    """
    view = OnnxGraph(proto.graph)
    nodes: list[onnx.NodeProto] = []
    changed = 0
    for node in proto.graph.node:
        nodes.append(node)
        bias = _small_bias(node, view)
        if bias is None:
            continue
        output, changed = node.output[0], changed + 1
        name = view.add_constant(added_tensor(output, "small_bias"), bias)
        if node.op_type == "Gemm":
            node.input.append(name)
        else:
            node.output[0] = view.free(added_tensor(output, "product"))
            named = added_tensor(node.name, "small_bias")
            nodes.append(helper.make_node("Add", [node.output[0], name], [output], name=named))
            nodes[-1].metadata_props.extend(node.metadata_props)
    if changed:
        view.replace_nodes(nodes)
    return changed


def _small_bias(node: onnx.NodeProto, view: OnnxGraph) -> np.ndarray[tuple[int], np.dtype[np.floating]] | None:
    """Return the bias that a product is to get; None if it has one, or no INT8 weight of two or more channels."""
    if node.op_type not in {"Gemm", "MatMul"} or len(node.input) > 2:
        return None
    if any(
        consumer.op_type == "Add" and _adds_constant(consumer, view)
        for consumer in view.consumers.get(node.output[0], ())
    ):
        return None
    weight = view.dequantizer(node.input[1], {"Transpose"})
    values = None if weight is None else view.constants.get(weight.input[0])
    if weight is None or values is None or len(values.dims) != 2:
        return None
    producer = view.producers.get(node.input[1])
    turned = attribute(node, "transB", 0) + (producer is not None and producer.op_type == "Transpose")
    channels, scale = values.dims[0 if turned % 2 else 1], view.array(weight.input[1])
    dtype = scale.dtype if scale is not None else np.dtype(np.float32)
    if channels < 2 or dtype not in _SMALLEST:
        return None
    return (_SMALLEST[dtype] * (1 + np.arange(channels) % 2)).astype(dtype)


def _adds_constant(node: onnx.NodeProto, view: OnnxGraph) -> bool:
    return any(view.array(name) is not None for name in node.input)


def strides_kept(proto: onnx.ModelProto) -> int:
    """Give 1 x 1 convolutions with a stride and padding a second row of zeros in their kernel; in place.

    Returns:
        Number of convolutions that were changed.
    """
    view = OnnxGraph(proto.graph)
    nodes: list[onnx.NodeProto] = []
    changed = 0
    for node in proto.graph.node:
        if node.op_type == "Conv" and moves_its_stride(node, view) and any(attribute(node, "pads", [])):
            weight = view.dequantizer(node.input[1])
            name = node.input[1] if weight is None else weight.input[0]
            value = view.array(name)
            if value is not None:
                wider = np.concatenate([value, np.zeros_like(value)], axis=2)
                added = view.add_constant(added_tensor(node.output[0], "wider_weight"), wider)
                if weight is not None:
                    own = onnx.NodeProto()
                    own.CopyFrom(weight)
                    own.input[0], own.output[0] = added, view.free(added_tensor(weight.output[0], "wider"))
                    own.name = added_tensor(weight.name, "wider")
                    nodes.append(own)
                node.input[1] = added if weight is None else own.output[0]
                _set_window(node, value.ndim - 2)
                changed += 1
        nodes.append(node)
    if changed:
        view.replace_nodes(nodes)
    return changed


def moves_its_stride(node: onnx.NodeProto, view: OnnxGraph) -> bool:
    """Return True for a 1 x 1 convolution with a stride, which OpenVINO moves to the operations before it."""
    return set(_kernel(node, view)) == {1} and any(stride > 1 for stride in attribute(node, "strides", []))


def _kernel(node: onnx.NodeProto, view: OnnxGraph) -> list[int]:
    weight = view.dequantizer(node.input[1])
    tensor = view.constants.get(node.input[1] if weight is None else weight.input[0])
    return [] if tensor is None else list(tensor.dims[2:])


def _set_window(node: onnx.NodeProto, rank: int) -> None:
    """Set the kernel's size, with one more place along its first axis, and pad for it at the end."""
    pads = list(attribute(node, "pads", [0] * 2 * rank))
    pads[rank] += 1
    kept = [own for own in node.attribute if own.name not in {"kernel_shape", "pads"}]
    del node.attribute[:]
    node.attribute.extend(
        [*kept, helper.make_attribute("kernel_shape", [2] + [1] * (rank - 1)), helper.make_attribute("pads", pads)]
    )
