"""Small Q/DQ networks written with onnx.helper, with ranges that fit the values."""

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.exact import open_session


class Builder:
    # Adds layers one after another; every tensor is named, and runs in ONNX Runtime to find ranges.
    #
    # shape: of the input; the batch is left open in the file.
    # seed: of weights and of the calibration input.
    # unsigned: activations are quantized to uint8 with a zero point of their own, as ONNX Runtime's quantizer does.
    def __init__(self, shape, seed=0, unsigned=False):
        self.rng = np.random.default_rng(seed)
        self.nodes, self.constants = [], {}
        self.unsigned = unsigned
        self.shape = shape
        self.x = self.rng.standard_normal(shape).astype(np.float32)
        self.values = {"input": self.x}
        self.count = 0

    def constant(self, value, name=None):
        name = name or f"c{len(self.constants)}"
        self.constants[name] = np.asarray(value)
        return name

    def op(self, kind, *inputs, outputs=1, **attributes):
        # Add a node; returns the name of its (first) output, whose values are known.
        self.count += 1
        names = [f"{kind.lower()}{self.count}" + (f"_{i}" if i else "") for i in range(outputs)]
        node = helper.make_node(kind, [i or "" for i in inputs], names, name=f"n_{names[0]}", **attributes)
        self.nodes.append(node)
        self.values.update(self._run(node, names))
        return names[0] if outputs == 1 else names

    def _run(self, node, names):
        graph = helper.make_graph(
            [node],
            "one",
            [],
            [helper.make_empty_tensor_value_info(n) for n in names],
            [
                numpy_helper.from_array(np.asarray(self.constants.get(i, self.values.get(i))), i)
                for i in dict.fromkeys(node.input)
                if i
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
        return dict(zip(names, session(model).run(None, {}), strict=True))

    def quantize(self, x, clip=0.999, symmetric=None):
        # Q and DQ of a tensor, on a grid that cuts a little off; returns the dequantized one.
        value = self.values[x]
        symmetric = not self.unsigned if symmetric is None else symmetric
        if symmetric:
            scale = np.float32(max(float(np.quantile(np.abs(value), clip)), 1e-3) / 127)
            zero = np.int8(0)
        else:
            low, high = min(0.0, float(value.min())), max(float(np.quantile(value, clip)), 1e-3)
            scale = np.float32((high - low) / 255)
            zero = np.uint8(np.clip(np.rint(-low / scale), 0, 255))
        names = [self.constant(scale), self.constant(zero)]
        return self.op("DequantizeLinear", self.op("QuantizeLinear", x, *names), *names)

    def weight(self, *shape, axis=0, per_channel=True):
        fan = int(np.prod(shape)) // shape[axis]
        value = (self.rng.standard_normal(shape) / np.sqrt(fan)).astype(np.float32)
        over = tuple(i for i in range(len(shape)) if i != axis)
        top = np.abs(value).max(axis=over) if per_channel else np.abs(value).max()
        scale = (top / 127).astype(np.float32)
        spread = scale.reshape([-1 if i == axis else 1 for i in range(len(shape))]) if per_channel else scale
        codes = np.clip(np.rint(value / spread), -127, 127).astype(np.int8)
        zero = np.zeros(scale.shape, np.int8)
        names = [self.constant(v) for v in (codes, scale, zero)]
        return self.op("DequantizeLinear", *names, **({"axis": axis} if per_channel else {}))

    def conv(self, x, outputs, taps=3, stride=1, padding=1, groups=1, dilation=1, bias=True):
        channels = self.values[x].shape[1]
        weight = self.weight(outputs, channels // groups, taps, taps)
        b = self.constant(self.rng.standard_normal(outputs).astype(np.float32) * 0.2) if bias else None
        pads = list(padding) if isinstance(padding, (tuple, list)) else [padding] * 4
        return self.op("Conv", x, weight, b, strides=[stride] * 2, pads=pads, group=groups, dilations=[dilation] * 2)

    def linear(self, x, outputs, bias=True):
        y = self.op("MatMul", x, self.weight(self.values[x].shape[-1], outputs, axis=1))
        return (
            self.op("Add", y, self.constant(self.rng.standard_normal(outputs).astype(np.float32) * 0.2)) if bias else y
        )

    def model(self, *outputs, batch="batch"):
        shape = [batch, *self.shape[1:]] if batch else list(self.shape)
        inputs = [helper.make_tensor_value_info("input", TensorProto.FLOAT, shape)]
        ends = []
        for name in outputs:
            kind = helper.np_dtype_to_tensor_dtype(self.values[name].dtype)
            sizes = [batch, *self.values[name].shape[1:]] if batch else self.values[name].shape
            ends.append(helper.make_tensor_value_info(name, kind, sizes))
        constants = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph(self.nodes, "net", inputs, ends, constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
        onnx.checker.check_model(model, full_check=True)
        return model

    def save(self, path, *outputs, batch="batch"):
        onnx.save(self.model(*outputs, batch=batch), str(path))
        return path


def gelu(b, x):
    root, one, half = (b.constant(np.float32(value)) for value in (np.sqrt(2), 1, 0.5))
    return b.op("Mul", x, b.op("Mul", half, b.op("Add", one, b.op("Erf", b.op("Div", x, root)))))


def convnext(b):
    channels, x = b.shape[1], "input"
    for _ in range(2):
        y = b.conv(b.quantize(x), channels, 7, padding=3, groups=channels)
        y = b.op("Transpose", y, perm=[0, 2, 3, 1])
        norm = [b.constant(b.rng.standard_normal(channels).astype(np.float32)) for _ in range(2)]
        y = b.linear(b.quantize(b.op("LayerNormalization", y, *norm, axis=-1)), 36)
        y = b.linear(b.quantize(gelu(b, y)), channels)
        y = b.op("Transpose", y, perm=[0, 3, 1, 2])
        y = b.op("Mul", b.constant(b.rng.standard_normal((channels, 1, 1)).astype(np.float32)), y)
        x = b.op("Add", y, x)
    return x


def windows(b, x, sizes):
    # Attention of x to itself in windows, as Swin's shifted ones: a bias of heads and pixels, a mask of windows.
    #
    # b: builder.
    # x: (images, windows, pixels, channels), quantized.
    # sizes: windows, pixels, heads, depth.
    count, pixels, heads, depth = sizes
    shape = b.constant(np.array([-1, pixels, heads, depth]))
    turns = ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    parts = (b.op("Reshape", b.linear(x, heads * depth), shape) for _ in turns)
    q, k, v = (b.quantize(b.op("Transpose", y, perm=turn)) for y, turn in zip(parts, turns, strict=True))
    scores = b.op("Mul", b.op("MatMul", q, k), b.constant(np.float32(depth**-0.5)))
    bias = b.rng.standard_normal((1, heads, pixels, pixels)).astype(np.float32)
    mask = np.where(b.rng.random((1, count, 1, pixels, pixels)) < 0.3, -100, 0).astype(np.float32)
    apart, joined = (b.constant(np.array(s)) for s in ([-1, count, heads, pixels, pixels], [-1, heads, pixels, pixels]))
    scores = b.op("Reshape", b.op("Add", scores, b.constant(bias)), apart)
    scores = b.op("Reshape", b.op("Add", scores, b.constant(mask)), joined)
    return b.quantize(b.op("MatMul", b.quantize(b.op("Softmax", scores, axis=-1), clip=1.0), v))


def session(model):
    # ONNX Runtime without its optimizations, which replace Q/DQ patterns by integer operators of its own.
    return open_session(model, optimize=False)


def all_values(path, inputs):
    model = onnx.load(str(path))
    known = {value.name for value in model.graph.output}
    for node in model.graph.node:
        for name in node.output:
            if name and name not in known:
                model.graph.output.append(helper.make_empty_tensor_value_info(name))
    run = session(model)
    return dict(zip([value.name for value in run.get_outputs()], run.run(None, inputs), strict=True))
