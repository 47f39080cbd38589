"""Random ONNX graphs of some forty operators, for properties that hold of every file."""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SHAPE = (2, 8, 6, 6)
UNARY = [
    "Relu",
    "Sigmoid",
    "Tanh",
    "LeakyRelu",
    "Elu",
    "Selu",
    "Softplus",
    "HardSigmoid",
    "HardSwish",
    "Erf",
    "Abs",
    "Neg",
    "Sin",
    "Cos",
    "Identity",
    "Gelu",
    "Mish",
    "Softsign",
    "Celu",
    "Atan",
]
SINCE = {
    "HardSwish": 14,
    "Gelu": 20,
    "Mish": 18,
    "LayerNormalization": 17,
    "GroupNormalization": 21,
    "RMSNormalization": 23,
}


class Graph:
    """A graph that grows by one operation at a time; all its tensors are of one shape.

    Attributes:
        hostile: True for constants of 1e-9 and 1e5, masks of -1e9, and an epsilon of 1e-12.
    """

    def __init__(self, seed: int, opset: int, *, hostile: bool = False) -> None:
        self.random, self.opset, self.hostile = np.random.default_rng(seed), opset, hostile
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.pool = ["x"]
        self.kinds = [getattr(self, name) for name in sorted(dir(self)) if name.startswith("_op_")]

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=f"n{len(self.nodes)}", **attributes))
        return name

    def const(self, value: object, dtype: type = np.float32) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def pick(self) -> str:
        recent = self.pool[-6:]
        return recent[int(self.random.integers(len(recent)))]

    def weight(self, *shape: int) -> str:
        return self.const(self.random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1))

    def axes(self, kind: str, x: str, axes: list[int], since: int, **attributes: Any) -> str:
        if self.opset >= since:
            return self.op(kind, x, self.const(axes, np.int64), **attributes)
        return self.op(kind, x, axes=axes, **attributes)

    def has(self, kind: str) -> bool:
        return self.opset >= SINCE.get(kind, 1)

    def _op_unary(self, x: str) -> str:
        kinds = [kind for kind in UNARY if self.has(kind)]
        return self.op(kinds[int(self.random.integers(len(kinds)))], x)

    def _op_binary(self, x: str) -> str:
        return self.op(str(self.random.choice(["Add", "Sub", "Mul", "Max", "Min"])), x, self.pick())

    def _op_scale(self, x: str) -> str:
        sizes = [1e-9, 1e-4, 0.5, 3, 1e3, 1e5] if self.hostile else [0.5, 0.1, 3]
        return self.op(str(self.random.choice(["Mul", "Add"])), x, self.const(self.random.choice(sizes)))

    def _op_divide(self, x: str) -> str:
        return self.op("Div", x, self.op("Add", self.op("Abs", self.pick()), self.const(1.0)))

    def _op_conv(self, x: str) -> str:
        size = int(self.random.choice([1, 3]))
        pads = [size // 2] * 4
        kind = str(self.random.choice(["Conv", "ConvTranspose"]))
        return self.op(kind, x, self.weight(8, 8, size, size), self.weight(8), pads=pads)

    def _op_depthwise(self, x: str) -> str:
        return self.op("Conv", x, self.weight(8, 1, 3, 3), pads=[1] * 4, group=8)

    def _op_matmul(self, x: str) -> str:
        return self.op("MatMul", x, self.weight(6, 6))

    def _op_attention(self, x: str) -> str:
        scores = self.op("MatMul", x, self.op("Transpose", x, perm=[0, 1, 3, 2]))
        scores = self.op("Mul", scores, self.const(0.3))
        mask = np.where(self.random.random((6, 6)) < 0.3, -1e9 if self.hostile else -50, 0)
        mask[:, 0] = 0
        scores = self.op("Softmax", self.op("Add", scores, self.const(mask)), axis=-1)
        return self.op("MatMul", scores, self.pick())

    def _op_norm(self, x: str) -> str:
        kinds = [
            "BatchNormalization",
            "InstanceNormalization",
            "LayerNormalization",
            "RMSNormalization",
            "GroupNormalization",
        ]
        kind = str(self.random.choice([kind for kind in kinds if self.has(kind)]))
        ones = [self.const(1 + 0.1 * self.random.random(6 if kind[0] in "LR" else 8)) for _ in range(4)]
        if kind == "BatchNormalization":
            return self.op(kind, x, *ones)
        if kind == "GroupNormalization":
            return self.op(kind, x, *ones[:2], num_groups=2)
        if kind == "InstanceNormalization":
            return self.op(kind, x, *ones[:2])
        return self.op(kind, x, *ones[: 1 + (kind[0] == "L")], axis=-1, epsilon=1e-12 if self.hostile else 1e-5)

    def _op_spelled_norm(self, x: str) -> str:
        mean = self.axes("ReduceMean", x, [-1], 18)
        centred = self.op("Sub", x, mean)
        square = (
            self.op("Pow", centred, self.const(2.0)) if self.random.random() < 0.5 else self.op("Mul", centred, centred)
        )
        variance = self.axes("ReduceMean", square, [-1], 18)
        epsilon = self.const(1e-12 if self.hostile else 1e-3)
        return self.op("Div", centred, self.op("Sqrt", self.op("Add", variance, epsilon)))

    def _op_reduce(self, x: str) -> str:
        kind = str(self.random.choice(["ReduceL2", "ReduceMax", "ReduceSumSquare", "ReduceLogSumExp", "ReduceL1"]))
        return self.op("Add", x, self.axes(kind, x, [1], 18))

    def _op_gate(self, x: str) -> str:
        return self.op("Mul", x, self.op("Sigmoid", self.op("GlobalAveragePool", x)))

    def _op_pool(self, x: str) -> str:
        return self.op(str(self.random.choice(["MaxPool", "AveragePool"])), x, kernel_shape=[3, 3], pads=[1] * 4)

    def _op_move(self, x: str) -> str:
        flat = self.op("Reshape", x, self.const([0, 8, 36], np.int64))
        return self.op("Reshape", self.op("Transpose", flat, perm=[0, 1, 2]), self.const([0, *SHAPE[1:]], np.int64))

    def _op_concat(self, x: str) -> str:
        starts, ends, axes = (self.const([v], np.int64) for v in (0, 4, 1))
        parts = [self.op("Slice", one, starts, ends, axes) for one in (x, self.pick())]
        return self.op("Concat", *parts, axis=1)

    def _op_pad(self, x: str) -> str:
        wide = self.op("Pad", x, self.const([0, 0, 1, 1, 0, 0, 1, 1], np.int64))
        return self.op("Conv", wide, self.weight(8, 8, 3, 3))

    def _op_resize(self, x: str) -> str:
        large = self.op("Resize", x, "", self.const([1, 1, 2, 2]), mode="linear")
        return self.op("AveragePool", large, kernel_shape=[2, 2], strides=[2, 2])

    def _op_where(self, x: str) -> str:
        return self.op("Where", self.const(self.random.random(SHAPE[1:]) < 0.5, np.bool_), x, self.pick())

    def _op_clip(self, x: str) -> str:
        return self.op("Clip", x, self.const(-3.0), self.const(1e9 if self.hostile else 6.0))

    def _op_exp(self, x: str) -> str:
        return self.op("Exp", self.op("Tanh", x))

    def _op_gather(self, x: str) -> str:
        return self.op("Gather", x, self.const(self.random.permutation(8), np.int64), axis=1)

    def _op_sized(self, x: str) -> str:
        shape = self.op("Shape", x)
        ones = self.op("ConstantOfShape", shape, value=numpy_helper.from_array(np.asarray([0.25], np.float32)))
        return self.op("Add", x, ones)

    def weighted(self) -> None:
        self.pool.append(self._op_depthwise("x"))

    def model(self, count: int) -> onnx.ModelProto:
        while len(self.nodes) < count:
            made = self.kinds[int(self.random.integers(len(self.kinds)))](self.pick())
            if self.random.random() < (0.1 if self.hostile else 0.4):
                made = self.op("Tanh", made)
            self.pool.append(made)
        read = {name for node in self.nodes for name in node.input}
        results = [name for name in self.pool if name not in read]
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", *SHAPE[1:]]) for name in ("x", *results)]
        graph = helper.make_graph(self.nodes, "random", values[:1], values[1:], self.constants)
        imports = [helper.make_opsetid("", self.opset)]
        ir_version = helper.find_min_ir_version_for(imports, ignore_unknown=True)
        return helper.make_model(graph, opset_imports=imports, ir_version=ir_version)
