"""What `build --explore` does: the recipe's network in several forms on the builder, as a table."""

from __future__ import annotations

import tempfile
from pathlib import Path

from compress.cli.console import OUT, print_json, print_table, progress
from compress.engines.engine_findings import unknown_part
from compress.engines.tensorrt_options import TensorRTOptions
from compress.pipeline.again import finished_run, network
from compress.pipeline.explore import Explorer, FormResult, best

_IMAGES = 64
_COLUMNS = ("form", "SM", "MB an image", "kernels", "8-bit macs", "least ms", "agreement", "--set")


def show_exploration(
    folder: Path,
    engine: str,
    options: TensorRTOptions,
    *,
    device: str | None,
    batch_size: int,
    least_agreement: float,
    as_json: bool,
) -> None:
    """Try the forms of a run's float network and say which moves the fewest bytes.

    Args:
        folder: a finished run.
        engine: `tensorrt-rtx` or `tensorrt`.
        options: how engines are built.
        device: under whose roofs times are bounded; None = not.
        batch_size: of these bounds.
        least_agreement: share of images that must get the float network's class, 0 to 1.
        as_json: one JSON document instead of tables.
    """
    this = finished_run(folder)
    spec = this.recipe.quantization
    with progress() as bars, tempfile.TemporaryDirectory() as files:
        rows = Explorer(
            model=network(this, "float"),
            recipe=this.recipe,
            example=this.example,
            calibration=this.batches("train", 32, limit=spec.calibration_images if spec else 64),
            images=this.batches("val", _IMAGES, limit=_IMAGES)[0],
            folder=Path(files),
            engine=engine,
            options=options,
            device=device,
            batch_size=batch_size,
            progress=bars,
        ).explore()
    chosen = best(rows, least_agreement=least_agreement)
    if as_json:
        print_json({"rows": [row.to_dict() for row in rows], "best": {sm: r.form for sm, r in chosen.items()}})
        return
    numbers = ("SM", "MB an image", "kernels", "8-bit macs", "least ms", "agreement")
    print_table(f"{folder}: forms on {engine}", _COLUMNS, [_cells(row) for row in rows], numbers=numbers)
    for row in rows:
        if row.error:
            OUT.print(f"{row.form}, SM {row.sm}: not built: {row.error}", markup=False, highlight=False)
    for sm, row in chosen.items():
        given = " ".join(f"--set '{text}'" for text in row.overrides) or "the recipe as it stands"
        OUT.print(f"SM {sm}: fewest bytes with {row.form}: {given}", markup=False, highlight=False, soft_wrap=True)


def _cells(row: FormResult) -> tuple[str, ...]:
    shown = " ".join(text if len(text) < 50 else f"{text[:47]}..." for text in row.overrides)
    if row.error:
        return (row.form, str(row.sm), "not built", "", "", "", "", shown)
    return (
        row.form,
        str(row.sm),
        f"{row.activation_bytes / 1e6:.2f}{unknown_part(row.untold)}",
        str(row.kernels),
        f"{row.int8_share:.0%}",
        "" if row.least_ms is None else f"{row.least_ms:.3f}",
        "not run" if row.agreement is None else f"{row.agreement:.1%}",
        shown,
    )
