"""Placement rules of each target, as data: which operations get quantized inputs and results.

`place` applies all tables. Sources: the engines' rules (TensorRT developer guide, "Working with Quantized Types" and
"DLA Supported Layers and Restrictions"; ONNX Runtime's QDQ transformer and its QNN Execution Provider; QNN's "HTP Op
Definition" supplement; OpenVINO's low precision transformations; LiteRT's 8-bit quantization specification,
https://ai.google.dev/edge/litert/models/quantization_spec) and the latencies in results/.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from compress.graph.ops import kinds
from compress.quantization import Residual, Target

# Operations whose result is a part of a tensor.
TAKES_APART = kinds(lambda t: t.takes_apart)


@dataclass(frozen=True, kw_only=True)
class TargetTable:
    """The placement rules of one target.

    Attributes:
        inputs: kinds whose tensor inputs are quantized, each with the reason that `inspect` shows.
        outputs: kinds whose result is quantized too, after the normalization and activation that fuse with them.
        residual: inputs of a residual add that are quantized: the `identity` branch, `both`, or `none`.
        residual_after: kinds of operation whose result an add takes in INT8, as a rule of layers that it fuses with.
        commutes: kinds that Q/DQ pass through unchanged, so that the tensor before them is quantized instead.
        apart: kinds for which parts of one tensor (such as query, key and value) have scales of their own.
        joined_parts: True also traces a part of a concat's result (`chunk`, `split`) back to the inputs of that concat,
            if these need a sign all or none: one range for the blocks of ShuffleNetV2.
        concat_shares: False gives the result of a concat of tensors with and without a sign a scale of its own: ONNX
            Runtime's QLinearConcat takes a scale for each input. Elsewhere one scale is faster.
        plain_paths: kinds of layer whose signed input is quantized where the layer reads it, if it is a part of a
            concat's result, of a roll's, or of a concat along another axis than the channels: OpenVINO 2026.4 does not
            carry a zero point through these.
        fuses: activations that an engine computes in the epilogue of the layer before.
        clips_at_zero: True lets clips of `fuses` fuse only if their lower limit is 0.
        unsigned: True quantizes tensors that are never negative unsigned: twice the resolution, and the x86 kernels
            absorb a ReLU only into a quantizer that cannot hold negative values.
        offset: kinds of layer whose signed activations are stored as unsigned integers around 128, the same grid. ONNX
            Runtime fuses a tensor with several consumers only in that form. OpenVINO 2026.4 converts a signed input of
            a convolution to it by itself, with a concat often with 9 levels instead of 256.
        zero_points: kinds of layer whose inputs may have any zero point: tensors with a known lowest value (GELU, SiLU)
            are stored as unsigned integers from there. They need the form of `offset`; linear layers take either.
        symmetric: kinds of layer that OpenVINO 2026.4 computes in 8 bits without a zero point only, and after a concat
            wrongly with one. A signed input is quantized where they read it.
        signed_second: True stores the second factor of a product of two activations as int8 without a zero point, also
            if it is never negative: OpenVINO multiplies in float by any other.
        stays_float, grouped_float: kinds that stay float, always or where they have groups, each with the reason.
        wide_symmetric: True stores activations of more than 8 bits as int16 without a zero point, also if none is
            negative: LiteRT's 16x8 kernels take no other.
        results: True also quantizes results that the model returns.
        one_scale: kinds whose input and result have one scale.
        wide: kinds that are quantized with more than 8 bits alone, each with the reason that 8 bits leave it float.
        opened: activations that are placed as several operations: SiLU as x * sigmoid(x).
        windows: largest side of the kernel of some kinds, and what computes larger ones, in float.
        auto_bits: bits of weights with `num_bits: auto`, on this machine.
        all_integers: weights of fewer than 8 bits use all 2**num_bits integers; engines want symmetric ones.
    """

    inputs: dict[str, str]
    outputs: dict[str, str] = field(default_factory=dict)
    residual: Residual = "identity"
    residual_after: frozenset[str] = frozenset({"conv", "conv_transpose"})
    commutes: frozenset[str] = kinds(lambda t: t.commutes_with_quantization)
    apart: frozenset[str] = frozenset({"matmul"})
    joined_parts: bool = False
    concat_shares: bool = True
    plain_paths: frozenset[str] = frozenset()
    fuses: frozenset[str] = kinds(lambda t: t.clips)
    clips_at_zero: bool = False
    unsigned: bool = False
    offset: frozenset[str] = frozenset()
    zero_points: frozenset[str] = frozenset()
    symmetric: frozenset[str] = frozenset()
    signed_second: bool = False
    stays_float: dict[str, str] = field(default_factory=dict)
    grouped_float: dict[str, str] = field(default_factory=dict)
    wide_symmetric: bool = False
    results: bool = False
    one_scale: frozenset[str] = frozenset()
    wide: dict[str, str] = field(default_factory=dict)
    opened: frozenset[str] = frozenset()
    windows: dict[str, tuple[int, str]] = field(default_factory=dict)
    auto_bits: int = 8
    all_integers: bool = False


_WEIGHTED = {
    "conv": "a convolution computes in INT8 when its input and weight are quantized",
    "conv_transpose": "a transposed convolution computes in INT8 when its input and weight are quantized",
    "linear": "a matrix product computes in INT8 when its input and weight are quantized",
    "matmul": "a matrix product of two activations computes in INT8 when both are quantized",
    "addmm": "a matrix product of two activations computes in INT8 when both are quantized",
}

_POOLS = ("avg_pool", "adaptive_avg_pool", "mean", "resize")

# Kinds that ONNX Runtime fuses to operations of unsigned integers.
_FUSED_INTEGERS = frozenset({*_WEIGHTED, *_POOLS, "add"})

_SOFTMAX = ("softmax", "log_softmax")
_NORMS = sorted(kinds(lambda t: t.category == "normalization" and t.needs_float).difference(_SOFTMAX))

_FLOAT = {
    "attention": "one opaque attention operation: its products are not visible to quantizers",
    "mul": "an elementwise product (squeeze-and-excite, gating) is bound by memory and is left to the float remainder",
    "window_attention": "one opaque attention operation: its products are not visible to quantizers",
    **dict.fromkeys(_NORMS, "normalization sums squares, which 8 bits do not hold"),
    **dict.fromkeys(_SOFTMAX, "an exponential over 8-bit steps loses the small probabilities"),
    "einsum": "an einsum that is no product of two matrices has no quantized form in ONNX",
    "contraction": "it has no quantized form: write the product as a matmul or a linear layer",
    "recurrent": "a recurrent layer takes its own rounded results again at every step, and no engine has it in 8 bits",
    "deform_conv": "a convolution at places that a tensor gives has no quantized form in ONNX",
    "sample": "it interpolates at places that a tensor gives, which 8 bits do not hold",
    "scatter": "a scatter computes with places, which 8 bits do not hold, and no engine has it in integers",
    "unknown": "an operation that compress does not know",
}

_COMPUTING = kinds(
    lambda t: t.category in {"product", "normalization", "activation", "arithmetic", "reduction", "unknown"}
)
_DLA = dict.fromkeys(
    (*("conv", "conv_transpose", "linear"), *_POOLS, *("add", "sub", "mul", "div", "pow", "maximum", "minimum")),
    "DLA computes a region in INT8 only if every tensor in it has a scale; one without sends it to fp16 or to the GPU",
) | dict.fromkeys(
    ("relu", "relu6", "leaky_relu", "batch_norm", "sigmoid", "tanh"),
    "DLA takes it between INT8 tensors (sigmoid and tanh are computed in fp16 inside)",
)

_LARGER = "the largest that DLA takes: the GPU computes it"

_QNN = dict.fromkeys(
    (*_WEIGHTED, *_POOLS, *("add", "sub", "mul", "div", "maximum", "minimum", "relu", "relu6", "leaky_relu")),
    "HTP computes an operator in integers only between pairs; ONNX Runtime gives others to the CPU",
) | dict.fromkeys(
    ("batch_norm", "sigmoid", "tanh", "hardswish", "elu", "gelu", *_SOFTMAX),
    "HTP has an operator for it between pairs of 8 or of 16 bits",
)

TABLES: dict[Target, TargetTable] = {
    "tensorrt": TargetTable(
        inputs=_WEIGHTED | dict.fromkeys(_POOLS, "averages do not commute with Q/DQ: INT8 in and out, or not at all"),
        outputs=dict.fromkeys(_POOLS, "averages do not commute with Q/DQ: INT8 in and out, or not at all"),
        stays_float=_FLOAT,
    ),
    "openvino": TargetTable(
        inputs=_WEIGHTED | dict.fromkeys(_POOLS[:3], "an average runs in 8 bits when its input is quantized"),
        residual="both",
        commutes=kinds(lambda t: t.commutes_with_quantization) - {"repeat"},  # Tile is float
        unsigned=True,
        offset=frozenset({"conv"}),
        plain_paths=frozenset({"conv"}),
        zero_points=frozenset({"conv", "linear"}),
        symmetric=frozenset({"conv_transpose"}),
        signed_second=True,
        # MobileNetV3-small, batch 1, one core of an AMD EPYC (6 % noise): with all nine squeeze-and-excite products in
        # 8 bits the network took 0.99 of the time.
        stays_float=_FLOAT
        | {
            "mul": "an elementwise product (squeeze-and-excite, gating) gains nothing in 8 bits: the engine's kernel "
            "for it took the time of the float product"
        },
        grouped_float={"conv_transpose": "OpenVINO computes transposed convolutions with groups in float"},
    ),
    "onnxruntime": TargetTable(
        inputs={kind: text for kind, text in _WEIGHTED.items() if kind != "conv_transpose"}
        | dict.fromkeys(_POOLS[:3], "an average runs in 8 bits between Q/DQ on both sides"),
        outputs=dict.fromkeys(
            ("conv", "add", *_POOLS[:3]),
            "ONNX Runtime fuses an operation to its QLinear form only between Q/DQ on both sides",
        ),
        residual="both",
        residual_after=frozenset({"conv", "conv_transpose", "silu", "hardswish"}),  # gates are integers in the file
        unsigned=True,
        offset=_FUSED_INTEGERS,
        zero_points=_FUSED_INTEGERS,
        joined_parts=True,
        clips_at_zero=True,
        concat_shares=False,
        stays_float=_FLOAT
        | {
            "mul": "it gets no range of its own; the file has a gate's product (squeeze-and-excite) between pairs that "
            "follow from those around it",
            "conv_transpose": "ONNX Runtime computes transposed convolutions in float",
        },
    ),
    "litert": TargetTable(
        inputs=_WEIGHTED | dict.fromkeys(_POOLS[1:3], "MEAN takes integers, with scales of their own in and out"),
        outputs=dict.fromkeys(
            (*_WEIGHTED, "add", *_POOLS[1:3]), "LiteRT computes an operator in INT8 only if its result is INT8 too"
        ),
        residual="both",
        unsigned=True,
        offset=_FUSED_INTEGERS,
        zero_points=_FUSED_INTEGERS,
        wide_symmetric=True,
        results=True,
        stays_float=_FLOAT
        | {
            "avg_pool": "AVERAGE_POOL_2D has one scale for input and result, which 8 bits of an average do not need",
            "resize": "RESIZE_BILINEAR has one scale for input and result; nearest neighbours keep their integers",
        },
    ),
    "dla": TargetTable(
        inputs=_DLA,
        outputs=_DLA,
        residual="both",
        clips_at_zero=True,
        results=True,
        one_scale=frozenset(_POOLS[:3]),
        opened=frozenset({"silu"}),
        windows=dict.fromkeys(("conv", "conv_transpose"), (32, _LARGER))
        | dict.fromkeys(("avg_pool", "max_pool"), (8, _LARGER)),
        stays_float=dict.fromkeys(
            _COMPUTING.difference(_DLA), "it is not among the layers that DLA takes in INT8: the GPU computes it"
        )
        | dict.fromkeys(_SOFTMAX, "DLA computes a softmax in fp16 (on Orin): it falls back to that, or to the GPU")
        | dict.fromkeys((*TAKES_APART, "roll"), "DLA takes a slice in fp16 alone: it falls back to that, or to the GPU")
        | dict.fromkeys(("hardswish", "gelu"), "DLA has no operator for it: the GPU computes it"),
        grouped_float={"conv_transpose": "DLA has no transposed convolution with groups: the GPU computes it"},
    ),
    "qnn": TargetTable(
        inputs=_QNN,
        outputs=_QNN,
        residual="both",
        unsigned=True,
        offset=frozenset(_QNN),
        zero_points=frozenset(_QNN),
        results=True,
        wide=dict.fromkeys(_SOFTMAX, f"{_FLOAT['softmax']}; with activations of 16 bits it is quantized"),
        stays_float={kind: text for kind, text in _FLOAT.items() if kind not in _QNN},
        opened=frozenset({"silu"}),
    ),
    "any": TargetTable(inputs=_WEIGHTED, residual="none", unsigned=True, all_integers=True, stays_float=_FLOAT),
}
