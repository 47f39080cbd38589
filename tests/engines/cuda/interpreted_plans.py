"""Whole plans by the Triton kernels against exact arithmetic, step by step: in the interpreter, or on a GPU.

The networks are small and cover what kernels distinguish: channels that are no multiple of 16 or 32, one pixel, strides
over padding, every epilogue, grouped and depthwise filters, concatenations, attention.
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx.reference
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings

from compress.engines.cuda.bind import Bindings, candidates
from compress.engines.cuda.executor import Executor
from compress.engines.cuda.plan.graph import read_graph
from compress.engines.cuda.plan.layout import lay_out
from compress.engines.cuda.plan.lower import lower, make_plan
from compress.engines.cuda.program import differences, float_graph, float_network
from compress.kernels.triton import int8_epilogue as epilogue
from compress.kernels.triton.int8_depthwise import RowsTile, depthwise_rows, pack_dots
from compress.kernels.triton.int8_descriptors import PointwiseTile, WindowTile, deep, pointwise, window
from compress.kernels.triton.int8_epilogue import Function, OutputGrid, Outputs, Residual, finish_of
from compress.kernels.triton.int8_product import Geometry, Tile, WideTile, pack_weight, wide
from tests.engines.cuda.qdq import Builder, convnext, windows
from tests.engines.cuda.test_plan import ACTIVATIONS, networks


def activations(b):
    x = b.quantize("input")
    functions = (lambda b, x: x, *ACTIVATIONS.values())
    parts = [b.quantize(function(b, b.conv(x, 5, taps=1, padding=0))) for function in functions]
    return parts[0], *parts[1:]


def residuals(b):
    x = b.quantize("input")
    y = b.quantize(b.op("Relu", b.conv(x, 18, 3, 2, 1)))
    shortcut = b.quantize(b.conv(x, 18, 1, 2, 0))
    plain = b.quantize(b.op("Relu", b.op("Add", b.conv(y, 18, 3, 1, 1), shortcut)))
    rounded = b.quantize(b.op("Add", b.quantize(b.conv(plain, 18, 1, 1, 0)), shortcut))
    dilated = b.conv(rounded, 20, 3, 1, 2, dilation=2)
    return b.op("Add", dilated, b.op("Tanh", b.conv(rounded, 20, 1, 1, 0)))


def groups(b):
    x = b.quantize(b.op("Relu", b.conv(b.quantize("input"), 24, 1, padding=0)))
    y = b.quantize(b.conv(x, 24, 3, 1, 1, groups=3))
    y = b.quantize(b.op("Relu", b.conv(y, 24, 5, 2, 2, groups=24)))
    y = b.quantize(b.op("Relu", b.conv(y, 24, 5, 1, 4, groups=24, dilation=2)))
    y = b.op("MaxPool", y, kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4)
    mean = b.quantize(b.op("AveragePool", y, kernel_shape=[3, 3], strides=[1, 1], pads=[1] * 4))
    joined = b.quantize(b.op("Concat", mean, b.op("Relu", b.conv(mean, 16, 1, padding=0)), axis=1))
    pooled = b.quantize(b.op("GlobalAveragePool", joined))
    return b.quantize(b.op("Mul", joined, b.op("Sigmoid", b.conv(pooled, 40, 1, padding=0))))


def stem(b):
    x = b.quantize(b.op("Relu", b.conv(b.quantize("input"), 16, 7, 2, 3)))
    x = b.quantize(b.op("GlobalAveragePool", x))
    return b.linear(b.op("Flatten", x), 10)


def small_stem(b):
    return b.quantize(b.op("Relu", b.conv(b.quantize("input"), 18, 3, 1, 1)))


def transformer(b, depth=12, codes=(0, 1, 2)):
    tokens, width = b.shape[1], 2 * depth
    x = b.quantize("input")
    heads = []
    for index, turn in enumerate(([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])):
        y = b.op("Reshape", b.linear(x, width), b.constant(np.array([0, tokens, 2, depth], np.int64)))
        y = b.op("Transpose", y, perm=turn)
        heads.append(b.quantize(y) if index in codes else y)
    scores = b.op("Mul", b.op("MatMul", heads[0], heads[1]), b.constant(np.float32(depth**-0.5)))
    mixed = b.op("MatMul", b.quantize(b.op("Softmax", scores, axis=-1), clip=1.0), heads[2])
    y = b.op("Reshape", b.op("Transpose", mixed, perm=[0, 2, 1, 3]), b.constant(np.array([0, tokens, width], np.int64)))
    y = b.op("Add", b.linear(b.quantize(y), 20), "input")
    norm = [b.constant(b.rng.standard_normal(20).astype(np.float32)) for _ in range(2)]
    return b.linear(b.quantize(b.op("LayerNormalization", y, *norm, axis=-1)), 5)


def sampled_places(b, stacked=False, aligned=0):
    # Deformable attention: 2 heads of 6 channels, 2 or 3 places of each in two images; some lie beyond them.
    points = (3, 3) if stacked else (3, 2)
    x, sides = b.quantize("input"), ((5, 4), (2, 3))

    def shaped(x, *sizes):
        return b.op("Reshape", x, b.constant(np.array(sizes, np.int64)))

    def heads(wide, *sizes):
        y = shaped(b.linear(x, wide), 0, 26, 2, *sizes)
        return b.op("Transpose", y, perm=[0, 2, 1, *range(3, 3 + len(sizes))])

    values = b.op("Transpose", shaped(b.linear(x, 12), 0, 26, 2, 6), perm=[0, 2, 3, 1])
    parts = b.op("Split", shaped(values, -1, 6, 26), b.constant(np.array([20, 6])), axis=2, outputs=2)
    places = shaped(heads(4 * sum(points), sum(points), 2), -1, 26, sum(points), 2)
    grids = b.op("Split", places, b.constant(np.array(points)), axis=2, outputs=2)
    if stacked:
        learned = b.constant(b.rng.standard_normal((1, 26, 3, 2)).astype(np.float32))
        grids[1] = b.op("Expand", learned, b.op("Shape", grids[1]))
    weights = shaped(b.op("Softmax", heads(2 * sum(points), sum(points)), axis=-1), -1, 1, 26, sum(points))
    samples = [
        b.op("GridSample", shaped(part, -1, 6, *side), grid, align_corners=aligned)
        for part, grid, side in zip(parts, grids, sides, strict=True)
    ]
    if stacked:
        two = b.constant(np.array([3]))
        joined = b.op("Concat", *(b.op("Unsqueeze", y, two) for y in samples), axis=-2)
        joined = shaped(joined, 0, 0, 0, sum(points))
    else:
        joined = b.op("Concat", *samples, axis=-1)
    y = b.op("ReduceSum", b.op("Mul", joined, weights), b.constant(np.array([-1])), keepdims=0)
    y = shaped(y if stacked else b.quantize(y), -1, 12, 26)
    return y if stacked else b.linear(b.op("Transpose", y, perm=[0, 2, 1]), 5)


def shapes_of_the_batch(b):
    # Constants that follow from the number of images: where to expand, and which images to take.
    x = b.quantize("input")
    shape = b.op("Shape", x)
    first, one = (b.constant(np.array(value)) for value in (0, 1))
    images = b.op("Range", first, b.op("Gather", shape, first), one)
    wide = b.quantize(b.op("Expand", b.op("GlobalMaxPool", x), shape))
    return b.op("Gather", b.op("Add", b.conv(wide, 6), b.conv(x, 6)), images, axis=0)


def windows_and_heads_apart(b, depth=12):
    # Attention over (images, heads, windows, tokens, depth), whose result has the heads last in memory.
    windows, tokens = b.shape[1:3]
    split = b.constant(np.array([0, windows, tokens, 2, depth], np.int64))
    x, heads = b.quantize("input"), []
    for turn in ([0, 3, 1, 2, 4], [0, 3, 1, 4, 2], [0, 3, 1, 2, 4]):
        y = b.op("Reshape", b.linear(x, 2 * depth), split)
        heads.append(b.quantize(b.op("Transpose", y, perm=turn)))
    scores = b.op("Mul", b.op("MatMul", heads[0], heads[1]), b.constant(np.float32(depth**-0.5)))
    mixed = b.op("MatMul", b.quantize(b.op("Softmax", scores, axis=-1), clip=1.0), heads[2])
    whole = b.constant(np.array([0, windows, tokens, 2 * depth], np.int64))
    return b.linear(b.quantize(b.op("Reshape", b.op("Transpose", mixed, perm=[0, 2, 3, 4, 1]), whole)), 5)


def shifted_windows(b):
    return windows(b, b.quantize("input"), (*b.shape[1:3], 2, 12))


def repeated_pixels(b):
    # Nearest resizes of codes by 2 and 3, of which one lies beside other codes and one is quantized again.
    x = b.quantize(b.op("Relu", b.conv(b.quantize("input"), 32)))
    factors = [b.constant(np.array(n, np.float32)) for n in ([], [1, 1, 2, 3])]
    y = b.op("Resize", x, *factors, mode="nearest")
    return b.conv(b.op("Concat", y, y, axis=1), 5), b.conv(b.quantize(b.op("Resize", x, *factors, mode="nearest")), 3)


CASES = {
    "activations": (activations, (2, 7, 3, 1), {}),
    "residuals of int8": (residuals, (1, 33, 5, 6), {}),
    "residuals of uint8": (residuals, (2, 16, 5, 4), {"unsigned": True}),
    "groups": (groups, (1, 20, 7, 5), {"unsigned": True}),
    "stem": (stem, (2, 3, 15, 11), {}),
    "small stem": (small_stem, (2, 3, 6, 5), {"unsigned": True}),
    "transformer": (transformer, (2, 9, 20), {}),
    "wide heads": (partial(transformer, depth=33), (1, 5, 20), {}),
    "scores of values": (partial(transformer, codes=(2,)), (2, 9, 20), {}),
    "sampled places": (sampled_places, (2, 26, 20), {}),
    "stacked samples": (partial(sampled_places, stacked=True, aligned=1), (2, 26, 20), {}),
    "shifted windows": (shifted_windows, (2, 3, 5, 20), {}),
    "shapes of the batch": (shapes_of_the_batch, (2, 5, 4, 3), {}),
    "windows and heads apart": (windows_and_heads_apart, (2, 3, 5, 20), {}),
    "repeated pixels": (repeated_pixels, (2, 6, 3, 2), {}),
    "convnext": (convnext, (1, 20, 3, 5), {}),
}


# Cases of which other sizes of the batch run in the interpreter too, which is slow; on a GPU all do.
OF_SEVERAL_SIZES = {"shapes of the batch", "shifted windows"}


def check(case, device):
    build, shape, options = CASES[case]
    b = Builder(shape, **options)
    outputs = build(b)
    with tempfile.TemporaryDirectory() as folder:
        path = b.save(Path(folder) / "m.onnx", *(outputs if isinstance(outputs, tuple) else (outputs,)))
        sizes = (shape[0], 1, shape[0]) if device.type == "cuda" or case in OF_SEVERAL_SIZES else shape[:1]
        layouts = [lay_out(make_plan(path, batch_size=size, dtype=torch.float32)) for size in sizes]
    bindings = Bindings(device, {})  # of all sizes, as the engine has it
    choices = (0, -1) if device.type == "cuda" else (-1,) if case in {"stem", "wide heads"} else (0,)
    for size, layout in zip(sizes, layouts, strict=True):
        ways = [candidates(step, layout, bindings) for step in layout.steps]
        for choice in choices:  # the guess, and another one
            executor = Executor(layout, [way[choice].run for way in ways], device)
            found = differences(executor, {"input": torch.from_numpy(b.x[:size]).to(device)})
            wrong = [d for d in found if d.wrong]
            assert found
            assert not wrong, wrong


def assert_codes(codes, y):
    # Codes are those of the values, but for ties, and what lies between rows is as it was.
    columns = y.shape[1]
    expected = (y.round() - 128).clamp(-128, 127)
    assert not (codes[:, :columns].cpu() - expected).abs()[((y % 1) - 0.5).abs() > 1e-3].any()
    assert not codes[:, columns:].any()
    assert expected.std() > 10


def clipped_sum(columns, device):
    # What follows products, a residual and ReLU: as kernels have it, and of sums and a residual in float64.
    factor, bias = 1e-3 * (0.5 + torch.rand(columns).double()), torch.randn(columns).double()
    finish = finish_of(
        factor,
        bias,
        residual=Residual(0.05, 3, True),
        second=Function("clip", 0.0),
        grid=OutputGrid(torch.tensor([0.3], dtype=torch.float64), zero=-128),
    ).to(device)
    return finish, lambda sums, other: (sums * factor + bias + 0.05 * (other.double() - 3)).clamp(min=0) / 0.3


def check_pointwise(device):
    for rows, channels, columns, zero, tile in (
        (70, 40, 48, 0, PointwiseTile(32, 32, 32)),
        (33, 64, 32, 5, PointwiseTile(32, 16, 64, programs=1)),
        (5, 16, 112, -128, PointwiseTile(32, 64, 32, stages=3)),
        (37, 150, 48, 5, Tile(32, 32, 64, part=16)),
        (20, 272, 37, 0, Tile(16, 64, 128)),
        (37, 40, 75, 5, WideTile(16, (32, 16), 64, programs=1)),
        (5, 16, 40, 0, WideTile(16, (32, 16), 32)),
    ):
        torch.manual_seed(0)
        pitch = columns + 16  # what lies between rows is another tensor's
        x = torch.randint(-128, 128, (rows, channels + -channels % 16), dtype=torch.int8)
        w = torch.randint(-127, 128, (columns, channels), dtype=torch.int8)
        residual = torch.randint(-128, 128, (rows, pitch), dtype=torch.int8)
        finish, plain = clipped_sum(columns, device)
        codes = torch.zeros(rows, pitch, dtype=torch.int8, device=device)
        outputs = Outputs(residual.to(device), codes, None, pitch, pitch)
        weight = pack_weight(w, zero, device=device)
        if isinstance(tile, Tile):
            deep(x.to(device), weight, finish, outputs, columns, tile, zero=zero)
        else:
            compute = wide if isinstance(tile, WideTile) else pointwise
            compute(x.to(device), weight, finish, outputs, columns, tile, 2, zero=zero)
        sums = (x[:, :channels].double() - zero) @ w.double().t()
        assert_codes(codes, plain(sums, residual[:, :columns]))


def check_dots(device):
    for shape, taps, stride, padding, zero, tile in (
        ((2, 20, 5, 6), 3, 1, 1, 0, RowsTile(2, 2, 8, 1)),
        ((1, 20, 3, 4), 5, 1, 2, 5, RowsTile(2, 2, 8, 1)),
        ((1, 16, 5, 7), 3, 2, 1, -128, RowsTile(2, 1, 4, 1)),
        ((1, 20, 6, 9), 5, 2, 2, 5, RowsTile(4, 2, 8, 1)),
        ((1, 16, 1, 1), 3, 1, 1, 0, RowsTile(1, 1, 4, 1)),
    ):
        torch.manual_seed(0)
        images, channels, height, width = shape
        x = torch.randint(-128, 128, (images, height, width, channels + -channels % 16), dtype=torch.int8)
        w = torch.randint(-127, 128, (channels, 1, taps, taps), dtype=torch.int8)
        factor, bias = 1e-3 * (0.5 + torch.rand(channels).double()), torch.randn(channels).double()
        grid = OutputGrid(torch.tensor([0.1], dtype=torch.float64), zero=-128)
        finish = finish_of(factor, bias, first=Function("clip", 0.0), grid=grid).to(device)
        real = F.pad(x.permute(0, 3, 1, 2)[:, :channels].double() - zero, (padding,) * 4)
        sums = F.conv2d(real, w.double(), None, stride, groups=channels).permute(0, 2, 3, 1)
        size = (sums.shape[1], sums.shape[2])
        codes = torch.zeros(images * size[0] * size[1], channels + 16, dtype=torch.int8, device=device)
        depthwise_rows(
            x.to(device).permute(0, 3, 1, 2)[:, :channels],
            pack_dots(w, zero, device=device),
            finish,
            Outputs(None, codes, None, 0, channels + 16),
            channels,
            Geometry(stride, stride, padding, padding),
            size,
            tile,
            zero=zero,
        )
        assert_codes(codes, (sums.reshape(-1, channels) * factor + bias).clamp(min=0) / 0.1)


def check_windows(device):
    for shape, columns, taps, padding, dilation, tile in (
        ((3, 40, 5, 6), 48, 3, 1, 1, WindowTile(1, 2, 8, 32, 32)),
        ((2, 16, 4, 4), 32, 3, 2, 2, WindowTile(2, 2, 4, 16, 32)),
        ((2, 64, 1, 1), 16, 1, 0, 1, WindowTile(16, 1, 1, 32, 64)),
    ):
        torch.manual_seed(0)
        images, channels, height, width = shape
        x = torch.randint(-128, 128, (images, height, width, channels + -channels % 16), dtype=torch.int8)
        w = torch.randint(-127, 128, (columns, channels, taps, taps), dtype=torch.int8)
        real = F.pad(x.permute(0, 3, 1, 2)[:, :channels].double(), (padding,) * 4)
        sums = F.conv2d(real, w.double(), None, 1, 0, dilation).permute(0, 2, 3, 1)
        size, pitch = (sums.shape[1], sums.shape[2]), columns + 16  # what lies between rows is another tensor's
        sums = sums.reshape(-1, columns)
        residual = torch.randint(-128, 128, (len(sums), pitch), dtype=torch.int8)
        finish, plain = clipped_sum(columns, device)
        codes = torch.zeros(len(sums), pitch, dtype=torch.int8, device=device)
        window(
            x.to(device).permute(0, 3, 1, 2)[:, :channels],
            pack_weight(w, device=device),
            finish,
            Outputs(residual.to(device), codes, None, pitch, pitch),
            columns,
            Geometry(1, 1, padding, padding, dilation, dilation),
            size,
            tile,
        )
        assert_codes(codes, plain(sums, residual[:, :columns]))


# Torch's own, by the names that epilogues know them by.
FUNCTIONS = {
    "none": lambda x: x,
    "clip": lambda x: x.clamp(-0.3, 0.9),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hard_sigmoid": F.hardsigmoid,
    "hard_swish": F.hardswish,
    "mish": F.mish,
    "elu": F.elu,
    "softplus": F.softplus,
}


def check_epilogues(device):
    assert set(FUNCTIONS) == set(epilogue.ACTIVATIONS)
    torch.manual_seed(0)
    x, w = (torch.randint(-128, 128, (n, 16), dtype=torch.int8) for n in (9, 7))
    bounds = {"clip": (-0.3, 0.9), "leaky_relu": (0.1,)}
    residual, sums = 2 * torch.randn(9, 7), x.double() @ w.double().t()
    one, grid = torch.ones(7).double(), OutputGrid(torch.tensor([0.02], dtype=torch.float64), zero=3)
    for name, function in FUNCTIONS.items():
        activation = Function(name, *bounds.get(name, ()))
        for first, second in ((activation, Function()), (Function(), activation)):
            finish = finish_of(
                1e-4 * one,
                0.1 * one,
                first=first,
                second=second,
                residual=Residual(1.0, 0, False),
                grid=grid,
                value=True,
            ).to(device)
            codes, value = (torch.zeros(9, 7, dtype=t, device=device) for t in (torch.int8, torch.float32))
            outputs = Outputs(residual.to(device), codes, value, 7, 7, 7)
            deep(x.to(device), pack_weight(w, device=device), finish, outputs, 7, Tile(16, 16, 32))
            y = 1e-4 * sums + 0.1
            y = function(y) + residual if first is activation else function(y + residual)
            torch.testing.assert_close(value.cpu().double(), y, rtol=1e-5, atol=2e-6, msg=name)
            expected = ((y / 0.02).round() + 3).clamp(-128, 127)
            assert not (codes.cpu() - expected)[((y / 0.02) % 1 - 0.5).abs() > 1e-3].any(), name


BEYOND = {  # constants that float16 does not hold
    "variance": "y = BatchNormalization (x, one, one, mean, large)",
    "divisor": "y = Div (x, large)",
    "small factor": "y = Mul (x, small)",
    "mask of whole rows": "no = Less (x, x) z = Where (no, x, lowest) y = Softmax <axis = -1> (z)",
    "factor of a mask": "no = Less (x, one) n = Cast <to = 1> (no) z = Mul (n, lowest) p = Add (z, x) y = Relu (p)",
}


def check_float16(device):
    for case, nodes in BEYOND.items():
        constants = "float[2] one = {1, 1}, float[2] mean = {2000, -3000}, float[2] large = {1e6, 4e6}"
        scalars = "float[1] small = {4e-8}, float lowest = {-3.4e38}"
        model = onnx.parser.parse_model(
            f'<ir_version: 8, opset_import: ["" : 15]> g (float[3, 2] x) => (float[3, 2] y) <{constants}, {scalars}> '
            f"{{ {nodes} }}"
        )
        x = np.array([[2500, -900], [1000, -4000], [-2000, 30]], np.float32)
        (expected,) = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
        with tempfile.TemporaryDirectory() as folder:
            onnx.save(model, Path(folder) / "m.onnx")
            graph = read_graph(Path(folder) / "m.onnx")
        inputs, layout = torch.from_numpy(x).to(device), lay_out(lower(graph, torch.float16))
        ways = [candidates(step, layout, Bindings(device, {}))[0].run for step in layout.steps]
        (layers,) = Executor(layout, ways, device).run({"x": inputs}).values()
        for found in (float_network(float_graph(graph), torch.float16, device)(inputs)[0], layers):
            np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=4e-3, atol=1e-5, err_msg=case)


@settings(max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(networks())
def check_networks(network):
    b, y = network
    with tempfile.TemporaryDirectory() as folder:
        layout = lay_out(make_plan(b.save(Path(folder) / "m.onnx", y), batch_size=b.shape[0], dtype=torch.float32))
    device = torch.device("cpu")
    bindings = Bindings(device, {})
    executor = Executor(layout, [candidates(step, layout, bindings)[0].run for step in layout.steps], device)
    wrong = [d for d in differences(executor, {"input": torch.from_numpy(b.x)}) if d.wrong]
    assert not wrong, wrong


def main():
    for case in CASES:
        check(case, torch.device("cpu"))
    for run in (check_pointwise, check_dots, check_windows, check_epilogues, check_float16):
        run(torch.device("cpu"))
    check_networks()
