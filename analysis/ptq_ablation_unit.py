"""The networks and cases of analysis/ptq_ablation.py, and what measures them: one unit a process.

    python analysis/ptq_ablation_unit.py train vit 0             # the float weights of a network and seed
    python analysis/ptq_ablation_unit.py measure vit-outliers 0  # the rows of a case and seed

Weights and rows are kept in --cache. Every row is written as it is finished, and training goes on from its last
checkpoint, so that a unit that was ended loses little.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import compress
from compress.data.base import BatchPlan, DataSet
from compress.data.spec import DataSpec
from compress.files import write_json
from compress.graph.fold import fold_batchnorm, foldable_pair
from compress.graph.ops import node_module
from compress.graph.trace import trace
from compress.measure.machine import describe_machine
from compress.quantization.compare import sqnr
from compress.quantization.equalize import find_pairs, replace_relu6
from compress.quantization.ranges import scale_inputs
from compress.quantization.smoothquant import find_norms
from compress.quantization.spec import ActivationSpec, AdaRoundSpec, QuantSpec, WeightSpec
from compress.training.checkpoint import load_model, save_model
from compress.training.loop import fit
from compress.training.spec import TrainSpec

Row = dict[str, Any]
CALIBRATION, CLASSES = 256, 10
ADAROUND = AdaRoundSpec(steps=250, images=256)
WHOLE = ActivationSpec(calibrator="max")  # activations keep their range, so that what is compared is the weights
PER_TENSOR = QuantSpec(weights=WeightSpec(axis=None), activations=WHOLE)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One network as it is quantized.

    Attributes:
        title: for the tables.
        network: key of NETWORKS.
        base: quantization by rounding to nearest.
        rows: name and what is switched on.
        change: what is done to the float network first; it computes the same afterwards.
    """

    title: str
    network: str
    base: QuantSpec
    rows: dict[str, dict[str, Any]]
    change: Callable[[nn.Module, Tensor, int], nn.Module] | None = None


def mobilenet() -> tuple[nn.Module, DataSpec, TrainSpec]:
    """Width 0.5, at 32 pixels."""
    model = compress.build_model(
        compress.ModelSpec(name="mobilenet_v2", options={"width_mult": 0.5}), num_classes=CLASSES
    )
    return model, _data(32), TrainSpec(epochs=16, lr=0.05, warmup_epochs=1)


def resnet() -> tuple[nn.Module, DataSpec, TrainSpec]:
    """Half as wide as usual, at 32 pixels."""
    spec = compress.ModelSpec(name="timm:resnet18", options={"channels": [32, 64, 128, 256]})
    return compress.build_model(spec, num_classes=CLASSES), _data(32), TrainSpec(epochs=6, lr=0.02, warmup_epochs=1)


def vit() -> tuple[nn.Module, DataSpec, TrainSpec]:
    """Four blocks of width 64 on 4 by 4 patches of 8 pixels."""
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
    """Multiply channels by log-normal factors and divide what reads them: the same function, ranges far apart.

    The factor enters through the BatchNorm of the layer, so that BatchNorm statistics stay true.
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
    """Multiply a few channels of what each norm returns and divide the weights that read them: the same function."""
    graph_module = trace(model, example)
    generator = torch.Generator().manual_seed(seed)
    for norm in find_norms(graph_module)[0]:
        parameters = [graph_module.get_parameter(path) for path in norm.parameters]
        scale = torch.ones(len(parameters[0]))
        scale[torch.randperm(len(scale), generator=generator)[:channels]] = factor
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(scale)
        for reader in norm.readers:
            scale_inputs(graph_module.get_submodule(reader), 1 / scale)
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
        base=QuantSpec(weights=WeightSpec(num_bits=4, axis=None), activations=WHOLE),
        rows={k: _LOW[k] for k in _FEW[:3]} | {"equalization + empirical": MOBILENET_ROWS["equalization + empirical"]},
    ),
    "resnet18": Case(
        title="ResNet-18 (half width, 32 px), W4A8, one scale a weight tensor",
        network="resnet18",
        base=QuantSpec(weights=WeightSpec(num_bits=4, axis=None), activations=WHOLE),
        rows=RESNET_ROWS,
    ),
    "resnet18-channel": Case(
        title="ResNet-18, W4A8, a scale a channel",
        network="resnet18",
        base=QuantSpec(weights=WeightSpec(num_bits=4), activations=WHOLE),
        rows={k: _LOW[k] for k in _FEW[:3]},
    ),
    "resnet18-3bit": Case(
        title="ResNet-18, W3A8, a scale a channel (mse)",
        network="resnet18",
        base=QuantSpec(weights=WeightSpec(num_bits=3, calibrator="mse"), activations=WHOLE),
        rows=_LOW,
    ),
    "vit": Case(
        title="ViT (4 blocks of 64, 32 px), W8A8, a scale a channel",
        network="vit",
        base=QuantSpec(activations=WHOLE),
        rows=VIT_ROWS,
    ),
    "vit-outliers": Case(
        title="the same, 3 channels of each LayerNorm times 100",
        network="vit",
        base=QuantSpec(activations=WHOLE),
        rows=VIT_ROWS,
        change=with_outliers,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Where a unit's results are kept, and what changes them.

    Attributes:
        cache: folder of weights and rows.
        epochs: factor on those of each network.
        steps: of AdaRound, a layer.
    """

    cache: Path
    epochs: float = 1.0
    steps: int = ADAROUND.steps

    def arguments(self) -> list[str]:
        """The same as arguments of this script."""
        return ["--cache", str(self.cache), "--epochs", f"{self.epochs:g}", "--steps", str(self.steps)]

    def rows(self, case: str, seed: int) -> Path:
        """The file that holds the rows of a case and seed, by name."""
        return self.cache / f"rows-{self.steps}-{self.epochs:g}" / f"{case}-{seed}.json"

    def training(self, network: str, seed: int) -> TrainSpec:
        """How a network is trained."""
        spec = NETWORKS[network]()[2]
        return replace(spec, seed=seed, epochs=max(1, round(spec.epochs * self.epochs)), evaluate_every=100)

    def weights(self, network: str, seed: int) -> Path:
        """The file of a trained network."""
        return self.cache / f"{network}-{seed}-{self.training(network, seed).epochs}.safetensors"


def train(network: str, seed: int, setup: Setup) -> None:
    """Train a network and keep its weights."""
    torch.manual_seed(seed)
    model, data_spec, _ = NETWORKS[network]()
    path = setup.weights(network, seed)
    data = compress.load_data(data_spec)
    report = fit(
        model, data, setup.training(network, seed), batch_size=64, folder=setup.cache, resume=True, name=path.stem
    )
    save_model(model, path)
    print(f"top-1 {report.final.top1:.4f}")


def trained(network: str, seed: int, setup: Setup) -> tuple[nn.Module, DataSet]:
    """The float network and its data."""
    model, data_spec, _ = NETWORKS[network]()
    load_model(model, setup.weights(network, seed))
    return model.eval(), compress.load_data(data_spec)


def read_rows(name: str, seed: int, setup: Setup) -> dict[str, Row]:
    """The finished rows of a case and seed, by name."""
    path = setup.rows(name, seed)
    found: dict[str, Row] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def missing(name: str, seed: int, setup: Setup) -> list[str]:
    """The rows of a case and seed that are yet to be measured."""
    found = read_rows(name, seed, setup)
    return [row for row in ("float", *CASES[name].rows) if row not in found]


def measure_case(name: str, seed: int, setup: Setup) -> None:
    """Measure and keep the rows of a case and seed that are missing."""
    rows = read_rows(name, seed, setup)
    machine = describe_machine()
    where = {"cpu": machine.cpu, "torch": torch.__version__}
    for row in missing(name, seed, setup):
        rows[row] = {**measure(CASES[name], row, seed, setup), "machine": where}
        write_json(setup.rows(name, seed), rows)
    lowest = min(rows.values(), key=lambda found: float(found["top1"]))
    print(f"{len(rows)} rows, top-1 {100 * lowest['top1']:.2f} to {100 * rows['float']['top1']:.2f} % (float)")


def measure(case: Case, row: str, seed: int, setup: Setup) -> Row:
    """One row, of one seed."""
    model, data = trained(case.network, seed, setup)
    example = next(iter(data.val.batches(BatchPlan(batch_size=8, limit=8))))[0]
    if case.change is not None:
        model = case.change(model, example, seed).eval()
    spec, seconds = None, 0.0
    network: nn.Module = model
    if row != "float":
        changes = dict(case.rows[row])
        if "adaround" in changes:
            changes["adaround"] = replace(changes["adaround"], steps=setup.steps)
        spec = replace(case.base, **changes)
        batches = [x for x, _ in data.train.batches(BatchPlan(batch_size=64, limit=CALIBRATION))]
        start = time.perf_counter()
        network = compress.quantize(model, example[:2], batches, spec=spec)
        seconds = time.perf_counter() - start
    correct, logits, reference = 0, [], []
    with torch.no_grad():
        for images, targets in data.val.batches(BatchPlan(batch_size=100)):
            logits.append(network(images))
            reference.append(model(images))
            correct += int((logits[-1].argmax(1) == targets).sum())
    noise = sqnr(torch.cat(reference), torch.cat(logits)) if spec is not None else None
    improvements: Any = getattr(network, "improvements", None)
    notes = improvements.notes() if spec is not None else []
    return {"top1": correct / len(data.val), "sqnr_db": noise, "seconds": seconds, "notes": notes}


def main() -> None:
    """Train a network, or measure a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "measure"))
    parser.add_argument("name", help="of the network or the case")
    parser.add_argument("seed", type=int)
    parser.add_argument("--cache", type=Path, default=Path("runs/ptq_ablation"))
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=ADAROUND.steps)
    a = parser.parse_args()
    torch.set_num_threads(1)
    setup = Setup(cache=a.cache, epochs=a.epochs, steps=a.steps)
    (train if a.what == "train" else measure_case)(a.name, a.seed, setup)


if __name__ == "__main__":
    main()
