"""What happens to a file for OpenVINO: forms that it reads, computes right, or computes faster (faults: 2026.4).

Every pass works on the model in place and returns how many nodes it changed; `targets` has their order.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from compress.errors import CompressWarning, first_few
from compress.export.names import added_constant, added_tensor, shifted_tensor
from compress.graph.ops import ONNX_KINDS, TRAITS
from compress.onnx_graph import (
    MOVES,
    PASSES,
    OnnxGraph,
    all_nodes,
    attribute,
    consumed_as,
    drop_unread,
    each_node,
    made_after,
    replace_attributes,
    unsigned,
    without_weights,
)

_SMALLEST = {np.dtype(np.float32): np.finfo(np.float32).tiny, np.dtype(np.float16): np.float16(2**-24)}


def warn_of_resizes(proto: onnx.ModelProto) -> None:
    """Name every Resize that OpenVINO computes without its antialias or keep_aspect_ratio_policy, and says nothing."""
    read = {"antialias": 0, "keep_aspect_ratio_policy": b"stretch"}
    resizes = [node for node in all_nodes(proto.graph.node) if node.op_type == "Resize"]
    others = [node.name for node in resizes if any(attribute(node, key, value) != value for key, value in read.items())]
    if others:
        warnings.warn(
            f"OpenVINO ignores antialias and keep_aspect_ratio_policy, so that it computes {first_few(others)} "
            "otherwise than torch and ONNX Runtime, in float too: resize before the network, or by average pooling",
            CompressWarning,
            stacklevel=5,
        )


def holds_pairs(node: onnx.NodeProto) -> bool:
    """True for operations that move values, but through which OpenVINO (2026.4) moves no pair."""
    own = len(node.output) > 1 or any(step > 1 for step in attribute(node, "dilations", ()))  # its newer MaxPool
    return node.op_type in {"SpaceToDepth", "GatherND"} or (node.op_type == "MaxPool" and own)


@each_node
def bias_shared_convolutions(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Add a bias to every convolution of an INT8 weight that has none and has several consumers.

    OpenVINO dequantizes the result of an INT8 convolution. Of two consumers, a quantizer merges the dequantization into
    its ranges, and the other keeps it as a product, which the plugin then moves into the convolution: the quantizer
    gets values that are dequantized already (0 dB). With a bias both read one sum. Zeros would be removed: it is the
    smallest number.
    """
    output = node.output[0]
    weight = view.dequantizer(node.input[1]) if node.op_type == "Conv" and len(node.input) == 2 else None
    if weight is None or len(view.consumers.get(output, ())) + (output in view.outputs) < 2:
        return None
    channels, scale = view.constants[weight.input[0]].dims[0], view.array(weight.input[1])
    dtype = scale.dtype if scale is not None else np.dtype(np.float32)
    bias = np.full(channels, _SMALLEST[dtype], dtype)
    node.input.append(view.add_constant(added_tensor(output, "bias"), bias))
    return [node]


def products_apart(proto: onnx.ModelProto) -> int:
    """Put a Max that changes no value between two products of rows in a row, of which one is INT8.

    The plugin makes one kernel of such layers (`SNIPPETS_MODE`) that names no precision. Where no sum is left in it,
    because there is no bias or a constant multiplies the sum, it returns zeros or noise. The Max stands before the
    quantizer of the second product.
    """
    view = OnnxGraph(proto.graph)
    products = [node for node in proto.graph.node if node.op_type in {"Gemm", "MatMul"}]
    pairs = [view.dequantizer(node.input[0]) for node in products]
    readers = {two.input[0] if two else one.output[0]: bool(two) for one, two in zip(products, pairs, strict=True)}
    sizes = _sizes(proto) if any(pairs) else {}

    def apart(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        tensor = node.input[0] if node.output[0] in readers else ""
        if len(sizes.get(tensor, ())) != _ROWS or not _from_product(tensor, view, any_type=readers[node.output[0]]):
            return None
        node.input[0] = view.free(added_tensor(tensor, "apart"))
        return [made_after(view.producers[tensor], "Max", [tensor] * 2, node.input[0]), node]

    return view.rewrite(apart)


# Rank of the products that become one kernel.
_ROWS = 2


def _from_product(tensor: str, view: OnnxGraph, *, any_type: bool) -> bool:
    """Return True if a tensor comes from a product, of an INT8 weight or any, through elementwise operations alone."""
    node = view.producers.get(tensor)
    if node is None or node.op_type in {"Gemm", "MatMul"}:
        return node is not None and (any_type or view.dequantizer(node.input[1], {"Transpose"}) is not None)
    kind = TRAITS[ONNX_KINDS.get(node.op_type, "unknown")]
    through = kind.elementwise or node.op_type in {"QuantizeLinear", "DequantizeLinear", "Softmax"}
    return through and any(_from_product(name, view, any_type=any_type) for name in node.input)


@each_node
def strides_kept(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Give 1 x 1 convolutions with a stride a second row of zeros in their kernel where OpenVINO would be wrong."""
    # With padding, in float too: a pass moves the stride to the operation before, and the padding is then counted at
    # the wrong resolution. INT8 with 8, 24, 40... input channels: without AVX-512, threads copy the positions that the
    # stride keeps 16 channels at a time, into each other's (RegNet's shortcuts: other values in every run).
    if node.op_type != "Conv" or not moves_its_stride(node, view):
        return None
    weight = view.dequantizer(node.input[1])
    value = view.array(node.input[1] if weight is None else weight.input[0])
    if value is None or not (any(attribute(node, "pads", [])) or (weight and value.shape[1] % 16 == 8)):
        return None
    wider = np.concatenate([value, np.zeros_like(value)], axis=2)
    added = view.add_constant(added_tensor(node.output[0], "wider_weight"), wider)
    rank = value.ndim - 2
    pads = list(attribute(node, "pads", []))
    pads[rank] += 1  # at the end of the first axis
    replace_attributes(node, kernel_shape=[2] + [1] * (rank - 1), pads=pads)
    if weight is None:
        node.input[1] = added
        return [node]
    own = onnx.NodeProto()
    own.CopyFrom(weight)
    own.input[0], own.output[0] = added, view.free(added_tensor(weight.output[0], "wider"))
    own.name, node.input[1] = added_tensor(weight.name, "wider"), own.output[0]
    return [own, node]


def moves_its_stride(node: onnx.NodeProto, view: OnnxGraph) -> bool:
    """Return True for a 1 x 1 convolution with a stride, which OpenVINO moves to the operations before it."""
    return set(_kernel(node, view)) == {1} and any(stride > 1 for stride in attribute(node, "strides", []))


def _kernel(node: onnx.NodeProto, view: OnnxGraph) -> list[int]:
    """Return the kernel's size along each axis of the image; [] if the weight is computed."""
    weight = view.dequantizer(node.input[1])
    tensor = view.constants.get(node.input[1] if weight is None else weight.input[0])
    return [] if tensor is None else list(tensor.dims[2:])


def _unfused(node: onnx.NodeProto, part: str, view: OnnxGraph) -> list[onnx.NodeProto]:
    """Return a node and the Max of its result with itself, under the name of the result, which gets a suffix."""
    # OpenVINO fuses no quantizer with the Max, and it took no measurable time.
    output = node.output[0]
    node.output[0] = view.free(added_tensor(output, part))
    return [node, made_after(node, "Max", [node.output[0]] * 2, output)]


@each_node
def float_averages(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Put a Max that changes no value after every AveragePool that has a consumer other than quantizers."""
    # OpenVINO computes an average of INT8 values in INT8 where a sum, a product or a concat consumes it, and rounds it
    # to the steps of its input (PoolFormer, DenseNet). Before an operation without an INT8 form it stays float.
    consumers = view.consumers.get(node.output[0], ()) if node.op_type == "AveragePool" else ()
    in_float = any(consumer.op_type != "QuantizeLinear" for consumer in consumers)
    return _unfused(node, "average", view) if in_float else None


@each_node
def padding_apart(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    # OpenVINO moves the zero point of an AveragePool's input behind it, and padding that is counted is then no zero
    # (8.6 dB): a Max that changes no value keeps it before. INT8 without a zero point may become UINT8 (`to_unsigned`).
    padded = any(attribute(node, "pads", [])) or attribute(node, "auto_pad", b"").startswith(b"SAME")
    counts = node.op_type == "AveragePool" and padded and attribute(node, "count_include_pad", 0)
    pair = view.dequantizer(node.input[0], PASSES) if counts else None
    point = view.array(pair.input[2]) if pair is not None and len(pair.input) > 2 else None
    if point is None or (point.dtype != np.int8 and not np.any(point)):
        return None
    tensor, node.input[0] = node.input[0], view.free(added_tensor(node.input[0], "padded"))
    return [made_after(node, "Max", [tensor] * 2, node.input[0]), node]


# First opset whose Pad takes its amounts as an input.
PAD_OPSET = 11


@each_node
def ceilings_apart(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    # OpenVINO divides a window of an AveragePool that reaches over counted padding (`ceil_mode`) by another number, in
    # float too (15 dB). The padding is written as a Pad of its own, so that the pool counts values of its input alone.
    pads = list(attribute(node, "pads", []))
    ceils = node.op_type == "AveragePool" and attribute(node, "ceil_mode", 0) and any(pads)
    if not ceils or not attribute(node, "count_include_pad", 0):
        return None
    half, output = len(pads) // 2, node.output[0]
    amounts = np.asarray([0, 0, *pads[:half], 0, 0, *pads[half:]], np.int64)
    inputs = [node.input[0], view.add_constant(added_tensor(output, "pads"), amounts)]
    node.input[0] = view.free(added_tensor(output, "whole"))
    replace_attributes(node, pads=None, count_include_pad=None)
    return [made_after(node, "Pad", inputs, node.input[0]), node]


@each_node
def joins_apart(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Put a Max that changes no value after every Concat whose result gets a zero point, but before convolutions.

    A quantizer after a Concat is moved to its inputs. A zero point then passes a Concat along axis 1 to convolutions
    alone: along other axes the plugin computes the convolution in float, refuses a product, or crashes.
    """
    if node.op_type != "Concat":
        return None
    pairs = [pair for pair in view.consumers.get(node.output[0], ()) if pair.op_type == "QuantizeLinear"]
    moved = [pair for pair in pairs if len(pair.input) > 2 and np.any(view.array(pair.input[2]))]
    again = [two for pair in moved for two in view.consumers.get(pair.output[0], ())]
    read = {after.op_type for two in again for after in view.consumers.get(two.output[0], ())}
    plain = attribute(node, "axis", 0) == 1 and read <= {"Conv", "ConvTranspose"}
    return None if not moved or plain else _unfused(node, "joined", view)


def extremes_apart(proto: onnx.ModelProto) -> int:
    """Put a Max that changes no value after every ReduceMax and ReduceMin of a quantized model.

    The CPU plugin computes them together with the quantizer after them, and then gets other values (0 to 20 dB). The
    other reductions are right.
    """
    if all(node.op_type != "QuantizeLinear" for node in proto.graph.node):
        return 0
    view = OnnxGraph(proto.graph)

    def apart(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        read = view.consumers.get(node.output[0], ()) if node.op_type in {"ReduceMax", "ReduceMin"} else ()
        bare = any(reader.op_type != "Max" or len({*reader.input}) > 1 for reader in read)
        return _unfused(node, "reduced", view) if bare else None

    return view.rewrite(apart)


@each_node
def factors_apart(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    # The CPU plugin puts factors of channels into the quantizer after them. With an open batch it then cuts channels of
    # a negative factor at the wrong ends (-2 dB). A Max that changes no value keeps them apart.
    own = _factors(node, view)
    before = [view.producers[name] for name in node.input if name in view.producers]
    channels = any(value.size > 1 for one in [node, *before] for value in _factors(one, view))
    if not channels or not any(np.any(value < 0) for value in own):
        return None
    readers = view.consumers.get(node.output[0], ())
    return _unfused(node, "scaled", view) if any(_fused_with_factors(reader, view) for reader in readers) else None


def _factors(node: onnx.NodeProto, view: OnnxGraph) -> list[NDArray[Any]]:
    if node.op_type == "Neg":
        return [np.array(-1.0)]
    names = node.input if node.op_type in {"BatchNormalization", "Div", "Mul"} else ()
    return [value for name in names if (value := view.array(name)) is not None]


def _fused_with_factors(node: onnx.NodeProto, view: OnnxGraph) -> bool:
    # A quantizer, or what may stand between it and a factor that becomes part of it.
    if node.op_type in {"Add", "Sub", "Mul", "Div"}:
        values = [value for name in node.input if (value := view.array(name)) is not None]
        return any(value.size == 1 or node.op_type in {"Mul", "Div"} for value in values)  # sums of channels are right
    return node.op_type in {*PASSES, "Clip", "Neg", "Pad", "QuantizeLinear", "Relu", "Split"}


def axes_from_the_front(proto: onnx.ModelProto) -> None:
    # OpenVINO (2026.4) reads no Resize of axes that are counted from the end.
    axes = [(node, attribute(node, "axes", ())) for node in proto.graph.node if node.op_type == "Resize"]
    negative = [pair for pair in axes if min(pair[1], default=0) < 0]
    sizes = _sizes(proto) if negative else {}
    for node, named in negative:
        if node.input[0] in sizes:
            replace_attributes(node, axes=[axis % len(sizes[node.input[0]]) for axis in named])


def flat_gathers(proto: onnx.ModelProto) -> int:
    """Rewrite every Gather of an activation by a table of indices as one by a row of them, and a Reshape.

    Such a Gather (`Tensor.unfold`, indexing with a tensor of two axes) has more axes than its input. OpenVINO moves the
    channel scales before it to its output without the new axes, and refuses the file ("GatherTransformation ...
    CALLBACK HAS THROWN"). A tensor with two unknown sizes after the axis is left alone.
    """
    view = OnnxGraph(proto.graph)
    tables = [node for node in proto.graph.node if node.op_type == "Gather" and node.input[0] not in view.constants]
    sizes = _sizes(proto) if tables else {}
    shapes = {name: [d.dim_value if d.HasField("dim_value") else -1 for d in dims] for name, dims in sizes.items()}

    def flat(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        if node.op_type != "Gather" or node.input[0] in view.constants:
            return None
        index, source = view.array(node.input[1]), shapes.get(node.input[0])
        if index is None or index.ndim < 2 or source is None:
            return None
        axis = attribute(node, "axis", 0) % len(source)
        target = [0] * axis + [*index.shape, *source[axis + 1 :]]  # 0 copies the size of the input, -1 is the remainder
        if target.count(-1) > 1:
            return None
        output = node.output[0]
        node.output[0] = view.free(added_tensor(output, "row"))
        node.input[1] = view.add_constant(added_tensor(output, "index"), index.reshape(-1).copy())
        shape = view.add_constant(added_tensor(output, "shape"), np.asarray(target, np.int64))
        return [node, made_after(node, "Reshape", [node.output[0], shape], output)]

    return view.rewrite(flat)


@each_node
def orders_in_two(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Write every Gather that puts the channels of an activation in another order as two, each its own inverse.

    OpenVINO puts the weights of the layers after it in that order instead (`RICFusion`), in float too, and takes the
    order where its inverse is needed: below 0 dB unless both are the same. It leaves two in a row alone.
    """
    index = view.array(node.input[1]) if node.op_type == "Gather" and node.input[0] not in view.constants else None
    rows: list[int] = [] if index is None or index.ndim != 1 else index.tolist()
    order = [i + len(rows) if i < 0 else i for i in rows]
    if sorted(order) != [*range(len(order))] or all(order[j] == i for i, j in enumerate(order)):
        return None
    halves = np.empty((2, len(order)), np.int64)
    for start in range(len(order)):
        cycle = [start]
        while order[cycle[-1]] != start:
            cycle.append(order[cycle[-1]])
        for place, channel in enumerate(cycle):
            halves[:, channel] = cycle[(1 - place) % len(cycle)], cycle[-place]
    halves[0] = [rows[order.index(channel)] for channel in halves[0]]  # the axis may be longer than the index
    output, between = node.output[0], view.free(added_tensor(node.output[0], "half"))
    names = [view.add_constant(added_tensor(output, f"order{i}"), half) for i, half in enumerate(halves)]
    node.input[1], node.output[0] = names[0], between
    second = made_after(node, "Gather", [between, names[1]], output)
    replace_attributes(second, axis=attribute(node, "axis", 0))
    return [node, second]


def whole_transforms(proto: onnx.ModelProto) -> int:
    # OpenVINO reads a one-sided DFT of real values with an axis too many, and an inverse one with one too few: a whole
    # DFT is cut, the result of an inverse one reshaped. Those of unknown size are left alone.
    transforms = [node for node in proto.graph.node if node.op_type == "DFT" and attribute(node, "onesided", 0)]
    view, sizes = OnnxGraph(proto.graph), _sizes(proto) if transforms else {}

    def whole(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        if node not in transforms:
            return None
        output, given = node.output[0], view.array(node.input[2]) if len(node.input) > 2 else None
        axis = attribute(node, "axis", -2 if given is None else int(given))
        if attribute(node, "inverse", 0):
            shape = [0, *(dim.dim_value for dim in sizes.get(output, ())[1:])]
            if len(shape) < 2 or 0 in shape[1:]:
                return None
            node.output[0] = view.free(added_tensor(output, "inverse"))
            names = [view.add_constant(added_tensor(output, "shape"), np.asarray(shape, np.int64))]
            return [node, made_after(node, "Reshape", [node.output[0], *names], output)]
        length = view.array(node.input[1]) if len(node.input) > 1 else None
        size = sizes[node.input[0]][axis].dim_value if node.input[0] in sizes else 0
        count = size if length is None else int(length)
        if not count:
            return None
        replace_attributes(node, onesided=0)
        node.output[0] = view.free(added_tensor(output, "whole"))
        bounds = (("first", 0), ("end", count // 2 + 1), ("axis", axis))
        names = [view.add_constant(added_tensor(output, key), np.asarray([n], np.int64)) for key, n in bounds]
        return [node, made_after(node, "Slice", [node.output[0], *names], output)]

    return view.rewrite(whole)


_TO_THE_END = np.iinfo(np.int64).max


@each_node
def concatenated_pads(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Replace every Pad of mode `wrap`, which OpenVINO cannot read, by Slices and Concats, axis by axis.

    A Pad by computed or negative amounts, or of named axes, is left alone.
    """
    wraps = node.op_type == "Pad" and attribute(node, "mode", b"") == b"wrap" and not any(node.input[2:])
    amounts = view.array(node.input[1]) if wraps else None
    if amounts is None or amounts.min() < 0 or not amounts.any():
        return None
    return _concatenated(view, node, amounts.reshape(2, -1).T.tolist())


def _concatenated(view: OnnxGraph, pad: onnx.NodeProto, amounts: list[list[int]]) -> list[onnx.NodeProto]:
    """Return the nodes of a Pad by (before, after) rows of each axis."""
    source, output, nodes = pad.input[0], pad.output[0], []
    last = max(axis for axis, pair in enumerate(amounts) if any(pair))

    def rows(start: int, end: int, axis: int, part: str) -> str:
        name = view.free(added_tensor(output, f"{part}{axis}"))
        bounds = {"start": start, "end": end, "axis": axis}
        constants = [view.add_constant(added_tensor(name, k), np.asarray([v], np.int64)) for k, v in bounds.items()]
        nodes.append(
            helper.make_node("Slice", [source, *constants], [name], name=added_tensor(pad.name, f"{part}{axis}"))
        )
        return name

    for axis, (before, after) in enumerate(amounts):
        if before or after:
            first = [rows(-before, _TO_THE_END, axis, "last")] if before else []
            end = [rows(0, after, axis, "first")] if after else []
            whole = output if axis == last else view.free(added_tensor(output, f"whole{axis}"))
            name = added_tensor(pad.name, f"whole{axis}")
            nodes.append(helper.make_node("Concat", [*first, source, *end], [whole], name=name, axis=axis))
            source = whole
    for node in nodes:
        node.metadata_props.extend(pad.metadata_props)
    return nodes


def batches_kept(proto: onnx.ModelProto) -> int:
    """Write a 0, which copies that size of the input, where a Reshape computes the batch: `x.view(n, -1)`.

    A file that computes with sizes nowhere else needs none of its biases apart (`biases_apart`), which are slow on ONNX
    Runtime. Files with graphs inside nodes are left alone.
    """
    if any(a.HasField("g") or a.graphs for node in proto.graph.node for a in node.attribute):
        return 0
    view = OnnxGraph(proto.graph)
    found = [(node, source) for node in proto.graph.node if (source := _batch_of(node, view)) is not None]
    names = {name: dims[0].dim_param for name, dims in (_sizes(proto) if found else {}).items()}
    changed = [(n, s) for n, s in found if names.get(s) and names[s] == names.get(n.input[0])]
    for node, _ in changed:
        sizes = [view.array(name) for name in view.producers[node.input[1]].input[1:]]
        whole = np.concatenate([np.zeros(1, np.int64), *(size.reshape(-1) for size in sizes if size is not None)])
        node.input[1] = view.add_constant(f"{node.output[0]}/batch_kept", whole)
    if changed:
        drop_unread(proto.graph)
    return len(changed)


def _batch_of(node: onnx.NodeProto, view: OnnxGraph) -> str | None:
    """Return the tensor whose first size a Reshape takes as its own first size, before constants; None if it is not so.

    As torch's exporters write it: Concat(Unsqueeze(Gather(Shape(tensor), 0)), constants), or with Shape(tensor, end=1).
    """
    shape = view.producers.get(node.input[1]) if node.op_type == "Reshape" else None
    if shape is None or shape.op_type != "Concat" or attribute(node, "allowzero", 0):
        return None
    if len(shape.input) < 2 or any(view.array(name) is None for name in shape.input[1:]):
        return None
    first = view.producers.get(shape.input[0])
    if first is not None and first.op_type == "Unsqueeze":
        first = view.producers.get(first.input[0])
    if first is not None and first.op_type == "Shape":
        return first.input[0] if (attribute(first, "start", 0), attribute(first, "end", 0)) == (0, 1) else None
    place = view.array(first.input[1]) if first is not None and first.op_type == "Gather" else None
    if first is None or place is None or place.size != 1 or place.item() != 0:
        return None
    asked = view.producers.get(first.input[0])
    return None if asked is None or asked.op_type != "Shape" or attribute(asked, "start", 0) else asked.input[0]


def _sizes(proto: onnx.ModelProto) -> dict[str, Any]:
    """Return the dimensions of tensors of rank 1 or more, as far as ONNX's shape inference follows them."""
    model = without_weights(proto)
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        if dims and not dims[0].dim_param and not dims[0].HasField("dim_value"):
            dims[0].dim_param = f"first size of {value.name}"
    try:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except onnx.shape_inference.InferenceError:  # an operation that ONNX cannot follow: the sizes stay computed
        return {}
    values = [*graph.value_info, *graph.output, *graph.input]
    return {v.name: v.type.tensor_type.shape.dim for v in values if v.type.tensor_type.shape.dim}


# Operators for which OpenVINO asks for a shape; recurrent ones do so for their states of zeros.
_COMPUTES_WITH_SIZES = frozenset({"Shape", "Size", "LSTM", "GRU", "RNN"})


def biases_apart(proto: onnx.ModelProto) -> int:
    """Replace the constant bias of every convolution by an Add after it, where sizes are open and computed with.

    OpenVINO's reader asks for the shape of a convolution's result to bring its bias to that rank, and shares the
    question with others for the same open size (a class token repeated for each image). The convolution then has two
    consumers, and a quantizer after its bias is computed with the bias of one channel for all: near 0 dB with an open
    batch. A sum asks for no shape.
    """
    view = OnnxGraph(proto.graph)
    types = [value.type.tensor_type for value in proto.graph.input if value.name not in view.constants]
    is_open = any(not t.HasField("shape") or any(not d.HasField("dim_value") for d in t.shape.dim) for t in types)
    if not is_open or all(node.op_type not in _COMPUTES_WITH_SIZES for node in all_nodes(proto.graph.node)):
        return 0

    def apart(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        bias = view.array(node.input[2]) if node.op_type == "Conv" and len(node.input) > 2 and node.input[2] else None
        kernel = _kernel(node, view) if bias is not None else []
        if bias is None or not kernel:
            return None
        output = node.output[0]
        del node.input[2:]
        node.output[0] = view.free(added_tensor(output, "product"))
        shaped = view.add_constant(added_tensor(output, "bias"), bias.reshape(1, -1, *[1] * len(kernel)))
        return [node, made_after(node, "Add", [node.output[0], shaped], output, added_tensor(node.name, "bias"))]

    return view.rewrite(apart)


@each_node
def signs_apart(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Give some consumers of a tensor a pair of equal values, signed or not, where convolutions need the other form.

    The plugin computes transposed convolutions and products of two activations in 8 bits without a zero point only, and
    without AMX convolutions of unsigned integers only: of two readers one would be float.
    """
    pair = view.producers.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
    zero = view.array(pair.input[2]) if pair is not None and len(pair.input) > 2 else None
    if pair is None or zero is None:
        return None
    readers = view.consumers.get(node.output[0], [])
    point: NDArray[Any] = np.zeros_like(zero, np.int8)
    if zero.dtype == np.uint8 and np.all(zero == _MIDDLE):
        others, form = [reader for reader in readers if _in_products(reader, view)], "signed"
    elif zero.dtype == np.int8 and not zero.any():
        others, form = [reader for reader in readers if reader.op_type != "ConvTranspose"], "unsigned"
        point = np.full_like(zero, _MIDDLE, np.uint8)
    else:
        return None
    if len(others) in {0, len(readers)}:
        return None
    q, result = (view.free(added_tensor(name, form)) for name in (node.input[0], node.output[0]))
    middle = view.add_constant(added_constant(result, "zero_point"), point)
    for reader in others:
        consumed_as(reader, node.output[0], result)
    names = [added_tensor(one.name, form) for one in (pair, node)]
    return [
        node,
        helper.make_node("QuantizeLinear", [*pair.input[:2], middle], [q], name=names[0]),
        helper.make_node("DequantizeLinear", [q, node.input[1], middle], [result], name=names[1]),
    ]


# Zero point of unsigned integers that hold the values of signed ones.
_MIDDLE = 128


def _in_products(node: onnx.NodeProto, view: OnnxGraph) -> bool:
    if node.op_type == "MatMul":
        pairs = [view.dequantizer(name, MOVES) for name in node.input]
        return all(pair is not None and pair.input[0] not in view.constants for pair in pairs)
    read = view.consumers.get(node.output[0], []) if node.op_type in MOVES else []
    return bool(read) and all(_in_products(reader, view) for reader in read)


_ZERO = np.zeros((), np.uint8)


def zero_points_into_biases(proto: onnx.ModelProto) -> int:
    """Let float32 convolutions without padding read unsigned integers without their zero point.

    A signed tensor is stored as q = x / scale + 128, because OpenVINO computes convolutions of unsigned integers, and
    its 1x1 kernels correct the sums for the zero point in every run. Without padding the correction is the same
    everywhere:

        conv(w, scale * (q - 128)) + b  =  conv(w, scale * q) + (b - scale * 128 * sum of w)

    MobileNetV2 and EfficientNet-Lite0 take 0.96 and 0.98 of the time with it. The bias is rounded to float32, which is
    the only change.
    """
    view = OnnxGraph(proto.graph)
    nodes: list[onnx.NodeProto] = []
    changed = 0
    for node in proto.graph.node:
        offset = _offset(node, view)
        read = view.consumers.get(node.output[0], []) if offset else []
        biases = [
            (conv, bias) for conv in read if (bias := _moved_bias(conv, node.output[0], offset, view)) is not None
        ]
        if len(biases) < len(read):  # OpenVINO (2026.4) moves the stride of a 1x1 up, and then computes it in float
            biases = [(conv, bias) for conv, bias in biases if not moves_its_stride(conv, view)]
        if len(biases) < len(read) or not biases or node.output[0] in view.outputs:
            nodes.append(node)
        if not biases:
            continue
        shifted = view.free(shifted_tensor(node.output[0]))
        zero = view.add_constant(added_constant(shifted, "zero_point"), _ZERO)
        name = shifted_tensor(node.name)
        nodes.append(helper.make_node("DequantizeLinear", [*node.input[:2], zero], [shifted], name=name))
        for conv, bias in biases:
            consumed_as(conv, node.output[0], shifted)
            del conv.input[2:]
            conv.input.append(view.add_constant(added_tensor(conv.output[0], "shifted_bias"), bias))
        changed += len(biases)
    view.replace_nodes(nodes)
    return changed


def _offset(node: onnx.NodeProto, view: OnnxGraph) -> float:
    """Return the real value of the zero point of a quantized activation; 0 for any other node."""
    if node.op_type != "DequantizeLinear" or len(node.input) < 3 or node.input[0] in view.constants:
        return 0.0
    scale, zero_point = (view.array(name) for name in node.input[1:])
    if scale is None or zero_point is None or scale.dtype != np.float32 or zero_point.dtype != np.uint8:
        return 0.0
    return float(scale.reshape(-1)[0]) * int(zero_point.reshape(-1)[0]) if scale.size == 1 else 0.0


def _moved_bias(conv: onnx.NodeProto, source: str, offset: float, view: OnnxGraph) -> NDArray[Any] | None:
    """Return the bias of a convolution that reads a tensor shifted by `offset`, (C,); None if it pads, for example."""
    if conv.op_type != "Conv" or conv.input[0] != source or any(attribute(conv, "pads", [])):
        return None
    if attribute(conv, "auto_pad", b"NOTSET") not in {b"NOTSET", b"VALID"}:
        return None
    weight = view.dequantizer(conv.input[1])
    arrays = [] if weight is None else [view.array(name) for name in weight.input]
    if weight is None or len(arrays) != 3 or any(array is None for array in arrays):
        return None
    q, scale, zero_point = (np.asarray(array) for array in arrays)
    bias = view.array(conv.input[2]) if len(conv.input) > 2 else np.zeros(len(q), np.float32)
    whole = scale.ndim == 0 or (scale.shape == q.shape[:1] and attribute(weight, "axis", 1) == 0)
    if not whole or q.dtype != np.int8 or zero_point.any() or bias is None or bias.dtype != np.float32:
        return None
    sums = q.reshape(len(q), -1).sum(1, dtype=np.int64) * scale.astype(np.float64)
    return np.asarray(bias.astype(np.float64) - offset * sums, np.float32)


# Operations that OpenVINO computes in 8 bits without a zero point only, or wrongly with one.
_SYMMETRIC = ("MatMul", "Gemm", "ConvTranspose")


def joins_signed(model: onnx.ModelProto) -> bool:
    return any(node.op_type == "Concat" for node in model.graph.node) and bool(_signed(OnnxGraph(model.graph)))


def to_unsigned(model: onnx.ModelProto) -> None:
    """Change QuantizeLinear and DequantizeLinear pairs that convolutions read from int8 to uint8, in place.

    Integers and zero points grow by 128, so real values stay; weights and inputs of matrix products and of
    transposed convolutions are unchanged.
    """
    # OpenVINO 2026.4.1 (x86, AVX-512) computes convolutions of concatenated signed tensors wrongly, and matrix
    # products of concatenated unsigned ones
    view, made = OnnxGraph(model.graph), dict[str, str]()
    for node, readers in _signed(view):
        for own in node.attribute:
            if own.name == "output_dtype":
                own.i = TensorProto.UINT8
        for one in (node, *readers):
            one.input[2] = unsigned(view, one.input[2], made)


def _signed(view: OnnxGraph) -> list[tuple[onnx.NodeProto, list[onnx.NodeProto]]]:
    signed = {name for name, tensor in view.constants.items() if tensor.data_type == TensorProto.INT8}

    def by(node: onnx.NodeProto, kind: str) -> bool:
        return node.op_type == kind and len(node.input) == 3 and node.input[2] in signed

    found = []
    for node in view.graph.node:
        read = view.consumers.get(node.output[0], []) if by(node, "QuantizeLinear") else []
        if read and node.output[0] not in view.outputs and all(by(one, "DequantizeLinear") for one in read):
            weighted = _weighted(read, view)
            if "Conv" in weighted and not weighted.intersection(_SYMMETRIC):
                found.append((node, read))
    return found


def _weighted(nodes: Collection[onnx.NodeProto], view: OnnxGraph) -> set[str]:
    kinds, seen, waiting = set(), set[str](), list(nodes)
    while waiting:
        for name in waiting.pop().output:
            for reader in view.consumers.get(name, []) if name not in seen else []:
                if reader.op_type in ("Conv", *_SYMMETRIC):
                    kinds.add(reader.op_type)
                elif reader.op_type != "QuantizeLinear":
                    waiting.append(reader)
            seen.add(name)
    return kinds
