"""The kind of an ONNX operator: the same rows of `graph.traits` that torch's operations have."""

from __future__ import annotations

from collections.abc import Callable

from compress.graph.traits import TRAITS, Traits

ONNX_KINDS = {
    "Conv": "conv", "ConvTranspose": "conv_transpose", "Gemm": "linear", "MatMul": "matmul", "Einsum": "einsum",
    "BatchNormalization": "batch_norm", "LayerNormalization": "layer_norm", "GroupNormalization": "group_norm",
    "InstanceNormalization": "instance_norm", "LRN": "local_response_norm", "LpNormalization": "normalize",
    "Softmax": "softmax", "LogSoftmax": "log_softmax", "Relu": "relu", "Clip": "clamp", "LeakyRelu": "leaky_relu",
    "PRelu": "leaky_relu", "Gelu": "gelu", "HardSwish": "hardswish", "Mish": "mish", "Tanh": "tanh", "Elu": "elu",
    "Selu": "elu", "Celu": "elu", "Sigmoid": "sigmoid", "HardSigmoid": "hardsigmoid", "Softplus": "softplus",
    "Add": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Neg": "neg", "Max": "maximum", "Min": "minimum",
    "Where": "where", "Pow": "pow", "Sqrt": "sqrt", "Exp": "exp", "Log": "log", "Sin": "sin", "Cos": "cos",
    "ReduceMean": "mean",
    "ReduceSum": "sum", "ReduceMax": "max", "ReduceMin": "min", "ReduceL2": "vector_norm", "MaxPool": "max_pool",
    "AveragePool": "avg_pool", "GlobalMaxPool": "adaptive_max_pool", "GlobalAveragePool": "adaptive_avg_pool",
    "Resize": "resize", "Pad": "pad", "Flatten": "flatten", "Reshape": "reshape", "Transpose": "transpose",
    "Squeeze": "squeeze", "Unsqueeze": "squeeze", "Expand": "repeat", "Tile": "repeat", "Split": "split",
    "Slice": "getitem", "Gather": "getitem", "DepthToSpace": "pixel_shuffle", "SpaceToDepth": "pixel_unshuffle",
    "Concat": "concat", "Identity": "identity", "Cast": "identity", "Dropout": "dropout", "Shape": "shape",
}  # fmt: skip


def onnx_operators(condition: Callable[[Traits], bool]) -> frozenset[str]:
    """The ONNX operators whose traits meet a condition.

    >>> sorted(onnx_operators(lambda t: t.category in {"weighted", "product"}))
    ['Conv', 'ConvTranspose', 'Einsum', 'Gemm', 'MatMul']
    """
    return frozenset(name for name, kind in ONNX_KINDS.items() if condition(TRAITS[kind]))
