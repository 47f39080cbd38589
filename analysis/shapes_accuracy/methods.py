"""The methods of the study: each makes a network from the float one."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import torch

import compress
from analysis.common.study import Row
from analysis.shapes_accuracy.setting import Network, Setting
from analysis.shapes_accuracy.unit import FEW, Made, Unit, exact_convolutions, first, macs
from compress import ActivationSpec, AdaRoundSpec, QATSpec, QuantSpec, SparsitySpec, TrainSpec, WeightSpec
from compress.data.base import DataSet
from compress.sparsity.channel_pruning import prune_channels
from compress.sparsity.parametrization import apply_masks, masked_layers, squash_masks
from compress.sparsity.sparsifier import sparsify
from compress.training import FinetuneSpec, fit

Calibrator = Literal["max", "percentile", "entropy", "mse"]


def make_float(unit: Unit) -> Made:
    """Train from scratch, first on small images, which cost a third."""
    setting, network = unit.setting, unit.network
    torch.manual_seed(unit.seed)
    spec = compress.ModelSpec(name=network.name, options=network.options)
    model = compress.build_model(spec, num_classes=setting.data.num_classes or 20).to(unit.device)
    common: Row = {"optimizer": "adamw", "weight_decay": 0.05, "clip_grad_norm": 2.0, "evaluate_every": 99}
    common |= {"lr": network.lr, "seed": unit.seed, "precision": setting.precision}
    small = TrainSpec(epochs=setting.epochs_small, warmup_epochs=1.0, schedule="constant", **common)
    large = TrainSpec(epochs=setting.epochs, warmup_epochs=0.1, **common)
    began = time.perf_counter()
    for training, data in ((small, unit.drawn(setting.small_size)), (large, unit.data)):
        few = DataSet(train=data.train, val=first(data.val, FEW))
        done = fit(model, few, training, batch_size=setting.batch_size, folder=None, device=unit.device)
    return Made(model.eval(), {"images_per_s": done.images_per_s, "train_s": time.perf_counter() - began})


def ptq(
    unit: Unit,
    *,
    bits: int = 8,
    weights: Calibrator = "max",
    activations: Calibrator = "mse",
    adaround: bool = False,
    batchnorm: Literal["fold", "keep"] = "fold",
    base: str = "float",
) -> Made:
    """Quantize after training, target TensorRT."""
    spec = QuantSpec(
        weights=WeightSpec(num_bits=bits, calibrator=weights),
        activations=ActivationSpec(calibrator=activations),
        adaround=AdaRoundSpec(steps=unit.network.adaround_steps) if adaround else None,
        batchnorm=batchnorm,
    )
    start, batches = copy.deepcopy(unit.get(base).model).eval(), unit.calibration
    began = time.perf_counter()
    qmodel = compress.quantize(start, unit.example, batches, spec=spec)
    return Made(qmodel, {"quantize_s": time.perf_counter() - began})


def qat(unit: Unit, begun: Made, lr: float) -> Made:
    """Train a quantized network; the zeros of a masked one stay zero."""
    qmodel = copy.deepcopy(begun.model)
    masked = begun.masked
    zeros = {name: cast(Any, qmodel.get_submodule(name)).weight.detach() != 0 for name in masked}
    if zeros:
        apply_masks(qmodel, zeros)
    facts = unit.train_on(qmodel, QATSpec(lr=lr, weight_decay=0.0))
    if zeros:
        squash_masks(qmodel)
    return Made(qmodel, facts, masked)


def two_of_four(unit: Unit, *, permute: bool) -> Made:
    """Mask 2:4 by magnitude and fine-tune."""
    model = unit.start()
    spec = SparsitySpec(permute=permute, permute_seconds=unit.setting.permute_seconds, seed=unit.seed)
    began = time.perf_counter()
    with exact_convolutions():  # the permuted network's outputs are compared to 1e-4
        report = sparsify(model, spec, example_inputs=unit.example)
    if report.permutation is not None and report.permutation.refused:
        raise RuntimeError(f"channels were not permuted: {report.permutation.refused}")
    masked = masked_layers(model)
    kept = sum((layer.original.abs() * layer.mask).sum().item() for layer in masked.values())
    facts: Row = {
        "kept_magnitude": kept / sum(layer.original.abs().sum().item() for layer in masked.values()),
        "masked_layers": len(masked),
        "one_shot": unit.top1(model),
        "mask_s": time.perf_counter() - began,
    }
    facts |= unit.train_on(model, FinetuneSpec(lr=FINETUNE_LR, weight_decay=0.01))
    squash_masks(model)
    return Made(model, facts, report.masked)


def sparse_ptq(unit: Unit) -> Made:
    """Quantize the permuted 2:4 network to INT8 after training."""
    sparse = unit.get("2:4 permuted")
    quantized = ptq(unit, base="2:4 permuted")
    return Made(quantized.model, {**quantized.facts, **kept_of(sparse)}, sparse.masked)


def sparse_qat(unit: Unit) -> Made:
    """Train the INT8 quantized, permuted 2:4 network; its zeros stay zero."""
    made = qat(unit, unit.get("2:4 permuted, PTQ W8A8"), QAT_LR)
    return Made(made.model, {**made.facts, **kept_of(unit.get("2:4 permuted"))}, made.masked)


def kept_of(made: Made) -> Row:
    """Return the facts of a sparse network that its quantized forms share."""
    return {key: made.facts[key] for key in ("kept_magnitude", "masked_layers")}


def channels(unit: Unit) -> Made:
    """Remove channels until as many multiply-accumulates are left as with 2:4, and fine-tune."""
    model = unit.start()
    share = macs(model, unit.example, unit.get("2:4").masked) / unit.macs / 2
    report = prune_channels(model, SparsitySpec(pattern=f"channel:{share:.4f}"), example_inputs=unit.example)
    facts: Row = {"one_shot": unit.top1(model), "macs_removed": report.removed}
    facts |= unit.train_on(model, FinetuneSpec(lr=FINETUNE_LR, weight_decay=0.01))
    return Made(model, facts)


def trained_on(unit: Unit) -> Made:
    """Train the float network like the sparse ones, to show the effect of that training alone."""
    model = unit.start()
    return Made(model, unit.train_on(model, FinetuneSpec(lr=FINETUNE_LR, weight_decay=0.01)))


FINETUNE_LR, QAT_LR, QAT_LR_4 = 2e-4, 3e-5, 5e-5
METHODS: dict[str, Callable[[Unit], Made]] = {
    "float": make_float,
    "PTQ W8A8 mse": ptq,
    "QAT W8A8": lambda unit: qat(unit, unit.get("PTQ W8A8 mse"), QAT_LR),
    "PTQ W4A8 mse": lambda unit: ptq(unit, bits=4, weights="mse"),
    "QAT W4A8": lambda unit: qat(unit, unit.get("PTQ W4A8 mse"), QAT_LR_4),
    "2:4": lambda unit: two_of_four(unit, permute=False),
    "2:4 permuted": lambda unit: two_of_four(unit, permute=True),
    "2:4 permuted, PTQ W8A8": sparse_ptq,
    "2:4 permuted, QAT W8A8": sparse_qat,
    "float, trained on": trained_on,
    "QAT W4A8, higher rate": lambda unit: qat(unit, unit.get("PTQ W4A8 mse"), unit.network.lr / 5),
    "QAT W4A8, higher rate, BatchNorm kept": lambda unit: qat(
        unit, ptq(unit, bits=4, weights="mse", batchnorm="keep"), unit.network.lr / 5
    ),
    "PTQ W8A8 max": lambda unit: ptq(unit, activations="max"),
    "PTQ W8A8 percentile": lambda unit: ptq(unit, activations="percentile"),
    "PTQ W8A8 entropy": lambda unit: ptq(unit, activations="entropy"),
    "PTQ W4A8 max": lambda unit: ptq(unit, bits=4),
    "channels": channels,
    "PTQ W4A8 AdaRound": lambda unit: ptq(unit, bits=4, weights="mse", adaround=True),
}
"""Methods in the order in which they run: the most important first, in case the time runs out."""


def methods_of(network: Network) -> list[str]:
    """Return the methods of a network."""
    return [name for name in METHODS if network.adaround_steps or "AdaRound" not in name]


def run_unit(
    key: tuple[str, int],
    network: Network,
    setting: Setting,
    *,
    device: str,
    folder: Path,
    deadline: float,
    hand_on: Callable[[Row], None],
    fail: Callable[[str, str], None],
) -> None:
    """Run every method of a unit; write its network to a file and pass its row on.

    Args:
        key: name and seed.
        network: network of that name.
        setting: setting of the study.
        device: `cuda` or `cpu`.
        folder: folder for the files.
        deadline: `time.time()` after which no method is begun.
        hand_on: takes the row, in which `file` names the file.
        fail: takes a method and the reason of its failure.
    """
    unit = Unit(network, key[1], setting, device, METHODS)
    for method in methods_of(network):
        began = time.time()
        if began > deadline:
            fail(method, "the time had run out")
            continue
        try:
            made = unit.get(method)
            row = {"network": key[0], "seed": key[1], "method": method, "top1_torch": unit.top1(made.model)}
            row |= made.facts | {"seconds": time.time() - began}
            path = folder / f"{key[0]}-{key[1]}-{list(METHODS).index(method)}.pt"
            torch.save(copy.deepcopy(made.model).cpu(), path)
            hand_on({**row, "dense_macs": unit.macs, "masked": list(made.masked), "file": str(path)})
        except Exception as error:  # any failure of one method is noted with its reason
            fail(method, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            if method == "float":
                raise
