"""Loss, metric and images of each task.

Here: names of tasks, their losses, and what a recipe may say of them; without torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from compress.errors import near_misses
from compress.support.imports import is_import_path

TaskName = Literal["classification", "segmentation", "detection", "restoration", "own"]
TASKS: tuple[TaskName, ...] = get_args(TaskName)

# Losses by task; the first is the default.
LOSSES_OF: dict[str, tuple[str, ...]] = {
    "classification": ("cross_entropy",),
    "segmentation": ("cross_entropy", "dice", "cross_entropy+dice"),
    "detection": ("detector",),
    "restoration": ("l1", "l2"),
    "own": (),
}


def lacking_parts(loss: Any, metric: Any) -> str:
    """Return what the task `own` lacks, in words; "" if it has both parts."""
    names = [name for name, value in (("loss", loss), ("metric", metric)) if value is None]
    return f"task own has no {' and no '.join(names)}: name yours, package.module:function" if names else ""


def task_contradictions(task: str, loss: str | None, metric: str | None, decode: str | None = None) -> Iterator[str]:
    """Yield a line if a part is neither a known name nor a path."""
    if decode is not None and (task != "detection" or not is_import_path(decode)):
        yield f"decode is {decode!r}: it must be null, or package.module:function for the task detection"
    if task == "own" and (lacking := lacking_parts(loss, metric)):
        yield lacking
    known = LOSSES_OF[task]
    if not (loss is None or loss in known or is_import_path(loss)):
        yield f"loss is {loss!r}{near_misses(loss, known)} ({allowed_names(known)})"
    if not (metric is None or is_import_path(metric)):
        yield f"metric is {metric!r}: it must be null or package.module:name"


def allowed_names(known: Sequence[str]) -> str:
    return f"one of: {', '.join(known)}, or package.module:function" if known else "package.module:function"


# The former place of this section, which scripts outside import.
sys.modules[f"{__name__}.spec"] = sys.modules[__name__]
