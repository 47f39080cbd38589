"""The networks that are compared, each trained on a data set, and the methods that make them smaller."""

from __future__ import annotations

from dataclasses import dataclass

from compress.training.spec import FinetuneSpec, TrainSpec

UNIFORM = "uniform"
BLOCKS, ENGINE_BLOCK, SHARES = "uniform of 16", 16, (0.875, 0.8, 0.75)
"""Uniform widths of these shares in multiples of 16 channels, which both engines compute at a time on AVX-512."""
CRITERIA = ("magnitude", "batchnorm", "taylor", "fisher", "reconstruction")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A float network of one seed.

    Attributes:
        network: a name of `analysis.common.cifar.NETWORKS`.
        data: `cifar10`, or `shapes` (32 pixels, 10 classes).
        seed: of its weights and of everything random afterwards.
        engine: that everything is measured on.
        int8: the smaller networks are INT8, and the bound is a share of the dense INT8 network's time.
        bound: largest share of that time.
        batch: pictures of a timed run.
        widths: shares of the channels that a search may keep.
        pictures: that a search looks at, at most.
        lr, weight_decay: of the float training.
    """

    network: str
    data: str = "cifar10"
    seed: int = 0
    engine: str = "onnxruntime"
    int8: bool = False
    bound: float = 0.7
    batch: int = 1
    widths: tuple[float, ...] = (0.75, 0.5)
    pictures: int = 256
    lr: float = 0.1
    weight_decay: float = 4e-4

    @property
    def name(self) -> str:
        """Such as `mobilenet_v2-cifar10-0`."""
        return f"{self.network}-{self.data}-{self.seed}"

    @property
    def multiple(self) -> int:
        """Of channels that Torch-Pruning keeps; ours are of 8, and of 4 in groups of fewer than 32."""
        return 4 if self.network.startswith("resnet") else 8

    def training(self, epochs: int) -> TrainSpec:
        """Return the settings of the float training."""
        return TrainSpec(epochs=epochs, lr=self.lr, weight_decay=self.weight_decay, warmup_epochs=min(2.0, epochs / 10))

    def tuning(self, epochs: int) -> TrainSpec:
        """Return the settings of the training of every smaller network, which are the same for all of them."""
        return FinetuneSpec(
            epochs=epochs,
            lr=self.lr / 2,
            weight_decay=self.weight_decay,
            warmup_epochs=0.0,
            distill_weight=0.5,
            distill_temperature=4.0,
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """One subject made smaller by one method.

    Attributes:
        subject: that it begins with.
        method: of the README's table.
    """

    subject: Subject
    method: str

    @property
    def labels(self) -> tuple[str, ...]:
        """One for each network; of uniform widths several, the largest within the bound and the next larger one.

        So their accuracy is known at the latency of every other network in between.
        """
        if self.method == BLOCKS:
            return tuple(f"{self.method}, {share:g}" for share in SHARES)
        return (self.method, f"{self.method} larger") if self.method == UNIFORM else (self.method,)

    @property
    def name(self) -> str:
        """Such as `mobilenet_v2-cifar10-0 uniform`."""
        return f"{self.subject.name} {self.method}"


def parts(names: list[str]) -> list[Part]:
    """Return the parts of the groups that `names` lists, the most valuable first in each.

    Raises:
        KeyError: an unknown group.
    """
    return [part for name in names for part in GROUPS[name]]


def _parts(subject: Subject, *methods: str) -> tuple[Part, ...]:
    return tuple(Part(subject=subject, method=method) for method in methods)


def _mobilenet(seed: int, data: str = "cifar10") -> Subject:
    return Subject(network="mobilenet_v2", data=data, seed=seed)


_RESNET56 = Subject(
    network="resnet56", engine="openvino", int8=True, bound=0.6, widths=(0.5,), pictures=96, lr=0.2, weight_decay=5e-4
)
_PEERS = ("search", "uniform", "torch-pruning-global")
_SEEDS = (0, 1, 2)

GROUPS: dict[str, tuple[Part, ...]] = {
    "mobilenet": tuple(part for seed in _SEEDS for part in _parts(_mobilenet(seed), *_PEERS)),
    "shapes": tuple(part for seed in _SEEDS for part in _parts(_mobilenet(seed, "shapes"), "search", "uniform")),
    "resnet56": _parts(_RESNET56, *_PEERS, "torch-pruning", "dense"),
    "criteria": _parts(_mobilenet(0), "search-widths", "torch-pruning", "dense", *CRITERIA),
    "blocks": tuple(part for seed in _SEEDS for part in _parts(_mobilenet(seed), BLOCKS)),
    "quick": (
        *_parts(Subject(network="resnet8", bound=0.9), *_PEERS, "magnitude"),
        *_parts(Subject(network="resnet8", seed=1, int8=True, bound=0.95), "search-widths", "dense"),
    ),
}
"""Parts by the name of their group."""
