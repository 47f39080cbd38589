"""The command `build explore`."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from compress.audit.engine import unknown_part
from compress.cli.build import (
    ENGINE,
    BatchOption,
    EngineOption,
    FurtherOption,
    RecipeArgument,
    SizeOption,
    SmOption,
    VariantOption,
    engine_options,
    exported_file,
)
from compress.cli.console import OUT, print_json, print_table, progress
from compress.cli.options import JsonOption, SetOption
from compress.engines.registry import require_engine
from compress.engines.tensorrt.build import check_builder
from compress.engines.tensorrt.library import BUILDERS
from compress.engines.tensorrt.options import PORTABLE_SMS
from compress.pipeline.again import finished_run, network
from compress.pipeline.studies.explore import LEAST_AGREEMENT, Explorer, FormResult, best
from compress.recipe.tree import load_recipe
from compress.roofline_model.model import find_device
from compress.variants import Variant

_IMAGES = 64
_COLUMNS = ("form", "SM", "MB an image", "kernels", "8-bit macs", "least ms", "agreement", "--set")


def explore(
    recipe: RecipeArgument,
    engine: EngineOption = ENGINE,
    sm: SmOption = None,
    batch: BatchOption = None,
    size: SizeOption = None,
    option: FurtherOption = None,
    variant: VariantOption = "",
    device: Annotated[
        str | None, typer.Option(help="Device whose roofs bound the time, such as rtx4090; also finds where INT8 pays.")
    ] = None,
    least_agreement: Annotated[
        float, typer.Option(help="Share of images that must get the float network's class.")
    ] = LEAST_AGREEMENT,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build and audit a network in several forms."""
    parsed = load_recipe(recipe, set_ or ())
    if device is not None:
        find_device(device)  # refused before a run that may be missing is made
    options = engine_options(engine, sm=sm, batch=batch, size=size, further=option, recipe=parsed)
    options = options if options.sms else replace(options, sms=PORTABLE_SMS)
    check_builder(engine, options if BUILDERS[engine].portable else replace(options, sms=()))
    require_engine("onnxruntime")  # compares the answers of the forms
    folder = exported_file(recipe, parsed, variant).parent
    this = finished_run(folder)
    spec = this.recipe.quantization
    with progress() as bars, tempfile.TemporaryDirectory() as files:
        rows = Explorer(
            model=network(this, Variant.FLOAT),
            recipe=this.recipe,
            example=this.example,
            calibration=this.batches("train", 32, limit=spec.calibration_images if spec else 64),
            images=this.batches("val", _IMAGES, limit=_IMAGES)[0],
            folder=Path(files),
            engine=engine,
            options=options,
            device=device,
            batch_size=options.batch[1],
            progress=bars,
        ).explore()
    chosen = best(rows, least_agreement=least_agreement)
    if as_json:
        print_json({"rows": [asdict(row) for row in rows], "best": {sm: r.form for sm, r in chosen.items()}})
        return
    numbers = ("SM", "MB an image", "kernels", "8-bit macs", "least ms", "agreement")
    print_table(f"{folder}: forms on {engine}", _COLUMNS, [_cells(row) for row in rows], numbers=numbers)
    for row in rows:
        if row.error:
            OUT.print(f"{row.form}, SM {row.sm}: not built: {row.error}", highlight=False)
    for capability, row in chosen.items():
        given = " ".join(f"--set '{text}'" for text in row.overrides) or "the recipe as it is"
        text = f"SM {capability}: fewest bytes with {row.form}: {given}"
        OUT.print(text, highlight=False, soft_wrap=True)


def _cells(row: FormResult) -> tuple[str, ...]:
    shown = " ".join(text if len(text) < 50 else f"{text[:47]}..." for text in row.overrides)
    if row.error:
        return (row.form, str(row.sm), "not built", "", "", "", "", shown)
    return (
        row.form,
        str(row.sm),
        f"{row.activation_bytes / 1e6:.2f}{unknown_part(row.unknown_sizes)}",
        str(row.kernels),
        f"{row.int8_share:.0%}",
        "" if row.least_ms is None else f"{row.least_ms:.3f}",
        "not run" if row.agreement is None else f"{row.agreement:.1%}",
        shown,
    )
