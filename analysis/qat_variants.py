"""What `qat_cost.py`, `qat_profile.py` and `qat_curve.py` train: networks, and the variants of each.

- float: the network as it is; folded: BatchNorm folded into the convolutions, the floor of what QAT can cost;
- fused: `compress.quantize`, trained through `compress.fuse_for_training`; fused-int8: convolutions forward on INT8
  tensor cores; plain: the quantized network itself;
- torch-ops: BatchNorm kept, torch's fake-quantize operations on inputs and weights; modelopt, pytorch-quantization:
  where they are installed.
"""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import compress
from compress.graph.fold import fold_batchnorm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Row = dict[str, Any]


@dataclass(frozen=True)
class Network:
    """A network, its images and the batch of its cases."""

    make: Callable[[], nn.Module]
    batch: int = 128
    pixels: int = 224


def _vit_s() -> nn.Module:
    sizes = {"patch_size": 16, "num_layers": 12, "num_heads": 6, "hidden_dim": 384, "mlp_dim": 1536}
    return torchvision.models.VisionTransformer(image_size=224, **sizes)


def _tiny() -> nn.Module:
    """What proves the script on a CPU."""
    layers = (nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.BatchNorm2d(16))
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


NETWORKS = {
    "resnet50": Network(torchvision.models.resnet50),
    "resnet18": Network(torchvision.models.resnet18),
    "mobilenet_v2": Network(torchvision.models.mobilenet_v2),
    "vgg16": Network(torchvision.models.vgg16, batch=64),
    "vit_s": Network(_vit_s),
    "tiny": Network(_tiny, batch=4, pixels=16),
}


def pretrained(network: Network) -> nn.Module:
    """The network with BatchNorm statistics of its own activations, so that folding leaves their size as it is."""
    torch.manual_seed(0)
    model = network.make().to(DEVICE)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) and not bool(weight.any()):
            nn.init.normal_(weight, std=0.02)  # a classifier that begins at zero has no range
    with torch.no_grad():
        model.train()(images(network, min(32, network.batch)))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1  # None would make the compiler break the graph
    return model


def images(network: Network, count: int) -> Tensor:
    """Random images, (count, 3, pixels, pixels)."""
    x = torch.randn(count, 3, network.pixels, network.pixels, device=DEVICE)
    return x.contiguous(memory_format=torch.channels_last)


def trained(variant: str, model: nn.Module, network: Network) -> tuple[nn.Module, nn.Module]:
    """(what a step calls, what holds the parameters)."""
    x = images(network, min(32, network.batch))
    if variant == "float":
        return model, model
    if variant == "folded":
        graph = compress.trace(model.eval(), x[:2])
        fold_batchnorm(graph)
        return graph, graph
    if variant in {"plain", "fused", "fused-int8"}:
        spec = compress.QuantSpec(activations=compress.ActivationSpec(calibrator="max"))
        qmodel = compress.quantize(model.eval(), x[:2], [x], spec=spec)
        qmodel.to(memory_format=torch.channels_last)
        if variant == "plain":
            return qmodel, qmodel
        return compress.fuse_for_training(qmodel, forward="int8" if variant == "fused-int8" else "float"), qmodel
    made = pytorch_quantization(network) if variant == "pytorch-quantization" else _OTHERS[variant](model, x)
    return made, made


class _Native:
    """Torch's fake-quantize operations on the input and the weight of a layer."""

    def quantized(self, x: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self
        weight = layer.weight.float()
        scale = weight.detach().abs().amax(tuple(range(1, weight.dim()))) / 127
        points = torch.zeros(len(scale), dtype=torch.int32, device=x.device)
        weight = torch.fake_quantize_per_channel_affine(weight, scale, points, 0, -127, 127)
        return torch.fake_quantize_per_tensor_affine(x, layer.step, points[0], -128, 127), weight


class NativeConv(nn.Conv2d, _Native):
    """A convolution with both."""

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, H, W)."""
        return self._conv_forward(*self.quantized(input), self.bias)


class NativeLinear(nn.Linear, _Native):
    """A linear layer with both."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., C)."""
        return F.linear(*self.quantized(input), self.bias)


def torch_ops(model: nn.Module, x: Tensor) -> nn.Module:
    """BatchNorm kept, every convolution and linear layer with torch's own operations."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            twin = {nn.Conv2d: NativeConv, nn.Linear: NativeLinear}.get(type(child))
            if twin is None:
                continue
            layer: Any = twin.__new__(twin)
            layer.__dict__.update(child.__dict__)
            layer.register_buffer("step", torch.tensor(0.03, device=x.device))
            setattr(module, name, layer)
    return model


def modelopt(model: nn.Module, x: Tensor) -> nn.Module:
    """NVIDIA ModelOpt, its INT8 default."""
    import modelopt.torch.quantization as mtq

    return mtq.quantize(model.eval(), copy.deepcopy(mtq.INT8_DEFAULT_CFG), lambda m: m(x[:8]))


def pytorch_quantization(network: Network) -> nn.Module:
    """pytorch-quantization: the network made while its layers stand in the place of torch's."""
    from pytorch_quantization import nn as qnn
    from pytorch_quantization import quant_modules

    quant_modules.initialize()
    try:
        model = network.make()
    finally:
        quant_modules.deactivate()
    for module in model.modules():
        if isinstance(module, qnn.TensorQuantizer):
            module.amax = torch.tensor(3.0)
    return model.to(DEVICE)


_OTHERS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {"torch-ops": torch_ops, "modelopt": modelopt}


def as_run(call: nn.Module, mode: str) -> Callable[[Tensor], Tensor]:
    """What a step calls: the module, compiled, or compiled into CUDA graphs."""
    if mode == "eager":
        return call
    return torch.compile(call, mode="reduce-overhead" if mode == "graphs" else None)


def allocated() -> int:
    """Bytes of tensors on the GPU."""
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


def finish() -> None:
    """Wait for the GPU."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def machine() -> dict[str, Any]:
    """What it was measured on."""
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
    }
    with suppress(ImportError):
        import triton

        found["triton"] = triton.__version__
    if DEVICE.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version()}
    return found
