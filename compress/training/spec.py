"""The `train`, `qat` and `finetune` sections of a recipe, which are also an argument of `compress.fit`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from compress.errors import RecipeError, near_misses
from compress.imports import is_import_path
from compress.validation import AtLeastOne, NotNegative, NotNegativeInt, Positive, Seed, Share, ShareBelowOne, validate

OPTIMIZERS = ("sgd", "adamw")
Schedule = Literal["cosine", "constant", "step", "one_cycle"]
Precision = Literal["fp32", "bf16", "fp16"]
Fused = Literal["auto", "on", "int8", "off"]
Scales = Literal["fixed", "learned"]


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Training of the float baseline.

    Attributes:
        epochs: passes over the training split; 0 evaluates only.
        optimizer: `sgd` (momentum, Nesterov), `adamw`, or a class, `package.module:Class`, such as `torch.optim:RAdam`,
            that is called with groups of parameters, lr and `optimizer_options`.
        optimizer_options: further keyword arguments of that class.
        lr: peak learning rate, for the whole (global) batch.
        momentum: momentum of SGD.
        weight_decay: decay of weights of two and more dimensions; biases and norms have none.
        warmup_epochs: length of the linear warm-up from lr / 100; may be a fraction.
        schedule: after the warm-up `cosine` to zero, `constant`, or `step` (a tenth after 2/3 of the epochs, a
            hundredth after 8/9); or `one_cycle` in place of the warm-up too.
        lr_scale: factor of the learning rate by pattern of parameter names, such as {"backbone.*": 0.1}.
        frozen: patterns of parameter names that are not trained, such as ["backbone.*"]; BatchNorm layers all of whose
            parameters are frozen keep their statistics too.
        label_smoothing: label smoothing of the cross entropy.
        clip_grad_norm: largest L2 norm of the gradients; None = no clipping.
        grad_accumulation: batches of data.batch_size images whose mean gradient makes one optimizer step.
        precision: `fp32`, or autocast in `bf16` or `fp16` (with a gradient scaler).
        channels_last: memory format of images and weights; None = wherever the model runs in it.
        compile: run the model through torch.compile.
        cuda_graphs: record the forward and the backward pass of a step once and replay them, so that small networks do
            not wait for the host; on one GPU, without effect on the CPU.
        distill: learn from the float model's logits too.
        distill_weight: share of the distillation loss.
        distill_temperature: softmax temperature of both models (Hinton et al., arXiv 1503.02531).
        seed: seed of the initial weights and of everything random in training.
        checkpoint_steps: also write a checkpoint every so many optimizer steps; None = at each epoch's end.
        evaluate_every: epochs between evaluations; the last epoch is always evaluated.
        ema_decay: evaluate and save a running mean of the weights, which keeps so much of itself at each step, such
            as 0.999; None = the weights of the last step.
    """

    epochs: NotNegativeInt = 8
    optimizer: str = "sgd"
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    lr: Positive = 0.05
    momentum: ShareBelowOne = 0.9
    weight_decay: NotNegative = 1e-4
    warmup_epochs: NotNegative = 1.0
    schedule: Schedule = "cosine"
    lr_scale: dict[str, Positive] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    label_smoothing: ShareBelowOne = 0.0
    clip_grad_norm: Positive | None = None
    grad_accumulation: AtLeastOne = 1
    precision: Precision = "fp32"
    channels_last: bool | None = None
    compile: bool = False
    cuda_graphs: bool = False
    distill: bool = False
    distill_weight: Share = 0.5
    distill_temperature: Positive = 2.0
    seed: Seed = 0
    checkpoint_steps: AtLeastOne | None = None
    evaluate_every: AtLeastOne = 1
    ema_decay: ShareBelowOne | None = None


@dataclass(frozen=True, kw_only=True)
class QATSpec(TrainSpec):
    """Quantization-aware training: as `TrainSpec`, shorter, gentler, and taught by the float model.

    Attributes:
        epochs, lr, warmup_epochs, distill: other defaults than `TrainSpec`.
        fused: train through fused chains (`compress.fuse_for_training`): `on`, `off`, or `auto` = where it is faster,
            on GPUs with Triton. `int8` also runs the forward pass of convolutions on INT8 tensor cores, where they can;
            it is faster still with `compile`. The trained network is the same.
        scales: `fixed` = ranges stay those of calibration; `learned` = they are trained too (LSQ, arXiv 1902.08153).
        normalize_weights: normalize weights of fewer than 8 bits before they are rounded (arXiv 1909.13144, section
            2.3).
        damping: peak strength of the loss that pulls weights to the centre of their integer, which keeps those of
            depthwise convolutions from oscillating (arXiv 2203.11086, section 4.1), such as 0.001; 0 = none.
        freeze_ranges_epoch: epoch, counted from 0, after which learned ranges no longer change; None = never.
        freeze_batchnorm_epoch: epoch after which BatchNorm's statistics no longer change, where
            quantization.batchnorm is `keep`; None = never.
    """

    epochs: NotNegativeInt = 2
    lr: Positive = 0.001
    warmup_epochs: NotNegative = 0.0
    distill: bool = True
    fused: Fused = "auto"
    scales: Scales = "fixed"
    normalize_weights: bool = False
    damping: NotNegative = 0.0
    freeze_ranges_epoch: NotNegativeInt | None = None
    freeze_batchnorm_epoch: NotNegativeInt | None = None


@dataclass(frozen=True, kw_only=True)
class FinetuneSpec(TrainSpec):
    """Training after weights were taken away: as `TrainSpec`, shorter, gentler, and taught by the dense model.

    Attributes:
        epochs, lr, warmup_epochs, distill: other defaults than `TrainSpec`.
    """

    epochs: NotNegativeInt = 3
    lr: Positive = 0.005
    warmup_epochs: NotNegative = 0.0
    distill: bool = True


_SECTIONS: dict[type[TrainSpec], str] = {TrainSpec: "train", QATSpec: "qat", FinetuneSpec: "finetune"}


_SPEED = {"cuda_graphs"}
"""Keys that change the speed alone: a training may go on with another value."""
_ADDED = {"damping", "normalize_weights"}
"""Keys that checkpoints of earlier versions do not hold: left out where they have their default."""


def identity_of(spec: TrainSpec) -> dict[str, Any]:
    """Return what a training must have in common with the checkpoint from which it goes on."""
    default = type(spec)()
    return {
        key: value
        for key, value in asdict(spec).items()
        if value not in ({}, ()) and key not in _SPEED and not (key in _ADDED and value == getattr(default, key))
    }


def check_train_spec(spec: TrainSpec) -> None:
    """Refuse a specification that cannot be followed.

    Raises:
        RecipeError: names each key, what was got and what is allowed.
    """
    section = _SECTIONS.get(type(spec), "train")
    validate(spec, TrainSpec, section=section, error=RecipeError, rules=train_contradictions)


def train_contradictions(spec: TrainSpec) -> Iterator[str]:
    """Yield a line for each contradiction between values that are in range by themselves."""
    section = _SECTIONS.get(type(spec), "train")
    if isinstance(spec, QATSpec) and spec.freeze_ranges_epoch is not None and spec.scales == "fixed":
        yield (
            f"{section}.freeze_ranges_epoch is {spec.freeze_ranges_epoch}, and fixed ranges never change: set "
            f"{section}.scales: learned, or leave it out"
        )
    if spec.cuda_graphs and spec.grad_accumulation > 1:
        yield (
            f"{section}.grad_accumulation is {spec.grad_accumulation}, and {section}.cuda_graphs records steps of one "
            "batch: leave one of them out"
        )
    if isinstance(spec, QATSpec) and spec.cuda_graphs and spec.damping:
        yield f"{section}.damping grows from step to step, which {section}.cuda_graphs cannot record: leave one out"
    if spec.optimizer not in OPTIMIZERS and not is_import_path(spec.optimizer):
        yield (
            f"{section}.optimizer is {spec.optimizer!r}{near_misses(spec.optimizer, OPTIMIZERS)} (one of: "
            f"{', '.join(OPTIMIZERS)}, or package.module:Class)"
        )
    if spec.optimizer_options and spec.optimizer in OPTIMIZERS:
        yield f"{section}.optimizer_options are those of an optimizer package.module:Class, and it is {spec.optimizer}"
    if spec.epochs and spec.warmup_epochs > spec.epochs:
        yield (
            f"{section}.warmup_epochs is {spec.warmup_epochs} of {spec.epochs} epochs, so lr would never reach "
            f"{section}.lr: it must be at most {section}.epochs"
        )
