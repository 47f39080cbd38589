"""A run: its folder with lock and state, keys that may change on a resume, what its steps share, networks as files."""

from __future__ import annotations

import errno
import os
import re
import socket
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from compress.data.base import BatchPlan, DataSet, Fingerprint, Split, changed_data
from compress.data.folder import UnlabelledSplit
from compress.detection import BoxesAndScores
from compress.engines import Engine, TorchEngine, build_engine
from compress.engines.registry import target_of
from compress.errors import ModelError, RecipeError, RunError
from compress.files import expand_user, read_json, write_json, write_text
from compress.measure.metric import Metric
from compress.models import ModelSpec
from compress.quantization import QuantSpec, Target
from compress.quantization.quantizer import Quantizer
from compress.recipe.tree import Recipe, load_recipe
from compress.records.files import METRICS, refuse_file_folder
from compress.sparsity import SparsitySpec
from compress.support.imports import own_sources
from compress.support.process import is_alive
from compress.support.progress import NoProgress, Progress
from compress.support.validation import parse
from compress.tasks.base import Task, first_tensor
from compress.tasks.classification import SAME_CLASS
from compress.tasks.load import detector_head, make_task
from compress.training import QATSpec
from compress.training.distributed import SINGLE, Processes
from compress.variants import Variant

LOCK_FILE = ".lock"
OWNER_FILE = ".owner"  # the lock of a file system that has none

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

_HOLDER = re.compile(r"process (\d+) on (.+)")


class FolderLock:
    """A lock, held until it is closed or collected, or the process ends."""

    def __init__(self, release: Callable[[], None]) -> None:
        self.close = weakref.finalize(self, release)


def lock_folder(path: Path) -> FolderLock:
    try:
        file = (path / LOCK_FILE).open("a+b")
    except OSError as error:
        raise RunError(f"{path} cannot be written to ({error}): name another folder with --out") from error
    try:
        import fcntl  # optional: only Unix has it

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        file.close()
        return _by_existence(path)
    except BlockingIOError:
        with file:
            raise _held(path, _holder(file)) from None
    except OSError as error:
        file.close()
        if error.errno in _NO_LOCKS:
            return _by_existence(path)
        raise RunError(f"{path} cannot be locked ({error}): name another folder with --out") from error
    try:
        file.truncate(0)
        file.write(_this_process().encode())
        file.flush()
    except OSError:  # on a full disk the lock is held all the same; only its words are missing
        pass
    return FolderLock(file.close)


def _by_existence(path: Path) -> FolderLock:
    owner = path / OWNER_FILE
    try:
        with owner.open("x", encoding="utf-8") as file:
            file.write(_this_process())
    except FileExistsError:
        with owner.open("rb") as there:
            raise _held(path, _holder(there), by_existence=True) from None
    except OSError as error:
        raise RunError(f"{path} cannot be written to ({error}): name another folder with --out") from error
    return FolderLock(partial(_remove, owner, os.getpid()))


def _remove(owner: Path, pid: int) -> None:
    if os.getpid() == pid:  # and not a process that was forked from it
        owner.unlink(missing_ok=True)


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _holder(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(200).decode(errors="replace").strip()


def _held(path: Path, holder: str, *, by_existence: bool = False) -> RunError:
    by, found = f" ({holder})" if holder else "", _HOLDER.fullmatch(holder)
    wait = "wait until it has ended, or name another folder with --out"
    here = found is not None and found[2] == socket.gethostname()
    if by_existence and here and found is not None and not is_alive(int(found[1])):
        return RunError(
            f"a process that is not there any more{by} has left its lock in {path}, on a file system that releases "
            f"none: remove {path / OWNER_FILE} and run again"
        )
    if found is None or here:
        return RunError(f"another process is at work in {path}{by}: {wait}")
    file = path / (OWNER_FILE if by_existence else LOCK_FILE)
    return RunError(
        f"another process is at work in {path}{by}: {wait}. If that host is dead and its lock has stayed, remove "
        f"{file} and run again"
    )


STATE_FILE = "state.json"
FORMAT = 2
COMMANDS = ("train", "ptq", "qat", "prune")  # commands of a run; others that write into a folder are studies


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a run.

    Attributes:
        data: fingerprints; None = not kept.
        sources: SHA-256 of the recipe's modules by name; None = not kept.
        changes: lines, see `RunFolder`.
        begun_in: folder of the recipe's relative paths; None = not kept.
    """

    format: int
    command: str
    recipe: str
    steps: dict[str, dict[str, Any]]
    data: dict[str, dict[str, Any]] | None = None
    changes: tuple[str, ...] = ()
    sources: dict[str, str] | None = None
    begun_in: str | None = None

    def write(self, folder: Path) -> None:
        write_json(folder / STATE_FILE, asdict(self))


def read_state_file(folder: Path) -> State:
    path = folder / STATE_FILE
    if not path.is_file():
        refuse_file_folder(folder)
        raise RunError(f"{folder} is no run folder ({STATE_FILE} is missing); give one that compress wrote")
    try:
        tree = read_json(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from None
    if not isinstance(tree, dict):
        raise _unreadable(path, f"it holds a {type(tree).__name__}, not an object")
    version = tree.get("format")
    if type(version) is not int or not 1 <= version <= FORMAT:
        raise _unreadable(path, f"its format is {version!r}, and this version of compress reads 1 to {FORMAT}")
    state, lines = parse(State, tree)
    lines = lines or [
        line for name, facts in (state.steps if state else {}).items() for line in _odd_facts(name, facts)
    ]
    if state is None or lines:
        raise _unreadable(path, "; ".join(lines))
    return state


def _odd_facts(step: str, facts: Mapping[str, Any]) -> list[str]:
    notes, left_out = facts.get("notes", []), facts.get("left_out", {})
    odd = []
    if not _all_texts(notes):
        odd.append(f"steps.{step}.notes is {notes!r:.80}: it must be a list of texts")
    if not isinstance(left_out, dict) or not all(map(_all_texts, left_out.values())):
        odd.append(f"steps.{step}.left_out is {left_out!r:.80}: it must hold a list of files for each split")
    return odd


def _all_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _unreadable(path: Path, reason: str) -> RunError:
    return RunError(f"{path} cannot be read: {reason}. Restore the file from a copy, or name a new folder with --out")


_Kept = TypeVar("_Kept")

RECIPE_FILE = "recipe.yaml"
Data = Mapping[str, Fingerprint]  # fingerprint of each split of a run


def read_kept(path: Path, kind: Any, default: _Kept, advice: str) -> _Kept:
    try:
        kept: _Kept = TypeAdapter(kind).validate_python(read_json(path)) if path.is_file() else default
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({error}): {advice}") from error
    return kept


class RunFolder:
    """A folder that holds one run of one recipe."""

    def __init__(self, path: Path, state: State, *, lock: FolderLock | None = None) -> None:
        self.path = path
        self._state = state
        self._lock = lock

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def recipe(self) -> str:
        return self._state.recipe

    @property
    def command(self) -> str:
        return self._state.command

    @property
    def changes(self) -> tuple[str, ...]:
        return self._state.changes

    @property
    def steps(self) -> list[str]:
        return list(self._state.steps)

    def done(self, step: str) -> bool:
        return step in self._state.steps

    def facts(self) -> list[dict[str, Any]]:
        return list(self._state.steps.values())

    def facts_of(self, step: str) -> dict[str, Any]:
        return dict(self._state.steps.get(step, {}))

    def finish(self, step: str, **facts: Any) -> None:
        self._state = replace(self._state, steps={**self._state.steps, step: facts})
        self._state.write(self.path)

    def check_data(self, data: Data) -> None:
        changes = changed_data(self._state.data or {}, data)
        if changes:
            raise RunError(
                f"the data are not those that the run in {self.path} was begun with: {'; '.join(changes)}. Restore "
                "them, or begin a new run in another folder (--out)"
            )

    def without_path(self, text: str) -> str:
        for path in dict.fromkeys((self.path.resolve(), self.path.absolute(), self.path)):
            if path.name:
                text = re.sub(rf"(?<![\w./\\-]){re.escape(str(path))}[/\\]", "", text)
        return text

    def metrics(self) -> list[Metric]:
        return list(METRICS.read(self.path) or ())

    def add_metrics(self, metrics: list[Metric], *, without: Callable[[Metric], bool] = lambda metric: False) -> None:
        """Add numbers in place of those for the same thing and of those that `without` names."""
        rows = {_key(m): m for m in self.metrics() if not without(m)} | {_key(m): m for m in metrics}
        METRICS.write(self.path, list(rows.values()))


def _key(metric: Metric) -> tuple[str, str, str, int | None]:
    return (metric.name, metric.variant, metric.engine, metric.batch_size)


def open_run(path: Path, recipe: Recipe, command: str, *, resume: bool, data: Data | None = None) -> RunFolder:
    """Begin a run in an empty or new folder, or go on with it, and lock the folder.

    With `resume` only keys of steps not yet taken may have changed; for studies none. `data`: fingerprints, compared on
    a resume.
    """
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; --out names a folder")
    _refuse_foreign(path)
    path.mkdir(parents=True, exist_ok=True)
    lock, sources = lock_folder(path), own_sources(_texts(asdict(recipe)))
    try:
        _refuse_foreign(path)
        if (path / STATE_FILE).is_file():
            folder = RunFolder(path, _reopened(path, recipe, command, sources, resume=resume), lock=lock)
            folder.check_data(data or {})
        else:
            kept = None if data is None else {name: asdict(fingerprint) for name, fingerprint in data.items()}
            known: dict[str, Any] = {"recipe": recipe.digest(), "data": kept, "sources": sources}
            state = State(format=FORMAT, command=command, steps={}, begun_in=str(Path.cwd()), **known)
            folder = RunFolder(path, state, lock=lock)
        _write(folder, recipe)
    except BaseException:
        lock.close()
        raise
    for left_over in path.rglob(".*.part"):  # of processes that were killed
        left_over.unlink(missing_ok=True)
    return folder


def _refuse_foreign(path: Path) -> None:
    if not path.is_dir() or (path / STATE_FILE).is_file():
        return
    left = [p.name for p in sorted(path.iterdir()) if not p.name.endswith(".part")]
    foreign = [name for name in left if name not in (RECIPE_FILE, LOCK_FILE, OWNER_FILE)]
    if foreign:
        raise RunError(f"{path} holds {foreign[0]} and is no run folder; name an empty or a new one with --out")


def _write(folder: RunFolder, recipe: Recipe) -> None:
    text, path = recipe.to_yaml(), folder / RECIPE_FILE
    if not path.is_file() or path.read_bytes() != text.encode("utf-8"):
        write_text(path, text)
    if not (folder / STATE_FILE).is_file() or read_state_file(folder.path) != folder._state:
        folder._state.write(folder.path)


def read_state(path: Path) -> RunFolder:
    return RunFolder(path, read_state_file(path))


def recipe_of(path: Path) -> Recipe:
    if not (path / RECIPE_FILE).is_file():
        raise RunError(f"{path} is no run folder ({RECIPE_FILE} is missing)")
    return load_recipe(path / RECIPE_FILE)


def recipe_from_anywhere(path: Path) -> Recipe:
    """The recipe of a run; relative paths are resolved to where it was begun, where they exist."""
    recipe, begun_in = recipe_of(path), read_state_file(path).begun_in
    if begun_in is None or Path(begun_in) == Path.cwd():
        return recipe

    def resolved(text: str | None) -> str | None:
        there = None if text is None else Path(begun_in) / expand_user(text)
        return text if there is None or not there.exists() else str(there)

    def model(spec: ModelSpec) -> ModelSpec:
        name = resolved(spec.name) if spec.name.endswith(".onnx") else spec.name
        return replace(spec, name=name or spec.name, weights=resolved(spec.weights))

    return replace(
        recipe,
        data=replace(recipe.data, root=resolved(recipe.data.root)),
        model=model(recipe.model),
        teacher=None if recipe.teacher is None else model(recipe.teacher),
    )


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _texts(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _texts(value)


def _check_sources(path: Path, state: State, sources: dict[str, str]) -> None:
    before = state.sources or sources
    changed = [name for name in before if before[name] != sources.get(name)]
    if changed and state.steps:
        raise RunError(
            f"the code of {', '.join(changed)} was changed since the run in {path} took the steps "
            f"{', '.join(state.steps)}: its model, data or losses differ from what was trained. Restore it, or begin a "
            "new run in another folder (--out)"
        )


def _reopened(path: Path, recipe: Recipe, command: str, sources: dict[str, str], *, resume: bool) -> State:
    state = read_state_file(path)
    may_change = {command, state.command} <= set(COMMANDS)
    if may_change and command != state.command:  # its networks are exported and measured: that would not be repeated
        raise RunError(
            f"{path} holds a run of `{state.command}`, not of `{command}`: go on with that command, or name a new "
            "folder with --out"
        )
    found = [] if state.recipe == recipe.digest() else _changed(path, recipe)
    taken = taken_steps(path, state.steps)
    bound = [change for change in found if not may_change or change.binding(taken)]
    if bound:
        raise RunError(
            f"{path} holds a run of another recipe; it differs in {', '.join(change.words for change in bound)}. Name "
            "a new folder with --out, or repeat the run's own values (--set) to go on with it. Only keys of steps not "
            f"yet taken may change; taken: {', '.join(taken) or 'none'}"
        )
    if not resume:
        raise RunError(f"{path} holds a run of this recipe already; --resume goes on with it, --out names a new folder")
    _check_sources(path, state, sources)
    after = f"after the steps {', '.join(taken)}" if taken else "before any step"
    lines = (f"the recipe was changed {after}: {change.words}" for change in found)
    return replace(
        state,
        format=FORMAT,
        recipe=recipe.digest(),
        changes=(*state.changes, *lines),
        sources=sources,
        begun_in=str(Path.cwd()),
    )


def _changed(path: Path, recipe: Recipe) -> list[Difference]:
    try:
        old = recipe_of(path)
    except (RunError, RecipeError) as error:
        raise RunError(
            f"{path} holds a run of another recipe, which cannot be compared: {error}. Repeat the run's own values "
            "(--set) to go on with it, or name a new folder with --out"
        ) from None
    return list(differences(asdict(old), asdict(recipe)))


def free_folder(parent: Path, name: str) -> Path:
    number = 1
    while (path := parent / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def latest_folder(parent: Path, name: str, recipe: Recipe | None = None) -> Path:
    """The last numbered folder with a run of `recipe`; else the last, or the first."""
    found = [parent / name]
    while (path := parent / f"{name}-{len(found) + 1}").exists():
        found.append(path)
    own = [path for path in found if recipe is not None and holds_run(path, recipe)]
    return (own or found)[-1]


def holds_run(path: Path, recipe: Recipe, *, step: str = "") -> bool:
    """True if a folder holds a run of a recipe, and one that has finished a step if that is named."""
    try:
        state = read_state(path)
    except RunError:
        return False
    return state.recipe == recipe.digest() and (not step or state.done(step))


_QUANTIZED = tuple(v.step for v in Variant if v.is_quantized)
_TRAINED = tuple(v.step for v in Variant if v.trained_from)
SENSITIVITY = "sensitivity"
TARGETS_STEP = "targets"  # ending of the step that makes a trained network for further targets
_FILES = ("export", "engines", "engine_audit", "evaluate", "bench", "end_to_end")

# Steps that depend on a section or key; the longest name counts. Every step depends on any other key.
STEPS: dict[str, tuple[str, ...]] = {
    "data.root": (),
    "data.workers": (),
    "data.max_pixels": (),
    "quantization": (*_QUANTIZED, *_FILES, SENSITIVITY),
    "qat": (*_TRAINED, *_FILES),
    "sparsity": ("mask", Variant.SPARSE.step, *_FILES),
    "finetune": (Variant.SPARSE.step, *_TRAINED, *_FILES),
    "export": _FILES,
    "export.require": ("engine_audit",),
    "bench": _FILES[1:],
    "search": (),
}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key that differs between two recipes.

    Attributes:
        key: its path, or that of a section that one lacks.
        words: with both values.
    """

    key: str
    words: str

    def binding(self, taken: Collection[str]) -> list[str]:
        parts = self.key.split(".")
        names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        steps = next((STEPS[name] for name in names if name in STEPS), None)
        return [step for step in taken if steps is None or step.removesuffix(f".{TARGETS_STEP}") in steps]


def differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> Iterator[Difference]:
    for key in {**there, **here}:
        old, new = there.get(key), here.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            section = isinstance(old, dict) or isinstance(new, dict)
            values = "" if section else f" ({old!r} there, {new!r} here)"
            yield Difference(key=f"{prefix}{key}", words=f"{prefix}{key}{values}")


def taken_steps(folder: Path, finished: Collection[str]) -> list[str]:
    suffix = ".checkpoint.safetensors"
    begun = (path.name.removesuffix(suffix) for path in sorted(folder.glob(f"*{suffix}")))
    studied = [SENSITIVITY] if any(folder.glob(f"{SENSITIVITY}-*.json")) else []
    return list(dict.fromkeys((*finished, *begun, *studied)))


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
        return [images for images, _ in part.batches(BatchPlan(batch_size=batch_size, limit=limit))]

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
