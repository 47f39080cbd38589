"""Rewrites a float ONNX graph, in place and without changing what it computes, so that its layers can be quantized.

- local functions are inlined, and nodes without a name get one;
- the opset is raised to the one that Q/DQ needs;
- operators that ONNX Runtime's optimizers fuse are written in ONNX's own: no other engine knows them;
- Identity operations are left out;
- an Einsum that is a product of two matrices is a MatMul, and an Attention is its two products and a Softmax;
- BatchNorm is folded into the layer before it, also where it is spelled as a product and a sum of constants, and a
  constant that is added to a convolution becomes its bias;
- factors of query and key that are applied before their product (torch's scaled_dot_product_attention as exporters
  write it, Swin's windows) move after it, so that the product's inputs are what layers return.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import external_data_helper, helper, inliner, numpy_helper
from onnx.shape_inference import InferenceError

from compress.engines.base import Arrays
from compress.errors import CalibrationError, QuantizationError, first_few
from compress.export.names import added_tensor
from compress.export.targets import pads_into_convolutions
from compress.graph.fold import folded_parameters
from compress.graph.spelled import Axes, axis_order, oriented_product
from compress.onnx_graph import (
    RANDOM,
    attribute,
    attributes_of,
    constant_tensor,
    consumed_as,
    drop_unread,
    free_name,
    inferred_graph,
    opset_of,
    replace_attributes,
    replace_nodes,
    tensors_of,
    transposed_pads,
    without_identities,
    without_weights,
)
from compress.onnx_ptq.source import FloatSession, Index, SourceFile, images_of, known_results, one_image, raised
from compress.support.process import core_count

_DOMAIN = "com.microsoft"
# Domains of operators in the layout of one machine.
_LAYOUTS = frozenset({"com.microsoft.nchwc", "com.ms.internal.nhwc"})
# Attributes that the numbers of a fused activation are.
_ACTIVATIONS = {"LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta")}
_SINCE = {"Gelu": 20, "LayerNormalization": 17}
_FUSED_LAYERS = {"FusedConv": "Conv", "FusedGemm": "Gemm"}


def open_fused(source: SourceFile) -> list[str]:
    """Write ONNX Runtime's fused operators as those that they were made of, in place; return a sentence if any.

    Those that need a higher opset than the file's stay.
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
    kinds = ", ".join(sorted(opened.kinds))
    return [f"{kinds} of ONNX Runtime's optimizer are written as ONNX's own operators"] if kinds else []


# An operator, its inputs, its result and its attributes; a result such as `.sum` gets a name after the whole's.
Step = tuple[str, Sequence[str], str, Mapping[str, Any]]


class _Opening:
    def __init__(self, source: SourceFile) -> None:
        self.index, self.kinds = Index(source), set[str]()
        self.opset = self.index.opset.get("", self.index.opset.get("ai.onnx", 1))
        half = any(one.data_type == onnx.TensorProto.FLOAT16 for one in source.proto.graph.initializer)
        self.dtype: type[np.floating[Any]] = np.float16 if half else np.float32

    def rule(self, node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        rules: dict[str, Callable[[onnx.NodeProto], list[Step]]] = {
            "FusedConv": self._layer,
            "FusedGemm": self._layer,
            "FusedMatMul": self._product,
            "QuickGelu": self._quick_gelu,
            "BiasGelu": self._gelu,
            "Gelu": self._gelu,
            "SkipLayerNormalization": self._skip_norm,
        }
        steps = rules[node.op_type](node) if node.domain == _DOMAIN and node.op_type in rules else []
        if steps:
            self.kinds.add(node.op_type)
        return self._written(node, steps) if steps else None

    def _written(self, node: onnx.NodeProto, steps: Sequence[Step]) -> list[onnx.NodeProto]:
        """Return nodes in the place of one; the last has its result."""
        result, names, made = node.output[0], dict[str, str](), list[onnx.NodeProto]()
        for op, inputs, name, attributes in steps:
            names[name] = self.index.free(added_tensor(result, name[1:])) if name.startswith(".") else name
            own = self.index.free(added_tensor(node.name or result, op)) if made else node.name
            read = [names.get(one, one) for one in inputs]
            made.append(helper.make_node(op, read, [names[name]], name=own, **attributes))
        made[-1].output[0] = result
        return made

    def _number(self, node: onnx.NodeProto, part: str, value: float) -> str:
        return self.index.add_constant(added_tensor(node.output[0], part), np.asarray(value, self.dtype))

    def _layer(self, node: onnx.NodeProto) -> list[Step]:
        """A layer, a sum with a further input, and an activation."""
        own = {"activation", "activation_params", "activation_alpha", "activation_beta", "activation_gamma"}
        kept = {one.name: helper.get_attribute_value(one) for one in node.attribute if one.name not in own}
        activation, keys = attribute(node, "activation", b"").decode(), _ACTIVATIONS
        numbers = list(attribute(node, "activation_params", []))
        numbers = numbers or [attribute(node, f"activation_{key}", 0.0) for key in keys.get(activation, ())]
        if activation == "Clip" and (self.opset < 11 or len(numbers) != 2):
            return []
        steps: list[Step] = [(_FUSED_LAYERS[node.op_type], node.input[:3], ".layer", kept)]
        if len(node.input) > 3 and node.input[3]:
            steps.append(("Add", [".layer", node.input[3]], ".sum", {}))
        if activation == "Clip":
            ends = [self._number(node, "end", number) for number in numbers]
            steps.append(("Clip", [steps[-1][2], *ends], ".clipped", {}))
        elif activation:
            options = dict(zip(keys.get(activation, ()), numbers, strict=True))
            steps.append((activation, [steps[-1][2]], ".activated", options))
        return steps

    def _product(self, node: onnx.NodeProto) -> list[Step]:
        """A product with a factor, of tensors whose last two axes may be turned."""
        if any(attribute(node, key, 0) for key in ("transA", "transB", "transBatchA", "transBatchB")):
            return []  # the number of axes, which a Transpose states, is not known here
        steps: list[Step] = [("MatMul", node.input, ".product", {})]
        if (factor := attribute(node, "alpha", 1.0)) != 1.0:
            steps.append(("Mul", [".product", self._number(node, "factor", factor)], ".scaled", {}))
        return steps

    def _quick_gelu(self, node: onnx.NodeProto) -> list[Step]:
        factor, x = attribute(node, "alpha", 1.702), node.input[0]
        gate: list[Step] = [("Sigmoid", [x], ".gate", {})]
        if factor != 1.0:
            scaled: Step = ("Mul", [x, self._number(node, "alpha", factor)], ".scaled", {})
            gate = [scaled, ("Sigmoid", [".scaled"], ".gate", {})]
        return [*gate, ("Mul", [x, ".gate"], ".product", {})]

    def _gelu(self, node: onnx.NodeProto) -> list[Step]:
        """A bias and GELU by erf, which is one operator from opset 20 on."""
        biased = len(node.input) > 1 and bool(node.input[1])
        steps: list[Step] = [("Add", node.input[:2], ".sum", {})] if biased else []
        x = ".sum" if biased else node.input[0]
        if self.opset >= _SINCE["Gelu"]:
            return [*steps, ("Gelu", [x], ".gelu", {})]
        root, one, half = (
            self._number(node, part, value) for part, value in (("root", 2**0.5), ("one", 1), ("half", 0.5))
        )
        return [
            *steps,
            ("Div", [x, root], ".scaled", {}),
            ("Erf", [".scaled"], ".erf", {}),
            ("Add", [".erf", one], ".share", {}),
            ("Mul", [x, ".share"], ".product", {}),
            ("Mul", [".product", half], ".gelu", {}),
        ]

    def _skip_norm(self, node: onnx.NodeProto) -> list[Step]:
        """A sum with a skip and a bias, and LayerNormalization; the sum may be a result too."""
        if self.opset < _SINCE["LayerNormalization"] or any(node.output[1:3]):
            return []
        names = [*node.input, *[""] * (5 - len(node.input))]
        given = node.output[3] if len(node.output) > 3 and node.output[3] else ".sum"
        steps: list[Step] = [("Add", names[:2], ".skipped" if names[4] else given, {})]
        if names[4]:
            steps.append(("Add", [".skipped", names[4]], given, {}))
        options = {"axis": -1, "epsilon": attribute(node, "epsilon", 1e-12)}
        return [*steps, ("LayerNormalization", [given, *filter(None, names[2:4])], ".norm", options)]


_LAYERS = {"Conv": "conv", "ConvTranspose": "conv_transpose", "Gemm": "linear"}
_MOVES = frozenset({"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Identity"})
# Elements of external data that are read into the model.
_SMALL = 1 << 20


def canonical(source: SourceFile, *, opset: int) -> tuple[SourceFile, list[str]]:
    """Return a rewritten copy of a file whose opset is at least `opset`, and a sentence for each kind of change."""
    copy, notes = copied(source), []
    if copy.functions:
        copy = inliner.inline_local_functions(copy)
        notes.append("the functions of the file are inlined")
    if opset_of(copy) < opset:
        notes.append(f"the opset is raised from {opset_of(copy)} to {opset}, which Q/DQ needs")
        copy = raised(source.path, copy, opset)
    name_nodes(copy.graph)
    source = replace(source, proto=copy)
    _read_small(source)
    notes += open_fused(source)
    for rewrite, text in (
        (plain_splits, "{} SplitToSequence operations are written as Split or Slice"),
        (drop_identities, "{} Identity operations are left out"),
        (constant_axes, "{} axes that follow from constants are written as constants"),
        (sizes_in_weights, "sizes that weights are computed with are written as constants (operations: {})"),
        (open_einsums, "{} Einsum operations are written as MatMul (products of two matrices) or Transpose"),
        (open_attention, "{} Attention operations are written as products and a Softmax"),
        (plain_gemms, "the factors, transposed inputs and sums of {} Gemm operations are written apart"),
        (explicit_pads, "the pads of {} transposed convolutions are written out"),
        (_pads_into_convolutions, "{} paddings with zeros are done by the convolutions after them"),
        (fold_constants_after_layers, "{} BatchNorm, scale and bias operations are folded into the layers before them"),
        (move_attention_scales, "the factors of query and key of {} attention products are applied after the product"),
    ):
        count = rewrite(source)
        notes += [text.format(count)] if count else []
    return source, notes


def _pads_into_convolutions(source: SourceFile) -> int:
    padded = pads_into_convolutions(source.proto, Index(source).value)
    if padded:
        drop_unread(source.proto.graph)  # what computed the amounts
    return padded


def copied(source: SourceFile) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(source.proto)
    return copy


def _read_small(source: SourceFile) -> None:
    """Take external data that are no large weights into the model: biases, indices, scales."""
    for tensor in tensors_of(source.proto.graph):
        if not external_data_helper.uses_external_data(tensor) or math.prod(tensor.dims) > _SMALL:
            continue
        name, value = tensor.name, source.array(tensor)
        tensor.CopyFrom(constant_tensor(name, value))


def name_nodes(graph: onnx.GraphProto) -> None:
    """Give nodes unique names, by which the table of decisions names layers; OpenVINO fails on a last input ''."""
    seen: set[str] = set()
    for node in graph.node:
        while node.input and not node.input[-1]:
            node.input.pop()
        node.name = free_name(node.name or f"{node.op_type}_{next(filter(None, node.output), '')}", seen)


def drop_identities(source: SourceFile) -> int:
    # Between a layer and what follows it they hide what can be folded and what engines fuse; so does an unread reader.
    graph = source.proto.graph
    drop_unread(graph)
    kept = without_identities(graph.node, {value.name for value in graph.output})
    count = len(graph.node) - len(kept)
    if count:
        replace_nodes(graph, kept)
    return count


def constant_axes(source: SourceFile) -> int:
    # TensorRT refuses axes that are computed, though from constants alone, as torch's unoptimized files do.
    index, made = Index(source), dict[str, str]()
    for node in index.graph.node:
        name = node.input[1] if len(node.input) > 1 else ""
        maker = index.producers.get(name)
        if not (node.op_type in {"Squeeze", "Unsqueeze"} or node.op_type.startswith("Reduce")) or maker is None:
            continue
        if maker.op_type == "Constant" or name not in index.unchanging:
            continue
        if name not in made and (value := index.value(name)) is not None:
            made[name] = index.add_constant(added_tensor(name, "value"), value)
        node.input[1] = made.get(name, name)
    if made:
        drop_unread(index.graph)
    return len(made)


# First opset whose Split takes sizes as an input.
_SPLIT_BY_INPUT = 13


def plain_splits(source: SourceFile) -> int:
    # TensorRT has no sequences, as which torch's unoptimized files split tensors.
    index, parts = Index(source), dict[str, list[str]]()
    splits = [one for one in index.graph.node if one.op_type == "SplitToSequence" and len(one.input) > 1]
    kinds, sizes = _kinds(source) if splits else {}, dict[str, NDArray[Any]]()
    slices = dict[str, tuple[str, int, int]]()
    for node in splits if opset_of(source.proto) >= _SPLIT_BY_INPUT else ():
        (name,), value, axis = node.output, index.value(node.input[1]), attribute(node, "axis", 0)
        if value is not None and not value.ndim and node.input[0] in kinds:  # all but the last are of this size
            whole = kinds[node.input[0]].shape.dim[axis].dim_value
            value = np.diff(np.r_[np.arange(0, whole, int(value)), whole]) if whole else value
        readers = index.consumers.get(name, [])
        read = [index.value(one.input[1]) for one in readers if one.op_type == "SequenceAt"]
        places = [place for place in read if place is not None]
        if value is None or name in index.outputs or len(places) < len(readers):
            continue
        if not value.ndim:  # of how many parts is unknown
            if all(place >= 0 for place in places):
                slices[name] = node.input[0], int(value), axis
            continue
        parts[name] = [index.free(added_tensor(name, f"{i}")) for i in range(len(value))]
        sizes[name] = value.astype(np.int64)

    def written(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        if node.output[0] in parts:
            (name,), axis = node.output, attribute(node, "axis", 0)
            read = [node.input[0], index.add_constant(added_tensor(name, "sizes"), sizes[name])]
            return [helper.make_node("Split", read, parts[name], name=node.name, axis=axis)]
        if node.op_type != "SequenceAt" or node.input[0] not in parts.keys() | slices.keys():
            return None
        (name, at), (out,) = node.input, node.output
        place = np.atleast_1d(np.asarray(index.value(at), np.int64))
        if name in parts:
            return [helper.make_node("Identity", [parts[name][place.item()]], node.output, name=node.name)]
        data, size, axis = slices[name]
        bounds = {"begin": size * place, "end": size * (place + 1), "axis": np.array([axis])}
        read = [index.add_constant(added_tensor(out, part), value) for part, value in bounds.items()]
        return [helper.make_node("Slice", [data, *read], node.output, name=node.name)]

    index.rewrite(written)
    if slices:
        drop_unread(index.graph)
    return len(parts) + len(slices)


def sizes_in_weights(source: SourceFile) -> int:
    # Sizes such as those of `weight.reshape(x.shape[1], -1)`, which the file fixes though it computes them.
    index = Index(source)
    layers = [node for node in index.graph.node if node.op_type in {*_LAYERS, "MatMul"}]
    open_ = index.fixed - index.unchanging
    names = [name for node in layers for name in node.input[1:] if name in open_]
    if not names:
        return 0
    kinds, read = _kinds(source), set(names)
    for name in names:  # grows
        new = [other for other in index.producers[name].input if other in open_ and other not in read]
        names += new
        read.update(new)

    def written(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        asked = index.producers.get(node.input[0]) if node.op_type == "Gather" and node.output[0] in read else None
        if asked is None or asked.op_type != "Shape" or asked.input[0] not in kinds:
            return None
        sizes = kinds[asked.input[0]].shape.dim[attribute(asked, "start", 0) : attribute(asked, "end", None)]
        known = np.asarray([size.dim_value if size.HasField("dim_value") else -1 for size in sizes], np.int64)
        place = index.value(node.input[1])
        if place is None or not np.isin(place, np.arange(-len(known), len(known))).all() or (known[place] < 0).any():
            return None
        value = numpy_helper.from_array(np.asarray(known[place]))
        return [helper.make_node("Constant", [], node.output, name=node.name, value=value)]

    return index.rewrite(written)


def open_einsums(source: SourceFile) -> int:
    """Write Einsums that are products of two matrices as MatMul, orders of axes as Transpose; return their number."""
    index = Index(source)
    kinds = _kinds(source) if any(node.op_type == "Einsum" for node in index.graph.node) else {}
    ranks = {name: len(kind.shape.dim) for name, kind in kinds.items() if kind.HasField("shape")}

    def opened(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        if node.op_type != "Einsum" or node.domain not in ("", "ai.onnx"):
            return None
        fixed = [name in index.unchanging for name in node.input]
        equation, known = attribute(node, "equation", b"").decode(), [ranks.get(name, 0) for name in node.input]
        turned = axis_order(equation, known)
        if turned is not None:
            return [helper.make_node("Transpose", node.input, node.output, name=node.name, perm=turned)]
        found = oriented_product(equation, known, fixed)
        if found is None:
            return None
        product, swapped = found
        left, right = reversed(node.input) if swapped else node.input
        made: list[onnx.NodeProto] = []
        sides = [_arranged(left, product.left, node, index, made), _arranged(right, product.right, node, index, made)]
        output, order = node.output[0], product.result
        result = output if order == tuple(range(len(order))) else index.free(added_tensor(output, "product"))
        made.append(helper.make_node("MatMul", sides, [result], name=node.name))
        if result != output:
            name = added_tensor(node.name, "order")
            made.append(helper.make_node("Transpose", [result], [output], name=name, perm=order))
        return made

    return index.rewrite(opened)


def plain_gemms(source: SourceFile) -> int:
    """Write each Gemm of constants without factors, with a bias of one number a column; return how many changed."""
    index = Index(source)

    def opened(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        if node.op_type != "Gemm" or not index.unchanging.issuperset(node.input[1:]):
            return None
        weight, bias = index.value(node.input[1]), index.value("".join(node.input[2:]))
        if weight is None or (bias is None and len(node.input) > 2):
            return None
        alpha, beta, turned = (attribute(node, *given) for given in (("alpha", 1.0), ("beta", 1.0), ("transA", 0)))
        columns, made, output = weight.shape[attribute(node, "transB", 0) - 1], [node], node.output[0]
        if (alpha, beta, turned) == (1.0, 1.0, 0) and (bias is None or bias.shape == (columns,)):
            return None
        replace_attributes(node, alpha=None, beta=None, transA=None)
        del node.input[2:]
        if turned:
            x = index.free(added_tensor(node.input[0], "turned"))
            made.insert(0, helper.make_node("Transpose", [node.input[0]], [x], perm=[1, 0]))
            node.input[0] = x
        if alpha != 1:
            node.input[1] = index.add_constant(added_tensor(output, "weight"), (alpha * weight).astype(weight.dtype))
        if bias is not None:
            bias = (beta * bias).astype(bias.dtype)
            row = bias.shape[:-1] in {(), (1,)}
            bias = np.broadcast_to(bias.reshape(-1), columns) if row else bias
            added = index.add_constant(added_tensor(output, "bias"), bias)
            if row:
                node.input.append(added)
            else:
                node.output[0] = index.free(added_tensor(output, "product"))
                made.append(helper.make_node("Add", [node.output[0], added], [output]))
        return made

    return index.rewrite(opened)


def explicit_pads(source: SourceFile) -> int:
    # OpenVINO (2026.4) misreads `auto_pad` and `output_shape` of a transposed convolution with an open batch.
    index, kinds = Index(source), _kinds(source)

    def size_of(name: str) -> list[int]:
        return [dim.dim_value for dim in kinds[name].shape.dim[2:]] if name in kinds else []

    def opened(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        given = attributes_of(node) if node.op_type == "ConvTranspose" else {}
        kernel, size = size_of(node.input[1]) if given else [], size_of(node.input[0]) if given else []
        if not given.keys() & {"auto_pad", "output_shape"} or not kernel or len(size) != len(kernel):
            return None
        pads = transposed_pads(given, size, kernel)
        if pads is None:
            return None
        replace_attributes(node, auto_pad=None, output_shape=None, pads=pads)
        return [node]

    return index.rewrite(opened)


def _kinds(source: SourceFile) -> dict[str, onnx.TypeProto.Tensor]:
    with contextlib.suppress(InferenceError, ValueError):  # reported where shapes are needed
        proto = onnx.shape_inference.infer_shapes(without_weights(source.proto)).graph
        values = [helper.make_tensor_value_info(one.name, one.data_type, one.dims) for one in proto.initializer]
        return {value.name: value.type.tensor_type for value in (*values, *proto.input, *proto.value_info)}
    return {}


def open_attention(source: SourceFile) -> int:
    """Write each Attention of opset 23 whose products can be quantized as MatMul and Softmax; return their number.

    Those with caches, heads that share keys, or further results stay.
    """
    index = Index(source)
    kinds = _kinds(source) if any(node.op_type == "Attention" for node in index.graph.node) else {}

    def opened(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
        if node.op_type != "Attention" or node.domain not in ("", "ai.onnx") or not _is_plain_attention(node, kinds):
            return None
        query, key, value = node.input[:3]
        kind, name = kinds[query], node.output[0]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        scale = attribute(node, "scale", None) or kind.shape.dim[3].dim_value ** -0.5
        turned, raw, scaled, masked, shares = (
            index.free(added_tensor(name, part)) for part in ("turned", "raw", "scores", "masked", "shares")
        )
        factor = index.add_constant(added_tensor(name, "factor"), np.asarray(scale, dtype))
        made = [
            helper.make_node("Transpose", [key], [turned], name=turned, perm=[0, 1, 3, 2]),
            helper.make_node("MatMul", [query, turned], [raw], name=f"{node.name}_scores"),
            helper.make_node("Mul", [raw, factor], [scaled], name=scaled),
        ]
        if len(node.input) > 3 and node.input[3]:
            if kinds[node.input[3]].elem_type == onnx.TensorProto.BOOL:
                least = index.add_constant(added_tensor(name, "mask"), np.asarray(_MASKED, dtype))
                made.append(helper.make_node("Where", [node.input[3], scaled, least], [masked], name=masked))
            else:
                made.append(helper.make_node("Add", [scaled, node.input[3]], [masked], name=masked))
            scaled = masked
        made.append(helper.make_node("Softmax", [scaled], [shares], name=shares, axis=-1))
        return [*made, helper.make_node("MatMul", [shares, value], [name], name=node.name)]

    return index.rewrite(opened)


# A score whose exponential is zero, which every float type holds.
_MASKED = -(2.0**14)


def _is_plain_attention(node: onnx.NodeProto, kinds: Mapping[str, onnx.TypeProto.Tensor]) -> bool:
    """Return True for as many heads of keys as of queries, (N, heads, tokens, size), and nothing but a mask."""
    used = [k for k, name in enumerate(node.input) if name]
    known = [kinds[name].shape.dim for name in node.input[:3] if name in kinds]
    if not {0, 1, 2} <= set(used) <= {0, 1, 2, 3} or any(node.output[1:]) or len(known) < 3:
        return False
    if any(attribute(node, key, 0) for key in ("is_causal", "softcap", "q_num_heads", "softmax_precision")):
        return False
    if any(len(dims) != 4 for dims in known) or not known[0][3].dim_value:
        return False
    mask = kinds.get(node.input[3]) if 3 in used else None
    if 3 in used and (mask is None or attribute(node, "left_window_size", -1) != -1):
        return False
    return len({dims[1].dim_value for dims in known}) == 1 and bool(known[0][1].dim_value)


def _arranged(name: str, axes: Axes, einsum: onnx.NodeProto, index: Index, made: list[onnx.NodeProto]) -> str:
    """Return a tensor with its axes in another order and with axes of size 1, whose nodes are added to `made`."""
    order = [axis for axis in axes if axis is not None]
    if order != sorted(order):
        turned = index.free(added_tensor(einsum.output[0], "turned"))
        made.append(helper.make_node("Transpose", [name], [turned], name=turned, perm=order))
        name = turned
    single = [place for place, axis in enumerate(axes) if axis is None]
    if not single:
        return name
    wider = index.free(added_tensor(einsum.output[0], "wider"))
    if index.opset.get("", 1) < 13:
        made.append(helper.make_node("Unsqueeze", [name], [wider], name=wider, axes=single))
    else:
        places = index.add_constant(added_tensor(wider, "axes"), np.asarray(single, np.int64))
        made.append(helper.make_node("Unsqueeze", [name, places], [wider], name=wider))
    return wider


def fold_constants_after_layers(source: SourceFile) -> int:
    """Fold into each layer the BatchNorm, or the constant factor and sum, that alone reads it; return their number."""
    index = Index(source)
    gone: set[str] = set()
    for node in list(index.graph.node):
        kind = _LAYERS.get(node.op_type)
        while kind is not None:
            after = index.alone(node.output[0])
            found = None if after is None else _folded(node, kind, after, index)
            if found is None:
                break
            weight, bias, nodes = found
            _set_parameters(node, weight, bias, index)
            node.output[0] = nodes[-1].output[0]
            index.producers[node.output[0]] = node
            gone.update(part.name for part in nodes)
    index.replace_nodes([node for node in index.graph.node if node.name not in gone])
    drop_unread(index.graph)
    return len(gone)


Folded = tuple[NDArray[Any], NDArray[Any], list[onnx.NodeProto]]


def _folded(layer: onnx.NodeProto, kind: str, after: onnx.NodeProto, index: Index) -> Folded | None:
    """Return (weight, bias, the nodes that they replace) of a layer with what follows it; None if nothing folds."""
    names = [layer.input[1], *([layer.input[2]] if len(layer.input) > 2 else [])]
    if after.op_type != "BatchNormalization" and index.unchanging.isdisjoint(after.input):
        return None
    if not index.unchanging.issuperset(names):
        return None
    weight, bias = index.value(names[0]), index.value(names[1]) if len(names) > 1 else None
    if weight is None or weight.dtype.kind != "f" or weight.ndim < 2:
        return None
    flip = kind == "linear" and not attribute(layer, "transB", 0)
    groups = attribute(layer, "group", 1)
    weight = weight.T if flip else weight
    channels = weight.shape[1] * groups if kind == "conv_transpose" else weight.shape[0]
    if bias is not None and bias.size not in (1, channels):
        return None
    bias = np.zeros(channels, weight.dtype) if bias is None else np.broadcast_to(bias.reshape(-1), (channels,))
    found = _statistics(after, layer.output[0], weight.ndim, channels, kind, index)
    if found is None:
        return None
    (mean, variance, epsilon, scale, shift), nodes = found
    tensors = [torch.from_numpy(np.array(v, np.float32)) for v in (weight, bias, mean, variance, scale, shift)]
    w, b, *numbers = tensors
    fused, moved = folded_parameters(
        w, b, (numbers[0], numbers[1], epsilon, numbers[2], numbers[3]), kind=kind, groups=groups
    )
    result = fused.detach().numpy().astype(weight.dtype)
    return result.T if flip else result, moved.detach().numpy().astype(weight.dtype), nodes


def _statistics(
    node: onnx.NodeProto, name: str, rank: int, channels: int, kind: str, index: Index
) -> tuple[tuple[Any, Any, float, Any, Any], list[onnx.NodeProto]] | None:
    """Return mean, variance, epsilon, scale and shift of a normalization in any of its spellings, and its nodes."""
    zero, one = np.zeros(channels, np.float32), np.ones(channels, np.float32)
    if node.op_type == "BatchNormalization":
        used = [output for output in node.output[1:] if output]
        values = [index.value(key) if key in index.unchanging else None for key in node.input[1:5]]
        if attribute(node, "training_mode", 0) or used or any(v is None or v.shape != (channels,) for v in values):
            return None
        scale, shift, mean, variance = values
        return (mean, variance, attribute(node, "epsilon", 1e-5), scale, shift), [node]
    if kind == "linear":
        return None
    if node.op_type == "Add":
        shift = _channel_operand(node, name, rank, channels, index)
        return None if shift is None else ((zero, one, 0.0, one, shift), [node])
    if node.op_type == "Mul":
        scale, then = _channel_operand(node, name, rank, channels, index), index.alone(node.output[0])
        if scale is None or then is None or then.op_type != "Add":
            return None
        shift = _channel_operand(then, node.output[0], rank, channels, index)
        return None if shift is None else ((zero, one, 0.0, scale, shift), [node, then])
    return None


def _channel_operand(node: onnx.NodeProto, name: str, rank: int, channels: int, index: Index) -> NDArray[Any] | None:
    """Return the constant that a node applies to the channels (axis 1) of a tensor, (C,); None if it is no such."""
    other = [key for key in node.input if key != name]
    value = index.value(other[0]) if len(other) == 1 and other[0] in index.unchanging else None
    if value is None or value.ndim > rank:
        return None
    sizes = [1] * (rank - value.ndim) + list(value.shape)
    if sizes[1] not in (1, channels) or any(size != 1 for i, size in enumerate(sizes) if i != 1):
        return None
    return np.broadcast_to(value.reshape(-1), (channels,))


def _set_parameters(layer: onnx.NodeProto, weight: NDArray[Any], bias: NDArray[Any], index: Index) -> None:
    parts = {"folded_weight": weight, "folded_bias": bias}
    for i, (part, value) in enumerate(parts.items(), start=1):
        name = index.add_constant(added_tensor(layer.output[0], part), value)
        if i < len(layer.input):
            layer.input[i] = name
        else:
            layer.input.append(name)


def move_attention_scales(source: SourceFile) -> int:
    """Apply the factors of the inputs of products of activations to the products; return the number of products."""
    index = Index(source)
    gone: set[str] = set()
    added: dict[str, list[onnx.NodeProto]] = {}
    for node in list(index.graph.node):
        if node.op_type != "MatMul" or not index.fixed.isdisjoint(node.input):
            continue
        scaled = [_scaled(name, index) for name in node.input]
        one = scaled[0] is not None and scaled[1] is not None and scaled[0][0] is scaled[1][0]
        if one or scaled == [None, None]:
            continue
        result = node.output[0]
        node.output[0] = current = index.free(added_tensor(result, "unscaled"))
        factors = [s for s in scaled if s is not None]
        for i, (factor, value, number) in enumerate(factors):
            after = result if i == len(factors) - 1 else index.free(added_tensor(result, "scaled"))
            made = helper.make_node(
                factor.op_type, [current, number], [after], name=added_tensor(node.name, f"scale_{i}")
            )
            added.setdefault(node.name, []).append(made)
            consumed_as(index.consumers[factor.output[0]][0], factor.output[0], value)
            gone.add(factor.name)
            current = after
    kept = [node for node in index.graph.node if node.name not in gone]
    index.replace_nodes(part for node in kept for part in (node, *added.get(node.name, ())))
    return len(added)


def _scaled(name: str, index: Index) -> tuple[onnx.NodeProto, str, str] | None:
    """Return the node that multiplies a tensor by one number before it is moved, its input and the number."""
    node = index.producers.get(name)
    while node is not None and node.op_type in _MOVES and index.alone(name) is not None:
        name = node.input[0]
        node = index.producers.get(name)
    if node is None or node.op_type not in {"Mul", "Div"} or index.alone(name) is None:
        return None
    places = (1,) if node.op_type == "Div" else (0, 1)
    for i in places:
        value = index.value(node.input[i]) if node.input[i] in index.fixed else None
        single = value is not None and value.ndim < 2 and value.size == 1
        if (single or _computed_scalar(node.input[i], index)) and node.input[1 - i] not in index.fixed:
            return node, node.input[1 - i], node.input[i]
    return None


def _computed_scalar(name: str, index: Index) -> bool:
    """Return True for one number that is computed from the size of a tensor, as torch's older exporter writes it."""
    scalar = {"Sqrt", "Div", "Cast", "Mul", "Reciprocal", "Pow"}
    node = index.producers.get(name) if name in index.fixed else None
    if node is None:
        return name in index.unchanging and (value := index.value(name)) is not None and value.size == 1
    if node.op_type in scalar:
        return all(_computed_scalar(key, index) for key in node.input)
    if node.op_type == "Slice":
        starts, ends = (index.value(key) for key in node.input[1:3])
        if starts is None or ends is None or not _is_shape(node.input[0], index):
            return False
        start, end = int(starts.reshape(-1)[0]), int(ends.reshape(-1)[0])
        return end - start == 1 or (start == -1 and end > 1 << 30)
    indices = index.value(node.input[1]) if node.op_type == "Gather" else None
    if node.op_type == "Constant":
        value = index.value(name)
        return value is not None and value.size == 1
    return indices is not None and indices.size == 1 and _is_shape(node.input[0], index)


def _is_shape(name: str, index: Index) -> bool:
    node = index.producers.get(name)
    return node is not None and node.op_type == "Shape"


# Largest change of an output, relative to its largest value, that a rewriting of the float graph may make.
_CHANGED, _CHANGED_IN_HALF = 1e-3, 1e-2

# Largest difference, relative to its largest value, of a result alone and in a batch: kernels differ by the size.
_APART = 1e-2

# Change that rounding alone may make, of probabilities near zero for example.
_ROUNDING = 1e-6


def comparison(original: SourceFile, feed: Arrays) -> Callable[[Arrays], None]:
    """Return a function that refuses other results than the file's own, which are computed beside the caller's work.

    The second image of the batch `feed` is computed, which shows a change as well as all of them (`results_for_one`).
    """
    pool = ThreadPoolExecutor(1)
    before = pool.submit(results_for_one, original, feed)
    pool.shutdown(wait=False)
    return partial(_check_same, original, before)


def results_for_one(source: SourceFile, feed: Arrays) -> Arrays:
    """Return a graph's outputs for one image, or for the batch where its size is fixed."""
    alone, names = one_image(source.proto, feed), known_results(source)
    return FloatSession(source, names, threads=max(1, core_count() // 2)).run(feed if alone is None else alone)


def images_apart(source: SourceFile, feed: Arrays) -> bool:
    # False for statistics of the batch, and for rows that are one set.
    alone = one_image(source.proto, feed)
    if alone is None or images_of(feed) < 2:
        return alone is not None
    session = FloatSession(source, known_results(source), threads=max(1, core_count() // 2))
    try:
        both, one = (session.run(feeds) for feeds in ({key: value[:2] for key, value in feed.items()}, alone))
    except CalibrationError:  # the open first dimension of its inputs is no batch
        return False
    results = [(np.asarray(both[name]), np.asarray(value)) for name, value in one.items()]
    changes = [change_of(b, a[-len(b) :]) for a, b in results if b.dtype.kind == "f" and b.ndim]
    return all(change <= _APART * largest + _ROUNDING for change, largest in changes)


def change_of(expected: NDArray[Any], found: NDArray[Any]) -> tuple[float, float]:
    """(Largest difference, largest finite magnitude expected) of two results: equal infinities and NaNs count as 0."""
    a, b = expected.astype(np.float64), found.astype(np.float64)
    largest = float(np.abs(a[np.isfinite(a)]).max(initial=0.0))
    if a.shape != b.shape:
        return np.inf, largest
    with np.errstate(invalid="ignore"):
        change = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, a - b)
    return float(np.abs(change).max(initial=0.0)), largest


def _check_same(original: SourceFile, before: Future[Arrays], after: Arrays) -> None:
    for name, expected in before.result().items():
        a, b = (np.asarray(value) for value in (expected, after[name]))
        if a.dtype.kind != "f" or a.size == 0:
            continue
        change, largest = change_of(a, b)
        limit = _CHANGED if a.dtype.itemsize > 2 else _CHANGED_IN_HALF
        if not change <= limit * largest + _ROUNDING:
            drawn = [node.name or node.output[0] for node in original.proto.graph.node if node.op_type in RANDOM]
            if drawn:
                raise QuantizationError(
                    f"{original.path} draws random numbers in every run, at {first_few(drawn)}: export the network in "
                    "evaluation mode, and give it such numbers as an input"
                )
            raise QuantizationError(
                f"{original.path}: folding and raising the opset changed the output {name!r} by {change:.3g}, and its "
                f"largest value is {largest:.3g}; at most {limit:g} of it is allowed. Export the file again with opset "
                "13 or later and BatchNorm folded"
            )


def shape_outputs(source: SourceFile, feed: Arrays | None) -> None:
    """Give the outputs of a file that state no dimensions those which they have, of any size; in place.

    Without inputs they are inferred, and stay as they are where that is not possible.
    """
    bare = [value for value in source.proto.graph.output if value.type.HasField("tensor_type")]
    bare = [value for value in bare if not value.type.tensor_type.shape.dim]
    ranks: dict[str, int] = {}
    if bare and feed is not None:
        ranks = {name: np.ndim(value) for name, value in results_for_one(source, feed).items()}
    elif bare:
        with contextlib.suppress(InferenceError, ValueError):
            made = inferred_graph(source.proto, {}).output
            ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in made}
    for value in bare:
        for axis in range(ranks.get(value.name, 0)):
            value.type.tensor_type.shape.dim.add().dim_param = f"{value.name}_{axis}"
