"""What `bench --end-to-end` prints: where the time goes from pictures to classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compress.cli.console import OUT, print_json, print_table, progress
from compress.files import replacing, write_json
from compress.measure import BenchSpec
from compress.measure.end_to_end import STAGES, EndToEnd
from compress.pipeline.end_to_end import END_TO_END_FILE, bench_end_to_end
from compress.report.plot_end_to_end import end_to_end_png

_FIGURES = tuple(f"{stage} ms" for stage in STAGES)


def show_end_to_end(
    files: Sequence[Path],
    spec: BenchSpec,
    *,
    images: Path | None,
    device: str,
    figure: Path | None,
    as_json: bool,
) -> None:
    """Measure, draw and print; a run folder keeps the figures as end_to_end.json and end_to_end.png."""
    with progress() as bars:
        found = bench_end_to_end(files, spec, images=images, device=device, progress=bars)
    folder = files[0] if files[0].is_dir() else None
    if folder is not None:
        write_json(folder / END_TO_END_FILE, found.to_dict())
    drawn = figure or (folder / "end_to_end.png" if folder is not None else None)
    if drawn is not None:
        with replacing(drawn) as temporary:
            temporary.write_bytes(end_to_end_png(found.results))
    if as_json:
        print_json({**found.to_dict(), "figure": None if drawn is None else str(drawn)})
        return
    columns = ("variant and engine", "batch", *_FIGURES, "all ms", "engine's share")
    print_table("from pictures to classes", columns, map(_row, found.results), numbers=columns[1:])
    for method in dict.fromkeys(row.method for row in found.results):
        OUT.print(method, markup=False, highlight=False)
    for name, reason in found.unavailable.items():
        OUT.print(f"unavailable {name}: {reason}", markup=False, highlight=False)
    if drawn is not None:
        OUT.print(f"figure: {drawn}", markup=False, highlight=False, soft_wrap=True)


def _row(row: EndToEnd) -> tuple[str, ...]:
    times = (f"{row.stage_ms[stage]:.3f}" if stage in row.stage_ms else "not needed" for stage in STAGES)
    return (row.label, str(row.batch_size), *times, f"{row.total_ms:.3f}", f"{row.share('engine'):.0%}")
