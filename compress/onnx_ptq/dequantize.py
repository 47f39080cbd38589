"""A quantized file as the float file that its integers stand for, so that it can be quantized anew.

Pairs of QuantizeLinear and DequantizeLinear, ONNX's operators on integers and those of ONNX Runtime (QOperator files,
dynamic quantization, weights of 4 bits) become float operators, integer weights become what they dequantize to. What a
quantizer also computed stays: tools drop a ReLU before a quantizer whose zero point is its lowest integer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, inliner

from compress.errors import QuantizationError
from compress.export.names import TARGET_KEY, added_tensor
from compress.graph.ops import onnx_operators
from compress.onnx_graph import PASSES, attribute, drop_unread, inputs_of, rename, without_identities
from compress.onnx_ptq.canonical import copied, name_nodes
from compress.onnx_ptq.source import QUANTIZED, Index, SourceFile, check_float, load_source
from compress.onnx_ptq.write import other_file, save_model

# Operators that compute the same of integers and of what they stand for, and those that are rewritten.
_READS_INTEGERS = (PASSES - {"Cast"}) | QUANTIZED | {"ArgMax", "ArgMin", "Shape", "Size", "Resize", "Upsample"}
_POSITIVE = onnx_operators(lambda t: t.non_negative == "always")
_KEEPS_SIGN = onnx_operators(lambda t: t.non_negative == "if inputs are") | PASSES | {"Split", "Identity"}
_UNARY = {"QLinearSigmoid": "Sigmoid", "QLinearLeakyRelu": "LeakyRelu", "QLinearSoftmax": "Softmax"}
_POOLS = {"QLinearAveragePool": "AveragePool", "QLinearGlobalAveragePool": "GlobalAveragePool"}
_BINARY = {"QLinearAdd": "Add", "QLinearMul": "Mul", "QLinearMatMul": "MatMul"}
# Places of the second operand's scale and zero point, and of the bias.
_DYNAMIC = {"DynamicQuantizeMatMul": (2, 3, 4), "MatMulIntegerToFloat": (3, 5, 6)}
_INTEGER = {"ConvInteger": "Conv", "MatMulInteger": "MatMul"}


def dequantize_onnx(path: Path | str, out: Path | str | None = None) -> Path:
    """Write the float file that a quantized one stands for; the file itself is not changed.

    Quantizers of activations are removed, integer weights and biases become the numbers that they stand for, operators
    on integers become those on floats: `QLinearConv` of onnx and `QGemm` of ONNX Runtime, for example.

    Args:
        path: quantized file.
        out: file to write, whole or not at all; None = `<name>.float.onnx` beside the file.

    Raises:
        AuditError: the file is missing, truncated or not valid ONNX.
        QuantizationError: it is not quantized, or holds an operator on integers that has no float form here.

    Examples:
        >>> path = compress.dequantize_onnx("int8.onnx", "again.onnx")
        >>> compress.audit_onnx(path).activation_pairs
        0
    """
    source = load_source(path, quantized=True)
    target = other_file(source.path, out, "float", "quantized")
    proto = copied(source)
    if proto.functions:
        proto = inliner.inline_local_functions(proto)
    source = replace(source, proto=proto)
    if not any(node.op_type in QUANTIZED for node in proto.graph.node):
        raise QuantizationError(f"{path} holds no quantizer: quantize it as it is")
    _Lifting(source).lift()
    check_float(source.path, proto)
    return save_model(source, target)


# Relative difference of scales that are written twice, in two types.
_SAME = 1e-3


class _Lifting:
    """Rewrites a graph so that tensors of integers hold what the integers stand for, under their own names."""

    def __init__(self, source: SourceFile) -> None:
        name_nodes(source.proto.graph)
        self.source, self.graph, self.index = source, source.proto.graph, Index(source)
        self.nodes: list[onnx.NodeProto] = []
        # Scale and zero point of the tensors of integers that now hold floats.
        self.real: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {}
        self.constants: dict[tuple[Any, ...], str] = {}
        # Tensors that are never negative, as far as the graph tells, and inputs, whose sign the images decide.
        self.positive: set[str] = {value.name for value in self.graph.input}
        self._rules: dict[str, Callable[[onnx.NodeProto], None]] = {
            **dict.fromkeys([*_UNARY, *_POOLS], self._unary),
            **dict.fromkeys(_BINARY, self._binary),
            **dict.fromkeys(_DYNAMIC, self._dynamic),
            **dict.fromkeys(_INTEGER, self._integer),
            "QuantizeLinear": self._quantize,
            "DequantizeLinear": self._dequantize,
            "DynamicQuantizeLinear": self._quantize_dynamic,
            "QLinearConv": self._conv,
            "QGemm": self._gemm,
            "QLinearConcat": self._concat,
            "QLinearWhere": self._where,
            "MatMulNBits": self._blocks,
        }

    def lift(self) -> None:
        for node in self.graph.node:
            read = [name for name in node.input if name in self.real]
            if read and node.op_type == "Cast" and self._is_sum(read[0]):
                self._add("Identity", node.input, node.output[0], node)
                continue
            if read and node.op_type not in _READS_INTEGERS:
                raise QuantizationError(
                    f"{self.source.path}: {node.name} ({node.op_type}) reads the integers {read[0]!r} themselves; give "
                    "the float file that it was made from"
                )
            if node.op_type in self._rules:
                self._rules[node.op_type](node)
                continue
            if read:
                self._moved(node, read[0])
            self._append(node)
        self._without_identities()
        drop_unread(self.graph)
        del self.graph.value_info[:]
        kept = [entry for entry in self.source.proto.metadata_props if entry.key != TARGET_KEY]
        del self.source.proto.metadata_props[:]
        self.source.proto.metadata_props.extend(kept)

    def _is_sum(self, name: str) -> bool:
        """Return True for the result of a product of integers, which a Cast alone makes a float."""
        scales, zeros = self.real[name]
        return zeros.dtype == np.int32 and float(scales) == 1.0

    def _value(self, name: str) -> NDArray[Any]:
        value = self.index.value(name) if name in self.index.unchanging else None
        if value is None:
            raise QuantizationError(
                f"{self.source.path}: {name!r} is computed, and scales, zero points and weights are read that are "
                "constants; give the float file that it was made from"
            )
        return value

    def _points(self, scale: str, zero: str) -> tuple[NDArray[Any], NDArray[Any]]:
        scales = self._value(scale)
        return scales, self._value(zero) if zero else np.zeros(scales.shape, np.uint8)

    def _add(self, op: str, inputs: Sequence[str], result: str, node: onnx.NodeProto, **attributes: Any) -> None:
        made = helper.make_node(op, list(inputs), [result], name=node.name, **attributes)
        made.metadata_props.extend(node.metadata_props)
        self._append(made)

    def _append(self, node: onnx.NodeProto) -> None:
        self.nodes.append(node)
        if self._is_positive(node.op_type, node.input, node):
            self.positive.update(node.output)

    def _is_positive(self, op: str, inputs: Sequence[str], node: onnx.NodeProto) -> bool:
        if op == "Clip":
            low = self.index.number(inputs[1]) if len(inputs) > 1 else attribute(node, "min", None)
            return low is not None and low >= 0
        return op in _POSITIVE or (op in _KEEPS_SIGN and all(map(self._is_never_negative, inputs)))

    def _is_never_negative(self, name: str) -> bool:
        if name not in self.index.unchanging or not name:
            return not name or name in self.positive
        value = self.index.value(name)
        return value is not None and (value.dtype.kind != "f" or bool((value >= 0).all()))

    def _kept(self, node: onnx.NodeProto, *names: str) -> dict[str, Any]:
        return {one.name: helper.get_attribute_value(one) for one in node.attribute if one.name in names or not names}

    def _operand(self, name: str, scale: str, zero: str, axis: int = 0) -> str:
        """Return the float tensor of an operand: a constant is computed, any other has been lifted."""
        if name in self.real or name not in self.index.unchanging:
            return name
        scales, zeros = self._points(scale, zero)
        return self._number(name, self._value(name), scales, zeros, axis)

    def _number(self, name: str, value: NDArray[Any], scales: NDArray[Any], zeros: NDArray[Any], axis: int) -> str:
        key = (name, scales.tobytes(), zeros.tobytes(), axis)
        if key not in self.constants:
            scales, zeros = (_along(one, value.ndim, axis) for one in (scales, zeros))
            real = (value.astype(np.float32) - zeros.astype(np.float32)) * scales
            self.constants[key] = self.index.add_constant(added_tensor(name, "float"), real.astype(scales.dtype))
        return self.constants[key]

    def _cuts(self, result: str, scale: str, zero: str) -> bool:
        """Return True if integers hold nothing below zero: their zero point is the lowest of them."""
        _, zeros = self.real[result] = self._points(scale, zero)
        return zeros.size == 1 and zeros.dtype.kind in "iu" and int(zeros.reshape(-1)[0]) == np.iinfo(zeros.dtype).min

    def _cut(self, uncut: str, node: onnx.NodeProto) -> None:
        """Write the ReLU, or ReLU6, that integers without anything below zero compute."""
        result = node.output[0]
        scales, zeros = self.real[result]
        steps = np.iinfo(zeros.dtype).max - np.iinfo(zeros.dtype).min
        name = added_tensor(node.name, "cut")
        if not np.isclose(float(scales.reshape(-1)[0]) * steps, 6.0, rtol=1e-4):
            self._append(helper.make_node("Relu", [uncut], [result], name=name))
        elif self.index.opset.get("", 1) < 11:
            self._append(helper.make_node("Clip", [uncut], [result], name=name, min=0.0, max=6.0))
        else:
            ends = [self.index.add_constant(added_tensor(result, end), np.asarray(v, scales.dtype)) for end, v in _ENDS]
            self._append(helper.make_node("Clip", [uncut, *ends], [result], name=name))

    def _computed(
        self, op: str, inputs: Sequence[str], node: onnx.NodeProto, scale: str, zero: str, **attributes: Any
    ) -> None:
        result = node.output[0]
        cuts = self._cuts(result, scale, zero) and not self._is_positive(op, inputs, node)
        uncut = self.index.free(added_tensor(result, "uncut")) if cuts else result
        self._add(op, inputs, uncut, node, **attributes)
        if cuts:
            self._cut(uncut, node)

    def _quantize(self, node: onnx.NodeProto) -> None:
        source, result = node.input[0], node.output[0]
        if source in self.index.unchanging:  # a weight that is quantized when the file is loaded
            self.real[result] = self._points(*_two(node.input[1:]))
            self._add("Identity", [source], result, node)
            return
        before = self.index.producers.get(source)
        if before is not None and before.op_type == "Clip" and source.endswith(added_tensor("", "clipped")):
            source = before.input[0]  # the bounds of fewer bits, which our own files spell out
        zero = node.input[2] if len(node.input) > 2 else ""
        if self._cuts(result, node.input[1], zero) and source not in self.positive:
            self._cut(source, node)
        else:
            self._add("Identity", [source], result, node)

    def _quantize_dynamic(self, node: onnx.NodeProto) -> None:
        """Quantize with the scale 1, which the operators on integers after it multiply by."""
        self._add("Identity", [node.input[0]], node.output[0], node)
        one: tuple[NDArray[Any], NDArray[Any]] = np.ones((), np.float32), np.zeros((), np.uint8)
        self.real[node.output[0]] = one
        for name, value in zip(node.output[1:], one, strict=False):
            constant = self.index.add_constant(added_tensor(name, "constant"), value)
            self.index.unchanging.add(name)
            self.index.constants[name] = self.index.constants[constant]
            self._append(helper.make_node("Identity", [constant], [name], name=added_tensor(name, "one")))

    def _dequantize(self, node: onnx.NodeProto) -> None:
        source, result = node.input[0], node.output[0]
        if source in self.real:
            self._add(*self._read_again(source, *self._points(*_two(node.input[1:]))), result, node)
        elif source in self.index.unchanging:
            key = (*node.input, *(one.SerializeToString() for one in node.attribute))
            if key not in self.constants:
                value = self._dequantized(node, self._value(source))
                self.constants[key] = self.index.add_constant(added_tensor(source, "float"), value)
            self._add("Identity", [self.constants[key]], result, node)
        else:
            raise QuantizationError(
                f"{self.source.path}: {node.name} dequantizes {source!r}, integers that the file is given or computes; "
                "give the float file that it was made from"
            )

    def _read_again(self, name: str, scales: NDArray[Any], zeros: NDArray[Any]) -> tuple[str, list[str]]:
        # The operation by which floats follow from those of the quantizer's own scale and zero point.
        first, zero = self.real[name]
        ratio = np.asarray(scales / first, scales.dtype)
        moved = np.asarray((zero.astype(scales.dtype) - zeros.astype(scales.dtype)) * scales)
        if ratio.size > 1 or not (moved.any() or abs(ratio - 1) > _SAME):
            return "Identity", [name]
        factor = self.index.add_constant(added_tensor(name, "factor"), ratio)
        if not moved.any():
            return "Mul", [name, factor]
        scaled = self.index.free(added_tensor(name, "scaled"))
        self._append(helper.make_node("Mul", [name, factor], [scaled], name=scaled))
        return "Add", [scaled, self.index.add_constant(added_tensor(name, "shift"), moved)]

    def _dequantized(self, node: onnx.NodeProto, value: NDArray[Any]) -> NDArray[Any]:
        """Return (q - zero point) * scale, with one scale, or one for each part or block along an axis."""
        scales, zeros = self._points(*_two(node.input[1:]))
        axis, block = attribute(node, "axis", 1), attribute(node, "block_size", 0)
        if scales.ndim > 1:
            axis %= value.ndim
            size = block or -(-value.shape[axis] // scales.shape[axis])
            scales, zeros = (np.repeat(one, size, axis).take(range(value.shape[axis]), axis) for one in (scales, zeros))
        elif scales.size > 1:
            scales, zeros = (_along(one, value.ndim, axis) for one in (scales, zeros))
        real = (value.astype(np.float32) - zeros.astype(np.float32)) * scales.astype(np.float32)
        return real.reshape(value.shape).astype(scales.dtype)

    def _unary(self, node: onnx.NodeProto) -> None:
        if attribute(node, "channels_last", 0):
            raise QuantizationError(f"{self.source.path}: {node.name} has its channels last; quantize the float file")
        kind = (_UNARY | _POOLS)[node.op_type]
        attributes = {k: v for k, v in self._kept(node).items() if k not in {"channels_last", "opset"}}
        self._computed(kind, [self._operand(*node.input[:3])], node, *_two(node.input[3:5]), **attributes)

    def _binary(self, node: onnx.NodeProto) -> None:
        a = self._operand(*_three(node.input[:3]), axis=-2)
        b = self._operand(*_three(node.input[3:6]), axis=-1)
        self._computed(_BINARY[node.op_type], [a, b], node, *_two(node.input[6:8]))

    def _conv(self, node: onnx.NodeProto) -> None:
        weight = self._operand(*node.input[3:6])
        inputs = [self._operand(*node.input[:3]), weight]
        if len(node.input) > 8 and node.input[8]:
            inputs.append(self._bias(node.input[8], node.input[1], node.input[4]))
        self._computed("Conv", inputs, node, *_two(node.input[6:8]), **self._kept(node))

    def _bias(self, name: str, first: str, second: str, factor: float = 1.0) -> str:
        """Return a bias in integers as floats: their scale is the product of the operands' scales."""
        scales = np.asarray(self._value(first) * self._value(second) * np.float32(factor))
        return self._number(name, self._value(name), scales, np.zeros((), np.int32), axis=0)

    def _gemm(self, node: onnx.NodeProto) -> None:
        names = [*node.input, *[""] * (9 - len(node.input))]
        axis = 0 if attribute(node, "transB", 0) else 1
        inputs = [self._operand(*_three(names[:3])), self._operand(*_three(names[3:6]), axis=axis)]
        if names[6]:
            inputs.append(self._bias(names[6], names[1], names[4], attribute(node, "alpha", 1.0)))
        kept = self._kept(node, "alpha", "transA", "transB")
        if names[7]:
            self._computed("Gemm", inputs, node, names[7], names[8], **kept)
        else:
            self._add("Gemm", inputs, node.output[0], node, **kept)

    def _concat(self, node: onnx.NodeProto) -> None:
        parts = [self._operand(*node.input[i : i + 3]) for i in range(2, len(node.input), 3)]
        self._computed("Concat", parts, node, *_two(node.input[:2]), **self._kept(node, "axis"))

    def _where(self, node: onnx.NodeProto) -> None:
        sides = [self._operand(*node.input[1:4]), self._operand(*node.input[4:7])]
        self._computed("Where", [node.input[0], *sides], node, *_two(node.input[7:9]))

    def _dynamic(self, node: onnx.NodeProto) -> None:
        names = [*node.input, *[""] * (8 - len(node.input))]
        scale, zero, bias = (names[i] for i in _DYNAMIC[node.op_type])
        inputs = [names[0], self._operand(names[1], scale, zero, axis=-1)]
        self._product(node, "MatMul", inputs, after=("Add", bias, "bias"))

    def _product(
        self, node: onnx.NodeProto, op: str, inputs: Sequence[str], *, after: tuple[str, str, str], **attributes: Any
    ) -> None:
        """Write a product, and the operator after it, by a tensor ("" = none) and with a suffix to its name."""
        kind, operand, suffix = after
        result = node.output[0]
        made = self.index.free(added_tensor(result, "product")) if operand else result
        self._add(op, inputs, made, node, **attributes)
        if operand:
            self._append(helper.make_node(kind, [made, operand], [result], name=added_tensor(node.name, suffix)))

    def _integer(self, node: onnx.NodeProto) -> None:
        """Write a product of integers as one of floats, divided by the scales that multiply it afterwards."""
        names = [*node.input, *[""] * (4 - len(node.input))]
        places, product = [], 1.0
        for k in range(2):
            if names[k] in self.real:
                product *= float(self.real[names[k]][0].reshape(-1)[0])
                places.append(names[k])
                continue
            zeros = self._value(names[2 + k]) if names[2 + k] else np.zeros((), np.uint8)
            axis = 0 if node.op_type == "ConvInteger" else -1
            ones = np.ones(zeros.shape, np.float32)
            places.append(self._number(names[k], self._value(names[k]), ones, zeros, axis))
        result = node.output[0]
        self.real[result] = np.ones((), np.float32), np.zeros((), np.int32)
        factor = ""
        if product != 1.0:
            factor = self.index.add_constant(added_tensor(result, "steps"), np.asarray(1 / product, np.float32))
        self._product(node, _INTEGER[node.op_type], places, after=("Mul", factor, "steps"), **self._kept(node))

    def _blocks(self, node: onnx.NodeProto) -> None:
        """Write a product with weights in blocks of 4 or 8 bits, (N, blocks, bytes), with the lower nibble first."""
        names = [*node.input, *[""] * (6 - len(node.input))]
        rows, columns = attribute(node, "K", 0), attribute(node, "N", 0)
        bits, size = attribute(node, "bits", 4), attribute(node, "block_size", 32)
        if bits not in (4, 8) or names[4]:
            raise QuantizationError(
                f"{self.source.path}: {node.name} has weights of {bits} bits{' in another order' if names[4] else ''}; "
                "those of 4 and 8 bits in order are read: give the float file that it was made from"
            )
        blocks = -(-rows // size)
        value = _unpacked(self._value(names[1]), bits).reshape(columns, blocks, size).astype(np.float32)
        scales = self._value(names[2])
        points: NDArray[Any] = np.full((columns, blocks), 2.0 ** (bits - 1), np.float32)
        if names[3]:
            given = self._value(names[3])
            packed = given.dtype == np.uint8
            points = _unpacked(given.reshape(columns, -1), bits)[:, :blocks] if packed else given.reshape(columns, -1)
        real = (value - points.astype(np.float32)[..., None]) * scales.reshape(columns, blocks, 1)
        real = np.ascontiguousarray(real.reshape(columns, -1)[:, :rows].T).astype(scales.dtype)
        weight = self.index.add_constant(added_tensor(names[1], "float"), real)
        self._product(node, "MatMul", [names[0], weight], after=("Add", names[5], "bias"))

    def _moved(self, node: onnx.NodeProto, read: str) -> None:
        """Give the results of an operator that moves integers their scale, and its constant integers as floats."""
        if node.op_type in {"Shape", "Size", "ArgMax", "ArgMin"}:
            return
        scales, zeros = self.real[read]
        for i, name in enumerate(node.input):
            tensor = self.index.constants.get(name)
            if tensor is not None and helper.tensor_dtype_to_np_dtype(tensor.data_type) == zeros.dtype:
                node.input[i] = self._number(name, self._value(name), scales, zeros, axis=0)
        self.real.update(dict.fromkeys(filter(None, node.output), (scales, zeros)))

    def _without_identities(self) -> None:
        """Remove the Identity nodes that lifting left, but those that write a result of the graph."""
        captured = {name for node in self.nodes for name in set(inputs_of(node)) - set(node.input)}
        anchored = captured | self.index.outputs
        kept = without_identities(self.nodes, anchored)
        made = {name for node in kept for name in node.output}
        results = {
            node.input[0]: node.output[0]
            for node in kept
            if node.op_type == "Identity" and node.input[0] in made - anchored and node.output[0] not in captured
        }
        kept = [node for node in kept if node.op_type != "Identity" or results.get(node.input[0]) != node.output[0]]
        rename(kept, results)
        wrong = [name for name in self.index.outputs if name in self.real]
        if wrong:
            raise QuantizationError(
                f"{self.source.path}: its output {wrong[0]!r} is of integers; give the float file that it was made from"
            )
        self.index.replace_nodes(kept)


_ENDS = (("low", 0.0), ("high", 6.0))


def _along(values: NDArray[Any], rank: int, axis: int) -> NDArray[Any]:
    return values.reshape([-1 if i == axis % rank else 1 for i in range(rank)] if values.size > 1 else ())


def _two(names: Sequence[str]) -> tuple[str, str]:
    return names[0], names[1] if len(names) > 1 else ""


def _three(names: Sequence[str]) -> tuple[str, str, str]:
    return names[0], *_two(names[1:])


def _unpacked(value: NDArray[Any], bits: int) -> NDArray[Any]:
    if bits == 8:
        return value
    return np.stack([value & 15, value >> 4], axis=-1).reshape(*value.shape[:-1], -1)
