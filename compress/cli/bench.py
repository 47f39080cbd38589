"""The command `bench`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.console import OUT, print_json, print_next, print_table, progress
from compress.cli.options import JsonOption, SizeOption, sides_of
from compress.cli.report import show_run
from compress.errors import EngineError, RunError, first_few
from compress.measure import BenchSpec, check_bench_spec
from compress.measure.latency import NOT_MEASURED, STAGES, EndToEnd
from compress.measure.metric import Metric
from compress.pipeline.saved import bench_again, bench_end_to_end
from compress.plots.results import draw_end_to_end
from compress.plots.style import WIDE, save_figure, styled
from compress.records.files import END_TO_END
from compress.report.document import write_report
from compress.support.text import display, significant


def bench(
    files: Annotated[list[Path], typer.Argument(help="ONNX files, or one run folder.")],
    engine: Annotated[
        list[str] | None, typer.Option("--engine", help="openvino, onnxruntime, cuda, ...; repeat for several.")
    ] = None,
    batch_size: Annotated[list[int] | None, typer.Option("--batch-size", help="Repeat for several.")] = None,
    seconds: Annotated[float, typer.Option(help="Longest time for each variant and batch size.")] = 3.0,
    size: SizeOption = None,
    end_to_end: Annotated[
        bool,
        typer.Option(
            "--end-to-end", metavar="", help="From images to classes: decoding, preprocessing, engine, top 5."
        ),
    ] = False,
    images: Annotated[
        Path | None, typer.Option(help="With --end-to-end: a folder of JPEG or PNG files; default: the run's own data.")
    ] = None,
    device: Annotated[str, typer.Option(help="With --end-to-end: where pixels are resized, cpu or cuda.")] = "cpu",
    figure: Annotated[
        Path | None, typer.Option(help="With --end-to-end: PNG to draw; default end_to_end.png in a run folder.")
    ] = None,
    mixed: Annotated[bool, typer.Option("--mixed", hidden=True)] = False,
    as_json: JsonOption = False,
) -> None:
    if mixed:
        raise RunError("`bench RUN --mixed` is now `sensitivity --from RUN --costs ENGINE --max-drop POINTS`")
    spec = _spec(engine, batch_size, seconds)
    if end_to_end and size is not None:
        raise RunError("--size is for files with open sides; --end-to-end takes the size of the preprocessing")
    if end_to_end:
        _end_to_end(files, spec, images=images, device=device, figure=figure, as_json=as_json)
        return
    if images is not None or figure is not None or device != "cpu":
        raise RunError("--images, --device and --figure go with --end-to-end")
    with progress() as bars:
        metrics = bench_again(files, spec, sides=() if size is None else sides_of(size), progress=bars)
    _show(files, metrics, as_json=as_json)
    measured = {metric.variant for metric in metrics if metric.value is not None}
    if not measured:
        raise EngineError("nothing was measured: no engine could run any of the files; the reasons are above")
    if lost := [name for name in dict.fromkeys(metric.variant for metric in metrics) if name not in measured]:
        raise EngineError(f"{', '.join(lost)} was not measured: no engine could run it; the reasons are above")


def _spec(engines: list[str] | None, batch_sizes: list[int] | None, seconds: float) -> BenchSpec:
    spec = BenchSpec(
        engines=tuple(engines or ("openvino", "onnxruntime")),
        batch_sizes=tuple(batch_sizes or (1, 32)),
        seconds=seconds,
    )
    check_bench_spec(spec)
    return spec


def _show(files: Sequence[Path], metrics: Sequence[Metric], *, as_json: bool) -> None:
    if len(files) == 1 and files[0].is_dir():
        write_report(files[0])
        show_run(files[0], as_json=as_json)
        return
    if as_json:
        print_json([metric.to_dict() for metric in metrics])
        return
    _show_files(metrics)
    print_next(f"inspect onnx {files[-1]} --rows")


def _show_files(metrics: Sequence[Metric]) -> None:
    found = {(m.engine, m.batch_size, m.variant, m.name): m for m in metrics if m.value is not None}
    first: dict[tuple[str, int | None], Metric] = {}
    rows = []
    for (engine, batch, file, name), p50 in found.items():
        if name != "p50_ms":
            continue
        begin = first.setdefault((engine, batch), p50)
        quiet = not (p50.reason or begin.reason)
        speed = "" if p50 is begin else f"{_number(begin) / _number(p50):.2f}x" if quiet else NOT_MEASURED
        others = (found.get((engine, batch, file, name)) for name in ("p99_ms", "images_per_s"))
        times = ("" if m is None else significant(m.value) for m in (p50, *others))
        rows.append((file, display(engine), batch, next(times), speed, *times))
    columns = ("file", "engine", "batch", "p50 ms", "speed-up", "p99 ms", "images/s")
    if rows:
        print_table(
            "latency; speed-up is against the first file on the same engine", columns, rows, numbers=columns[2:]
        )
    for status, reason in dict.fromkeys((m.status, m.reason) for m in metrics if m.reason):
        where = dict.fromkeys(f"{m.variant} on {display(m.engine)}" for m in metrics if m.reason == reason)
        OUT.print(f"{status} {first_few(where, 3)}: {reason}", highlight=False, soft_wrap=True)


def _number(metric: Metric) -> float:
    return metric.value or math.nan


def _end_to_end(
    files: Sequence[Path], spec: BenchSpec, *, images: Path | None, device: str, figure: Path | None, as_json: bool
) -> None:
    with progress() as bars:
        found = bench_end_to_end(files, spec, images=images, device=device, progress=bars)
    folder = files[0] if files[0].is_dir() else None
    if folder is not None:
        END_TO_END.write(folder, found)
    drawn = figure or (folder / "end_to_end.png" if folder is not None else None)
    if drawn is not None:
        with styled():
            save_figure(draw_end_to_end(found.results, WIDE), drawn)
    if as_json:
        print_json({**found.to_dict(), "figure": None if drawn is None else str(drawn)})
        return
    columns = ("variant and engine", "batch", *(f"{stage} ms" for stage in STAGES), "all ms", "engine's share")
    print_table("from images to classes", columns, map(_stages, found.results), numbers=columns[1:])
    for method in dict.fromkeys(row.method for row in found.results):
        OUT.print(method, highlight=False)
    for name, reason in found.unavailable.items():
        OUT.print(f"unavailable {name}: {reason}", highlight=False)
    if drawn is not None:
        OUT.print(f"figure: {drawn}", highlight=False, soft_wrap=True)
    print_next(f"bench {files[0]}" if folder is None else f"report {folder}")


def _stages(row: EndToEnd) -> tuple[str, ...]:
    times = (f"{row.stage_ms[stage]:.3f}" if stage in row.stage_ms else "not needed" for stage in STAGES)
    return (row.label, str(row.batch_size), *times, f"{row.total_ms:.3f}", f"{row.share('engine'):.0%}")
