"""The commands on a finished run: `report`, `export`, `bundle`, `predict`; what is printed of a run folder."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from compress.cli.console import ERRORS, OUT, print_json, print_next, print_table
from compress.cli.options import FolderArgument, JsonOption, VariantOption
from compress.errors import RunError, near_misses
from compress.pipeline.predict import SERVERS, Prediction, write_bundle
from compress.pipeline.predict import predict as predict_images
from compress.pipeline.run import read_state
from compress.pipeline.saved import export_again
from compress.quantization import TARGETS
from compress.records.files import read_run
from compress.records.summary import (
    RULES_TITLE,
    best_variant,
    foreign_files,
    rules_text,
    shown_rows,
    slower_sentences,
    summary_columns,
    summary_notes,
    unavailable_engines,
)
from compress.report.document import write_comparison, write_report
from compress.support.limits import BATCH
from compress.support.text import MISSING, display

_SERVE = {
    "triton": "docker run --rm -p 8000:8000 -v {models}:/models nvcr.io/nvidia/tritonserver:TAG "
    "tritonserver --model-repository=/models",
    "openvino": "docker run --rm -p 9000:9000 -v {models}:/models openvino/model_server --port 9000 "
    "--model_name {name} --model_path /models/{name}",
}

OtherArgument = Annotated[Path | None, typer.Argument(help="A second run folder, which the first is compared with.")]


def report(folder: FolderArgument, other: OtherArgument = None, as_json: JsonOption = False) -> None:
    if other is None:
        write_report(folder)
        show_run(folder, as_json=as_json)
        return
    markdown, page = write_comparison(folder, other)
    if as_json:
        print_json({"comparison": str(page)})
        return
    OUT.print(markdown.read_text(encoding="utf-8"), highlight=False, soft_wrap=True, markup=False)
    OUT.print(f"comparison: {page}\n            {markdown}", highlight=False, soft_wrap=True)
    print_next(f"report {folder}", f"report {other}")


def show_folder(folder: Path, *, named: bool, resume: bool) -> None:
    """Print a folder that no option named, and the steps that `--resume` finds: a typo would go unnoticed for hours."""
    if not named:
        ERRORS.print(f"folder   {folder}", highlight=False, soft_wrap=True)
    if not resume:
        return
    if (folder / "state.json").is_file():
        text = f"{folder}: finished so far: {', '.join(read_state(folder).steps) or 'no step'}"
    else:
        text = f"{folder} holds no run: a new one begins"
    ERRORS.print(text, highlight=False, soft_wrap=True)


def show_run(folder: Path, *, as_json: bool) -> None:
    data = read_run(folder)
    if as_json:
        metrics = [metric.to_dict() for metric in data.metrics]
        print_json(
            {"folder": str(folder), "report": str(folder / "report.html"), "metrics": metrics, "notes": data.notes}
        )
        return
    agreement = {(m.variant, m.engine): m.value for m in data.metrics if m.name == "agreement"}
    rows = []
    for row in shown_rows(data.metrics):
        agrees = agreement.get((row.variant, row.engine))
        rows.append((*row.cells(), MISSING if agrees is None else f"{agrees:.2f}"))
    columns = (*summary_columns(data.metrics), "agrees %")
    shown = len(columns) if agreement else -1
    print_table(str(folder), columns[:shown], [row[:shown] for row in rows], numbers=columns[3:shown])
    if agreement:
        OUT.print(
            "agrees %: share of images (of pixels in segmentation) with the same class as torch's fake quantization"
        )
    for note in summary_notes(data.metrics):
        OUT.print(note)
    for note in (*foreign_files(data), *slower_sentences(data.slower)):
        OUT.print(f"[yellow]note[/] {escape(note)}", markup=True)
    if rules := rules_text(data.slower):
        OUT.print(RULES_TITLE)
        OUT.print(rules, markup=False, highlight=False, soft_wrap=True)
    for note in data.notes:
        OUT.print(f"[yellow]note[/] {escape(note)}", markup=True)
    for engine, reason in unavailable_engines(data.metrics).items():
        OUT.print(f"[yellow]unavailable[/] {escape(engine)}: {escape(reason)}", markup=True)
    best = best_variant(data.metrics)
    if best is not None:
        OUT.print(f"[bold]ship {display(best[0])}[/]: {escape(best[1])}", markup=True, highlight=False, soft_wrap=True)
    OUT.print(f"report: {folder / 'report.html'}\n        {folder / 'report.md'}", highlight=False, soft_wrap=True)
    if best is None:
        print_next(f"ptq --from {folder}", f"qat --from {folder}")
    else:
        print_next(f"predict {folder} IMAGE.jpg", f"bundle {folder} --server triton", f"sensitivity --from {folder}")


def export(
    folder: FolderArgument,
    variant: VariantOption = "",
    target: Annotated[
        str | None, typer.Option(help="Of a run for several targets: which one's file; default: the first's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; default <variant>-<precision>.onnx.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32 or fp16, of all that is not quantized.")] = "fp32",
    opset: Annotated[int, typer.Option(help="19 or later.")] = 19,
    static_batch: Annotated[bool, typer.Option("--static-batch", metavar="", help="Fix the batch size to 1.")] = False,
    as_json: JsonOption = False,
) -> None:
    if target is not None and target not in TARGETS:
        raise RunError(f"--target is {target!r}{near_misses(target, TARGETS)} (one of: {', '.join(TARGETS)})")
    path = export_again(
        folder,
        variant=variant,
        target=target,
        out=out,
        precision=precision,
        opset=opset,
        dynamic_batch=not static_batch,
    )
    if as_json:
        print_json({"onnx": str(path), "bytes": path.stat().st_size})
    else:
        OUT.print(f"{path} ({path.stat().st_size:,} bytes)", highlight=False)
        print_next(f"bench {path}", f"inspect onnx {path}")


def bundle(
    folder: FolderArgument,
    server: Annotated[str, typer.Option(help=", ".join(SERVERS))] = "triton",
    out: Annotated[Path, typer.Option("--out", "-o", help="The server's model repository.")] = Path("models"),
    variant: VariantOption = "",
    name: Annotated[str, typer.Option(help="Of the model in the repository; default: the run folder's.")] = "",
    max_batch_size: Annotated[int, typer.Option(min=1, max=BATCH, help="Triton: largest batch.")] = 32,
    as_json: JsonOption = False,
) -> None:
    written = write_bundle(folder, server, out, variant=variant, name=name, max_batch_size=max_batch_size)
    if as_json:
        print_json([str(path) for path in written])
    else:
        OUT.print("\n".join(map(str, written)), highlight=False, soft_wrap=True)
        command = _SERVE[server].format(models=out.resolve(), name=written[0].parent.parent.name)
        OUT.print(f"next:\n  {command}", highlight=False, soft_wrap=True)


def predict(
    folder: FolderArgument,
    images: Annotated[list[Path], typer.Argument(help="Files or folders of images.")],
    engine: Annotated[str, typer.Option(help="Engine that runs the network.")] = "openvino",
    variant: VariantOption = "",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of what is drawn or restored; default RUN/predictions."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    found = predict_images(folder, images, engine=engine, variant=variant, out=out)
    if as_json:
        print_json([asdict(prediction) for prediction in found])
        return
    for prediction in found:
        OUT.print(f"{prediction.image}: {_found(prediction)}", highlight=False, soft_wrap=True)
    print_next(f"bundle {folder} --server triton")


def _found(prediction: Prediction) -> str:
    boxes = [
        f"{name} {score:.0%} at {', '.join(f'{side:.0f}' for side in box)}" for name, score, box in prediction.boxes
    ]
    shares = [f"{name} {share:.1%}" for name, share in prediction.classes]
    if prediction.drawn and prediction.restored:
        return prediction.drawn
    drawn = f" ({prediction.drawn})" if prediction.drawn else ""
    return ("; ".join(boxes or shares) or "no box") + drawn
