"""The commands that run a recipe: train, ptq, qat, prune; `ptq` also takes an ONNX file without its source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from operator import length_hint
from pathlib import Path
from typing import Any

from rich.markup import escape

from compress.audit.onnx import audit_onnx
from compress.cli.console import OUT, print_json, print_table, progress
from compress.cli.onnx_data import (
    AgainOption,
    ChannelsOption,
    DataOption,
    FileOption,
    ImagesOption,
    LayoutOption,
    MeanOption,
    OpsOption,
    PrecisionOption,
    SizeOption,
    StdOption,
    TargetOption,
    batches_of,
    form_of,
    spec_of,
)
from compress.cli.options import (
    DeviceOption,
    JsonOption,
    OutOption,
    RecipeChoice,
    RecipeOption,
    ResumeOption,
    SetOption,
)
from compress.cli.report import show_finished_steps, show_run
from compress.errors import RecipeError
from compress.files import write_json, write_text
from compress.measure.file_check import FileCheck, check_onnx
from compress.onnx_ptq.dequantize import dequantize_onnx
from compress.onnx_ptq.quantize import QuantizedFile, quantize_onnx_file
from compress.pipeline import COMMANDS, default_folder
from compress.pipeline import run as run_recipe
from compress.recipe.tree import load_recipe
from compress.records.files import FILE_RESULT
from compress.training.distributed import init_processes


def _command(name: str) -> Callable[..., None]:
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
                show_finished_steps(folder)
            with progress(processes.is_main) as bars:
                run_recipe(parsed, name, folder, resume=resume, device=device, processes=processes, progress=bars)
        finally:
            processes.close()
        if processes.is_main:
            show_run(folder, as_json=as_json)

    return command


train, ptq_of_recipe, qat, prune = map(_command, COMMANDS)


def ptq(
    recipe: RecipeChoice = None,
    set_: SetOption = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    onnx: FileOption = None,
    data: DataOption = None,
    target: TargetOption = None,
    precision: PrecisionOption = "fp32",
    size: SizeOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    layout: LayoutOption = "NCHW",
    channels: ChannelsOption = "RGB",
    images: ImagesOption = None,
    ops: OpsOption = None,
    again: AgainOption = False,
) -> None:
    """Run a recipe, or quantize a file."""
    if onnx is None:
        if recipe is None:
            raise RecipeError("give --recipe, or --onnx FILE and --data for a network of which only the file is there")
        if data is not None or target is not None or precision != "fp32" or ops or again:
            raise RecipeError(
                "--data, --target, --precision, --ops and --again belong to --onnx FILE; a recipe has a data, a "
                "quantization and an export section"
            )
        ptq_of_recipe(recipe, set_, out, resume, device, as_json)
        return
    spec = spec_of(recipe, set_, target, images)
    batches = batches_of(data, form_of(onnx, size, mean, std, layout, channels), spec.calibration_images)
    folder = out or Path("runs") / f"{onnx.stem}-ptq"
    if again:
        onnx = dequantize_onnx(onnx, folder / f"{onnx.stem}.float.onnx")
    first = First(batches)
    with progress() as bars:
        name = folder / f"{onnx.stem}.int8.onnx"
        done = quantize_onnx_file(onnx, first, spec=spec, out=name, precision=precision, ops=ops or (), progress=bars)
    write_text(folder / "placement.csv", done.placement.to_csv())
    check = check_onnx(onnx, done.path, first.batch, target=done.placement.target, ops=ops or ())
    _show(done, check, folder, as_json=as_json)


class First:
    """Batches that are read once; the first stays at `batch`."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches, self.batch = batches, None

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.batch = batch if self.batch is None else self.batch
            yield batch

    def __length_hint__(self) -> int:
        return length_hint(self.batches)


def _show(done: QuantizedFile, check: FileCheck, folder: Path, *, as_json: bool) -> None:
    audit = audit_onnx(done.path)
    count = sum(row.int8 for row in audit.rows)
    document = {
        "file": str(done.path),
        "placement": str(folder / "placement.csv"),
        "target": done.placement.target,
        "images": done.calibration.images,
        "layers": len(audit.rows),
        "int8_layers": count,
        "int8_share": audit.int8_share,
        "opset": audit.opset,
        "precision": done.casting.precision if done.casting else audit.float_type,
        "float32": [asdict(row) for row in done.casting.kept] if done.casting else [],
        "notes": list(done.notes),
        "check": asdict(check),
    }
    write_json(folder / FILE_RESULT, document)
    if as_json:
        print_json(document)
        return
    rows = [(row.layer, row.rule, row.reason) for row in done.placement.decisions if row.decision == "float"]
    if rows:
        print_table("stays float", ("operation", "rule", "reason"), rows)
    for note in done.notes:
        OUT.print(f"[yellow]note[/] {escape(note)}", markup=True)
    OUT.print(
        f"{count} of {len(audit.rows)} weighted operations are INT8 ({audit.int8_share:.1%} of the weights), "
        f"calibrated on {done.calibration.images} images; the remainder is {audit.float_type}; opset {audit.opset}"
    )
    if check.written_db is not None:
        there = f", {check.engine_db:.1f} dB on {check.engine}" if check.engine_db is not None else ""
        OUT.print(f"against float: {check.written_db:.1f} dB as the file says{there} ({check.images} images)")
    if check.warning:
        OUT.print(f"[red]warning[/] {escape(check.warning)}", markup=True)
    OUT.print(f"{done.path}\n{folder / 'placement.csv'}", highlight=False, soft_wrap=True)
