"""The state that the steps of a run share, and its networks as files and engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from compress.data.base import BatchPlan, DataSet, Split
from compress.data.folder import UnlabelledSplit
from compress.detection import BoxesAndScores
from compress.engines import Engine, TorchEngine, build_engine
from compress.engines.registry import target_of
from compress.errors import ModelError, RecipeError, RunError
from compress.pipeline.folder import RunFolder
from compress.quantization import QuantSpec, Target
from compress.quantization.quantizer import Quantizer
from compress.recipe.tree import Recipe
from compress.sparsity import SparsitySpec
from compress.support.progress import NoProgress, Progress
from compress.tasks.base import Task, first_tensor
from compress.tasks.classification import SAME_CLASS
from compress.tasks.load import detector_head, make_task
from compress.training import QATSpec
from compress.training.distributed import SINGLE, Processes
from compress.variants import Variant

_Section = TypeVar("_Section")


def task_of(recipe: Recipe, data: DataSet) -> Task:
    labels, detector = data.val.labels, None
    if recipe.task == "detection":
        size = data.val.preprocessing.height_width
        detector = detector_head(recipe.model, num_classes=len(labels), image_size=size)
    task = make_task(
        recipe.task, labels, loss=recipe.loss, metric=recipe.metric, decode=recipe.decode, detector=detector
    )
    return replace(task, metric=SAME_CLASS, evidence=None) if recipe.data.name == "images" else task


def boxes_and_scores(recipe: Recipe, data: DataSet) -> BoxesAndScores:
    size = data.val.preprocessing.height_width
    detector = detector_head(recipe.model, num_classes=len(data.val.labels), image_size=size)
    if detector is None:
        raise RecipeError(
            f"export.nms is true, and {recipe.model.name} is no one-stage detector of torchvision: only their decoding "
            "can be put into a file; set export.nms to false"
        )
    return detector.boxes_and_scores()


@dataclass
class Run:
    """A run in progress.

    Attributes:
        resume: steps may go on from files.
        start: a run whose float network is taken over; None = it is trained.
        networks: those made or loaded so far; target None = the first, and networks without quantizers.
    """

    recipe: Recipe
    folder: RunFolder
    data: DataSet
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    processes: Processes = SINGLE
    progress: Progress = field(default_factory=NoProgress)
    resume: bool = False
    start: Path | None = None
    networks: dict[tuple[Variant, Target | None], nn.Module] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def task(self) -> Task:
        return task_of(self.recipe, self.data)

    def name_classes(self, float_model: nn.Module) -> None:
        for split in (self.data.train, self.data.val):
            if isinstance(split, UnlabelledSplit):
                with torch.inference_mode():
                    split.name_classes(lambda images: first_tensor(float_model(images)), self.device)

    @property
    def quantization(self) -> QuantSpec:
        return _needed(self.recipe.quantization, "quantization")

    @property
    def qat(self) -> QATSpec:
        return _needed(self.recipe.qat, "qat")

    @property
    def sparsity(self) -> SparsitySpec:
        return _needed(self.recipe.sparsity, "sparsity")

    @property
    def example(self) -> Tensor:
        return self.batches("train", 2, limit=2)[0]

    def batches(self, split: str, batch_size: int, *, limit: int | None = None) -> list[Tensor]:
        """Unaugmented images on the CPU."""
        part = self.data.train if split == "train" else self.data.val
        plan = BatchPlan(batch_size=batch_size, limit=limit)
        return [images for images, _ in part.batches(plan)]

    def path(self, name: str) -> Path:
        return self.folder / name

    @property
    def variants(self) -> tuple[Variant, ...]:
        return tuple(dict.fromkeys(variant for variant, _ in self.networks))

    @property
    def placements(self) -> dict[Target, Target | None]:
        """The recipe's targets, each as it stands in `networks`: the first one as None."""
        spec = self.recipe.quantization
        return {} if spec is None else {target: target if i else None for i, target in enumerate(spec.targets)}

    def key(self, variant: Variant, target: Target | None) -> tuple[Variant, Target | None]:
        """Return where a network stands in `networks`; another target than the recipe's counts as the first."""
        return variant, self.placements.get(target) if variant.is_quantized and target is not None else None

    def files(self, variant: Variant) -> NetworkFiles:
        """The files of a variant for measuring, and its first target's module in torch."""
        further = [target for target in self.placements.values() if target is not None and variant.is_quantized]
        return NetworkFiles(
            file=self.path(variant.onnx_file),
            further={target: self.path(f"{stem(variant, target)}.onnx") for target in further},
            in_torch=lambda threads: self.in_torch(variant, threads=threads),
        )

    def in_torch(self, variant: Variant, target: Target | None = None, *, threads: int | None = None) -> Engine:
        shape, model = self.data.val.preprocessing.input_shape, self.networks[variant, target]
        label = torch_label(variant, target)
        return TorchEngine(model, shape, device=str(self.device), label=label, threads=threads)

    def finish(self, step: str, **facts: Any) -> None:
        left_out = {name: split.skipped for name, split in self._splits().items() if split.skipped}
        said = {note for facts in self.folder.facts() for note in facts.get("notes", ())}
        read = [f"data, {name}: {note}" for name, split in self._splits().items() for note in split.notes()]
        self.notes += [note for note in read if self.folder.without_path(note) not in said]
        kept = {"notes": [self.folder.without_path(note) for note in self.notes], "left_out": left_out}
        self.folder.finish(step, **facts, **{key: value for key, value in kept.items() if value})
        self.notes.clear()

    def all_notes(self) -> list[str]:
        steps = self.folder.facts()
        notes = [*self.folder.changes, *(note for facts in steps for note in facts.get("notes", ()))]
        for name, split in self._splits().items():
            files = list(dict.fromkeys(file for facts in steps for file in facts.get("left_out", {}).get(name, ())))
            if files:
                more = ", ..." if len(files) > 3 else ""
                count = f"{len(files)} of the {len(split)} files of {name}"
                notes.append(f"data: {count} could not be read and are left out: {', '.join(files[:3])}{more}")
        return notes

    def _splits(self) -> dict[str, Split]:
        return {"train": self.data.train, "val": self.data.val}


def _needed(section: _Section | None, name: str) -> _Section:
    if section is None:
        raise RunError(f"the recipe has {name}: null, and this step needs the section; give it in the recipe")
    return section


def stem(variant: str, target: Target | None = None) -> str:
    """The name of a network's files; None is the first target.

    >>> stem("ptq"), stem("ptq", "openvino")
    ('ptq', 'ptq.openvino')
    """
    return str(variant) if target is None else f"{variant}.{target}"


def layer_weight(model: nn.Module, path: str) -> Tensor:
    weight = model.get_submodule(path).weight
    if not isinstance(weight, Tensor):
        raise ModelError(f"{path}.weight is a {type(weight).__name__}, not a tensor: name a layer that has a weight")
    return weight


def weight_quantizer(model: nn.Module, path: str) -> Quantizer:
    quantizer = model.get_submodule(path).weight_quantizer
    if not isinstance(quantizer, Quantizer):
        raise ModelError(f"{path} has no quantized weight: name a layer that the placement quantizes")
    return quantizer


def torch_label(variant: Variant, target: Target | None = None) -> str:
    if not variant.is_quantized:
        return "torch"
    return f"torch (fake quantization{f', {target}' if target else ''})"


@dataclass(frozen=True, kw_only=True)
class NetworkFiles:
    """One network to be measured.

    Attributes:
        in_torch: makes the engine `torch` with a number of threads; None without a module.
    """

    file: Path
    further: Mapping[Target, Path] = field(default_factory=dict)
    in_torch: Callable[[int | None], Engine] | None = None

    def of(self, engine: str) -> Path:
        target = target_of(engine)
        return self.file if target is None else self.further.get(target, self.file)

    def engine(
        self, name: str, *, batch_size: int | None = None, threads: int | None = None, precision: str | None = None
    ) -> Engine:
        if name == "torch" and self.in_torch is not None:
            return self.in_torch(threads)
        return build_engine(self.of(name), name, batch_size=batch_size, threads=threads, precision=precision)
