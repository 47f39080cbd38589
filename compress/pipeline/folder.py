"""The run folder, its finished steps, and which keys of its recipe may change on a resume."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compress.data.base import Fingerprint, changed_data
from compress.errors import RecipeError, RunError
from compress.files import expand_user, write_text
from compress.measure.metric import Metric
from compress.models.spec import ModelSpec
from compress.pipeline.lock import LOCK_FILE, OWNER_FILE, FolderLock, lock_folder
from compress.pipeline.state import COMMANDS, FORMAT, STATE_FILE, State, read_state_file
from compress.recipe.tree import Recipe, load_recipe
from compress.records.files import METRICS
from compress.support.imports import own_sources
from compress.variants import Variant

RECIPE_FILE = "recipe.yaml"
Data = Mapping[str, Fingerprint]
"""Fingerprint of each split of a run."""


class RunFolder:
    """A folder that holds one run of one recipe."""

    def __init__(self, path: Path, state: State, *, lock: FolderLock | None = None) -> None:
        self.path = path
        self._state = state
        self._lock = lock

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def release(self) -> None:
        """Let other runs into the folder."""
        if self._lock is not None:
            self._lock.close()

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def recipe(self) -> str:
        """Digest of the recipe that the run is of."""
        return self._state.recipe

    @property
    def command(self) -> str:
        """The command that the run was begun with."""
        return self._state.command

    @property
    def changes(self) -> tuple[str, ...]:
        """A line for each key changed on a resume."""
        return self._state.changes

    @property
    def steps(self) -> list[str]:
        """The finished steps, in order."""
        return list(self._state.steps)

    def done(self, step: str) -> bool:
        """Whether a step has ended."""
        return step in self._state.steps

    def facts(self) -> list[dict[str, Any]]:
        """The facts of each finished step, in order."""
        return list(self._state.steps.values())

    def facts_of(self, step: str) -> dict[str, Any]:
        """Return the facts of a step; none if it is unfinished."""
        return dict(self._state.steps.get(step, {}))

    def finish(self, step: str, **facts: Any) -> None:
        """Record an ended step, whole or not at all."""
        self._state = replace(self._state, steps={**self._state.steps, step: facts})
        self._state.write(self.path)

    def check_data(self, data: Data) -> None:
        """Refuse data that differ from those of the begin."""
        changes = changed_data(self._state.data or {}, data)
        if changes:
            raise RunError(
                f"the data are not those that the run in {self.path} was begun with: {'; '.join(changes)}. Restore "
                "them, or begin a new run in another folder (--out)"
            )

    def without_path(self, text: str) -> str:
        """Make paths of this folder relative."""
        for path in dict.fromkeys((self.path.resolve(), self.path.absolute(), self.path)):
            if path.name:
                text = re.sub(rf"(?<![\w./\\-]){re.escape(str(path))}[/\\]", "", text)
        return text

    def metrics(self) -> list[Metric]:
        """Return the numbers so far.

        Raises:
            RunError: their file is damaged.
        """
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

    Raises:
        RunError: the folder holds something else or another run, `resume` is missing, or it is locked.
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
            known: dict[str, Any] = {"recipe": recipe.digest(), "data": _plain(data), "sources": sources}
            state = State(format=FORMAT, command=command, steps={}, begun_in=str(Path.cwd()), **known)
            folder = RunFolder(path, state, lock=lock)
        _write(folder, recipe)
    except BaseException:
        lock.close()
        raise
    _sweep(path)
    return folder


def _plain(data: Data | None) -> dict[str, dict[str, Any]] | None:
    return None if data is None else {name: asdict(fingerprint) for name, fingerprint in data.items()}


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
    """Return an existing run folder.

    Raises:
        RunError: it is none, or its state is damaged.
    """
    return RunFolder(path, read_state_file(path))


def recipe_of(path: Path) -> Recipe:
    """Return a run folder's recipe.

    Raises:
        RunError: there is none.
        RecipeError: this version does not read it.
    """
    if not (path / RECIPE_FILE).is_file():
        raise RunError(f"{path} is no run folder ({RECIPE_FILE} is missing)")
    return load_recipe(path / RECIPE_FILE)


def recipe_from_anywhere(path: Path) -> Recipe:
    """The recipe of a run; relative paths are resolved to where it was begun, where they exist.

    Raises:
        RunError, RecipeError: as `recipe_of`.
    """
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


def _sweep(path: Path) -> None:
    """Remove what killed processes have left."""
    for left_over in path.rglob(".*.part"):
        left_over.unlink(missing_ok=True)


def free_folder(parent: Path, name: str) -> Path:
    """`parent/name`, or the first free `parent/name-2`, ..."""
    number = 1
    while (path := parent / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def latest_folder(parent: Path, name: str, recipe: Recipe | None = None) -> Path:
    """The last numbered folder with a run of `recipe`; else the last, or the first."""
    found = [parent / name]
    while (path := parent / f"{name}-{len(found) + 1}").exists():
        found.append(path)
    own = [path for path in found if recipe is not None and _holds(path, recipe)]
    return (own or found)[-1]


def _holds(path: Path, recipe: Recipe) -> bool:
    try:
        return read_state(path).recipe == recipe.digest()
    except RunError:
        return False


_QUANTIZED = tuple(v.step for v in Variant if v.is_quantized)
_TRAINED = tuple(v.step for v in Variant if v.trained_from)
SENSITIVITY = "sensitivity"
TARGETS_STEP = "targets"
"""Ending of the step that makes a trained network for further targets."""
_FILES = ("export", "engines", "engine_audit", "evaluate", "bench", "end_to_end")

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
"""Steps that depend on a section or key; the longest name counts. Every step depends on any other key."""


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
        """Taken steps that depend on the key."""
        parts = self.key.split(".")
        names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        steps = next((STEPS[name] for name in names if name in STEPS), None)
        return [step for step in taken if steps is None or step.removesuffix(f".{TARGETS_STEP}") in steps]


def differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> Iterator[Difference]:
    """Yield the keys that differ between two recipes as trees."""
    for key in {**there, **here}:
        old, new = there.get(key), here.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            section = isinstance(old, dict) or isinstance(new, dict)
            values = "" if section else f" ({old!r} there, {new!r} here)"
            yield Difference(key=f"{prefix}{key}", words=f"{prefix}{key}{values}")


def taken_steps(folder: Path, finished: Collection[str]) -> list[str]:
    """Finished steps, the training of a checkpoint, a begun study."""
    suffix = ".checkpoint.safetensors"
    begun = (path.name.removesuffix(suffix) for path in sorted(folder.glob(f"*{suffix}")))
    studied = [SENSITIVITY] if any(folder.glob(f"{SENSITIVITY}-*.json")) else []
    return list(dict.fromkeys((*finished, *begun, *studied)))
