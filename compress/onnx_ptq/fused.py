"""Operators that ONNX Runtime's optimizers fuse, in ONNX's own: no other engine knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import helper

from compress.errors import QuantizationError
from compress.export.names import added_tensor
from compress.onnx_graph.graph import attribute
from compress.onnx_ptq.index import Index
from compress.onnx_ptq.load import SourceFile

_DOMAIN = "com.microsoft"
_LAYOUTS = frozenset({"com.microsoft.nchwc", "com.ms.internal.nhwc"})
"""Domains of operators in the layout of one machine."""
_ACTIVATIONS = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta")}
"""Attributes that the numbers of a fused activation are."""
_SINCE = {"Gelu": 20, "LayerNormalization": 17}
_LAYERS = {"FusedConv": "Conv", "FusedGemm": "Gemm"}


def open_fused(source: SourceFile) -> tuple[str, ...]:
    """Write ONNX Runtime's fused operators as those that they were made of, in place; return the kinds.

    Those that need a higher opset than the file's stay.

    Raises:
        QuantizationError: the file is in the layout of ONNX Runtime's machine.
    """
    for node in source.proto.graph.node:
        if node.domain in _LAYOUTS:
            raise QuantizationError(
                f"{source.path} is in the layout that ONNX Runtime chose for its machine ({node.domain}.{node.op_type} "
                f"at {node.name or node.output[0]}); give the file it was optimized from, or optimize it up to "
                "ORT_ENABLE_EXTENDED"
            )
    opened = _Opening(source)
    opened.index.rewrite(opened.rule)
    return tuple(sorted(opened.kinds))


class _Opening:
    def __init__(self, source: SourceFile) -> None:
        self.index, self.kinds = Index(source), set[str]()
        self.opset = self.index.opset.get("", self.index.opset.get("ai.onnx", 1))
        self.made: list[onnx.NodeProto] = []
        half = any(one.data_type == onnx.TensorProto.FLOAT16 for one in source.proto.graph.initializer)
        self.dtype: type[np.floating[Any]] = np.float16 if half else np.float32

    def rule(self, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        """Return the nodes that a fused one stands for; None if it is none."""
        rules: dict[str, Callable[[onnx.NodeProto], bool]] = {
            "FusedConv": self._layer,
            "FusedGemm": self._layer,
            "FusedMatMul": self._product,
            "QuickGelu": self._quick_gelu,
            "BiasGelu": self._gelu,
            "Gelu": self._gelu,
            "SkipLayerNormalization": self._skip_norm,
        }
        self.made = []
        if node.domain != _DOMAIN or node.op_type not in rules or not rules[node.op_type](node):
            return None
        self.kinds.add(node.op_type)
        return self.made

    def _add(self, node: onnx.NodeProto, op: str, inputs: list[str], result: str, **attributes: Any) -> str:
        name = node.name if not self.made else self.index.free(added_tensor(node.name or node.output[0], op))
        self.made.append(helper.make_node(op, inputs, [result], name=name, **attributes))
        return result

    def _free(self, node: onnx.NodeProto, part: str) -> str:
        return self.index.free(added_tensor(node.output[0], part))

    def _layer(self, node: onnx.NodeProto) -> bool:
        """A layer, a sum with a further input, and an activation."""
        own = {"activation", "activation_params", "activation_alpha", "activation_beta", "activation_gamma"}
        kept = {one.name: helper.get_attribute_value(one) for one in node.attribute if one.name not in own}
        activation, result = attribute(node, "activation", b"").decode(), node.output[0]
        inputs, added = list(node.input[:3]), node.input[3] if len(node.input) > 3 else ""
        numbers = list(attribute(node, "activation_params", []))
        numbers = numbers or [attribute(node, f"activation_{key}", 0.0) for key in _ACTIVATIONS.get(activation, ())]
        if activation == "Clip" and (self.opset < 11 or len(numbers) != 2):
            return False
        made = self._free(node, "layer") if activation or added else result
        made = self._add(node, _LAYERS[node.op_type], inputs, made, **kept)
        if added:
            made = self._add(node, "Add", [made, added], self._free(node, "sum") if activation else result)
        if activation == "Clip":
            ends = [self.index.add_constant(added_tensor(result, "end"), np.asarray(v, self.dtype)) for v in numbers]
            self._add(node, "Clip", [made, *ends], result)
        elif activation:
            self._add(
                node, activation, [made], result, **dict(zip(_ACTIVATIONS.get(activation, ()), numbers, strict=True))
            )
        return True

    def _product(self, node: onnx.NodeProto) -> bool:
        """A product with a factor, of tensors whose last two axes may be turned."""
        turned = [attribute(node, key, 0) for key in ("transA", "transB")]
        if any(turned) or attribute(node, "transBatchA", 0) or attribute(node, "transBatchB", 0):
            return False  # the number of axes, which a Transpose states, is not known here
        factor, result = attribute(node, "alpha", 1.0), node.output[0]
        made = self._add(node, "MatMul", list(node.input), result if factor == 1.0 else self._free(node, "product"))
        if factor != 1.0:
            number = self.index.add_constant(added_tensor(result, "factor"), np.asarray(factor, self.dtype))
            self._add(node, "Mul", [made, number], result)
        return True

    def _quick_gelu(self, node: onnx.NodeProto) -> bool:
        """The product of x and sigmoid(alpha * x)."""
        factor, x = attribute(node, "alpha", 1.702), node.input[0]
        scaled = x
        if factor != 1.0:
            number = self.index.add_constant(added_tensor(node.output[0], "alpha"), np.asarray(factor, self.dtype))
            scaled = self._add(node, "Mul", [x, number], self._free(node, "scaled"))
        gate = self._add(node, "Sigmoid", [scaled], self._free(node, "gate"))
        self._add(node, "Mul", [x, gate], node.output[0])
        return True

    def _gelu(self, node: onnx.NodeProto) -> bool:
        """A bias and GELU by erf, which is one operator from opset 20 on."""
        x = node.input[0]
        if len(node.input) > 1 and node.input[1]:
            x = self._add(node, "Add", list(node.input[:2]), self._free(node, "sum"))
        if self.opset >= _SINCE["Gelu"]:
            self._add(node, "Gelu", [x], node.output[0])
            return True
        root, one, half = (
            self.index.add_constant(added_tensor(node.output[0], part), np.asarray(value, self.dtype))
            for part, value in (("root", 2**0.5), ("one", 1), ("half", 0.5))
        )
        scaled = self._add(node, "Div", [x, root], self._free(node, "scaled"))
        error = self._add(node, "Erf", [scaled], self._free(node, "erf"))
        share = self._add(node, "Add", [error, one], self._free(node, "share"))
        product = self._add(node, "Mul", [x, share], self._free(node, "product"))
        self._add(node, "Mul", [product, half], node.output[0])
        return True

    def _skip_norm(self, node: onnx.NodeProto) -> bool:
        """A sum with a skip and a bias, and LayerNormalization; the sum may be a result too."""
        if self.opset < _SINCE["LayerNormalization"] or any(node.output[1:3]):
            return False
        names = [*node.input, *[""] * (5 - len(node.input))]
        given = node.output[3] if len(node.output) > 3 and node.output[3] else self._free(node, "sum")
        x = self._add(node, "Add", names[:2], self._free(node, "skipped") if names[4] else given)
        if names[4]:
            x = self._add(node, "Add", [x, names[4]], given)
        epsilon = attribute(node, "epsilon", 1e-12)
        norm = [x, *filter(None, names[2:4])]
        self._add(node, "LayerNormalization", norm, node.output[0], axis=-1, epsilon=epsilon)
        return True
