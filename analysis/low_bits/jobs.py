"""The trainings of the study: which network, at how many bits, from which settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compress.quantization.spec import ActivationSpec, QuantSpec, WeightSpec
from compress.sparsity.spec import Schedule, SparsitySpec
from compress.training.spec import QATSpec, TrainSpec


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training, once for each seed.

    Attributes:
        network: a name of `analysis.common.cifar.NETWORKS`.
        bits: of weights and activations; None = float.
        weight: share of the study's time for one seed, relative to other jobs.
        seeds: number of trainings; of float networks and of those quantized from them.
        first_seed: seed of the first; one that has no float network begins at that of seed 0.
        lr, weight_decay, optimizer, most_epochs: of the training.
        axis: 0 = a weight scale for each channel, None = for each layer.
        normalize, damping, distill: choices of `QATSpec`.
        offsets: offsets of signed activations learn too (LSQ+).
        sparse: 2:4 masks of all layers that the pattern divides: held (`one-shot`), moving (`sr-ste`), or learned
            (`gumbel`).
        mask_end: share of the steps after which moving and learned masks stay.
        recorded: way to run the step that is tried first; None = as the command line says.
    """

    network: str
    bits: int | None = None
    weight: float = 1.0
    seeds: int = 1
    first_seed: int = 0
    lr: float = 0.2
    weight_decay: float = 5e-4
    optimizer: str = "sgd"
    most_epochs: int = 200
    axis: int | None = 0
    normalize: bool = False
    damping: float = 0.0
    offsets: bool = False
    distill: bool = True
    sparse: Schedule | None = None
    mask_end: float = 0.8
    recorded: str | None = None

    def sparsity_spec(self) -> SparsitySpec | None:
        """Return the sparsity, or None."""
        return None if self.sparse is None else SparsitySpec(schedule=self.sparse, kernels="any")

    def quant_spec(self) -> QuantSpec:
        """Return the quantization: LSQ's first steps at few bits, BatchNorm kept, first and last layers at 8 bits."""
        bits = self.bits or 8
        few = bits < 8
        return QuantSpec(
            target="any",
            weights=WeightSpec(num_bits=bits, axis=0 if self.axis == 0 else None, calibrator="lsq" if few else "max"),
            activations=ActivationSpec(num_bits=bits, calibrator="lsq" if few else "mse"),
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
_SPARSE = replace(_QAT, network="resnet56", bits=8, lr=0.02, most_epochs=12, sparse="sr-ste", weight=1.6)
_ADAM = Job(network="vit_tiny", lr=1e-3, weight_decay=0.05, optimizer="adamw")
_SPARSE_VIT = replace(_ADAM, bits=8, lr=3e-4, most_epochs=20, sparse="sr-ste", weight=1.6)

JOBS: dict[str, Job] = {
    "resnet20": Job(network="resnet20", weight=1.2, seeds=3),
    "resnet20-w2a2": replace(_QAT, bits=2, weight=2.2, seeds=3, weight_decay=5e-5),
    "resnet20-w4a4": replace(_QAT, bits=4, weight=1.0, seeds=3),
    "resnet20-w3a3": replace(_QAT, bits=3, weight=1.3, seeds=3),
    "mobilenet_v2": replace(_MOBILE, weight=2.5, weight_decay=4e-4),
    "mobilenet_v2-w4a4": replace(_MOBILE, bits=4, weight=2.0, lr=0.05, damping=1e-3),
    "resnet56": Job(network="resnet56", weight=2.2),
    "vit_tiny": replace(_ADAM, weight=2.0),
    "vgg16_bn": Job(network="vgg16_bn", weight=0.5, lr=0.1, recorded="graph"),
    "resnet20-w2a2-normalized": replace(_QAT, bits=2, weight=1.5, weight_decay=5e-5, normalize=True),
    "resnet20-w2a2-tensor": replace(_QAT, bits=2, weight=1.5, weight_decay=5e-5, axis=None),
    "convnext": replace(_ADAM, network="convnext", weight=1.5),
    "resnet56-w8a8-sr-ste": _SPARSE,
    "resnet56-w8a8-magnitude": replace(_SPARSE, sparse="one-shot"),
    "vit_tiny-w8a8-sr-ste": _SPARSE_VIT,
    "vit_tiny-w8a8-magnitude": replace(_SPARSE_VIT, sparse="one-shot"),
    "resnet56-w8a8-gumbel": replace(_SPARSE, sparse="gumbel", mask_end=0.5),
    "resnet56-w8a8-sr-ste-half": replace(_SPARSE, mask_end=0.5),
    "vit_tiny-w8a8-gumbel": replace(_SPARSE_VIT, sparse="gumbel", mask_end=0.5),
    "vit_tiny-w8a8-sr-ste-half": replace(_SPARSE_VIT, mask_end=0.5),
    "mobilenet_v2-w4a4-offsets": replace(_MOBILE, bits=4, weight=1.2, lr=0.05, damping=1e-3, offsets=True),
    "mobilenet_v2-w3a3": replace(_MOBILE, bits=3, weight=1.2, lr=0.05, damping=1e-3),
    "mobilenet_v2-w3a3-offsets": replace(_MOBILE, bits=3, weight=1.2, lr=0.05, damping=1e-3, offsets=True),
    "mobilenet_v2-w4a4-more": replace(_MOBILE, bits=4, weight=1.2, lr=0.05, damping=1e-3, seeds=2, first_seed=1),
}
"""In the order in which they train; a quantized network needs the float one of its name before it."""
