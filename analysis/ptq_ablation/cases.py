"""The networks and the cases of the ablation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import compress
from compress.data.spec import DataSpec
from compress.graph.fold import fold_batchnorm, foldable_pair
from compress.graph.ops import node_module
from compress.graph.trace import trace
from compress.quantization.ptq.equalize import find_pairs, replace_relu6
from compress.quantization.ptq.ranges import scale_inputs
from compress.quantization.ptq.smoothquant import find_norms
from compress.quantization.spec import ActivationSpec, AdaRoundSpec, QuantSpec, WeightSpec
from compress.training.spec import TrainSpec

CALIBRATION, CLASSES = 256, 10
ADAROUND = AdaRoundSpec(steps=250, images=256)
WHOLE = ActivationSpec(calibrator="max")  # activations are not clipped, so that only the weights differ
PER_TENSOR = QuantSpec(weights=WeightSpec(axis=None), activations=WHOLE, insist=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One network as it is quantized.

    Attributes:
        title: title of its table.
        network: key of NETWORKS.
        base: quantization with rounding to nearest.
        rows: name of each row, and the options of the quantization that it changes.
        change: changes the float network first, without changing its function.
    """

    title: str
    network: str
    base: QuantSpec
    rows: dict[str, dict[str, Any]]
    change: Callable[[nn.Module, Tensor, int], nn.Module] | None = None


def mobilenet() -> tuple[nn.Module, DataSpec, TrainSpec]:
    """Return MobileNetV2 of width 0.5 for 32 pixels, its data and its training."""
    model = compress.build_model(
        compress.ModelSpec(name="mobilenet_v2", options={"width_mult": 0.5}), num_classes=CLASSES
    )
    return model, _data(32), TrainSpec(epochs=16, lr=0.05, warmup_epochs=1)


def resnet() -> tuple[nn.Module, DataSpec, TrainSpec]:
    """Return ResNet-18 of half the usual width for 32 pixels, its data and its training."""
    spec = compress.ModelSpec(name="timm:resnet18", options={"channels": [32, 64, 128, 256]})
    return compress.build_model(spec, num_classes=CLASSES), _data(32), TrainSpec(epochs=6, lr=0.02, warmup_epochs=1)


def vit() -> tuple[nn.Module, DataSpec, TrainSpec]:
    """Return a ViT with four blocks of width 64 on 4 by 4 patches of 8 pixels, its data and its training."""
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 4, "num_heads": 4}
    spec = compress.ModelSpec(name="timm:vit_tiny_patch16_224", options=options)
    training = TrainSpec(epochs=24, optimizer="adamw", lr=1e-3, weight_decay=0.05, clip_grad_norm=1.0)
    return compress.build_model(spec, num_classes=CLASSES), _data(32), training


NETWORKS: dict[str, Callable[[], tuple[nn.Module, DataSpec, TrainSpec]]] = {
    "mobilenet_v2": mobilenet,
    "resnet18": resnet,
    "vit": vit,
}


def _data(size: int) -> DataSpec:
    return DataSpec(name="digits", image_size=size)


def widen(model: nn.Module, example: Tensor, seed: int, sigma: float = 1.0) -> nn.Module:
    """Multiply channels by log-normal factors and divide the next weights: the same function with unequal ranges.

    The factor is applied to the BatchNorm of the layer, so that its statistics remain correct.
    """
    graph_module = trace(model, example)
    replace_relu6(graph_module)
    folded = copy.deepcopy(graph_module)
    fold_batchnorm(folded)
    norms = {str(p[0].target): p[1] for n in graph_module.graph.nodes if (p := foldable_pair(n)) is not None}
    generator = torch.Generator().manual_seed(seed)
    for pair in find_pairs(folded)[0]:
        norm: Any = node_module(norms[pair.first])
        factor = torch.exp(sigma * torch.randn(len(norm.weight), generator=generator))
        with torch.no_grad():
            norm.weight.mul_(factor)
            norm.bias.mul_(factor)
        scale_inputs(graph_module.get_submodule(pair.second), 1 / factor.repeat_interleave(pair.repeat))
    return graph_module


def with_outliers(model: nn.Module, example: Tensor, seed: int, channels: int = 3, factor: float = 100.0) -> nn.Module:
    """Multiply a few channels of each norm's result and divide the weights that consume them: the same function."""
    graph_module = trace(model, example)
    generator = torch.Generator().manual_seed(seed)
    for norm in find_norms(graph_module)[0]:
        parameters = [graph_module.get_parameter(path) for path in norm.parameters]
        scale = torch.ones(len(parameters[0]))
        scale[torch.randperm(len(scale), generator=generator)[:channels]] = factor
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(scale)
        for consumer in norm.consumers:
            scale_inputs(graph_module.get_submodule(consumer), 1 / scale)
    return graph_module


_EQUALIZE = {"relu6": "relu", "equalize": True}
MOBILENET_ROWS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "nearest, a scale a channel": {"weights": WeightSpec()},
    "ReLU6 to ReLU": {"relu6": "relu"},
    "bias correction, analytic": {"bias_correction": "analytic"},
    "bias correction, empirical": {"bias_correction": "empirical"},
    "equalization": _EQUALIZE,
    "equalization + analytic": {**_EQUALIZE, "bias_correction": "analytic"},
    "equalization + empirical": {**_EQUALIZE, "bias_correction": "empirical"},
}
RESNET_ROWS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "bias correction, analytic": {"bias_correction": "analytic"},
    "bias correction, empirical": {"bias_correction": "empirical"},
    "equalization": {"equalize": True},
    "equalization + empirical": {"equalize": True, "bias_correction": "empirical"},
    "AdaRound": {"adaround": ADAROUND},
    "AdaRound + empirical": {"adaround": ADAROUND, "bias_correction": "empirical"},
}
VIT_ROWS: dict[str, dict[str, Any]] = {
    "nearest": {},
    "SmoothQuant 0.5": {"smooth": 0.5},
    "SmoothQuant 0.75": {"smooth": 0.75},
    "bias correction, empirical": {"bias_correction": "empirical"},
    "SmoothQuant 0.5 + empirical": {"smooth": 0.5, "bias_correction": "empirical"},
}
_FEW = ("nearest", "bias correction, empirical", "AdaRound", "AdaRound + empirical")
_WIDE = {k: v for k, v in MOBILENET_ROWS.items() if "AdaRound" not in k and k != "ReLU6 to ReLU"}
_LOW = {k: RESNET_ROWS[k] for k in _FEW}
CASES: dict[str, Case] = {
    "mobilenet_v2": Case(
        title="MobileNetV2 (width 0.5, 32 px), W8A8, one scale a weight tensor",
        network="mobilenet_v2",
        base=PER_TENSOR,
        rows={k: MOBILENET_ROWS[k] for k in ("nearest", "ReLU6 to ReLU", "equalization", "equalization + empirical")},
    ),
    "mobilenet_v2-wide": Case(
        title="the same, ReLU, channels rescaled (sigma 1)",
        network="mobilenet_v2",
        base=PER_TENSOR,
        rows=_WIDE,
        change=widen,
    ),
    "mobilenet_v2-4bit": Case(
        title="MobileNetV2 as trained, W4A8, one scale a weight tensor",
        network="mobilenet_v2",
        base=QuantSpec(weights=WeightSpec(num_bits=4, axis=None), activations=WHOLE, insist=True),
        rows={k: _LOW[k] for k in _FEW[:3]} | {"equalization + empirical": MOBILENET_ROWS["equalization + empirical"]},
    ),
    "resnet18": Case(
        title="ResNet-18 (half width, 32 px), W4A8, one scale a weight tensor",
        network="resnet18",
        base=QuantSpec(weights=WeightSpec(num_bits=4, axis=None), activations=WHOLE, insist=True),
        rows=RESNET_ROWS,
    ),
    "resnet18-channel": Case(
        title="ResNet-18, W4A8, a scale a channel",
        network="resnet18",
        base=QuantSpec(weights=WeightSpec(num_bits=4), activations=WHOLE, insist=True),
        rows={k: _LOW[k] for k in _FEW[:3]},
    ),
    "resnet18-3bit": Case(
        title="ResNet-18, W3A8, a scale a channel (mse)",
        network="resnet18",
        base=QuantSpec(weights=WeightSpec(num_bits=3, calibrator="mse"), activations=WHOLE, insist=True),
        rows=_LOW,
    ),
    "vit": Case(
        title="ViT (4 blocks of 64, 32 px), W8A8, a scale a channel",
        network="vit",
        base=QuantSpec(activations=WHOLE, insist=True),
        rows=VIT_ROWS,
    ),
    "vit-outliers": Case(
        title="the same, 3 channels of each LayerNorm times 100",
        network="vit",
        base=QuantSpec(activations=WHOLE, insist=True),
        rows=VIT_ROWS,
        change=with_outliers,
    ),
}
