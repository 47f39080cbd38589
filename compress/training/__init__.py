"""The training loop, its checkpoints and processes. Here: the `train`, `qat` and `finetune` sections of a recipe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from compress.errors import RecipeError, near_misses
from compress.support.imports import is_import_path
from compress.support.validation import (
    AtLeastOne,
    NotNegative,
    NotNegativeInt,
    Positive,
    Seed,
    Share,
    ShareBelowOne,
    validate,
)

OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("cosine", "constant", "step", "one_cycle")
MIXES = ("mixup", "cutmix")
AUGMENTS = ("randaugment", "trivialaugment", "autoaugment", "augmix", "random_erasing", *MIXES)
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
            hundredth after 8/9); `one_cycle` in place of the warm-up too; or a function, `package.module:function`,
            of (step, steps) that returns the share of `lr` at each step after the warm-up, counted from 0.
        lr_scale: factor of the learning rate by pattern of parameter names, such as {"backbone.*": 0.1}.
        frozen: patterns of parameter names that are not trained, such as ["backbone.*"]; BatchNorm layers all of whose
            parameters are frozen keep their statistics too.
        label_smoothing: label smoothing of the cross entropy.
        augment: changes of training batches, after those of `data.augment`. For classification `randaugment`,
            `trivialaugment`, `autoaugment`, `augmix` and `random_erasing` of each image, `mixup` and `cutmix` of the
            batch (of both, one at random), as torchvision.transforms.v2 has them; for any task a function,
            `package.module:function`, of (images, targets) that returns both.
        augment_options: keyword arguments of named changes, such as {randaugment: {magnitude: 7}, mixup: {alpha: 0.2}}.
        clip_grad_norm: largest L2 norm of the gradients; None = no clipping.
        grad_accumulation: batches of data.batch_size images whose mean gradient makes one optimizer step.
        precision: `fp32`, or autocast in `bf16` or `fp16` (with a gradient scaler).
        channels_last: memory format of images and weights; None = wherever the model runs in it.
        compile: run the model through torch.compile: whole, or `regions`, which compiles blocks that are alike once and
            so begins sooner (a quantized network; a float one is compiled whole). What was compiled is kept for the
            next run, in TORCHINDUCTOR_CACHE_DIR or else in ~/.cache/compress.
        cuda_graphs: record the forward and the backward pass of a step once and replay them, so that small networks do
            not wait for the host; without effect on the CPU.
        gradients: type in which several processes exchange their gradients; `bf16` sends half of the bytes of `fp32`
            and rounds each gradient to eight bits.
        sync_batchnorm: normalize by the statistics of the whole batch where several processes share it, in place of
            each process's own; one exchange more for every BatchNorm layer and pass.
        distill: learn from the float model's logits too.
        distill_weight: share of the distillation loss.
        distill_temperature: softmax temperature of both models (Hinton et al., arXiv 1503.02531).
        distill_features: modules of the teacher whose outputs modules of the network learn too, such as
            {layer3.5.conv2: layer3.22.bn2}; outputs of other shapes are compared as attention maps (arXiv 1612.03928).
        distill_feature_weight: weight of their distance beside that of the outputs, within the share of distillation.
        seed: seed of the initial weights and of everything random in training.
        checkpoint_every: epochs between checkpoints; the last epoch always writes one. A checkpoint holds weights and
            the state of the optimizer, and writing it may take longer than a short epoch.
        checkpoint_steps: also write a checkpoint every so many optimizer steps; None = at epochs' ends alone.
        evaluate_every: epochs between evaluations; the last epoch is always evaluated.
        keep_best: end with the weights of the evaluated epoch whose metric is best, in place of the last one's.
        stop_after: end after so many evaluations in a row without a better metric; None = after all epochs.
        stop_within: end as soon as the metric is no more than this below that of the float network, in the unit of
            reports (0.5 = half a point); of `qat` and `finetune`.
        ema_decay: evaluate and save a running mean of the weights, which keeps so much of itself at each step, such
            as 0.999; None = the weights of the last step.

    Examples:
        >>> spec = compress.TrainSpec(epochs=2, optimizer="adamw", lr=0.001, ema_decay=0.999)
        >>> spec.schedule
        'cosine'
    """

    epochs: NotNegativeInt = 8
    optimizer: str = "sgd"
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    lr: Positive = 0.05
    momentum: ShareBelowOne = 0.9
    weight_decay: NotNegative = 1e-4
    warmup_epochs: NotNegative = 1.0
    schedule: str = "cosine"
    lr_scale: dict[str, Positive] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    label_smoothing: ShareBelowOne = 0.0
    augment: tuple[str, ...] = ()
    augment_options: dict[str, dict[str, Any]] = field(default_factory=dict)
    clip_grad_norm: Positive | None = None
    grad_accumulation: AtLeastOne = 1
    precision: Precision = "fp32"
    channels_last: bool | None = None
    compile: bool | Literal["regions"] = False
    cuda_graphs: bool = False
    gradients: Literal["fp32", "bf16"] = "fp32"
    sync_batchnorm: bool = False
    distill: bool = False
    distill_weight: Share = 0.5
    distill_temperature: Positive = 2.0
    distill_features: dict[str, str] = field(default_factory=dict)
    distill_feature_weight: Positive = 1.0
    seed: Seed = 0
    checkpoint_every: AtLeastOne = 1
    checkpoint_steps: AtLeastOne | None = None
    evaluate_every: AtLeastOne = 1
    keep_best: bool = False
    stop_after: AtLeastOne | None = None
    stop_within: NotNegative | None = None
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

    Examples:
        >>> spec = compress.QATSpec(epochs=1, scales="learned")
        >>> spec.epochs, spec.distill
        (1, True)
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


# Keys that affect only speed and may change on a resume.
_SPEED = {"cuda_graphs", "checkpoint_every"}
# Keys that earlier checkpoints lack: left out at their default.
_ADDED = {
    "gradients",
    "sync_batchnorm",
    "damping",
    "normalize_weights",
    "keep_best",
    "stop_after",
    "stop_within",
    "distill_feature_weight",
}


def identity_of(spec: TrainSpec, *, reference: float | None = None) -> dict[str, Any]:
    """What a training must have in common with its checkpoint; `reference` is that of `stop_within`."""
    default = type(spec)()
    compared = {} if spec.stop_within is None else {"reference": reference}
    return compared | {
        key: value
        for key, value in asdict(spec).items()
        if value not in ({}, ()) and key not in _SPEED and not (key in _ADDED and value == getattr(default, key))
    }


def check_train_spec(spec: TrainSpec) -> None:
    section = _SECTIONS.get(type(spec), "train")
    validate(spec, TrainSpec, section=section, error=RecipeError, rules=train_contradictions)


def train_contradictions(spec: TrainSpec) -> Iterator[str]:
    section = _SECTIONS.get(type(spec), "train")
    if isinstance(spec, QATSpec) and spec.freeze_ranges_epoch is not None and spec.scales == "fixed":
        yield (
            f"{section}.freeze_ranges_epoch is {spec.freeze_ranges_epoch}, and fixed ranges never change: set "
            f"{section}.scales: learned, or leave it out"
        )
    if isinstance(spec, QATSpec) and spec.cuda_graphs and spec.damping:
        yield f"{section}.damping grows from step to step, which {section}.cuda_graphs cannot record: leave one out"
    yield from _unknown_names(spec, section)
    yield from _feature_contradictions(spec, section)
    if spec.optimizer_options and spec.optimizer in OPTIMIZERS:
        yield f"{section}.optimizer_options are those of an optimizer package.module:Class, and it is {spec.optimizer}"
    if spec.epochs and spec.warmup_epochs > spec.epochs:
        yield (
            f"{section}.warmup_epochs is {spec.warmup_epochs} of {spec.epochs} epochs, so lr would never reach "
            f"{section}.lr: it must be at most {section}.epochs"
        )
    if spec.stop_after is not None and spec.stop_after * spec.evaluate_every >= max(1, spec.epochs):
        yield (
            f"{section}.stop_after is {spec.stop_after} evaluations, one in {spec.evaluate_every} epochs, and "
            f"{section}.epochs is {spec.epochs}: it would never end the training"
        )


def _unknown_names(spec: TrainSpec, section: str) -> Iterator[str]:
    """Yield a line for each part that is neither known nor a path."""
    given = [("optimizer", spec.optimizer, OPTIMIZERS, "Class"), ("schedule", spec.schedule, SCHEDULES, "function")]
    given += [("augment", name, AUGMENTS, "function") for name in spec.augment]
    for key, name, known, kind in given:
        if name not in known and not is_import_path(name):
            hint = near_misses(name, known)
            yield f"{section}.{key} is {name!r}{hint} (one of: {', '.join(known)}, or package.module:{kind})"
    for name in spec.augment_options:
        if name not in spec.augment or name not in AUGMENTS:
            hint = near_misses(name, spec.augment)
            yield f"{section}.augment_options has {name!r}{hint}: its keys are named changes of {section}.augment"
    if len(set(spec.augment)) < len(spec.augment):
        yield f"{section}.augment names a change twice: {', '.join(spec.augment)}"


def _feature_contradictions(spec: TrainSpec, section: str) -> Iterator[str]:
    if not spec.distill_features:
        return
    if not spec.distill:
        yield f"{section}.distill_features is set, and {section}.distill is false: set it, or leave the features out"
    fused = isinstance(spec, QATSpec) and spec.fused in {"on", "int8"}
    if fused or spec.compile:
        key = "fused" if fused else "compile"
        yield (
            f"{section}.distill_features watches the outputs of modules, which {section}.{key} replaces: leave one of "
            "them out"
        )


def task_specific(spec: TrainSpec, section: str, task: str) -> Iterator[str]:
    named = [name for name in spec.augment if name in AUGMENTS]
    if named and task != "classification":
        yield (
            f"{section}.augment is {', '.join(named)}, which changes images without their masks or boxes, and task is "
            f"{task}: data.augment moves both, or name a function package.module:function"
        )
    if spec.stop_within is not None and section == "train":
        yield (
            "train.stop_within compares with the float network, which this section trains: use train.stop_after, or "
            "set it in qat or finetune"
        )


# The former place of this section, which scripts outside import.
sys.modules[f"{__name__}.spec"] = sys.modules[__name__]
