"""ONNX files for the tests of `compress.onnx_ptq`: of torch's older exporter, and written node by node."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import nn

import compress
from tests.exact import compute
from tests.networks import Net
from tests.onnx_models import onnx_model


def gated_net():
    def run(net, x):
        x = F.hardswish(net.norm(net.stem(x)))
        y = F.relu6(net.depthwise(x))
        gate = F.hardsigmoid(net.excite(F.relu(net.squeeze(F.adaptive_avg_pool2d(y, 1)))))
        x = net.project(F.silu(y * gate)) + x
        x = torch.cat([F.interpolate(x, scale_factor=2.0), net.up(x)], 1)
        return net.fc(F.max_pool2d(x, 2).mean((2, 3)))

    return Net(
        run,
        stem=nn.Conv2d(3, 8, 3, 2, 1, bias=False),
        norm=nn.BatchNorm2d(8),
        depthwise=nn.Conv2d(8, 8, 3, 1, 1, groups=8),
        squeeze=nn.Conv2d(8, 4, 1),
        excite=nn.Conv2d(4, 8, 1),
        project=nn.Conv2d(8, 8, 1),
        up=nn.ConvTranspose2d(8, 4, 2, 2),
        fc=nn.Linear(12, 5),
    )


def attention():
    # Patches, one block of a transformer with torch's own attention, and a class token.
    def run(net, x):
        x = net.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([net.token.expand(x.shape[0], -1, -1), x], 1)
        n, t, c = x.shape
        q, k, v = net.qkv(net.norm1(x)).reshape(n, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c)
        x = x + net.out(y)
        x = x + net.down(F.gelu(net.up(net.norm2(x))))
        return net.head(x[:, 0])

    return Net(
        run,
        patches=nn.Conv2d(3, 16, 4, 4),
        token=nn.Parameter(torch.randn(1, 1, 16)),
        norm1=nn.LayerNorm(16),
        norm2=nn.LayerNorm(16),
        qkv=nn.Linear(16, 48),
        out=nn.Linear(16, 16),
        up=nn.Linear(16, 32),
        down=nn.Linear(32, 16),
        head=nn.Linear(16, 5),
    )


def shuffled():
    def run(net, x):
        a, b = F.relu(net.stem(x)).chunk(2, 1)
        x = torch.cat([a, F.relu(net.branch(b))], 1)
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return F.avg_pool2d(F.leaky_relu(net.last(x)), 2)

    return Net(run, stem=nn.Conv2d(3, 8, 3, 1, 1), branch=nn.Conv2d(4, 4, 3, 1, 1), last=nn.Conv2d(8, 8, 1))


def export(
    model: nn.Module,
    path: Path,
    *,
    opset: int = 17,
    half: bool = False,
    folded: bool = True,
    x: torch.Tensor | None = None,
) -> Path:
    x = torch.randn(2, 3, 16, 16) if x is None else x
    mode = torch.onnx.TrainingMode.EVAL if folded else torch.onnx.TrainingMode.PRESERVE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval().half() if half else model.eval(),
            (x.half() if half else x,),
            str(path),
            dynamo=False,
            opset_version=opset,
            input_names=["picture"],
            output_names=["scores"],
            training=mode,
            do_constant_folding=folded,
            dynamic_axes={"picture": {0: "batch"}, "scores": {0: "batch"}},
        )
    return path


def quantized_file(source: str, model: nn.Module, x: torch.Tensor, spec: compress.QuantSpec, out: Path) -> Any:
    # Write a quantized file of a torch model, or of the file that it is exported to; return what was quantized.
    if source == "torch":
        qmodel = compress.quantize(model, x, [x], spec=spec)
        compress.export_onnx(qmodel, x, out)
        return qmodel
    return compress.quantize_onnx(export(model, out.with_name("float.onnx"), x=x), [x], spec=spec, out=out)


def batches(count: int = 2, size: int = 16, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 3, size, size, generator=generator) for _ in range(count)]


def run(path: Path, x: np.ndarray) -> np.ndarray:
    return compute(path, x)


def sqnr(a: np.ndarray, b: np.ndarray) -> float:
    # Signal to noise of b against a, in dB.
    noise = np.square(a.astype(np.float64) - b).mean()
    return float(10 * np.log10(np.square(a.astype(np.float64)).mean() / max(noise, 1e-30)))


def model_of(
    nodes: list[onnx.NodeProto],
    constants: dict[str, np.ndarray],
    *,
    shape=(2, 3, 8, 8),
    opset: int = 17,
    result="y",
    domains: tuple[str, ...] = (),
    rank: int = 4,
) -> onnx.ModelProto:
    ends = {"x": shape}, {result: [f"d{i}" for i in range(rank)]}
    return onnx_model(nodes, *ends, constants, opset=opset, ir_version=8, domains=domains)


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(np.float32)
