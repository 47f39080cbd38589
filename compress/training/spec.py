"""How a network is trained: a recipe's `train` and `qat` sections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Training of the float baseline.

    Attributes:
        epochs: passes over the training split.
        optimizer: `sgd` (momentum, Nesterov) or `adamw`.
        lr: peak learning rate, for the whole (global) batch.
        momentum: of SGD.
        weight_decay: on weights of two and more dimensions; biases and norms have none.
        warmup_epochs: linear warm-up from lr / 100; may be a fraction.
        schedule: `cosine` to zero or `constant` after the warm-up, step by step.
        label_smoothing: of the cross entropy.
        clip_grad_norm: largest L2 norm of the gradients; None = no clipping.
        grad_accumulation: batches whose gradients are summed for one optimizer step.
        precision: `fp32`, or autocast in `bf16` or `fp16` (with a gradient scaler).
        channels_last: memory format; None = on GPUs only.
        compile: run the model through torch.compile.
        distill: learn from the float model's logits too.
        distill_weight: share of the distillation loss, 0 to 1.
        distill_temperature: softmax temperature of both (Hinton et al., arXiv 1503.02531).
        seed: initial weights and everything random in training.
        checkpoint_steps: also keep a checkpoint every so many optimizer steps; None = at each epoch's end.
        evaluate_every: epochs between evaluations; the last epoch is always evaluated.
    """

    epochs: int = 8
    optimizer: Literal["sgd", "adamw"] = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup_epochs: float = 1.0
    schedule: Literal["cosine", "constant"] = "cosine"
    label_smoothing: float = 0.0
    clip_grad_norm: float | None = None
    grad_accumulation: int = 1
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    channels_last: bool | None = None
    compile: bool = False
    distill: bool = False
    distill_weight: float = 0.5
    distill_temperature: float = 2.0
    seed: int = 0
    checkpoint_steps: int | None = None
    evaluate_every: int = 1


@dataclass(frozen=True, kw_only=True)
class QATSpec(TrainSpec):
    """Quantization-aware training: as `TrainSpec`, shorter, gentler, and taught by the float model.

    Attributes:
        epochs, lr, warmup_epochs, distill: other defaults than `TrainSpec`.
    """

    epochs: int = 2
    lr: float = 0.001
    warmup_epochs: float = 0.0
    distill: bool = True
