"""The command line, the provenance and the exit that all studies share."""

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from compress.errors import CompressError
from compress.measure.parity import sqnr_db

Row = dict[str, Any]

# Options whose values are paths of one machine. They do not belong to what was measured.
PATH_OPTIONS = frozenset({"--out", "--before", "--cache", "--peers", "--rows"})


def _sentence(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if not isinstance(error, CompressError):
        return sys.__excepthook__(kind, error, trace)
    return print(f"error {kind.__name__}: {error}", file=sys.stderr)


def option(*names: str, **about: Any) -> tuple[tuple[str, ...], Row]:
    """An argument of a study, given as to argparse's `add_argument`."""
    return names, about


def study_options(
    description: str | None, *options: tuple[tuple[str, ...], Row], out: str | None = None
) -> argparse.Namespace:
    """Parse the command line of a study.

    `out` is the default folder of `--out`, which the environment variable OUT replaces; None leaves the option out.
    What compress refuses ends the process with a sentence from here on, as it does on the command line.
    """
    sys.excepthook = _sentence
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if out is not None:
        folder = Path(os.environ.get("OUT", out))
        parser.add_argument("--out", type=Path, default=folder, help=f"folder of the results; default: {out}")
    for names, about in options:
        parser.add_argument(*names, **about)
    return parser.parse_args()


def command_line(arguments: Sequence[str] | None = None, **shown: str) -> str:
    """Return the command of this process as it is typed in the repository root, without paths of this machine.

    Args:
        arguments: arguments after the module's name; None takes those of this process.
        shown: option -> the word that stands for its paths, such as `data="DIR"` for `--data`.
    """
    spec = sys.modules["__main__"].__spec__
    words, kept = list(sys.argv[1:] if arguments is None else arguments), []
    while words:
        word = words.pop(0)
        if word.removeprefix("--") in shown:
            kept += [word, shown[word.removeprefix("--")]]
            while words and not words[0].startswith("--"):
                words.pop(0)
        elif word in PATH_OPTIONS:
            words = words[1:]
        elif word.partition("=")[0] not in PATH_OPTIONS:
            kept.append(word)
    return " ".join(["python -m", spec.name if spec else sys.argv[0], *kept])


def software(*packages: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def gpu_software(*packages: str) -> Row:
    import torch  # lazy: parts of this module are used without it

    found: Row = {**software(*packages), "torch": torch.__version__}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version()}
    return found


class BudgetSpentError(BaseException):
    """The time has run out. Not an Exception, so that nothing takes it for a failure of its own."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise BudgetSpentError

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def read_rows(file: Path) -> list[Row]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    return [json.loads(line) for line in lines]


def newest_rows(file: Path, key: str) -> dict[str, Row]:
    return {row[key]: row for row in read_rows(file)}


def append_row(file: Path, row: Row) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as opened:
        opened.write(json.dumps(row) + "\n")


def sqnr(expected: Sequence[Any], found: Sequence[Any]) -> float:
    """Signal to noise in dB of arrays that belong together; at most 300, so that a file holds it."""
    joined = (np.concatenate([np.asarray(x, np.float64).ravel() for x in arrays]) for arrays in (expected, found))
    return min(300.0, sqnr_db(*joined))


def listed(row: Row) -> str:
    return ", ".join(f"{key} {value}" for key, value in row.items())


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a table in Markdown."""
    columns = list(head)
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return lines + [f"| {' | '.join(map(str, cells))} |" for cells in rows]


def report_from_file(description: str | None, write: Callable[[Path], object]) -> None:
    write(study_options(description, option("file", type=Path, help="JSON file that the study wrote")).file)
