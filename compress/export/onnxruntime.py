"""What happens to a file for ONNX Runtime: the forms that it computes in integers, without overflow (1.31).

Every pass works on the model in place; `targets` has their order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from compress.export.names import added_constant, added_tensor
from compress.graph.spelled import spelled_activation
from compress.onnx_graph import (
    MOVES,
    PASSES,
    TELLING,
    WEIGHTED_OPS,
    OnnxForm,
    OnnxGraph,
    attribute,
    consumed_as,
    each_node,
    made_after,
    may_saturate,
    opset_of,
    replace_attributes,
    sort_nodes,
    unsigned,
)

_LARGEST = 2**31 - 1
AXIS_OPSET = 13  # first opset of a DequantizeLinear with a scale for each channel
_QUANTIZED_ALONE = frozenset({"Conv", "ConvTranspose", "Gemm"})
_ROOM = 2.0**30  # largest bias in steps: half of what INT32 holds, so that float32 scales may be inexact


@each_node
def room_for_biases(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Raise scales of INT8 weights whose layer's bias would not fit into INT32.

    Biases are added as INT32 in steps of input scale * weight scale. A channel whose weights are close to zero
    (training leaves such dead channels) has a tiny scale, and its bias may take more steps than INT32 holds: a wrong
    number, without an error. A weight moves by at most half a new step, and all weights of the channel together by a
    ten-millionth of the bias for each input.
    """
    found = _bias(node, view)
    if found is None:
        return None
    source, dequantize = _scale(node.input[0], view), view.dequantizer(node.input[1], MOVES)
    if source is None or dequantize is None:
        return None
    bias = view.array(found[0].input[found[1]])
    q, scale = (view.array(name) for name in dequantize.input[:2])
    if bias is None or q is None or scale is None or q.dtype != np.int8 or scale.dtype != np.float32:
        return None
    if bias.ndim != 1 or scale.shape not in {(), bias.shape}:
        return None
    steps = np.maximum(np.abs(bias.astype(np.float64)) / _ROOM, np.finfo(np.float32).tiny) / source
    needed = (steps if scale.ndim else steps.max()).astype(np.float32)
    if (scale >= needed).all():
        return None
    wider = np.maximum(scale, needed)
    axis = attribute(dequantize, "axis", 1)
    ratio = (scale / wider).reshape([-1 if i == axis else 1 for i in range(q.ndim)] if scale.ndim else ())
    values = {"q": np.round(q * ratio).astype(np.int8), "scale": wider}
    for i, (part, value) in enumerate(values.items()):
        dequantize.input[i] = view.add_constant(added_constant(dequantize.name, part), value)
    return [node]


@each_node
def clips_apart(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Write every Relu and Clip of an INT8 product's result as Max and Min, where no quantizer alone reads it.

    ONNX Runtime takes such a product, Relu or Clip and quantizer for one operation; where the quantizer is missing, it
    computes the product in float. Between a product and other operations its form in 8 bits has a float result.
    """
    scale = _scale_of_product(node, view) if node.op_type in {"Relu", "Clip"} else None
    if scale is None:
        return None
    low, high = [*node.input[1:], "", ""][:2] if node.op_type == "Clip" else ("", "")
    if node.op_type == "Relu":
        low = view.add_constant(added_constant(node.name, "zero"), np.zeros((), scale.dtype))
    steps = [(kind, bound) for kind, bound in (("Max", low), ("Min", high)) if bound]
    made, source = [], node.input[0]
    for i, (kind, bound) in enumerate(steps, start=1):
        output = node.output[0] if i == len(steps) else view.free(added_tensor(node.output[0], "low"))
        made.append(made_after(node, kind, [source, bound], output, node.name if i == len(steps) else ""))
        source = output
    return made or None


def _scale_of_product(node: onnx.NodeProto, view: OnnxGraph) -> NDArray[Any] | None:
    """Return the scale of what an INT8 product reads whose result a node alone reads, and not for quantizers alone."""
    readers, product = view.consumers.get(node.output[0], []), view.producers.get(node.input[0])
    if product is None or product.op_type not in {"Gemm", "MatMul"} or len(view.consumers[product.output[0]]) > 1:
        return None
    if not readers or all(reader.op_type == "QuantizeLinear" for reader in readers):
        return None
    scales = [_scale(name, view) for name in product.input[:2]]
    return None if any(scale is None for scale in scales) else scales[0]


def integer_biases(proto: onnx.ModelProto, operators: Collection[str] = ("Gemm", "MatMul")) -> tuple[str, ...]:
    """Write as INT32 the bias of every Gemm, or MatMul and Add, whose input and weight are quantized; return names.

    For LiteRT, which rounds all biases so, also those of convolutions (`operators`).

    ONNX Runtime merges MatMul and Add into Gemm before it looks for Q/DQ, and runs a Gemm in 8 bits only if its bias is
    an INT32 DequantizeLinear of scale input scale * weight scale; else it dequantizes the weights in every run. (It
    rewrites the biases of convolutions itself.) A bias moves by at most half a step.
    """
    view = OnnxGraph(proto.graph)
    done: dict[str, onnx.NodeProto] = {}
    for node in proto.graph.node:
        found = _bias(node, view) if node.op_type in operators else None
        if found is None:
            continue
        holder, place = found
        source, weight = (_scale(name, view) for name in node.input[:2])
        bias = view.array(holder.input[place])
        if bias is None or source is None or weight is None or {source.dtype, weight.dtype} != {np.dtype(np.float32)}:
            continue
        product = np.asarray(source * weight, np.float32)
        if bias.ndim != 1 or product.shape not in {(), (1,), bias.shape}:
            continue  # an added number or map, which is no bias for each output
        scale = np.broadcast_to(product, bias.shape).copy()
        steps = np.round(bias / scale)
        if np.abs(steps).max() < _LARGEST:
            done[holder.name] = _dequantize(view, holder, place, steps.astype(np.int32), scale)
    view.replace_nodes(
        part for node in list(proto.graph.node) for part in ((done[node.name], node) if node.name in done else (node,))
    )
    return tuple(done)


def _bias(node: onnx.NodeProto, view: OnnxGraph) -> tuple[onnx.NodeProto, int] | None:
    """Return (node that adds the constant bias of a convolution or matrix product, index of that input)."""
    if node.op_type in {"Conv", "ConvTranspose", "Gemm"}:
        constant = len(node.input) == 3 and node.input[2] in view.constants
        plain = node.op_type != "Gemm" or all(attribute(node, name, 1.0) == 1.0 for name in ("alpha", "beta"))
        return (node, 2) if constant and plain else None
    after = view.consumers.get(node.output[0], []) if node.op_type == "MatMul" else []
    if len(after) != 1 or after[0].op_type != "Add":
        return None
    return next(((after[0], i) for i, name in enumerate(after[0].input) if name in view.constants), None)


def _scale(name: str, view: OnnxGraph) -> NDArray[Any] | None:
    """Return the scale of a tensor that comes from bytes, also through operations that move values."""
    node = view.dequantizer(name, MOVES | {"MaxPool"})
    zero = None if node is None or len(node.input) < 3 else view.array(node.input[2])
    wide = zero is not None and zero.dtype.itemsize > 1  # what reads 16 bits is no integer operation
    return None if node is None or wide else view.array(node.input[1])


def _dequantize(
    view: OnnxGraph, holder: onnx.NodeProto, place: int, steps: NDArray[Any], scale: NDArray[Any]
) -> onnx.NodeProto:
    parts = {"bias_q": steps, "bias_scale": scale, "bias_zero_point": np.zeros_like(steps)}
    names = [view.add_constant(added_constant(holder.name, part), value) for part, value in parts.items()]
    holder.input[place] = added_constant(holder.name, "bias")
    name = added_constant(holder.input[place], "DequantizeLinear")
    return helper.make_node("DequantizeLinear", names, [holder.input[place]], name=name, axis=0)


# Operations through which ONNX Runtime moves a pair (its QDQPropagationTransformer), to one consumer of the result.
_MOVED_THROUGH = frozenset({"MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice"})
_PASSES = PASSES | {"Pad"}
_SCALE_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)
# First opset whose pairs take float16.
_HALF_OPSET = 19
# Operations that compute in integers if what they consume is quantized.
_WANTED = WEIGHTED_OPS | {"Add", "AveragePool", "GlobalAveragePool", "QuantizeLinear"}


def repeat_pairs(
    proto: onnx.ModelProto, *, everywhere: bool = False, after: Callable[[onnx.NodeProto], bool] | None = None
) -> int:
    """Add a pair after each concat, split or flattening of quantized tensors that a layer consumes; return the number.

    A pair before such an operation also gives the range of its result, and TensorRT and OpenVINO use it so. ONNX
    Runtime moves pairs through few operations; after all others it takes the tensor for float, and its consumer
    computes in float: 8 of the 26 convolutions of a SqueezeNet. The second pair has the scale of the first, so that no
    value changes. Results of other moves get one where they have several consumers; all do with `everywhere`, and only
    those of nodes that fulfil `after`.
    """
    view = OnnxGraph(proto.graph)
    types = _SCALE_TYPES if opset_of(proto) >= _HALF_OPSET else _SCALE_TYPES[:1]
    wanted = _wanted(view)
    first: dict[str, onnx.NodeProto] = {}  # by tensor, the pair whose integers it holds
    wide: set[str] = set()  # tensors that hold them in a type for which there is no pair
    nodes: list[onnx.NodeProto] = []
    added = 0
    for node in proto.graph.node:
        nodes.append(node)
        if _dequantizes_activation(node, view):
            first[node.output[0]] = node
        pair = _common_pair(node, first, view)
        if pair is None:
            continue
        typed = _cast_pair(node, pair, view, types) if node.op_type == "Cast" else pair
        if typed is None or (node.op_type != "Cast" and not wide.isdisjoint(node.input)):
            wide.update(node.output)
        pair = typed or pair
        for name in node.output:
            first[name] = pair
            if name in wide:
                continue
            passed = node.op_type in _MOVED_THROUGH and len(view.consumers.get(name, ())) < 2
            if not everywhere and ((passed if after is None else not after(node)) or name not in wanted):
                continue
            again = _pair(name, pair.input[1:], view)
            nodes += again
            first[again[1].output[0]] = pair
            for consumer in view.consumers.get(name, ()):
                consumed_as(consumer, name, again[1].output[0])
            added += 1
    _shapes_of_integers(nodes)
    view.replace_nodes(nodes)
    return added


def _shapes_of_integers(nodes: list[onnx.NodeProto]) -> None:
    """Take shapes of quantized tensors from their integers, so that nothing is computed in float for its shape."""
    integers: dict[str, str] = {}
    for node in nodes:
        if node.op_type == "QuantizeLinear":
            integers[node.input[0]] = node.output[0]
        elif node.op_type == "DequantizeLinear":
            integers[node.output[0]] = node.input[0]
        elif node.op_type == "Shape":
            node.input[0] = integers.get(node.input[0], node.input[0])


def _wanted(view: OnnxGraph) -> set[str]:
    """Return the tensors that reach an operation in integers through operations that pass pairs."""
    found: set[str] = set()
    for node in reversed(view.graph.node):
        if node.op_type in _WANTED or (node.op_type in _PASSES and found.intersection(node.output)):
            found.update(node.input)
    return found


def _dequantizes_activation(node: onnx.NodeProto, view: OnnxGraph) -> bool:
    producer = view.producers.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
    return producer is not None and producer.op_type == "QuantizeLinear"


@each_node
def floats_apart(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Repeat the scale of a float layer's input for each channel; opset 13 and later.

    ONNX Runtime quantizes the weight and the bias of a layer between two pairs by itself, the weight with one scale,
    also where the layer is to stay float; it does so for inputs of one scale alone.
    """
    pair = view.producers.get(node.input[0]) if node.op_type in _QUANTIZED_ALONE else None
    weight = view.array(node.input[1]) if pair is not None and _dequantizes_activation(pair, view) else None
    if pair is None or weight is None or weight.ndim < 2 or not _is_quantized_after(node, view):
        return None
    values = [value for value in map(view.array, pair.input[1:]) if value is not None and value.size == 1]
    if len(values) != len(pair.input) - 1:
        return None
    last = node.op_type == "Conv" or (node.op_type == "Gemm" and attribute(node, "transB", 0))
    channels = weight.shape[1 if last else 0] * (attribute(node, "group", 1) if node.op_type == "Conv" else 1)
    name = view.free(added_tensor(node.output[0], "float_input"))
    made = made_after(pair, pair.op_type, pair.input, name, name)
    for place, value in enumerate(values, start=1):
        each = np.broadcast_to(np.ravel(value), channels)
        made.input[place] = view.add_constant(added_tensor(name, f"each_{place}"), each)
    replace_attributes(made, axis=1)
    node.input[0] = name
    return [made, node]


def _is_quantized_after(node: onnx.NodeProto, view: OnnxGraph) -> bool:
    consumers = view.consumers.get(node.output[0], ())
    if len(consumers) != 1 or consumers[0].op_type == "QuantizeLinear":
        return len(consumers) == 1
    return consumers[0].op_type in {"Relu", "Clip"} and _is_quantized_after(consumers[0], view)


def _common_pair(node: onnx.NodeProto, first: dict[str, onnx.NodeProto], view: OnnxGraph) -> onnx.NodeProto | None:
    """Return the pair whose scale and zero point all tensors that a node moves have; None if they have no such."""
    if node.op_type not in _PASSES or (node.op_type == "Pad" and not _pads_within_range(node, view)):
        return None
    pairs = [first.get(name) for name in (node.input if node.op_type == "Concat" else node.input[:1])]
    scale = view.array(pairs[0].input[1]) if pairs and pairs[0] is not None else None
    if node.op_type == "Concat" and (scale is None or scale.dtype != np.float32):
        return None  # ONNX Runtime (1.31) makes a QLinearConcat, which it cannot load with other scales
    if not pairs or pairs[0] is None or not all(p is not None and _alike(p, pairs[0], view) for p in pairs):
        return None
    return pairs[0]


def _pads_within_range(node: onnx.NodeProto, view: OnnxGraph) -> bool:
    if attribute(node, "mode", b"constant") != b"constant":
        return True
    value = view.array(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros(1)
    return value is not None and not value.any()


def _cast_pair(
    node: onnx.NodeProto, pair: onnx.NodeProto, view: OnnxGraph, types: Collection[int]
) -> onnx.NodeProto | None:
    # Return a pair like that before a Cast, with a scale of the new type; None if the type has no such scale.
    scale, to = view.array(pair.input[1]), attribute(node, "to", 0)
    if scale is None or to not in types:
        return None
    made = scale.astype(helper.tensor_dtype_to_np_dtype(to))
    if made.dtype == scale.dtype:
        return pair
    if not np.isfinite(made).all() or not made.all():
        return None  # half precision does not hold it
    like = onnx.NodeProto()
    like.CopyFrom(pair)
    like.input[1] = view.add_constant(added_tensor(node.output[0], "scale_again"), made)
    return like


def _alike(a: onnx.NodeProto, b: onnx.NodeProto, view: OnnxGraph) -> bool:
    if list(a.input[1:]) == list(b.input[1:]):
        return True
    values = [(view.array(x), view.array(y)) for x, y in zip(a.input[1:], b.input[1:], strict=False)]
    return len(a.input) == len(b.input) and all(
        x is not None and y is not None and x.dtype == y.dtype and np.array_equal(x, y) for x, y in values
    )


def _pair(name: str, numbers: Sequence[str], view: OnnxGraph) -> list[onnx.NodeProto]:
    # A pair for a tensor, with the scale and zero point of these names.
    parts = ("quantized_again", "dequantized_again", "QuantizeLinear_again", "DequantizeLinear_again")
    integers, result, quantize, dequantize = (view.free(added_tensor(name, part)) for part in parts)
    return [
        helper.make_node("QuantizeLinear", [name, *numbers], [integers], name=quantize),
        helper.make_node("DequantizeLinear", [integers, *numbers], [result], name=dequantize),
    ]


# Activations that are x times a gate: a and b of clip(a x + b, 0, 1), or None for a sigmoid.
_GATED: dict[str, tuple[float, float] | None] = {"silu": None, "hardswish": (1 / 6, 1 / 2)}
_GATES = frozenset({"Sigmoid", "HardSigmoid"})


class _Bytes(NamedTuple):
    # A QuantizeLinear or DequantizeLinear of uint8 with one float32 scale, its scale and its zero point.
    node: onnx.NodeProto
    scale: float
    zero: float


def scaled_in_integers(proto: onnx.ModelProto) -> None:
    """Put pairs around every product of a quantized tensor and a gate (squeeze and excite): a QLinearMul.

    Error: the tensor and the gate, whose range follows from its argument's, are rounded.
    """
    view = OnnxGraph(proto.graph)
    if view.rewrite(partial(_scaled, view=view)):
        sort_nodes(proto.graph)  # the image's pair may stand after the product


def _scaled(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    if node.op_type != "Mul" or not _quantized_alone(node.output[0], view):
        return None
    for x, gate in (node.input, reversed(node.input)):
        source = view.producers.get(gate)
        if source is None or source.op_type not in _GATES or view.alone(gate) is None or x == source.input[0]:
            continue
        image, argument = _dequantized(x, view), _bytes(source.input[0], view)
        if image is None or argument is None or _bytes(image, view) is None:
            return None
        options = [attribute(source, name, default) for name, default in (("alpha", 0.2), ("beta", 0.5))]
        pair = _pair_to(_most(argument, options if source.op_type == "HardSigmoid" else None), gate, view)
        node.input[:] = [image, pair[1].output[0]]
        return [*pair, node]
    return None


def activations_in_integers(proto: onnx.ModelProto) -> None:
    """Write every SiLU and hard-swish between pairs of uint8 as x times a gate between pairs, in place.

    ONNX Runtime has none in integers. Error: the gate is rounded, about half a step of the result at the largest x.
    """
    if opset_of(proto) < 11:  # whose Clip has its limits as attributes
        return
    view = OnnxGraph(proto.graph)
    form, made = OnnxForm(view, opset_of(proto)), dict[str, list[onnx.NodeProto]]()
    for node in proto.graph.node:
        name, x, inside = "", "", [node.output[0]]
        if node.op_type == "HardSwish":
            name, x = "hardswish", node.input[0]
        elif node.op_type in TELLING and (found := spelled_activation(node.output[0], form)) is not None:
            name, x, inside = found.name, found.x, list(found.values)
        argument = _bytes(x, view) if name in _GATED else None
        if argument is not None and _quantized_alone(inside[-1], view):
            made |= {inner: [] for inner in inside}
            made[inside[-1]] = _gated(_GATED[name], argument, view.producers[inside[-1]], view)
    view.replace_nodes(part for node in list(proto.graph.node) for part in made.get(node.output[0], [node]))


def _gated(
    numbers: tuple[float, float] | None, argument: _Bytes, last: onnx.NodeProto, view: OnnxGraph
) -> list[onnx.NodeProto]:
    x, result = argument.node.output[0], last.output[0]
    gate = view.free(added_tensor(result, "gate"))
    nodes = [made_after(last, "Sigmoid", [x], gate)]
    if numbers is not None:  # the bytes of x, read with a scale of their own, are a x
        part, moved = (view.free(added_tensor(result, name)) for name in ("part", "moved"))
        step = np.array(argument.scale * numbers[0], np.float32)
        shift = (np.array(1, np.uint8), np.array(numbers[1], np.float32), np.array(0, np.uint8))
        own, *shifts = (view.add_constant(added_tensor(part, "constant"), value) for value in (step, *shift))
        ends = [view.add_constant(added_tensor(gate, "end"), np.array(end, np.float32)) for end in (0, 1)]
        nodes = [
            made_after(last, "DequantizeLinear", [argument.node.input[0], own, argument.node.input[2]], part),
            made_after(last, "DequantizeLinear", shifts, b := view.free(added_tensor(result, "shift"))),
            made_after(last, "Add", [part, b], moved),
            made_after(last, "Clip", [moved, *ends], gate),  # which ONNX Runtime leaves to the pair after it
        ]
    pair = _pair_to(_most(argument, numbers), gate, view)
    return [*nodes, *pair, made_after(last, "Mul", [x, pair[1].output[0]], result, last.name)]


def _most(argument: _Bytes, numbers: Sequence[float] | None) -> float:
    # The largest value of a gate whose argument comes from bytes.
    largest = (255 - argument.zero) * argument.scale
    most = 1 / (1 + np.exp(-largest)) if numbers is None else min(numbers[0] * largest + numbers[1], 1.0)
    return max(most, 1 / 255)


def _pair_to(most: float, name: str, view: OnnxGraph) -> list[onnx.NodeProto]:
    # A pair of uint8 for a tensor between 0 and `most`.
    scale = view.add_constant(added_tensor(name, "step"), np.array(most / 255, np.float32))
    zero = view.add_constant(added_tensor(name, "zero"), np.array(0, np.uint8))
    return _pair(name, [scale, zero], view)


def _bytes(name: str, view: OnnxGraph) -> _Bytes | None:
    # The DequantizeLinear of bytes that a tensor is the result of.
    return _of_bytes(view.producers.get(name), "DequantizeLinear", view)


def _of_bytes(node: onnx.NodeProto | None, kind: str, view: OnnxGraph) -> _Bytes | None:
    if node is None or node.op_type != kind:
        return None
    scale, zero = map(view.array, node.input[1:]) if len(node.input) == 3 else (None, None)
    if scale is None or zero is None or scale.size != 1 or scale.dtype != np.float32 or zero.dtype != np.uint8:
        return None
    return _Bytes(node, float(scale.reshape(())), float(zero.reshape(())))


def _quantized_alone(name: str, view: OnnxGraph) -> bool:
    return _of_bytes(view.alone(name), "QuantizeLinear", view) is not None


def _dequantized(name: str, view: OnnxGraph) -> str | None:
    # The tensor after the pair of a tensor, or itself if it comes from a pair.
    if _bytes(name, view) is not None:
        return name
    readers = [reader for reader in view.consumers.get(name, ()) if reader.op_type == "QuantizeLinear"]
    after = [one.output[0] for reader in readers for one in view.consumers.get(reader.output[0], ())]
    return after[0] if len(readers) == 1 and after else None


@each_node
def bounded_softmaxes(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Put a Min between every Softmax of a dequantized tensor and the QuantizeLinear to uint8 after it.

    ONNX Runtime fuses the three into QLinearSoftmax, whose uint8 result wraps where a probability is larger than 255
    steps: just above the calibrated range becomes 0 (5 dB). Where 255 steps reach 1 there is nothing to bound.
    """
    source = view.producers.get(node.input[0]) if node.op_type == "QuantizeLinear" else None
    if source is None or source.op_type != "Softmax" or view.dequantizer(source.input[0]) is None:
        return None
    scale, zero = view.array(node.input[1]), view.array(node.input[2]) if len(node.input) > 2 else None
    if scale is None or scale.size != 1 or zero is None or zero.dtype != np.uint8 or 255 * float(scale.item()) >= 1:
        return None
    top = np.asarray(254.75 * scale.reshape(()), scale.dtype)  # which rounds to 255
    return _limited(node, "Min", top, ("bounded", "most"), view)  # ONNX Runtime removes a Clip


def _limited(
    node: onnx.NodeProto, kind: str, limit: NDArray[Any], parts: tuple[str, str], view: OnnxGraph
) -> list[onnx.NodeProto]:
    # Return a node and, before it, the Min or Max of its first input with a constant; `parts` name the two tensors.
    name = view.free(added_tensor(node.output[0], parts[0]))
    constant = view.add_constant(added_tensor(node.output[0], parts[1]), limit)
    made = made_after(node, kind, [node.input[0], constant], name)
    node.input[0] = name
    return [made, node]


@each_node
def layouts_apart(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Put a Reshape to its own shape before each node that fails in ONNX Runtime's order of INT8 images."""
    # Between INT8 convolutions it moves a Resize or a Pad to the order with channels last. It shrinks no cubic one
    # there, and takes `axes` for all (CenterCropPad pads so too; 1.31). No Transpose passes a Reshape.
    fails = {
        "Resize": attribute(node, "axes", None) is not None or attribute(node, "mode", b"nearest") == b"cubic",
        "Pad": any(node.input[3:]),
        "CenterCropPad": True,
    }
    if not fails.get(node.op_type):
        return None
    source = node.input[0]
    shape, same = (view.free(added_tensor(node.output[0], part)) for part in ("shape", "same"))
    node.input[0] = same
    return [made_after(node, "Shape", [source], shape), made_after(node, "Reshape", [source, shape], same), node]


@each_node
def transposes_apart(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    # ONNX Runtime (1.31) repeats a DequantizeLinear with several consumers, but no Transpose after it: products that
    # share one (a layer that is called twice, equal layers) are FusedMatMul in float.
    pair = view.producers.get(node.input[0]) if node.op_type == "Transpose" else None
    if pair is None or pair.op_type != "DequantizeLinear" or pair.input[0] not in view.constants:
        return None
    made = [node]
    for reader in view.consumers.get(node.output[0], [])[1:]:
        names = [view.free(added_tensor(node.output[0], part)) for part in ("again_dequantized", "again")]
        for part, source, result in zip((pair, node), (pair.input[0], names[0]), names, strict=True):
            own = made_after(part, part.op_type, [source, *part.input[1:]], result, result)
            own.attribute.extend(part.attribute)
            made.append(own)
        consumed_as(reader, node.output[0], names[1])
    return made if len(made) > 1 else None


@each_node
def dilations_apart(node: onnx.NodeProto, view: OnnxGraph) -> list[onnx.NodeProto] | None:
    """Put a Max between every average with dilations and its QuantizeLinear: QLinearAveragePool has none (1.31)."""
    source = view.producers.get(node.input[0]) if node.op_type == "QuantizeLinear" else None
    scale = view.array(node.input[1]) if source is not None else None
    if source is None or scale is None or source.op_type != "AveragePool":
        return None
    if all(step == 1 for step in attribute(source, "dilations", [])):
        return None
    return _limited(node, "Max", np.array(np.finfo(scale.dtype).min), ("apart", "least"), view)


def _beside_wide(weight: str, view: OnnxGraph) -> bool:
    # Layers compute with activations of 16 bits in float.
    for reader in view.consumers.get(weight, ()):
        if reader.op_type in MOVES:
            return _beside_wide(reader.output[0], view)
        pairs = [view.dequantizer(name, PASSES) for name in reader.input[:2] if name != weight]
        points = [view.array(pair.input[2]) for pair in pairs if pair is not None and len(pair.input) > 2]
        if any(point is not None and point.itemsize == 2 for point in points):
            return True
    return False


def weights_to_unsigned(model: onnx.ModelProto) -> None:
    """Change int8 weights that may saturate (x86 without VNNI) to uint8, in place."""
    view, made = OnnxGraph(model.graph), dict[str, str]()
    for node in model.graph.node:
        weight = view.constants.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if weight is None or not may_saturate(weight) or _beside_wide(node.output[0], view):
            continue
        name, scale, *point = node.input
        if {scale, *point} - view.constants.keys():
            continue
        if not point:
            point = [view.add_constant(f"{scale}_zero_point", np.zeros(view.constants[scale].dims, np.int8))]
        node.input[:] = [unsigned(view, name, made), scale, unsigned(view, point[0], made)]
