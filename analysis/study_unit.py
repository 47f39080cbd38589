"""One network from one seed: trained, then compressed in every way of the study; each result is handed on as a file.

Images are drawn once and stay on the device as 8-bit numbers. The float network trains on small pictures first, which
cost a third, then on those of the study's size. Every other network begins at the float one; those that train on do so
for the same images, taught by it. What is handed on is evaluated from its ONNX file elsewhere (study_file.py).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

import compress
from compress import (
    ActivationSpec,
    AdaRoundSpec,
    QATSpec,
    QuantSpec,
    SparsitySpec,
    TrainSpec,
    WeightSpec,
)
from compress.data import BatchPlan, DataSpec
from compress.data.base import DataSet, Split
from compress.data.memory import in_memory
from compress.data.shapes import MOVEMENT
from compress.graph.layers import layers as layer_table
from compress.graph.trace import trace
from compress.sparsity.channel import prune_channels
from compress.sparsity.parametrization import apply_masks, masked_layers, squash_masks
from compress.sparsity.sparsifier import sparsify
from compress.training import FinetuneSpec, evaluate, fit

Row = dict[str, Any]
FEW = 256  # images of the evaluation that `fit` ends with; that of the study comes after it, on the whole split
Calibrator = Literal["max", "percentile", "entropy", "mse"]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network of the study.

    Attributes:
        name: for `compress.ModelSpec`.
        lr: peak learning rate of the float training (AdamW).
        options: of the model's maker.
        adaround_steps: of each layer; 0 = without AdaRound.
        least_s: with less time left the network is not begun: its float training would hardly end.
    """

    name: str
    lr: float
    options: dict[str, Any] = field(default_factory=dict)
    adaround_steps: int = 100
    least_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all networks share.

    Attributes:
        data: of the study; `train_images` are those of the float training.
        small_size: side of the pictures of the first epochs.
        epochs_small, epochs: of the float training, on small pictures and on those of the study's size.
        batch_size: of the float training.
        tune_images, tune_batch_size: of one epoch of fine-tuning or QAT.
        calibration_images: for ranges.
        precision: of training.
        permute_seconds: of the permutation search.
        ort_gmacs: multiply-accumulates, in 1e9, that ONNX Runtime may spend on a file, which decide its images.
    """

    data: DataSpec
    small_size: int
    epochs_small: int
    epochs: int
    batch_size: int
    tune_images: int
    tune_batch_size: int
    calibration_images: int = 512
    precision: Literal["fp32", "bf16"] = "bf16"
    permute_seconds: float = 8.0
    ort_gmacs: float = 100.0


NETWORKS = {
    "resnet18": Network(name="resnet18", lr=2e-3, adaround_steps=300, least_s=60.0),
    "mobilenet_v2": Network(name="mobilenet_v2", lr=3e-3, options={"dropout": 0.0}, least_s=80.0),
    "resnet50": Network(name="resnet50", lr=1.5e-3, least_s=110.0),
    "vgg16_bn": Network(name="vgg16_bn", lr=5e-4, options={"dropout": 0.0}, adaround_steps=0, least_s=150.0),
}
FULL = Setting(
    data=DataSpec(
        name="shapes",
        image_size=224,
        num_classes=100,
        train_images=51_200,
        val_images=4_000,
        batch_size=256,
    ),
    small_size=128,
    epochs_small=8,
    epochs=4,
    batch_size=256,
    tune_images=19_200,
    tune_batch_size=128,
)
QUICK_NETWORKS = {
    "resnet18": Network(
        name="timm:resnet18", lr=2e-3, options={"channels": (16, 32, 64, 128), "stem_width": 16}, adaround_steps=4
    ),
    "mobilenet_v2": Network(name="mobilenet_v2", lr=3e-3, options={"width_mult": 0.25}, adaround_steps=0),
}
QUICK = Setting(
    data=replace(FULL.data, image_size=32, num_classes=4, clutter=0.0, train_images=256, val_images=60),
    small_size=24,
    epochs_small=1,
    epochs=1,
    batch_size=32,
    tune_images=64,
    tune_batch_size=32,
    calibration_images=32,
    precision="fp32",
    permute_seconds=1.0,
    ort_gmacs=0.02,
)


@dataclass(frozen=True)
class Made:
    """A finished network, and what is known of it: `facts` go into its row as they are."""

    model: nn.Module
    facts: Row = field(default_factory=dict)
    masked: tuple[str, ...] = ()


class Unit:
    """A network and a seed; each method is made once, when it is first asked for."""

    def __init__(self, network: Network, seed: int, setting: Setting, device: str) -> None:
        self.network, self.seed, self.setting, self.device = network, seed, setting, torch.device(device)
        self.made: dict[str, Made] = {}

    @cached_property
    def data(self) -> DataSet:
        """Pictures of the study's size, on the device."""
        return self.drawn(self.setting.data.image_size)

    @cached_property
    def tune_data(self) -> DataSet:
        """Those of a fine-tuning's epoch: the first of the training pictures."""
        return DataSet(train=first(self.data.train, self.setting.tune_images), val=first(self.data.val, FEW))

    def drawn(self, size: int) -> DataSet:
        """Pictures of a size, drawn into the device's memory."""
        drawn = compress.load_data(replace(self.setting.data, image_size=size, seed=self.seed))
        return DataSet(
            train=in_memory(drawn.train, self.device, movement=MOVEMENT),
            val=validation(self.setting, self.device, size),
        )

    @cached_property
    def example(self) -> Tensor:
        """Two pictures."""
        return next(iter(self.data.val.batches(BatchPlan(batch_size=2), device=self.device)))[0]

    @cached_property
    def macs(self) -> int:
        """Multiply-accumulates of an image in the float network."""
        return macs(self.get("float").model, self.example)

    @cached_property
    def calibration(self) -> list[Tensor]:
        """Batches of the training split."""
        plan = BatchPlan(batch_size=64, limit=self.setting.calibration_images)
        return [images for images, _ in self.data.train.batches(plan, device=self.device)]

    def get(self, method: str) -> Made:
        """The result of a method."""
        if method not in self.made:
            self.made[method] = METHODS[method](self)
        return self.made[method]

    def start(self) -> nn.Module:
        """A copy of the float network."""
        return copy.deepcopy(self.get("float").model)

    def top1(self, model: nn.Module) -> float:
        """Percent, in torch (fake quantization where the network has it), on the whole evaluation split."""
        return 100 * evaluate(model, self.data.val, batch_size=250, device=self.device).top1

    def train_on(self, model: nn.Module, spec: TrainSpec) -> Row:
        """An epoch of the fine-tuning pictures, taught by the float network."""
        spec = replace(spec, seed=self.seed, epochs=1, optimizer="adamw", precision=self.setting.precision)
        size, teacher = self.setting.tune_batch_size, self.get("float").model
        done = fit(
            model.train(), self.tune_data, spec, batch_size=size, folder=None, teacher=teacher, device=self.device
        )
        model.eval()
        return {"images_per_s": done.images_per_s}


@contextmanager
def exact_convolutions() -> Iterator[None]:
    """Convolutions in float32, not TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def first(split: Split, count: int) -> Split:
    """The first images of a split that is in memory; the memory is shared."""
    part: Any = copy.copy(split)
    part.images, part.targets = part.images[:count], part.targets[:count]
    return cast(Split, part)


def validation(setting: Setting, device: torch.device | str, size: int | None = None) -> Split:
    """The evaluation split, the same for every seed, on the device."""
    spec = replace(setting.data, image_size=size or setting.data.image_size, seed=0)
    return in_memory(compress.load_data(spec).val, device)


# Methods: each makes a network from the float one ---------------------------------------------------------------------


def make_float(unit: Unit) -> Made:
    """Train from scratch, on small pictures first."""
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
    """Post-training quantization, target TensorRT."""
    rounding = AdaRoundSpec(steps=unit.network.adaround_steps) if adaround else None
    spec = QuantSpec(
        weights=WeightSpec(num_bits=bits, calibrator=weights),
        activations=ActivationSpec(calibrator=activations),
        adaround=rounding,
        batchnorm=batchnorm,
    )
    start, batches = copy.deepcopy(unit.get(base).model).eval(), unit.calibration
    began = time.perf_counter()
    qmodel = compress.quantize(start, unit.example, batches, spec=spec)
    return Made(qmodel, {"quantize_s": time.perf_counter() - began})


def qat(unit: Unit, begun: Made, lr: float) -> Made:
    """Quantization-aware training of a quantized network, its zeros held where it is masked."""
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
    """2:4 by magnitude, fine-tuned."""
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
    """INT8 of the permuted 2:4 network, before training."""
    sparse = unit.get("2:4 permuted")
    quantized = ptq(unit, base="2:4 permuted")
    return Made(quantized.model, {**quantized.facts, **kept_of(sparse)}, sparse.masked)


def sparse_qat(unit: Unit) -> Made:
    """INT8 of the permuted 2:4 network, trained on with its zeros held."""
    made = qat(unit, unit.get("2:4 permuted, PTQ W8A8"), QAT_LR)
    return Made(made.model, {**made.facts, **kept_of(unit.get("2:4 permuted"))}, made.masked)


def kept_of(made: Made) -> Row:
    """What a sparse network keeps."""
    return {key: made.facts[key] for key in ("kept_magnitude", "masked_layers")}


def channels(unit: Unit) -> Made:
    """Whole channels removed until the multiply-accumulates are those that 2:4 leaves, fine-tuned."""
    model = unit.start()
    share = macs(model, unit.example, unit.get("2:4").masked) / unit.macs / 2
    report = prune_channels(model, SparsitySpec(pattern=f"channel:{share:.4f}"), example_inputs=unit.example)
    facts: Row = {"one_shot": unit.top1(model), "macs_removed": report.removed}
    facts |= unit.train_on(model, FinetuneSpec(lr=FINETUNE_LR, weight_decay=0.01))
    return Made(model, facts)


def trained_on(unit: Unit) -> Made:
    """The float network with the same training as the sparse ones: what that training alone brings."""
    model = unit.start()
    return Made(model, unit.train_on(model, FinetuneSpec(lr=FINETUNE_LR, weight_decay=0.01)))


def macs(model: nn.Module, example: Tensor, only: Iterable[str] | None = None) -> int:
    """Multiply-accumulates of an image; of the named layers alone where given."""
    names = None if only is None else set(only)
    found = layer_table(trace(model, example[:1]))
    return sum(layer.macs or 0 for layer in found if names is None or layer.path in names)


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
"""In the order in which they are made: what matters most comes first, in case the time ends."""


def methods_of(network: Network) -> list[str]:
    """Methods that a network gets."""
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
    """Make every method of a unit, and hand each on: a file with the network, and its row so far.

    Args:
        key: name and seed.
        network: of that name.
        setting: how.
        device: `cuda` or `cpu`.
        folder: for the files.
        deadline: `time.time()` after which no method is begun.
        hand_on: takes the row, with `file` in it.
        fail: takes a method and why there is none.
    """
    unit = Unit(network, key[1], setting, device)
    for method in methods_of(network):
        began = time.time()
        if began > deadline:
            fail(method, "the time was over")
            continue
        try:
            made = unit.get(method)
            row = {"network": key[0], "seed": key[1], "method": method, "top1_torch": unit.top1(made.model)}
            row |= made.facts | {"seconds": time.time() - began}
            path = folder / f"{key[0]}-{key[1]}-{list(METHODS).index(method)}.pt"
            torch.save(copy.deepcopy(made.model).cpu(), path)
            hand_on({**row, "dense_macs": unit.macs, "masked": list(made.masked), "file": str(path)})
        except Exception as error:  # one method's failure is a row that says so, whatever it is
            fail(method, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            if method == "float":
                raise
