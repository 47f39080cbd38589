"""Commands that run a recipe: train, ptq, qat, prune."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.markup import escape

from compress.cli.console import ERRORS, OUT, print_json, print_table, progress
from compress.cli.options import DeviceOption, JsonOption, OutOption, RecipeOption, ResumeOption, SetOption
from compress.pipeline import default_folder, run
from compress.pipeline.folder import read_state
from compress.recipe import load_recipe
from compress.report import SUMMARY_COLUMNS, read_run, summary_notes, summary_table, unavailable_engines
from compress.training import init_processes

_HELP = {
    "train": "Train the float baseline, export and measure it.",
    "ptq": "Baseline, post-training quantization, export, engines, report.",
    "qat": "Baseline, post-training quantization, quantization-aware training, export, engines, report.",
    "prune": "Baseline, sparsity, fine-tuning; with a quantization section also INT8 with the zeros held.",
}


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for name, text in _HELP.items():
        app.command(name, help=text)(_command(name))


def _command(name: str):  # type: ignore[no-untyped-def]  # noqa: ANN202  (typer reads the inner function's types)
    def command(
        recipe: RecipeOption,
        set_: SetOption = None,
        out: OutOption = None,
        resume: ResumeOption = False,
        device: DeviceOption = None,
        as_json: JsonOption = False,
    ) -> None:
        parsed = load_recipe(recipe, set_ or ())
        processes = init_processes(device)
        try:
            folder = processes.on_main(lambda: out or default_folder(recipe, name, resume=resume, recipe=parsed))
            if resume and processes.is_main:
                tell_begun(folder)
            with progress(processes.is_main) as bars:
                run(parsed, name, folder, resume=resume, device=device, processes=processes, progress=bars)
        finally:
            processes.close()
        if processes.is_main:
            show_run(folder, as_json=as_json)

    return command


def tell_begun(folder: Path) -> None:
    """Say what `--resume` finds: a new run in a folder that was misspelt would go unnoticed for hours."""
    if (folder / "state.json").is_file():
        text = f"{folder}: finished so far: {', '.join(read_state(folder).steps) or 'no step'}"
    else:
        text = f"{folder} holds no run: a new one begins"
    ERRORS.print(text, highlight=False, markup=False, soft_wrap=True)


def show_run(folder: Path, *, as_json: bool) -> None:
    """Print what a run measured, and where its reports are."""
    data = read_run(folder)
    if as_json:
        metrics = [metric.to_dict() for metric in data.metrics]
        print_json(
            {"folder": str(folder), "report": str(folder / "report.html"), "metrics": metrics, "notes": data.notes}
        )
        return
    agreement = {(m.variant, m.engine): m.value for m in data.metrics if m.name == "agreement"}
    found = summary_table(data.metrics)
    rows = []
    for row in [row for row in found if row.batch_size is not None] or found:  # torch is not timed: shown if alone
        agrees = agreement.get((row.variant, row.engine))
        rows.append((*row.cells(), "n/a" if agrees is None else f"{agrees:.2f}"))
    columns = (*SUMMARY_COLUMNS, "agrees %")
    print_table(str(folder), columns, rows, numbers=columns[3:])
    OUT.print("agrees %: share of evaluation images that the engine puts in the same class as torch, fake quantization")
    for note in summary_notes(data.metrics):
        OUT.print(escape(note))
    for note in data.notes:
        OUT.print(f"[yellow]note[/] {escape(note)}")
    for engine, reason in unavailable_engines(data.metrics).items():
        OUT.print(f"[yellow]unavailable[/] {escape(engine)}: {escape(reason)}")
    OUT.print(f"report: {folder / 'report.html'}\n        {folder / 'report.md'}", highlight=False, soft_wrap=True)
