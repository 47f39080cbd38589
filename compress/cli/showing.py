"""Commands over what a run has left: export, bench, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compress.cli.console import OUT, print_json, print_table, progress
from compress.cli.end_to_end import show_end_to_end
from compress.cli.options import JsonOption
from compress.cli.running import show_run
from compress.errors import RunError
from compress.measure import BenchSpec, check_bench_spec
from compress.pipeline.again import bench_again, export_again
from compress.report import write_report

FolderArgument = Annotated[Path, typer.Argument(help="A run folder.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("export")(export)
    app.command("bench")(bench)
    app.command("report")(report)


def export(
    folder: FolderArgument,
    variant: Annotated[str, typer.Option(help="float, ptq or qat; default: the last that the run made.")] = "",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; default <variant>-<precision>.onnx.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32 or fp16, of all that is not quantized.")] = "fp32",
    opset: Annotated[int, typer.Option(help="19 or later.")] = 19,
    static_batch: Annotated[bool, typer.Option("--static-batch", help="Fix the batch size to 1.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a network of a run as ONNX once more, in another precision or opset."""
    path = export_again(
        folder, variant=variant, out=out, precision=precision, opset=opset, dynamic_batch=not static_batch
    )
    if as_json:
        print_json({"onnx": str(path), "bytes": path.stat().st_size})
    else:
        OUT.print(f"{path} ({path.stat().st_size:,} bytes)", highlight=False)


def bench(
    files: Annotated[list[Path], typer.Argument(help="ONNX files, or one run folder.")],
    engine: Annotated[list[str] | None, typer.Option("--engine", help="Repeat for several.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option("--batch-size", help="Repeat for several.")] = None,
    seconds: Annotated[float, typer.Option(help="At most this long for each variant and batch size.")] = 3.0,
    end_to_end: Annotated[
        bool, typer.Option("--end-to-end", help="From pictures to classes: decoding, preprocessing, engine, top 5.")
    ] = False,
    images: Annotated[
        Path | None, typer.Option(help="With --end-to-end: a folder of JPEG or PNG files; default: the run's own data.")
    ] = None,
    device: Annotated[str, typer.Option(help="With --end-to-end: where pixels are resized, cpu or cuda.")] = "cpu",
    figure: Annotated[
        Path | None, typer.Option(help="With --end-to-end: PNG to draw; default end_to_end.png in a run folder.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Latency of ONNX files on engines, all in turn; of a run folder, its report is brought up to date too."""
    spec = BenchSpec(
        engines=tuple(engine or ("openvino", "onnxruntime")), batch_sizes=tuple(batch_size or (1, 32)), seconds=seconds
    )
    check_bench_spec(spec)
    if end_to_end:
        show_end_to_end(files, spec, images=images, device=device, figure=figure, as_json=as_json)
        return
    if images is not None or figure is not None or device != "cpu":
        raise RunError("--images, --device and --figure go with --end-to-end")
    with progress() as bars:
        metrics = bench_again(files, spec, progress=bars)
    if len(files) == 1 and files[0].is_dir():
        write_report(files[0])
        show_run(files[0], as_json=as_json)
        return
    if as_json:
        print_json([metric.to_dict() for metric in metrics])
        return
    rows = [
        (
            m.variant,
            m.engine,
            m.batch_size,
            m.name,
            "unavailable" if m.value is None else f"{m.value:.4g} {m.unit}",
            m.reason,
        )
        for m in metrics
    ]
    print_table("latency", ("file", "engine", "batch", "figure", "value", "why not"), rows)


def report(folder: FolderArgument, as_json: JsonOption = False) -> None:
    """Write the report of a run folder again and print its table."""
    write_report(folder)
    show_run(folder, as_json=as_json)
