"""The effect of a subset of quantizers on a network's outputs and on its metric."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from compress.errors import QuantizationError
from compress.graph.batches import model_inputs
from compress.graph.inputs import TARGET_KEYS, flat_tensors, run_with
from compress.quantization.sensitivity.compare import decibel
from compress.quantization.sensitivity.subset import Subset, run_subset
from compress.support.meters import TaskMetric


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Effect of quantizers on a network's logits.

    Attributes:
        sqnr_db: signal to noise of the logits against the float network's, dB; inf where nothing changed.
        agreement: share of images (of pixels, for segmentation) whose highest logit is the float network's, 0 to 1;
            None for outputs that decide for no class.
        score: the metric, by default top-1; shares are 0 to 1. None for images without targets.
    """

    sqnr_db: float
    agreement: float | None
    score: float | None

    @property
    def noise(self) -> float:
        """Power of the noise over that of the signal: 10^(-sqnr_db / 10)."""
        return float(10 ** (-self.sqnr_db / 10))


@dataclass
class _Top1:
    """Counts correct images, as `argmax` decides."""

    hits: int = 0
    count: int = 0

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.hits += int((logits.argmax(1) == targets.to(logits.device)).sum())
        self.count += len(targets)

    def compute(self) -> float:
        return self.hits / self.count


def _logits(output: Any) -> Tensor:
    tensors: Sequence[Tensor] = flat_tensors(output)
    if not tensors or tensors[0].dim() != 2:
        shape = tuple(tensors[0].shape) if tensors else "no tensor"
        raise QuantizationError(
            f"sensitivity compares logits (N, classes); the network returned {shape}; give the metric of its task"
        )
    return tensors[0]


_TOP1 = TaskMetric(name="top1", make=_Top1, select=_logits, classes=lambda logits: logits.argmax(1))
_OUTPUTS = TaskMetric(name="outputs", make=_Top1, select=flat_tensors)


def outputs_alone(model: nn.Module, batch: Any) -> TaskMetric | None:
    """Return what judges a network without a metric by its outputs alone; None if they are logits of classes."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            found = flat_tensors(model(*model_inputs(model, batch)))
    finally:
        model.train(training)
    return None if len(found) == 1 and found[0].dim() == 2 else _OUTPUTS


@dataclass
class Probe:
    """Holds batches and the float network's outputs, and measures the effect of a subset of quantizers.

    Attributes:
        model: float network.
        qmodel: the same, quantized and calibrated.
        images: batches, with targets or without.
        metric: by which networks are judged; None = top-1.
    """

    model: nn.Module
    qmodel: fx.GraphModule
    images: Iterable[Any]
    metric: TaskMetric | None = None
    batches: list[tuple[Tensor, ...]] = field(default_factory=list, init=False)
    targets: list[Any] = field(default_factory=list, init=False)
    reference: list[Any] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.judge = self.metric or _TOP1
        given = list(self.images)
        self.batches, self.targets = _split(self.qmodel, given)
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                self.reference = [
                    self.judge.select(run_with(self.model, model_inputs(self.model, batch))) for batch in given
                ]
        finally:
            self.model.train(training)

    def of(self, qmodel: fx.GraphModule) -> Probe:
        """Return a probe of another quantized form of the same network, with the float outputs that are known."""
        other = copy(self)
        other.qmodel = qmodel
        return other

    @property
    def count(self) -> int:
        """Number of images."""
        return sum(len(inputs[0]) for inputs in self.batches)

    @property
    def float_score(self) -> float | None:
        """The metric of the float network; None without targets."""
        return self._score(iter(self.reference))

    def effect(self, subset: Subset, *, images: int | None = None) -> Effect:
        """Return the effect of a subset of quantizers; outputs are held one batch at a time.

        Args:
            subset: the quantizers that are on.
            images: stop after the batch with this image, and leave the metric out; None = all images, and the metric.
        """
        signal = noise = 0.0
        same = places = seen = 0
        meter = self.judge.make() if self.targets and images is None else None
        for i, inputs in enumerate(self.batches):
            if images is not None and seen >= images:
                break
            seen += len(inputs[0])
            outputs, reference = self.judge.select(run_subset(self.qmodel, subset, *inputs)), self.reference[i]
            for a, b in zip(flat_tensors(reference), flat_tensors(outputs), strict=True):
                signal += a.double().square().sum().item()
                noise += (a.double() - b.double()).square().sum().item()
            if self.judge.classes is not None:
                equal = self.judge.classes(outputs) == self.judge.classes(reference)
                same, places = same + int(equal.sum()), places + equal.numel()
            if meter is not None:
                meter.update(outputs, self.targets[i])
        return Effect(
            sqnr_db=decibel(signal, noise),
            agreement=same / places if places else None,
            score=None if meter is None else self.judge.figures(meter)[self.judge.name],
        )

    def _score(self, outputs: Iterator[Any]) -> float | None:
        if not self.targets:
            return None
        meter = self.judge.make()
        for value, targets in zip(outputs, self.targets, strict=True):
            meter.update(value, targets)
        return self.judge.figures(meter)[self.judge.name]


def _split(qmodel: fx.GraphModule, images: Iterable[Any]) -> tuple[list[tuple[Tensor, ...]], list[Any]]:
    """Return the inputs of each batch, and their targets if every batch has them."""
    inputs: list[tuple[Tensor, ...]] = []
    targets: list[Any] = []
    for batch in images:
        inputs.append(model_inputs(qmodel, batch))
        if isinstance(batch, Mapping):
            targets += [batch[key] for key in TARGET_KEYS if key in batch][:1]
        elif isinstance(batch, (tuple, list)):
            position = 1 if isinstance(batch[0], (tuple, list)) else len(inputs[-1])
            targets += batch[position : position + 1]
    if not inputs:
        raise QuantizationError("sensitivity got no images to measure on; give at least one batch")
    return inputs, targets if len(targets) == len(inputs) else []
