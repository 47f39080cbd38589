"""Writes the float32 part of an ONNX graph in half precision, and leaves in float32 what half precision does not hold.

TensorRT 10 and 11 compute in the types that a file says. Every float tensor becomes float16 or bfloat16, with Casts at
the borders of the operations that stay float32: those whose types the standard fixes, whose constants vanish, whose
values end beyond the type or are too small for it, and which add up more than it holds.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from compress.export.names import added_tensor
from compress.graph.ops import onnx_operators
from compress.onnx_graph import (
    SMALL_CONSTANT,
    OnnxGraph,
    attribute,
    drop_unread,
    free_name,
    inputs_of,
    opset_of,
    replace_attributes,
    subgraphs,
    without_weights,
)
from compress.support.meters import decibel

# Types that a remainder may be written in, by precision.
HALVES = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
LARGEST = {"fp16": 65504.0, "bf16": 3.3895313892515355e38}
# Signal to noise that the rounding of one tensor must keep: values of usual size keep 73 and 55 dB.
LOSS_DB = {"fp16": 50.0, "bf16": 35.0}

# Other images may reach so many times the largest value that was measured.
_MARGIN = 2.0
# Where masks of a softmax end: exp(-16384) is zero, and sums of masks stay finite.
_MASK = 2.0**14
_FLOAT = TensorProto.FLOAT
_STANDARD = frozenset({"", "ai.onnx"})
# Convolutions and matrix products.
PRODUCTS = onnx_operators(lambda t: t.category in {"weighted", "product"})
_HEAVY = PRODUCTS | onnx_operators(lambda t: t.category == "normalization") | {"Softmax", "LogSoftmax"}
# Operators that read a tensor as it is.
_ANY_TYPE = frozenset({"Shape", "Size", "IsNaN", "IsInf"})
# Operators whose constants may end where the type ends.
_BOUNDS = frozenset({"Clip", "Min", "Max"})
_DIVIDES = frozenset({"Div", "Reciprocal", "Pow", "Log"})
_TO_DIVISION = frozenset(
    {"Add", "Sqrt", "Expand", "Reshape", "Identity", "Unsqueeze", "Clip", "Max", "ReduceMean", "ReduceSum"}
)
# Operators through which a mask comes to its softmax.
_MASKING = frozenset(
    {
        "Add",
        "Sub",
        "Where",
        "Mul",
        "Expand",
        "Reshape",
        "Unsqueeze",
        "Squeeze",
        "Slice",
        "Transpose",
        "Tile",
        "Cast",
        "Identity",
        "Concat",
        "Min",
        "Max",
        "Gather",
        "Trilu",
        "ConstantOfShape",
    }
)
# Operators that the standard defines as functions with constants of float32.
_FLOAT_INSIDE = frozenset({"MeanVarianceNormalization"})
# Inputs that are added: one that is too small for the type is small beside the sum.
_BIASES = {"Conv": (2,), "ConvTranspose": (2,), "Gemm": (2,), "LayerNormalization": (2,), "BatchNormalization": (2, 3)}
# Operators that stay float32 where nothing was measured.
_RISKY = frozenset(
    {
        "ReduceSumSquare",
        "ReduceL2",
        "ReduceLogSumExp",
        "ReduceLogSum",
        "InstanceNormalization",
        "LpNormalization",
        "Exp",
    }
)
_ADDING = frozenset({"ReduceMean", "ReduceSum", "ReduceL1", "GlobalAveragePool"})
_SQUARING = frozenset({"ReduceL2", "ReduceSumSquare", "LpNormalization", "InstanceNormalization"})
_EXPONENTIAL = frozenset({"Softmax", "LogSoftmax", "ReduceLogSumExp"})


@dataclass(frozen=True, kw_only=True)
class Kept:
    """An operation that stays float32; `casts`, at its borders, are the price."""

    node: str
    op_type: str
    product: bool
    reason: str
    casts: int


@dataclass(frozen=True, kw_only=True)
class Casting:
    """What became of the float operations of a graph.

    Attributes:
        nodes, products: in half precision, and those of them that are convolutions and matrix products.
        casts: Cast nodes that were added.
        kept: what stays float32, in graph order.
        tensors: names of those in half precision.
    """

    precision: str
    nodes: int
    products: int
    casts: int
    kept: tuple[Kept, ...]
    tensors: frozenset[str] = frozenset()

    @property
    def types(self) -> dict[str, int]:
        return dict.fromkeys(self.tensors, HALVES[self.precision])

    def notes(self) -> list[str]:
        """Return a sentence for each kind of reason, with its operations and price."""
        groups: dict[str, list[Kept]] = {}
        for row in self.kept:
            groups.setdefault(row.reason.partition(":")[0], []).append(row)
        found = []
        for kind, rows in groups.items():
            named = ", ".join(f"{row.node} ({row.op_type})" for row in rows[:3])
            more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
            casts = sum(row.casts for row in rows)
            example = rows[0].reason.partition(":")[2]
            price = f"{casts} Cast{'s' if casts != 1 else ''}"
            found.append(f"{named}{more} in float32, {price}: {kind}{f' ({example.strip()})' if example else ''}")
        return found


class Ranges:
    """Values of a float32 graph, measured.

    Attributes:
        largest: magnitude, by tensor; infinite values and NaN are left out.
        highest: value, by tensor.
        inner: largest number that a reduction adds up, by its result.
    """

    def __init__(self, graph: onnx.GraphProto, precision: str) -> None:
        self.largest: dict[str, float] = {}
        self.highest: dict[str, float] = {}
        self.inner: dict[str, float] = {}
        self._power: dict[str, tuple[float, float]] = {}  # of the tensor, and of what rounding adds
        self._dtype = helper.tensor_dtype_to_np_dtype(HALVES[precision])
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            if node.op_type in _ADDING | _SQUARING | _EXPONENTIAL and node.domain in _STANDARD:
                self._readers.setdefault(node.input[0], []).append(node)
        self._axes = {tensor.name: tensor for tensor in graph.initializer}

    def add(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Take values of float32 tensors, by name."""
        for name, value in values.items():
            x = np.asarray(value)
            if x.dtype != np.float32 or not x.size:
                continue
            finite = _finite(x)
            largest, signal, noise = _loss(finite, self._dtype)
            self.largest[name] = max(self.largest.get(name, 0.0), largest)
            self.highest[name] = max(self.highest.get(name, -np.inf), float(finite.max(initial=-np.inf)))
            before = self._power.get(name, (0.0, 0.0))
            self._power[name] = before[0] + signal, before[1] + noise
            for node in self._readers.get(name, ()):
                result = node.output[0]
                self.inner[result] = max(self.inner.get(result, 0.0), self._inner(node, x))

    def db(self, name: str) -> float:
        """Return the signal to noise that rounding leaves of a tensor; infinite where nothing is lost."""
        return decibel(*self._power[name])

    def _inner(self, node: onnx.NodeProto, x: NDArray[Any]) -> float:
        axes = self._axes_of(node, x.ndim)
        x = np.where(np.isfinite(x), x, 0).astype(np.float64)
        if node.op_type in _EXPONENTIAL:
            return float(np.exp(np.minimum(x - x.max(axis=axes, keepdims=True), 0)).sum(axis=axes).max(initial=0))
        if node.op_type == "InstanceNormalization":
            x = x - x.mean(axis=axes, keepdims=True)
        x = np.square(x) if node.op_type in _SQUARING else np.abs(x)
        return float(x.sum(axis=axes).max(initial=0))

    def _axes_of(self, node: onnx.NodeProto, rank: int) -> tuple[int, ...]:
        if node.op_type in {"InstanceNormalization", "GlobalAveragePool"}:
            return tuple(range(2, rank))
        if node.op_type in {"Softmax", "LogSoftmax", "LpNormalization"}:
            return (attribute(node, "axis", -1) % rank,) if rank else ()
        given = attribute(node, "axes", None)
        if given is None and len(node.input) > 1 and node.input[1]:
            tensor = self._axes.get(node.input[1])
            given = [-1] if tensor is None else numpy_helper.to_array(tensor).reshape(-1).tolist()
        return tuple(range(rank)) if not given else tuple(sorted({int(axis) % rank for axis in given}))


class Weights:
    """Constants of a model, all in the model itself."""

    def array(self, tensor: onnx.TensorProto) -> NDArray[Any]:
        return numpy_helper.to_array(tensor)

    def tensor(self, array: NDArray[Any], name: str) -> onnx.TensorProto:
        return numpy_helper.from_array(array, name)


def cast_model(
    proto: onnx.ModelProto,
    precision: str,
    *,
    types: Mapping[str, int] | None = None,
    ranges: Ranges | None = None,
    keep: Mapping[str, str] | None = None,
    keep_io_types: bool = True,
    weights: Weights | None = None,
) -> Casting:
    """Write the float32 tensors of a graph in half precision, in place.

    `types` are of tensors beside those that inference finds; without `ranges`, operators that are known to overflow
    stay float32; `keep` has the reasons of nodes that stay float32, by name. Without `keep_io_types` inputs and outputs
    are halved where their consumers are. `weights` reads and makes constants; None = all are in the model.
    """
    caster = _Caster(proto, precision, {**(types or {}), **types_of(proto)}, ranges, weights or Weights())
    caster.choose(keep or {})
    return _Rewriting(caster, keep_io_types).done()


def types_of(proto: onnx.ModelProto) -> dict[str, int]:
    """Return the types of tensors that a graph says or inference finds."""
    model = without_weights(proto)
    model.graph.value_info.extend(proto.graph.value_info)
    with contextlib.suppress(Exception):  # such as a loop whose sizes contradict each other: what the file says remains
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    found = {}
    for value in (*model.graph.value_info, *model.graph.output, *model.graph.input):
        found[value.name] = value.type.tensor_type.elem_type if value.type.HasField("tensor_type") else -1
    return found | {tensor.name: tensor.data_type for tensor in proto.graph.initializer}


class _Caster:
    """Chooses the operations that stay float32."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        precision: str,
        types: Mapping[str, int],
        ranges: Ranges | None,
        weights: Weights,
    ) -> None:
        self.proto, self.graph, self.precision, self.types, self.ranges = proto, proto.graph, precision, types, ranges
        self.weights, self.array = weights, weights.array
        self.dtype = HALVES[precision]
        self.numpy = helper.tensor_dtype_to_np_dtype(self.dtype)
        self.name = self.numpy.name
        self.largest = LARGEST[precision]
        self.opset = opset_of(proto)
        self.functions = {(function.domain, function.name) for function in proto.functions}
        self.nodes = list(self.graph.node)
        view = OnnxGraph(self.graph)
        self.initializers = {tensor.name: tensor for tensor in self.graph.initializer}
        self.constants, self.outputs, self.taken = view.constants, view.outputs, view.taken
        self.producers: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        self.captured: set[str] = set()
        for i, node in enumerate(self.nodes):
            self.producers.update((name, i) for name in node.output if name)
            for name in dict.fromkeys(node.input):
                self.readers.setdefault(name, []).append(i)
            self.captured.update(set(inputs_of(node)) - set(node.input))
        self.roles = [self._roles(node) for node in self.nodes]
        self.masks = self._masks()
        # Reason by the place of a node; "" for one that only lies between others.
        self.kept: dict[int, str] = {}

    def is_float(self, name: str) -> bool:
        return bool(name) and self.types.get(name) == _FLOAT

    def _roles(self, node: onnx.NodeProto) -> tuple[frozenset[int], frozenset[int]]:
        """Return the float32 inputs and outputs that the standard lets be of the half type."""
        none: tuple[frozenset[int], frozenset[int]] = (frozenset(), frozenset())
        own = (node.domain, node.op_type) in self.functions or node.op_type in _FLOAT_INSIDE
        if node.domain not in _STANDARD or own:
            return none
        taken = _half_places(node.op_type, self.opset, self.name, len(node.input), len(node.output))
        if taken is None:
            return none
        inputs = frozenset(i for i, name in enumerate(node.input) if self.is_float(name) and i in taken[0])
        outputs = frozenset(i for i, name in enumerate(node.output) if self.is_float(name) and i in taken[1])
        return inputs, outputs

    def _masks(self) -> set[str]:
        """Return the tensors that come to nothing but a softmax."""
        found: set[str] = set()
        for node in reversed(self.nodes):
            results = [name for name in node.output if name]
            if node.op_type in {"Softmax", "LogSoftmax"} or (node.op_type in _MASKING and found.issuperset(results)):
                names = [name for name in node.input if self.is_float(name)]
                found.update(n for n in names if n not in self.outputs | self.captured and self._only_masks(n, found))
        return found

    def _only_masks(self, name: str, found: set[str]) -> bool:
        readers = [self.nodes[i] for i in self.readers.get(name, ())]
        return all(
            r.op_type in {"Softmax", "LogSoftmax"}
            or (r.op_type in _MASKING and found.issuperset(filter(None, r.output)))
            for r in readers
        )

    def choose(self, keep: Mapping[str, str]) -> None:
        sized = self._sized()
        for i, node in enumerate(self.nodes):
            if not any(map(self.is_float, (*node.input, *node.output))):
                continue
            reason = keep[node.name] if node.name in keep else self._refused(node, i)
            if reason is not None:
                self.kept[i] = reason
            elif sized.issuperset(filter(None, node.output)) and not self._may_be_mask(node):
                self.kept[i] = ""
        self._own_float()
        self._integers()
        for i, node in enumerate(self.nodes):
            if i not in self.kept and any(map(self.is_float, (*node.input, *node.output))):
                self._constants_of(i, node)
        self._calibrated()
        if self.ranges is not None:
            self._measured(self.ranges)
        else:
            self._by_operator()
        self._join()

    def keep(self, i: int, reason: str) -> None:
        if not self.kept.get(i):
            self.kept[i] = reason

    def _may_be_mask(self, node: onnx.NodeProto) -> bool:
        return any(name in self.masks for name in node.output)

    def _sized(self) -> set[str]:
        """Return the tensors that follow from sizes, and constants, alone."""
        fixed, sized = {*self.constants, ""}, set[str]()
        for node in self.nodes:
            read = inputs_of(node)
            if node.op_type in {"Shape", "Size"} or (fixed.issuperset(read) and not sized.isdisjoint(read)):
                sized.update(node.output)
            if sized.issuperset(node.output) or fixed.issuperset(read):
                fixed.update(node.output)
        return sized

    def _refused(self, node: onnx.NodeProto, i: int) -> str | None:
        """Return why the standard or this tool leaves a node's types alone."""
        if list(subgraphs([node])):
            return f"{node.op_type} holds a graph of its own, whose inside stays float32"
        if (node.domain, node.op_type) in self.functions:
            return f"{node.op_type} is a function of the file, whose inside stays float32"
        if node.domain not in _STANDARD:
            return f"operators of the domain {node.domain!r} get the types that they had"
        unknown = [name for name in (*node.input, *node.output) if name and self.types.get(name, -1) in (-1, 0)]
        if unknown and node.op_type not in _ANY_TYPE:
            return f"a type is not known, which images and the library of its operators tell: that of {unknown[0]}"
        inputs, outputs = self.roles[i]
        if node.op_type in _ANY_TYPE or node.op_type == "Constant":
            return ""
        computed = any(map(self.is_float, node.output))
        if (computed and not outputs) or (not computed and not inputs):
            return f"{node.op_type} of opset {self.opset} does not take {self.name}"
        if not any(map(self.is_float, node.input)) and node.op_type not in {"Cast", "ConstantOfShape"}:
            return ""  # random numbers, windows
        return None

    def _own_float(self) -> None:
        """Leave float32 what the file itself casts to float32 from half precision."""
        own = {
            node.output[0]
            for node in self.nodes
            if node.op_type == "Cast"
            and self.is_float(node.output[0])
            and self.types.get(node.input[0]) in HALVES.values()
        }
        for i, node in enumerate(self.nodes):
            if own.intersection(node.input) or own.intersection(node.output):
                self.keep(i, "the file itself computes it in float32")
                own.update(name for name in node.output if self.is_float(name))

    def _integers(self) -> None:
        """Leave float32 the elementwise operations whose results become integers, sizes or boxes that overlap."""
        waiting = []
        for i, node in enumerate(self.nodes):
            to_integer = node.op_type == "Cast" and not any(map(self.is_float, node.output))
            if to_integer and attribute(node, "to", 0) not in (*HALVES.values(), TensorProto.DOUBLE):
                waiting += [node.input[0]]
                if self.is_float(node.input[0]):
                    self.keep(i, "")
            elif node.op_type in {"Resize", "Upsample", "Range", "NonMaxSuppression"}:
                waiting += [name for k, name in enumerate(node.input) if k not in self.roles[i][0]]
        while waiting:
            name = waiting.pop()
            place = self.producers.get(name)
            if place is None or not self.is_float(name) or self.kept.get(place):
                continue
            if self.nodes[place].op_type in _HEAVY | {"DequantizeLinear", "Constant"}:
                continue
            self.kept[place] = "its results become integers, sizes or boxes, for which half precision is too coarse"
            waiting += self.nodes[place].input

    def _constants_of(self, i: int, node: onnx.NodeProto) -> None:
        """Leave a node float32 whose constants do not survive, and what divides by its result."""
        for k in self.roles[i][0]:
            name = node.input[k]
            if name not in self.constants:
                continue
            value = np.asarray(self.array(self.constants[name]), np.float32)
            scales = node.op_type in {"QuantizeLinear", "DequantizeLinear"}
            reason = self._scale_reason(name, value) if scales else self._constant_reason(node, k, name, value)
            if reason:
                self.keep(i, reason)
                if not scales and float(np.abs(value).max(initial=0.0)) <= self.largest:
                    self._to_division(i, reason)

    def _scale_reason(self, name: str, value: NDArray[Any]) -> str:
        error = np.abs(_rounded(value, self.numpy) - value)
        if bool((error <= 2.0 ** -(11 if self.precision == "fp16" else 8) * value).all()):
            return ""
        return f"a scale is zero or coarse in {self.name}: {name} holds {float(value.min()):.3g}"

    def _constant_reason(self, node: onnx.NodeProto, k: int, name: str, value: NDArray[Any]) -> str:
        largest, signal, noise = _loss(_finite(value), self.numpy)
        if largest > self.largest:
            bound = node.op_type in _BOUNDS and (k > 0 or node.op_type != "Clip")
            if bound or self._may_be_mask(node):
                return ""
            return f"a constant is beyond {self.name}: {name} holds {largest:.3g}"
        db = decibel(signal, noise)
        if db >= LOSS_DB[self.precision] or k in _BIASES.get(node.op_type, ()):
            return ""
        if node.op_type in {"Add", "Sub"} and not self._divided(node):
            return ""  # small beside the other operand, or the result is small, which is measured
        if largest < 2.0 ** -(25 if self.precision == "fp16" else 134):
            return f"a constant becomes 0 in {self.name}: {name} holds at most {largest:.3g}"
        return f"a constant is too small for {self.name}: {name} of at most {largest:.3g} keeps {db:.0f} dB"

    def _divided(self, node: onnx.NodeProto) -> bool:
        waiting, seen = list(node.output), set[str]()
        while waiting:
            name = waiting.pop()
            seen.add(name)
            readers = [self.nodes[i] for i in self.readers.get(name, ())]
            if any(r.op_type in _DIVIDES and (r.op_type != "Div" or r.input[1] == name) for r in readers):
                return True
            after = {made for r in readers if r.op_type in _TO_DIVISION for made in r.output}
            waiting += after - seen
        return False

    def _to_division(self, i: int, reason: str) -> None:
        """Leave float32 what follows a small constant, up to the operation that divides by it."""
        waiting = [i]
        while waiting:
            place = waiting.pop()
            self.keep(place, reason)
            node = self.nodes[place]
            if node.op_type in _DIVIDES and place != i:
                continue
            for name in node.output:
                waiting += [
                    r
                    for r in self.readers.get(name, ())
                    if not self.kept.get(r) and self.nodes[r].op_type in _DIVIDES | _TO_DIVISION
                ]

    def _calibrated(self) -> None:
        """Leave float32 what has pairs whose range, which was calibrated, ends beyond the type."""
        for i, node in enumerate(self.nodes):
            quantizes = node.op_type == "QuantizeLinear"
            tensor = self.constants.get(node.input[1]) if quantizes or node.op_type == "DequantizeLinear" else None
            if tensor is None or node.input[0] in self.constants:
                continue
            largest = 127 * float(np.asarray(self.array(tensor), np.float32).max(initial=0.0))
            if largest > self.largest / _MARGIN:
                places = [self.producers.get(node.input[0])] if quantizes else self.readers.get(node.output[0], [])
                for place in (i, *places):
                    if place is not None and self.nodes[place].op_type not in _ANY_TYPE:
                        self.keep(
                            place, f"values end beyond {self.name}: {node.input[0]} was calibrated to {largest:.3g}"
                        )

    def _measured(self, ranges: Ranges) -> None:
        """Leave float32 what was seen to end beyond the type, to be too small for it, or to add up too much."""
        limit = self.largest / _MARGIN
        for name, largest in ranges.largest.items():
            if not self.is_float(name) or name in self.constants:
                continue
            reason = ""
            if largest > limit:
                maker = self.nodes[self.producers[name]].op_type if name in self.producers else ""
                mask = name in self.masks and ranges.highest[name] <= limit and maker not in PRODUCTS
                reason = "" if mask else f"values end beyond {self.name}: {name} reaches {largest:.3g}"
            elif (db := ranges.db(name)) < LOSS_DB[self.precision]:
                reason = f"values are too small for {self.name}: {name} of at most {largest:.3g} keeps {db:.0f} dB"
            if reason:
                for place in (self.producers.get(name), *self.readers.get(name, ())):
                    if place is not None and self.nodes[place].op_type not in _ANY_TYPE:
                        self.keep(place, reason)
        for name, inner in ranges.inner.items():
            if inner > limit and name in self.producers:
                reason = f"a sum inside ends beyond {self.name}: {name} adds up to {inner:.3g}"
                self.keep(self.producers[name], reason)

    def _by_operator(self) -> None:
        """Leave float32 what easily overflows float16: exponentials, squares, and what is computed of squares."""
        if self.precision == "bf16":
            return
        for i, node in enumerate(self.nodes):
            if i in self.kept or not self.roles[i][1]:
                continue
            reason = f"{node.op_type} may end beyond {self.name}, and no images were given to tell"
            if self._squares(node):
                self._to_division(i, reason)
            elif node.op_type in _RISKY:
                self.keep(i, reason)

    def _squares(self, node: onnx.NodeProto) -> bool:
        if node.op_type == "Mul":
            return node.input[0] == node.input[1]
        if node.op_type != "Pow":
            return False
        tensor = self.constants.get(node.input[1])
        return tensor is None or bool((np.abs(self.array(tensor)) > 1).any())

    def _join(self) -> None:
        """Leave float32 the operations that lie between others of float32: two Casts cost more than they save."""
        changed = True
        while changed:
            changed = False
            for i, node in enumerate(self.nodes):
                inputs, outputs = self.roles[i]
                if i in self.kept or not outputs or node.op_type in PRODUCTS | {"QuantizeLinear", "DequantizeLinear"}:
                    continue
                before = [node.input[k] for k in inputs if node.input[k] not in self.constants]
                after = [node.output[k] for k in outputs]
                if not before or self.outputs.intersection(after):
                    continue
                readers = [self.readers.get(name, ()) for name in after]
                if all(self.producers.get(name) in self.kept for name in before) and all(
                    places and all(place in self.kept for place in places) for places in readers
                ):
                    self.kept[i], changed = "", True


class _Rewriting:
    """Gives tensors their types, and puts Casts where a consumer needs another one."""

    def __init__(self, chosen: _Caster, keep_io_types: bool) -> None:
        self.chosen, self.graph = chosen, chosen.graph
        self.taken = chosen.taken | {node.name for node in chosen.nodes}
        self.made: list[onnx.NodeProto] = []
        self.named: dict[tuple[str, bool], str] = {}
        self.casts: Counter[int] = Counter()
        self.anchored = chosen.captured | (chosen.outputs if keep_io_types else set())
        # Tensors that are of the half type under their own names.
        self.half: set[str] = set()
        if not keep_io_types:
            for value in self.graph.input:
                readers = chosen.readers.get(value.name, [])
                if value.name in self.anchored | chosen.initializers.keys() or not chosen.is_float(value.name):
                    continue
                if not any(i in chosen.kept for i in readers):
                    value.type.tensor_type.elem_type = chosen.dtype
                    self.half.add(value.name)

    def done(self) -> Casting:
        chosen = self.chosen
        halved: list[onnx.NodeProto] = []
        for i, node in enumerate(chosen.nodes):
            inputs, outputs = chosen.roles[i] if i not in chosen.kept else (frozenset(), frozenset())
            self._inputs(i, node, inputs)
            self.made.append(node)
            self._outputs(i, node, outputs)
            if outputs or inputs:
                halved.append(node)
        del self.graph.node[:]
        self.graph.node.extend(self.made)
        for value in (*self.graph.value_info, *self.graph.output):
            if value.name in self.half:
                value.type.tensor_type.elem_type = chosen.dtype
        self._drop()
        kept = tuple(
            Kept(
                node=node.name or node.output[0],
                op_type=node.op_type,
                product=node.op_type in PRODUCTS,
                reason=reason,
                casts=self.casts[i],
            )
            for i, node in enumerate(chosen.nodes)
            if (reason := chosen.kept.get(i))
        )
        return Casting(
            precision=chosen.precision,
            nodes=len(halved),
            products=sum(node.op_type in PRODUCTS for node in halved),
            casts=sum(node.op_type == "Cast" for node in self.made)
            - sum(node.op_type == "Cast" for node in chosen.nodes),
            kept=kept,
            tensors=frozenset(self.half | {name for (_, half), name in self.named.items() if half}),
        )

    def _inputs(self, i: int, node: onnx.NodeProto, places: Collection[int]) -> None:
        chosen = self.chosen
        for k, name in enumerate(node.input):
            if not chosen.is_float(name):
                continue
            if name in chosen.constants:
                if k in places:
                    node.input[k] = self._constant(node, name)
            elif node.op_type not in _ANY_TYPE and (node.op_type != "Cast" or i in chosen.kept):
                node.input[k] = self._as(name, k in places, i)

    def _as(self, name: str, half: bool, reader: int) -> str:
        """Return the name of a tensor in a type; a Cast is added when it is first asked for."""
        if (name in self.half) == half and (name, half) not in self.named:
            return name
        if (name, half) not in self.named:
            self.named[name, half] = self._cast(name, self.chosen.dtype if half else _FLOAT, self._free(name, half))
            producer = self.chosen.producers.get(name)
            self.casts[producer if half and producer in self.chosen.kept else reader] += 1
        return self.named[name, half]

    def _outputs(self, i: int, node: onnx.NodeProto, places: Collection[int]) -> None:
        chosen = self.chosen
        if not places:
            return
        if node.op_type == "Cast":
            replace_attributes(node, to=chosen.dtype)
        elif node.op_type == "ConstantOfShape":
            value = attribute(node, "value", None)
            number = np.zeros(1, np.float32) if value is None else numpy_helper.to_array(value)
            if chosen._may_be_mask(node):
                number = np.clip(number, -_MASK, _MASK)
            replace_attributes(node, value=numpy_helper.from_array(number.astype(chosen.numpy)))
        elif attribute(node, "output_dtype", 0) == _FLOAT:
            replace_attributes(node, output_dtype=chosen.dtype)
        for k in places:
            name = node.output[k]
            if name not in self.anchored:
                self.half.add(name)
                continue
            made = self._free(name, True)
            node.output[k] = self.named[name, True] = made
            self._cast(made, _FLOAT, name)

    def _constant(self, node: onnx.NodeProto, name: str) -> str:
        """Return the name of a constant in the half type."""
        chosen = self.chosen
        value = np.asarray(chosen.array(chosen.constants[name]), np.float32)
        bound = chosen.largest if node.op_type in _BOUNDS else _MASK
        largest = float(np.abs(_finite(value)).max(initial=0.0))
        if largest > chosen.largest:
            value = np.where(np.isfinite(value), np.clip(value, -bound, bound), value)
        else:
            bound = 0.0
        key = f"{name} {bound}"
        if (key, True) not in self.named:
            tensor = chosen.initializers.get(name)
            alone = tensor is not None and name not in chosen.captured | chosen.outputs and self._all_half(name)
            made = name if alone and not bound else self._free(name, True)
            new = chosen.weights.tensor(np.ascontiguousarray(value.astype(chosen.numpy)).reshape(value.shape), made)
            if made == name and tensor is not None:
                tensor.CopyFrom(new)
            else:
                self.graph.initializer.append(new)
            self.named[key, True] = made
        return self.named[key, True]

    def _all_half(self, name: str) -> bool:
        """Return True if every consumer of a constant takes it in the half type."""
        for i in self.chosen.readers[name]:
            node, places = self.chosen.nodes[i], self.chosen.roles[i][0]
            if i in self.chosen.kept or any(one == name and k not in places for k, one in enumerate(node.input)):
                return False
        return True

    def _cast(self, source: str, dtype: int, result: str) -> str:
        name = free_name(added_tensor(result, "Cast"), self.taken)
        self.made.append(helper.make_node("Cast", [source], [result], name=name, to=dtype))
        return result

    def _free(self, name: str, half: bool) -> str:
        return free_name(added_tensor(name, self.chosen.name if half else "float32"), self.taken)

    def _drop(self) -> None:
        """Remove what is no longer read, and let inputs that only named constants (IR 3) be none."""
        types = {tensor.name: tensor.data_type for tensor in self.graph.initializer}
        read = {name for node in self.graph.node for name in inputs_of(node)} | self.chosen.outputs
        for k, value in reversed(list(enumerate(self.graph.input))):
            if value.name in self.chosen.initializers and value.name not in read:
                del self.graph.input[k]
            elif value.name in types:
                value.type.tensor_type.elem_type = types[value.name]
        for value in self.graph.value_info:
            if value.name in types:
                value.type.tensor_type.elem_type = types[value.name]
        drop_unread(self.graph)
        self.chosen.proto.ir_version = max(self.chosen.proto.ir_version, 4)


def widened(proto: onnx.ModelProto, types: Mapping[str, int] | None = None) -> onnx.ModelProto:
    """Return a float32 model that computes what one with half-precision tensors says: each result is rounded.

    Operations compute in float32 inside, as engines accumulate. It runs where bfloat16 does not.
    """
    types = {**(types or {}), **types_of(proto)}
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    nodes: list[onnx.NodeProto] = []
    for tensor in model.graph.initializer:
        if tensor.data_type not in _HALF_TYPES:
            continue
        if len(tensor.raw_data) <= SMALL_CONSTANT and not tensor.external_data:
            tensor.CopyFrom(_wide(tensor))
        else:  # widened when it is read, so that it is in memory once
            name, tensor.name = tensor.name, added_tensor(tensor.name, "half")
            nodes.append(helper.make_node("Cast", [tensor.name], [name], to=_FLOAT))
    for value in model.graph.input:
        if value.type.tensor_type.elem_type in _HALF_TYPES:
            value.type.tensor_type.elem_type = _FLOAT
    for node in model.graph.node:
        for one in node.attribute:
            if one.name in {"to", "dtype", "output_dtype"} and one.i in _HALF_TYPES:
                one.i = _FLOAT
            elif one.name == "value" and one.t.data_type in _HALF_TYPES:
                one.t.CopyFrom(_wide(one.t))
        nodes.append(node)
        for k, name in enumerate(node.output):
            dtype = types.get(name, 0)
            if dtype in _HALF_TYPES and node.op_type not in {"Constant", "Identity"}:
                exact, short = (added_tensor(name, part) for part in ("exact", "short"))
                node.output[k] = exact
                nodes.append(helper.make_node("Cast", [exact], [short], to=dtype))
                nodes.append(helper.make_node("Cast", [short], [name], to=_FLOAT))
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(nodes)
    for value in model.graph.output:
        if value.type.tensor_type.elem_type in _HALF_TYPES:
            value.type.tensor_type.elem_type = _FLOAT
    return model


_HALF_TYPES = frozenset(HALVES.values())


def _wide(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)


@cache
def _half_places(
    op_type: str, opset: int, name: str, inputs: int, outputs: int
) -> tuple[frozenset[int], frozenset[int]] | None:
    """Return the places of an operator's inputs and outputs that may be of a type; None for an unknown operator."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    fits = {one.type_param_str for one in schema.type_constraints if f"tensor({name})" in one.allowed_type_strs}

    def places(formal: Sequence[Any], count: int) -> frozenset[int]:
        return frozenset(i for i in range(count) if formal and formal[min(i, len(formal) - 1)].type_str in fits)

    return places(schema.inputs, inputs), places(schema.outputs, outputs)


def _rounded(x: NDArray[Any], dtype: Any) -> NDArray[Any]:
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(dtype).astype(np.float32)


def _finite(x: NDArray[Any]) -> NDArray[Any]:
    finite = np.isfinite(x)
    return x if finite.all() else x[finite]


# Elements that are rounded at a time: their copies stay in the cache.
_PIECE = 1 << 15


def _loss(x: NDArray[Any], dtype: Any) -> tuple[float, float, float]:
    """Return the largest magnitude of finite values, their sum of squares, and that of what rounding changes."""
    largest = signal = noise = 0.0
    flat = x.reshape(-1)
    for start in range(0, flat.size, _PIECE):
        part = flat[start : start + _PIECE]
        largest = max(largest, float(np.abs(part).max(initial=0.0)))
        signal += float(np.square(part, dtype=np.float64).sum())  # a product would wait for other threads
        noise += float(np.square(part - _rounded(part, dtype), dtype=np.float64).sum())
    return largest, signal, noise
