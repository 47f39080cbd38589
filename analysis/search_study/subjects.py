"""The networks that are compared, each trained on a data set, and the methods that make them smaller."""

from __future__ import annotations

from dataclasses import dataclass

from compress.training.spec import FinetuneSpec, TrainSpec

_LARGER = 1.12
CRITERIA = ("magnitude", "batchnorm", "taylor", "fisher", "reconstruction")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A float network of one seed.

    Attributes:
        network: a name of `analysis.common.cifar.NETWORKS`.
        data: `cifar10`, or `shapes` (32 pixels, 10 classes).
        seed: of its weights and of everything random afterwards.
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
    """A row of the study: one subject made smaller by one method.

    Attributes:
        subject: that it begins with.
        method: of the README's table.
        slack: share of the subject's bound that the network is to keep; uniform widths are made at two of them, so that
            their accuracy is known at the latency of every other network in between.
    """

    subject: Subject
    method: str
    slack: float = 1.0

    @property
    def label(self) -> str:
        """Such as `uniform` or `uniform x1.12`."""
        return self.method if self.slack == 1 else f"{self.method} x{self.slack:g}"

    @property
    def name(self) -> str:
        """Such as `mobilenet_v2-cifar10-0 uniform x1.12`."""
        return f"{self.subject.name} {self.label}"


def parts(names: list[str]) -> list[Part]:
    """Return the parts of the groups that `names` lists, the most valuable first in each.

    Raises:
        KeyError: an unknown group.
    """
    return [part for name in names for part in GROUPS[name]]


def _parts(subject: Subject, *methods: str) -> tuple[Part, ...]:
    found = []
    for method in methods:
        found.append(Part(subject=subject, method=method))
        if method == "uniform":
            found.append(Part(subject=subject, method=method, slack=_LARGER))
    return tuple(found)


def _mobilenet(seed: int, data: str = "cifar10") -> Subject:
    return Subject(network="mobilenet_v2", data=data, seed=seed)


_RESNET56 = Subject(
    network="resnet56", int8=True, bound=0.56, batch=16, widths=(0.5,), pictures=64, lr=0.2, weight_decay=5e-4
)
_PEERS = ("search", "uniform", "torch-pruning")
_OURS = ("search", "uniform")

GROUPS: dict[str, tuple[Part, ...]] = {
    "mobilenet": _parts(_mobilenet(0), *_PEERS, "torch-pruning-global", "dense"),
    "floats": (Part(subject=_RESNET56, method="float"), *(Part(subject=_mobilenet(s), method="float") for s in (1, 2))),
    "shapes-floats": tuple(Part(subject=_mobilenet(s, "shapes"), method="float") for s in (0, 1, 2)),
    "resnet56": _parts(_RESNET56, "search", "dense"),
    "resnet56-widths": _parts(_RESNET56, "uniform", "torch-pruning"),
    "seed1": _parts(_mobilenet(1), *_OURS),
    "seed2": _parts(_mobilenet(2), *_OURS),
    "criteria": _parts(_mobilenet(0), "search-widths", *CRITERIA),
    "shapes": tuple(part for seed in (0, 1, 2) for part in _parts(_mobilenet(seed, "shapes"), *_PEERS)),
    "quick": (
        *_parts(Subject(network="resnet8", bound=0.9), *_PEERS, "magnitude"),
        *_parts(Subject(network="resnet8", seed=1, int8=True, bound=0.9), "search-widths", "dense"),
    ),
}
"""Parts by the name of their group; `floats` only trains the float networks of `resnet56` and of two seeds."""
