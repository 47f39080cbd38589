"""The run folder: what a run is, which of its steps are behind it, and the refusal of another run's folder.

A step first writes its files, each whole or absent, and then its line in `state.json`. A run that is stopped at any
moment therefore finds, on `--resume`, either the line and the files or neither. A lock on `recipe.yaml`, which the
system lets go of when a process ends in whatever way, keeps two runs out of one folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from compress.errors import RunError
from compress.files import write_json, write_text
from compress.measure.metric import Metric
from compress.recipe import Recipe, load_recipe

_STATE = "state.json"
_FORMAT = 1


class RunFolder:
    """A folder that holds one run of one recipe; see `open_run`."""

    def __init__(self, path: Path, state: dict[str, Any], *, lock: IO[bytes] | None = None) -> None:
        self.path = path
        self._state = state
        self._lock = lock

    def __getstate__(self) -> dict[str, Any]:
        """What other processes of the run are sent; the lock stays with the one that writes."""
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
        return str(self._state["recipe"])

    @property
    def command(self) -> str:
        """The command that the run was begun with."""
        return str(self._state["command"])

    @property
    def steps(self) -> list[str]:
        """The steps that have ended, in that order."""
        return list(self._state["steps"])

    def done(self, step: str) -> bool:
        """Whether a step has ended."""
        return step in self._state["steps"]

    def facts(self) -> list[dict[str, Any]]:
        """What each step wrote down, in the order in which they ended."""
        return list(self._state["steps"].values())

    def finish(self, step: str, **facts: Any) -> None:
        """Write down that a step has ended, with facts worth keeping: its line is written last, and in one piece."""
        self._state["steps"][step] = facts
        write_json(self.path / _STATE, self._state)

    def without_path(self, text: str) -> str:
        """`text` with the files of this folder named as they stand in it: a folder that is moved tells no old place."""
        for path in dict.fromkeys((self.path.resolve(), self.path.absolute(), self.path)):
            if path.name:
                text = re.sub(rf"(?<![\w./\\-]){re.escape(str(path))}[/\\]", "", text)
        return text

    def metrics(self) -> list[Metric]:
        """The numbers measured so far."""
        path = self.path / "metrics.json"
        return [Metric.from_dict(row) for row in json.loads(path.read_text())] if path.is_file() else []

    def add_metrics(self, metrics: list[Metric]) -> None:
        """Add numbers; a number for the same thing takes the place of the older one."""
        rows = {_key(m): m for m in self.metrics()} | {_key(m): m for m in metrics}
        write_json(self.path / "metrics.json", [m.to_dict() for m in rows.values()])


def _key(metric: Metric) -> tuple[str, str, str, int | None]:
    return (metric.name, metric.variant, metric.engine, metric.batch_size)


def open_run(path: Path, recipe: Recipe, command: str, *, resume: bool) -> RunFolder:
    """Begin a run in an empty or new folder, or go on with the one that is there.

    Args:
        path: the folder.
        recipe: of the run; written into the folder as resolved.
        command: `train`, `ptq`, `qat` or `prune`.
        resume: go on with a run of the same recipe; without it a folder that holds anything is refused.

    Raises:
        RunError: the folder holds something else, another recipe, or a run and `resume` was not asked for; or another
            process is at work in it.
    """
    state_file = path / _STATE
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; --out names a folder")
    if state_file.is_file():
        return _reopen(path, recipe, resume)
    left = [p for p in path.iterdir() if not p.name.endswith(".part")] if path.is_dir() else []
    if [p for p in left if p.name != "recipe.yaml"]:
        raise RunError(f"{path} holds {left[0].name} and is no run folder; name an empty or a new one with --out")
    path.mkdir(parents=True, exist_ok=True)
    write_text(path / "recipe.yaml", recipe.to_yaml())
    lock = _locked(path)
    _sweep(path)
    state = {"format": _FORMAT, "command": command, "recipe": recipe.digest(), "steps": {}}
    write_json(state_file, state)
    return RunFolder(path, state, lock=lock)


def _locked(path: Path) -> IO[bytes] | None:
    """The recipe file of a folder, open and locked; None where the system or the file system has no such locks.

    Raises:
        RunError: another process holds the lock.
    """
    try:
        import fcntl
    except ImportError:
        return None
    file = (path / "recipe.yaml").open("rb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise RunError(
            f"another process is at work in {path}: wait until it has ended, or name another folder with --out"
        ) from None
    except OSError:
        file.close()
        return None
    return file


def read_state(path: Path) -> RunFolder:
    """An existing run folder.

    Raises:
        RunError: it is not one, or its state cannot be read.
    """
    state_file = path / _STATE
    if not state_file.is_file():
        raise RunError(f"{path} is no run folder ({_STATE} is missing); give one that a command of compress wrote")
    try:
        state = json.loads(state_file.read_text())
        if state["format"] != _FORMAT or not isinstance(state["steps"], dict):
            raise ValueError(f"format {state.get('format')}")
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{state_file} cannot be read ({error}); name a new folder with --out") from None
    return RunFolder(path, state)


def recipe_of(path: Path) -> Recipe:
    """The recipe that a run folder was made with.

    Raises:
        RunError: the folder holds none.
        RecipeError: it holds one that this version does not read.
    """
    if not (path / "recipe.yaml").is_file():
        raise RunError(f"{path} is no run folder (recipe.yaml is missing)")
    return load_recipe(path / "recipe.yaml")


def _reopen(path: Path, recipe: Recipe, resume: bool) -> RunFolder:
    folder = read_state(path)
    if folder.recipe != recipe.digest():
        told = ", ".join(_differences(asdict(recipe_of(path)), asdict(recipe)))
        raise RunError(
            f"{path} holds a run of another recipe; it differs in {told}. Name a new folder with --out, or repeat the "
            "run's own values (--set) to go on with it"
        )
    if not resume:
        raise RunError(f"{path} holds a run of this recipe already; --resume goes on with it, --out names a new folder")
    if not (path / "recipe.yaml").is_file():
        write_text(path / "recipe.yaml", recipe.to_yaml())
    lock = _locked(path)
    _sweep(path)
    return RunFolder(path, folder._state, lock=lock)


def _sweep(path: Path) -> None:
    """Remove what processes that were killed while they were writing have left, in the folder and those in it."""
    for left_over in path.rglob(".*.part"):
        left_over.unlink(missing_ok=True)


def _differences(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys that differ, with both values; of a section that one of the two lacks, its name."""
    for key in {**there, **here}:
        old, new = there.get(key), here.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            section = isinstance(old, dict) or isinstance(new, dict)
            yield f"{prefix}{key}" + ("" if section else f" ({old!r} there, {new!r} here)")


def free_folder(parent: Path, name: str) -> Path:
    """`parent/name`, or `parent/name-2`, ... : the first that does not exist."""
    number = 1
    while (path := parent / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return path


def latest_folder(parent: Path, name: str, recipe: Recipe | None = None) -> Path:
    """The last of `parent/name`, `parent/name-2`, ... that holds a run of `recipe`.

    Where none does, and without a recipe, the last that exists; the first name when none does.
    """
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
