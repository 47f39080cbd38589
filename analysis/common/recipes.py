"""Studies that run recipes: each run is a folder that goes on after a stop, and the table is made of their metrics."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import compress
from analysis.common.study import command_line, gpu_software, listed, table
from compress.files import write_text
from compress.records.files import RunData, read_run
from compress.records.summary import summary_columns, summary_table


@dataclass(frozen=True, kw_only=True)
class RecipeRun:
    """A recipe with changed keys.

    Attributes:
        label: names the run in the table and its folder.
        recipe: path or name.
        command: `train`, `ptq`, `qat` or `prune`.
        overrides: `section.key=value` each.
    """

    label: str
    recipe: str
    command: str
    overrides: Sequence[str] = field(default_factory=tuple)


def run_all(runs: Iterable[RecipeRun], folder: Path) -> list[tuple[str, RunData]]:
    found = []
    for run in runs:
        recipe = compress.load_recipe(run.recipe, run.overrides)
        made = compress.run(recipe, run.command, folder / run.label, resume=(folder / run.label).is_dir())
        found.append((run.label, read_run(made.path)))
    return found


def write_table(title: str, runs: Sequence[tuple[str, RunData]], file: Path) -> str:
    names = ["run", *summary_columns(runs[0][1].metrics)]
    lines = [f"# {title}", "", f"`{command_line()}`; {listed(gpu_software('onnxruntime', 'openvino'))}.", ""]
    lines += table(names, ([label, *row.cells()] for label, run in runs for row in summary_table(run.metrics)))
    return write_text(file, "\n".join(lines) + "\n").read_text(encoding="utf-8")
