"""ONNX files that the TensorRT tests build: a small residual network in float, fp16, INT8 and 2:4."""

import copy
from pathlib import Path

import onnx
import torch
from onnx import helper
from torch import nn

import compress
from compress.sparsity.parametrization import nm_mask
from tests.networks import TinyResNet
from tests.onnx_models import onnx_model

KINDS = ("float", "fp16", "int8", "sparse-int8")
IMAGE = (3, 16, 16)


def network() -> nn.Module:
    torch.manual_seed(0)
    model = TinyResNet(width=16)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.running_mean, std=0.1)
    return model.eval()


def write_all(folder: Path) -> dict[str, Path]:
    model, x = network(), torch.randn(4, *IMAGE)
    sparse = copy.deepcopy(model)
    for module in sparse.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels % 4 == 0:
            module.weight.data *= nm_mask(module.weight.data.abs(), 2, 4)
    spec = compress.QuantSpec(target="tensorrt")
    made = {
        "float": (model, "fp32", "float"),
        "fp16": (model, "fp16", "float"),
        "int8": (compress.quantize(model, x, [x], spec=spec), "fp16", "ptq"),
        "sparse-int8": (compress.quantize(sparse, x, [x], spec=spec), "fp16", "sparse-ptq"),
    }
    return {
        kind: compress.export_onnx(
            net, x, folder / f"{kind}.onnx", precision=precision, metadata={"compress.variant": variant}
        )
        for kind, (net, precision, variant) in made.items()
    }


def unsupported(path: Path) -> Path:
    nodes = [
        helper.make_node("Relu", ["x"], ["kept"], name="/block/Relu"),
        helper.make_node("Unique", ["kept"], ["y"], name="/block/Unique"),
    ]
    onnx.save(onnx_model(nodes, {"x": ["batch", 4]}, {"y": ["count"]}, ir_version=10), path)
    return path
