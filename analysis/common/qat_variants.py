"""The networks that the studies of quantization-aware training train, and the variants of each.

- float: the network as it is; folded: BatchNorm folded into the convolutions, a lower bound of the cost of QAT;
- fused: `compress.quantize`, trained through `compress.fuse_for_training`; fused-int8: the same, with the forward pass
  of convolutions on INT8 tensor cores; fused-cudnn: the same as fused, with cuDNN's depthwise convolutions in place of
  ours; plain: the quantized network without fusion;
- torch-ops: BatchNorm not folded, torch's fake-quantize operations on inputs and weights;
- modelopt, pytorch-quantization: these tools, where they are installed.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, fx, nn

import compress
from analysis.common.networks import with_statistics
from analysis.common.study import Row, gpu_software
from compress.graph.fold import fold_batchnorm
from compress.qat_fusion.fuse import FusedLayerModule
from compress.qat_fusion.regions import compile_regions
from compress.tasks.classification import classification
from compress.training import TrainSpec
from compress.training.distributed import SINGLE
from compress.training.passes import Passes, RecordedPasses

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Network:
    """A network, the size of its images and its batch size."""

    make: Callable[[], nn.Module]
    batch: int = 128
    pixels: int = 224


def _vit_s() -> nn.Module:
    sizes = {"patch_size": 16, "num_layers": 12, "num_heads": 6, "hidden_dim": 384, "mlp_dim": 1536}
    return torchvision.models.VisionTransformer(image_size=224, **sizes)


def _tiny() -> nn.Module:
    layers = (nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.BatchNorm2d(16))
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


NETWORKS = {
    "resnet50": Network(torchvision.models.resnet50),
    "resnet18": Network(torchvision.models.resnet18),
    "mobilenet_v2": Network(torchvision.models.mobilenet_v2),
    "vgg16": Network(torchvision.models.vgg16, batch=64),
    "vit_s": Network(_vit_s),
    "regnet_y_3_2gf": Network(torchvision.models.regnet_y_3_2gf),
    "efficientnet_v2_s": Network(torchvision.models.efficientnet_v2_s),
    "mobilenet_v3_large": Network(torchvision.models.mobilenet_v3_large),
    "convnext_tiny": Network(torchvision.models.convnext_tiny),
    "swin_t": Network(torchvision.models.swin_t),
    "densenet121": Network(torchvision.models.densenet121),
    "tiny": Network(_tiny, batch=4, pixels=16),
}


def pretrained(network: Network) -> nn.Module:
    """Return the network with BatchNorm statistics of images, so that folding does not change activations' size."""
    torch.manual_seed(0)
    model = network.make().to(DEVICE)
    for module in model.modules():
        if isinstance(module, nn.Linear) and not bool(module.weight.any()):
            nn.init.normal_(module.weight, std=0.02)  # a classifier of zeros has no range
    return with_statistics(model, images(network, min(32, network.batch))).train()


def images(network: Network, count: int) -> Tensor:
    x = torch.randn(count, 3, network.pixels, network.pixels, device=DEVICE)
    return x.contiguous(memory_format=torch.channels_last)


def trained(variant: str, model: nn.Module, network: Network) -> tuple[nn.Module, nn.Module]:
    x = images(network, min(32, network.batch))
    if variant == "float":
        return model, model
    if variant == "folded":
        graph = compress.trace(model.eval(), x[:2])
        fold_batchnorm(graph)
        return graph, graph
    if variant in {"plain", "fused", "fused-cudnn", "fused-int8"}:
        spec = compress.QuantSpec(activations=compress.ActivationSpec(calibrator="max"))
        qmodel = compress.quantize(model.eval(), x[:2], [x], spec=spec)
        qmodel.to(memory_format=torch.channels_last)
        if variant == "plain":
            return qmodel, qmodel
        fused = compress.fuse_for_training(qmodel, forward="int8" if variant == "fused-int8" else "float")
        for module in fused.modules() if variant == "fused-cudnn" else ():
            if isinstance(module, FusedLayerModule):
                module.kernels = "torch"
        return fused, qmodel
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
    """A convolution with fake-quantized input and weight."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(*self.quantized(input), self.bias)


class NativeLinear(nn.Linear, _Native):
    """A linear layer with fake-quantized input and weight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(*self.quantized(input), self.bias)


def torch_ops(model: nn.Module, x: Tensor) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            twin: Any = {nn.Conv2d: NativeConv, nn.Linear: NativeLinear}.get(type(child))
            if twin is None:
                continue
            layer = twin.__new__(twin)
            layer.__dict__.update(child.__dict__)
            layer.register_buffer("step", torch.tensor(0.03, device=x.device))
            setattr(module, name, layer)
    return model


def modelopt(model: nn.Module, x: Tensor) -> nn.Module:
    import modelopt.torch.quantization as mtq  # optional: a peer that is measured where it is installed

    return mtq.quantize(model.eval(), copy.deepcopy(mtq.INT8_DEFAULT_CFG), lambda m: m(x[:8]))


def pytorch_quantization(network: Network) -> nn.Module:
    from pytorch_quantization import nn as qnn  # optional: a peer that is measured where it is installed
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
    """Return the module for mode `eager`, else compiled: whole, by `regions`, or into CUDA graphs (`graphs`).

    Only graphs, such as quantized networks, are compiled by regions; float networks are compiled whole.
    """
    if mode == "eager":
        return call
    if mode == "regions" and isinstance(call, fx.GraphModule):
        return compile_regions(call)
    return torch.compile(call, mode="reduce-overhead" if mode == "graphs" else None)


class TrainingStep:
    """A step of SGD on a batch, after three of them, in which compilation and cuDNN's search happen.

    Args:
        variant: name of a variant (see the top of the file).
        network: network to train.
        precision: `bf16` (autocast) or `fp32`.
        mode: `eager`, `compiled`, `regions` or `graphs`.
        phase: makes a context in which each phase of a step runs, from the phase's name.

    Attributes:
        owner: module that holds the parameters.
    """

    def __init__(
        self,
        variant: str,
        network: Network,
        precision: str,
        mode: str,
        phase: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._call, self.owner = trained(variant, pretrained(network), network)
        self.owner.to(memory_format=torch.channels_last).to(DEVICE).train()
        self._call.train()
        self._optimizer = torch.optim.SGD(self.owner.parameters(), lr=1e-5, momentum=0.9)
        self._run, self._precision, self._phase = as_run(self._call, mode), precision, phase
        self._x = images(network, network.batch)
        self._y = torch.randint(0, 10, (network.batch,), device=DEVICE)
        self._repeat(3, self)

    def __call__(self) -> None:
        with (
            self._phase("forward"),
            torch.autocast(DEVICE.type, torch.bfloat16, enabled=self._precision == "bf16"),
        ):
            loss = F.cross_entropy(self._run(self._x).float(), self._y)
        with self._phase("backward"):
            loss.backward()
        self._update()

    def recorded(self) -> Callable[[], None]:
        spec: Any = TrainSpec(precision=self._precision)  # type: ignore[arg-type]
        scaler = torch.amp.GradScaler(DEVICE.type, enabled=False)
        passes = Passes(
            self._run, None, model=self.owner, task=classification(10), spec=spec, scaler=scaler, device=DEVICE
        )
        recorded = RecordedPasses(passes, spec, SINGLE) if DEVICE.type == "cuda" else passes

        def step() -> None:
            recorded(self._x, self._y, factor=1.0, done=0.0)
            self._update()

        self._repeat(4, step)
        return step

    def _update(self) -> None:
        with self._phase("optimizer"):
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    def _repeat(self, count: int, step: Callable[[], None]) -> None:
        for _ in range(count):
            step()
        finish()


def allocated() -> int:
    return torch.cuda.memory_allocated() if DEVICE.type == "cuda" else 0


def finish() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def fast_arithmetic() -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True


def machine() -> Row:
    return gpu_software("torchvision", "triton")
