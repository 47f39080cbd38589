"""The trainings of the study: which network, at how many bits, from which settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compress.quantization.spec import ActivationSpec, QuantSpec, WeightSpec
from compress.training.spec import QATSpec, TrainSpec


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training, once for each seed.

    Attributes:
        network: a name of `analysis.common.cifar.NETWORKS`.
        bits: of weights and activations; None = float.
        weight: share of the study's time for one seed, relative to other jobs.
        seeds: number of trainings; of float networks and of those quantized from them.
        lr, weight_decay, optimizer, most_epochs: of the training.
        axis: 0 = a weight scale for each channel, None = for each layer.
        normalize, damping, distill: choices of `QATSpec`.
    """

    network: str
    bits: int | None = None
    weight: float = 1.0
    seeds: int = 1
    lr: float = 0.2
    weight_decay: float = 5e-4
    optimizer: str = "sgd"
    most_epochs: int = 200
    axis: int | None = 0
    normalize: bool = False
    damping: float = 0.0
    distill: bool = True

    def quant_spec(self) -> QuantSpec:
        """Return the quantization: LSQ's first steps, BatchNorm kept, first and last layers at 8 bits."""
        bits = self.bits or 8
        return QuantSpec(
            target="any",
            weights=WeightSpec(num_bits=bits, axis=0 if self.axis == 0 else None, calibrator="lsq"),
            activations=ActivationSpec(num_bits=bits, calibrator="lsq"),
            first_last_bits=8,
            batchnorm="keep",
        )

    def train_spec(self, epochs: int) -> TrainSpec:
        """Return the settings of the training."""
        warm = min(2.0, epochs / 10)
        if self.bits is None:
            return TrainSpec(
                epochs=epochs, lr=self.lr, weight_decay=self.weight_decay, optimizer=self.optimizer, warmup_epochs=warm
            )
        return QATSpec(
            epochs=epochs,
            lr=self.lr,
            weight_decay=self.weight_decay,
            optimizer=self.optimizer,
            warmup_epochs=warm,
            distill=self.distill,
            distill_weight=0.5,
            distill_temperature=4.0,
            scales="learned",
            normalize_weights=self.normalize,
            damping=self.damping,
        )


_QAT = Job(network="resnet20", lr=0.05, weight_decay=1e-4)
_MOBILE = Job(network="mobilenet_v2", lr=0.1, weight_decay=1e-4)
_ADAM = Job(network="vit_tiny", lr=1e-3, weight_decay=0.05, optimizer="adamw")

JOBS: dict[str, Job] = {
    "resnet20": Job(network="resnet20", weight=1.2, seeds=3),
    "resnet20-w2a2": replace(_QAT, bits=2, weight=2.2, seeds=3, weight_decay=5e-5),
    "resnet20-w4a4": replace(_QAT, bits=4, weight=1.0, seeds=3),
    "resnet20-w3a3": replace(_QAT, bits=3, weight=1.3, seeds=3),
    "mobilenet_v2": replace(_MOBILE, weight=2.5, weight_decay=4e-4),
    "mobilenet_v2-w4a4": replace(_MOBILE, bits=4, weight=2.0, lr=0.05, damping=1e-3),
    "resnet56": Job(network="resnet56", weight=2.2),
    "vit_tiny": replace(_ADAM, weight=2.0),
    "vgg16_bn": Job(network="vgg16_bn", weight=0.8, lr=0.1),
    "resnet20-w2a2-normalized": replace(_QAT, bits=2, weight=1.5, weight_decay=5e-5, normalize=True),
    "resnet20-w2a2-tensor": replace(_QAT, bits=2, weight=1.5, weight_decay=5e-5, axis=None),
    "convnext": replace(_ADAM, network="convnext", weight=1.5),
}
"""In the order in which they train; a quantized network needs the float one of its name before it."""
