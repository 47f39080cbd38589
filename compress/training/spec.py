"""How a network is trained: a recipe's `train` and `qat` sections."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from compress.errors import RecipeError, near_misses

Optimizer = Literal["sgd", "adamw"]
Schedule = Literal["cosine", "constant"]
Precision = Literal["fp32", "bf16", "fp16"]
Fused = Literal["auto", "on", "int8", "off"]
Scales = Literal["fixed", "learned"]


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Training of the float baseline.

    Attributes:
        epochs: passes over the training split; 0 evaluates only.
        optimizer: `sgd` (momentum, Nesterov) or `adamw`.
        lr: peak learning rate, for the whole (global) batch.
        momentum: of SGD.
        weight_decay: on weights of two and more dimensions; biases and norms have none.
        warmup_epochs: linear warm-up from lr / 100; may be a fraction.
        schedule: `cosine` to zero or `constant` after the warm-up, step by step.
        label_smoothing: of the cross entropy.
        clip_grad_norm: largest L2 norm of the gradients; None = no clipping.
        grad_accumulation: batches of data.batch_size images whose mean gradient makes one optimizer step.
        precision: `fp32`, or autocast in `bf16` or `fp16` (with a gradient scaler).
        channels_last: memory format of images and weights; None = wherever the model runs in it.
        compile: run the model through torch.compile.
        distill: learn from the float model's logits too.
        distill_weight: share of the distillation loss, 0 to 1.
        distill_temperature: softmax temperature of both (Hinton et al., arXiv 1503.02531).
        seed: initial weights and everything random in training.
        checkpoint_steps: also keep a checkpoint every so many optimizer steps; None = at each epoch's end.
        evaluate_every: epochs between evaluations; the last epoch is always evaluated.
        ema_decay: evaluate and keep a running mean of the weights, which keeps so much of itself at each step, such
            as 0.999; None = the weights of the last step.
    """

    epochs: int = 8
    optimizer: Optimizer = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup_epochs: float = 1.0
    schedule: Schedule = "cosine"
    label_smoothing: float = 0.0
    clip_grad_norm: float | None = None
    grad_accumulation: int = 1
    precision: Precision = "fp32"
    channels_last: bool | None = None
    compile: bool = False
    distill: bool = False
    distill_weight: float = 0.5
    distill_temperature: float = 2.0
    seed: int = 0
    checkpoint_steps: int | None = None
    evaluate_every: int = 1
    ema_decay: float | None = None


@dataclass(frozen=True, kw_only=True)
class QATSpec(TrainSpec):
    """Quantization-aware training: as `TrainSpec`, shorter, gentler, and taught by the float model.

    Attributes:
        epochs, lr, warmup_epochs, distill: other defaults than `TrainSpec`.
        fused: train through fused chains (`compress.fuse_for_training`): `on`, `off`, or `auto` = where it is faster,
            on GPUs with Triton. `int8`: and convolutions forward on INT8 tensor cores, where they can; faster again
            where `compile` is set. What is trained is the same.
        scales: `fixed` = ranges stay those of calibration; `learned` = they are trained too (LSQ, arXiv 1902.08153).
        freeze_ranges_epoch: learned ranges stay as they are from this epoch on, counted from 0; None = never.
        freeze_batchnorm_epoch: the same of BatchNorm's statistics, where quantization.batchnorm is `keep`.
    """

    epochs: int = 2
    lr: float = 0.001
    warmup_epochs: float = 0.0
    distill: bool = True
    fused: Fused = "auto"
    scales: Scales = "fixed"
    freeze_ranges_epoch: int | None = None
    freeze_batchnorm_epoch: int | None = None


@dataclass(frozen=True, kw_only=True)
class FinetuneSpec(TrainSpec):
    """Training after weights were taken away: as `TrainSpec`, shorter, gentler, and taught by the dense model.

    Attributes:
        epochs, lr, warmup_epochs, distill: other defaults than `TrainSpec`.
    """

    epochs: int = 3
    lr: float = 0.005
    warmup_epochs: float = 0.0
    distill: bool = True


_SECTIONS: dict[type[TrainSpec], str] = {QATSpec: "qat", FinetuneSpec: "finetune"}


def check_train_spec(spec: TrainSpec, *, section: str | None = None) -> None:
    """Refuse a value that cannot be trained with.

    Args:
        spec: what to check.
        section: recipe section that messages name; None = the one that its class is for.

    Raises:
        RecipeError: names the key, what was got and what is allowed.
    """
    section = section or _SECTIONS.get(type(spec), "train")
    choices: list[tuple[str, object]] = [("optimizer", Optimizer), ("schedule", Schedule), ("precision", Precision)]
    if isinstance(spec, QATSpec):
        choices += [("fused", Fused), ("scales", Scales)]
    for key, allowed in choices:
        got = getattr(spec, key)
        if got not in get_args(allowed):
            names = ", ".join(get_args(allowed))
            raise RecipeError(f"{section}.{key} is {got!r}{near_misses(str(got), get_args(allowed))} (one of: {names})")
    for key, fits, allowed_range in _ranges(spec):
        if not fits:
            raise RecipeError(f"{section}.{key} is {getattr(spec, key)!r}: it must be {allowed_range}")
    if isinstance(spec, QATSpec) and spec.freeze_ranges_epoch is not None and spec.scales == "fixed":
        raise RecipeError(
            f"{section}.freeze_ranges_epoch is {spec.freeze_ranges_epoch}, and fixed ranges never move: set "
            f"{section}.scales: learned, or leave it out"
        )
    if spec.epochs and spec.warmup_epochs > spec.epochs:
        raise RecipeError(
            f"{section}.warmup_epochs is {spec.warmup_epochs} of {spec.epochs} epochs, so lr would never reach "
            f"{section}.lr: it must be at most {section}.epochs"
        )


def _ranges(spec: TrainSpec) -> tuple[tuple[str, bool, str], ...]:
    """(key, whether it is in range, the range in words) for each number."""
    clip, every, decay = spec.clip_grad_norm, spec.checkpoint_steps, spec.ema_decay
    freezing = ("freeze_ranges_epoch", "freeze_batchnorm_epoch") if isinstance(spec, QATSpec) else ()
    epochs = [(key, getattr(spec, key)) for key in freezing]
    return (
        ("epochs", spec.epochs >= 0, "0 or more"),
        ("lr", math.isfinite(spec.lr) and spec.lr > 0, "a finite number above 0"),
        ("momentum", 0 <= spec.momentum < 1, "at least 0 and below 1"),
        ("weight_decay", math.isfinite(spec.weight_decay) and spec.weight_decay >= 0, "a finite number, 0 or more"),
        ("warmup_epochs", math.isfinite(spec.warmup_epochs) and spec.warmup_epochs >= 0, "a finite number, 0 or more"),
        ("label_smoothing", 0 <= spec.label_smoothing < 1, "at least 0 and below 1"),
        ("clip_grad_norm", clip is None or (math.isfinite(clip) and clip > 0), "a finite number above 0, or null"),
        ("grad_accumulation", spec.grad_accumulation >= 1, "1 or more"),
        ("distill_weight", 0 <= spec.distill_weight <= 1, "from 0 to 1"),
        (
            "distill_temperature",
            math.isfinite(spec.distill_temperature) and spec.distill_temperature > 0,
            "a finite number above 0",
        ),
        ("seed", spec.seed >= 0, "0 or more"),
        ("checkpoint_steps", every is None or every >= 1, "1 or more, or null"),
        ("evaluate_every", spec.evaluate_every >= 1, "1 or more"),
        ("ema_decay", decay is None or 0 <= decay < 1, "at least 0 and below 1, or null"),
        *((key, epoch is None or epoch >= 0, "0 or more, or null") for key, epoch in epochs),
    )
