"""ONNX files without their source: `ptq --onnx` quantizes one, `cast` writes one in half precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from operator import length_hint
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from compress.audit.onnx import audit_onnx
from compress.cli.console import OUT, decibels, print_json, print_next, print_table, progress
from compress.cli.options import (
    DataOption,
    FormOptions,
    ImagesOption,
    JsonOption,
    OpsOption,
    batches_of,
)
from compress.data.base import Preprocessing
from compress.errors import RecipeError, first_few
from compress.files import write_json, write_text
from compress.measure.parity import FileCheck, check_onnx
from compress.onnx_ptq.cast import cast_onnx
from compress.onnx_ptq.dequantize import dequantize_onnx
from compress.onnx_ptq.quantize import QuantizedFile, quantize_onnx_file
from compress.pipeline.studies.sensitivity import plain
from compress.pipeline.studies.tune import Tuned, tune
from compress.quantization import QuantSpec
from compress.quantization.placement.decisions import Decision
from compress.records.files import FILE_RESULT
from compress.support.text import MISSING


def quantize_file(
    onnx: Path,
    data: str | None,
    form: Preprocessing,
    spec: QuantSpec,
    *,
    out: Path | None,
    precision: str,
    ops: Sequence[Path],
    again: bool,
    tuning: dict[str, Any] | None = None,
    every: bool,
    as_json: bool,
) -> None:
    if tuning is not None and ops:
        raise RecipeError("--tune measures files of standard operators: leave --ops or --tune out")
    if out is not None and out.suffix.lower() in {".onnx", ".tflite", ".engine"} and not out.is_dir():
        raise RecipeError(
            f"--out is {out}, a file's name; --out names a folder, in which {onnx.stem}.int8.onnx is written"
        )
    images = spec.calibration_images
    batches = batches_of(data, form, images if tuning is None else images + images // 4)  # a fifth is held back
    folder = out or Path("runs") / f"{onnx.stem}-ptq"
    if again:
        onnx = dequantize_onnx(onnx, folder / f"{onnx.stem}.float.onnx")
    first = First(batches)
    with progress() as bars:
        name = folder / f"{onnx.stem}.int8.onnx"
        if tuning is not None:
            tuned = tune(onnx, first, out=name, spec=spec, precision=precision, progress=bars, **tuning)
            done = tuned.quantized
        else:
            tuned = None
            done = quantize_onnx_file(onnx, first, spec=spec, out=name, precision=precision, ops=ops, progress=bars)
    write_text(folder / "placement.csv", done.placement.to_csv())
    check = check_onnx(onnx, done.path, first.batch, target=done.placement.target, ops=ops)
    _show(onnx, done, check, folder, tuned, every=every, as_json=as_json)


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


def _show(
    onnx: Path,
    done: QuantizedFile,
    check: FileCheck,
    folder: Path,
    tuned: Tuned | None,
    *,
    every: bool,
    as_json: bool,
) -> None:
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
    if tuned is not None:
        groups, forms = (list(map(asdict, rows)) for rows in (tuned.groups, tuned.forms))
        own = {"recommended": str(tuned.path), "why": tuned.why, "floor": tuned.goal, "minutes": tuned.minutes}
        forms = [{**form, "path": str(form["path"])} for form in forms]
        document["tuned"] = plain({"choice": tuned.choice, **own, "groups": groups, "forms": forms})
    write_json(folder / FILE_RESULT, document)
    if as_json:
        print_json(document)
        return
    print_float([row for row in done.placement.decisions if row.decision == "float"], every=every)
    for note in done.notes:
        OUT.print(f"[yellow]note[/] {escape(note)}", markup=True)
    OUT.print(
        f"{count} of {len(audit.rows)} weighted operations are INT8 ({audit.int8_share:.1%} of the weights), "
        f"calibrated on {done.calibration.images} images; the remainder is {audit.float_type}; opset {audit.opset}"
    )
    mend = f"inspect parity --onnx {onnx} --data DATA --mend-sqnr 20"
    for place, ratio in (("the file as it says", check.written_db), (check.engine, check.engine_db)):
        if ratio is not None:
            OUT.print(f"{place} against float, {check.images} images: {decibels(ratio, mend)}", soft_wrap=True)
    if check.warning:
        OUT.print(f"[red]warning[/] {escape(check.warning)}", markup=True)
    if tuned is not None:
        _show_tuned(tuned)
    OUT.print(f"{done.path}\n{folder / 'placement.csv'}", highlight=False, soft_wrap=True)
    print_next(f"bench {onnx} {done.path}", f"inspect onnx {done.path}")


def _show_tuned(tuned: Tuned) -> None:
    columns = ("file", "ms", "against float", "SQNR, dB", "agrees %", "keeps the floor")
    rows = [
        (
            form.label,
            MISSING if form.ms is None else f"{form.ms:.3f}",
            MISSING if form.ratio is None else f"{1 / form.ratio:.2f}x",
            f"{form.effect.sqnr_db:.1f}",
            MISSING if form.effect.agreement is None else f"{100 * form.effect.agreement:.2f}",
            "yes" if form.kept else "no",
        )
        for form in tuned.forms
    ]
    print_table(f"{tuned.goal}, {tuned.images} images held back", columns, rows, numbers=columns[1:5])
    tried = sum(group.gain_ms is not None for group in tuned.groups)
    OUT.print(f"{tried} of {len(tuned.groups)} groups of layers tried, {tuned.minutes:.1f} minutes")
    OUT.print(f"recommended: {tuned.choice} ({tuned.path}): {tuned.why}", markup=False, highlight=False, soft_wrap=True)


def print_float(decisions: Iterable[Decision], *, every: bool) -> None:
    rows = list(decisions)
    if every:
        print_table("stays float", ("operation", "rule", "reason"), [(row.layer, row.rule, row.reason) for row in rows])
        return
    reasons: dict[str, list[str]] = {}
    for row in rows:
        reasons.setdefault(row.reason, []).append(row.layer)
    if rows:
        OUT.print(f"stays float: {len(rows)} operations, by reason (--all lists each):")
    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        OUT.print(f"  {len(names):4} {reason}: {first_few(names)}", markup=False, highlight=False, soft_wrap=True)


_IMAGES = 32


def cast(
    file: Annotated[Path, typer.Argument(help="An ONNX file, float or quantized.")],
    *,
    precision: Annotated[str, typer.Option("--precision", help="fp16 or bf16.")] = "fp16",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="New file; default beside the old one.")] = None,
    half_io: Annotated[
        bool, typer.Option("--half-io", metavar="", help="Inputs and outputs in half precision too.")
    ] = False,
    data: DataOption = None,
    form: FormOptions,
    images: ImagesOption = None,
    ops: OpsOption = None,
    as_json: JsonOption = False,
) -> None:
    batches = None if data is None else batches_of(data, form.of(file), images or _IMAGES)
    done = cast_onnx(file, out, precision=precision, batches=batches, keep_io_types=not half_io, ops=ops or ())
    casting = done.casting
    if as_json:
        document = {"file": str(done.path), "precision": precision, "images": done.images, "sqnr_db": done.sqnr_db}
        counts = {"nodes": casting.nodes, "products": casting.products, "casts": casting.casts}
        kept = [asdict(row) for row in casting.kept]
        print_json({**document, **counts, "float32": kept, "notes": list(done.notes)})
        return
    for note in done.notes:
        OUT.print(f"[yellow]note[/] {escape(note)}", markup=True)
    products = sum(row.product for row in casting.kept)
    OUT.print(
        f"{casting.products} of {casting.products + products} products and {casting.nodes} operations in all are "
        f"{precision}; {len(casting.kept)} stay float32; {casting.casts} Casts"
    )
    if done.sqnr_db is not None:
        OUT.print(f"against float32: {done.sqnr_db:.1f} dB as the file says, ranges of {done.images} images")
    OUT.print(str(done.path), highlight=False, soft_wrap=True)
    print_next(f"bench {file} {done.path}")
