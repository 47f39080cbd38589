"""The file `state.json` of a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.errors import RunError
from compress.files import read_json, write_json
from compress.records.files import refuse_file_folder
from compress.support.validation import parse

STATE_FILE = "state.json"
FORMAT = 2
COMMANDS = ("train", "ptq", "qat", "prune")
"""Commands of a run; others that write into a folder are studies."""


@dataclass(frozen=True, kw_only=True)
class State:
    """The state of a run.

    Attributes:
        format: version.
        steps: facts by finished step, in order.
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
        """Write the file, whole or not at all."""
        write_json(folder / STATE_FILE, asdict(self))


def read_state_file(folder: Path) -> State:
    """The state of a run folder.

    Raises:
        RunError: there is none, or it is damaged.
    """
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
    if not _texts(notes):
        odd.append(f"steps.{step}.notes is {notes!r:.80}: it must be a list of texts")
    if not isinstance(left_out, dict) or not all(map(_texts, left_out.values())):
        odd.append(f"steps.{step}.left_out is {left_out!r:.80}: it must hold a list of files for each split")
    return odd


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _unreadable(path: Path, reason: str) -> RunError:
    return RunError(f"{path} cannot be read: {reason}. Restore the file from a copy, or name a new folder with --out")
