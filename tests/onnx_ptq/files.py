"""ONNX files for the tests of `compress.onnx_ptq`: of torch's older exporter, and written node by node."""

import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from tests.exact import open_session


class Gated(nn.Module):
    """Hard swish, squeeze-and-excite, a depthwise and a transposed convolution, ReLU6, resize and concat."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.project = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        x = F.hardswish(self.norm(self.stem(x)))
        y = F.relu6(self.depthwise(x))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        x = self.project(F.silu(y * gate)) + x
        x = torch.cat([F.interpolate(x, scale_factor=2.0), self.up(x)], 1)
        return self.fc(F.max_pool2d(x, 2).mean((2, 3)))


class Attention(nn.Module):
    """Patches, one block of a transformer with torch's own attention, and a class token."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        n, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(n, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c)
        x = x + self.out(y)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x[:, 0])


class Shuffled(nn.Module):
    """Two branches of a split, joined and shuffled."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.branch = nn.Conv2d(4, 4, 3, 1, 1)
        self.last = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        a, b = F.relu(self.stem(x)).chunk(2, 1)
        x = torch.cat([a, F.relu(self.branch(b))], 1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return F.avg_pool2d(F.leaky_relu(self.last(x)), 2)


def export(
    model: nn.Module,
    path: Path,
    *,
    opset: int = 17,
    half: bool = False,
    folded: bool = True,
    x: torch.Tensor | None = None,
) -> Path:
    """Write a file with torch's older exporter, the batch open; `folded` False leaves BatchNorm as it is."""
    x = torch.randn(2, 3, 16, 16) if x is None else x
    mode = torch.onnx.TrainingMode.EVAL if folded else torch.onnx.TrainingMode.PRESERVE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval().half() if half else model.eval(), (x.half() if half else x,), str(path), dynamo=False,
            opset_version=opset, input_names=["picture"], output_names=["scores"], training=mode,
            do_constant_folding=folded, dynamic_axes={"picture": {0: "batch"}, "scores": {0: "batch"}},
        )  # fmt: skip
    return path


def batches(count: int = 2, size: int = 16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 3, size, size, generator=generator) for _ in range(count)]


def run(path: Path, x: np.ndarray) -> np.ndarray:
    """The first output of a file on ONNX Runtime."""
    session = open_session(path)
    return session.run(None, {session.get_inputs()[0].name: x})[0]


def sqnr(a: np.ndarray, b: np.ndarray) -> float:
    """Signal to noise of b against a, in dB."""
    noise = np.square(a.astype(np.float64) - b).mean()
    return float(10 * np.log10(np.square(a.astype(np.float64)).mean() / max(noise, 1e-30)))


def model_of(
    nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray], *, shape=(2, 3, 8, 8), opset: int = 17, result="y",
    domains: tuple[str, ...] = (), rank: int = 4,
) -> onnx.ModelProto:  # fmt: skip
    """A model of some nodes, from input `x` to output `y`."""
    graph = helper.make_graph(
        nodes,
        "made",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info(result, TensorProto.FLOAT, [f"d{i}" for i in range(rank)])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(name, 1) for name in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(np.float32)
