"""Receptive fields as files: the theoretical table; figures and page of effective fields."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor, nn

from compress.errors import ReceptiveFieldError
from compress.files import replacing, write_bytes, write_json, write_text
from compress.graph.inputs import Inputs
from compress.plots.erf import draw_drift, draw_field, draw_table
from compress.plots.style import save_figure, styled, to_png
from compress.receptive import (
    EffectiveReceptiveField,
    ErfDrift,
    ErfOptions,
    ReceptiveFieldTable,
    effective_receptive_field,
    effective_receptive_fields,
    erf_drift,
    receptive_field,
)
from compress.receptive.effective import SHARES, layers_to_show
from compress.report.blocks import render
from compress.support.progress import Progress
from compress.support.text import csv_text

_PAGE_COLUMNS = ("layer", "units", "side, px", "σ, px", "half within, px", "theoretical, px", "share")

_COLUMNS = (
    "name",
    "path",
    "kind",
    "shape",
    "status",
    "size",
    "effective_stride",
    "effective_padding",
    "local_size",
    "smallest",
    "seen",
    "macs",
    "reason",
    "notes",
)


@dataclass(frozen=True, kw_only=True)
class TheoreticalReport:
    """The table and its files."""

    table: ReceptiveFieldTable
    paths: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True)
class ErfReport:
    """The fields and their files.

    Attributes:
        page: HTML in which one picks the layer.
        animation: GIF from the first layer to the last; None of one layer.
    """

    fields: tuple[EffectiveReceptiveField, ...]
    picture: Path
    page: Path
    numbers: Path
    animation: Path | None


def receptive_field_report(
    model: nn.Module, example_inputs: Inputs, *, out: Path | str, name: str = ""
) -> TheoreticalReport:
    """Write the theoretical fields to `receptive_field.{csv,json,png}` in `out`."""
    table = receptive_field(model, example_inputs)
    folder = Path(out)
    numbers = write_json(
        folder / "receptive_field.json",
        {"model": name or table.model, "image_size": list(table.image_size), "rows": table.records()},
    )
    text = write_text(folder / "receptive_field.csv", table_csv(table))
    return TheoreticalReport(
        table=table,
        paths=(text, numbers, save_figure(draw_table(table, name=name), folder / "receptive_field.png", dpi=130)),
    )


def table_csv(table: ReceptiveFieldTable) -> str:
    """CSV; axes are joined with `x`, empty = unknown or none."""
    return csv_text(_COLUMNS, ([_cell(record[column]) for column in _COLUMNS] for record in table.records()))


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(value) if value and isinstance(value[0], str) else "x".join(_cell(v) for v in value)
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def erf_report(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    out: Path | str,
    name: str = "",
    weights: str = "",
    layers: Sequence[str] | None = None,
    count: int = 8,
    options: ErfOptions | None = None,
    progress: Progress | None = None,
) -> ErfReport:
    """Write effective receptive fields as `erf.{png,html,json,gif}` into `out`."""
    batches: Tensor | list[Any] = images if isinstance(images, Tensor) else list(images)
    if len(batches) == 0:
        raise ReceptiveFieldError("no images were given")
    first = _first(batches)
    chosen = list(layers) if layers else layers_to_show(model, first[None], count=count)
    fields = effective_receptive_fields(
        model, batches, layers=chosen, options=options or ErfOptions(), progress=progress
    )
    title = f"{name or fields[0].model}: where its layers look"
    with styled():
        pictures = [to_png(draw_field(field, first, name=name), dpi=110) for field in fields]
    folder = Path(out)
    lead = (
        f"Effective receptive fields over {fields[-1].images} images of {first.shape[1]} x {first.shape[2]} px: how "
        "strongly each pixel moves the central unit of a layer, as the mean magnitude of the gradient (Luo et al., "
        "arXiv 1701.04128)."
    ) + (f" The network has {weights}." if weights else "")
    document = {"model": name or fields[0].model, "weights": weights, "fields": [numbers_of(f) for f in fields]}
    numbers = write_json(folder / "erf.json", document)
    write_bytes(folder / "erf.png", pictures[-1])
    animation = write_animation(folder / "erf.gif", pictures) if len(pictures) > 1 else None
    page = write_text(folder / "erf.html", _erf_page(title, lead, fields, [_lighter(p) for p in pictures]))
    return ErfReport(fields=fields, picture=folder / "erf.png", page=page, numbers=numbers, animation=animation)


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """The drift from the first network to each of the others.

    Attributes:
        pictures: PNG of each, in the same order.
    """

    drifts: dict[str, ErfDrift]
    pictures: tuple[Path, ...]
    numbers: Path


def drift_report(
    networks: Mapping[str, nn.Module],
    images: Tensor | Iterable[Any],
    *,
    out: Path | str,
    name: str = "",
    layer: str | None = None,
) -> DriftReport:
    """Compare effective fields with that of the first network, over the same images."""
    if len(networks) < 2:
        raise ReceptiveFieldError(f"a drift is between two networks; got {', '.join(networks) or 'none'}")
    batches: Tensor | list[Any] = images if isinstance(images, Tensor) else list(images)
    measured = {key: effective_receptive_field(network, batches, layer=layer) for key, network in networks.items()}
    before, *others = measured
    drifts = {key: erf_drift(measured[before], measured[key]) for key in others}
    folder = Path(out)
    first = measured[before]
    text = f"{name or first.model}, {first.layer}, {first.images} images."
    pictures = tuple(
        save_figure(draw_drift(drift, before=before, after=key, text=text), folder / f"erf_drift_{key}.png", dpi=130)
        for key, drift in drifts.items()
    )
    rows = [
        {
            "before": before,
            "after": key,
            "total_variation": drift.total_variation,
            "moved_px": drift.moved_px,
            "radius_change_px": drift.radius_change_px,
            "size_ratio": drift.size_ratio,
            "fields": [numbers_of(drift.before), numbers_of(drift.after)],
        }
        for key, drift in drifts.items()
    ]
    numbers = write_json(folder / "erf_drift.json", {"model": name, "drifts": rows})
    return DriftReport(drifts=drifts, pictures=pictures, numbers=numbers)


def _first(images: Tensor | list[Any]) -> Tensor:
    item = images[0]
    if isinstance(item, (tuple, list)):
        item = item[0]
    if not isinstance(item, Tensor) or item.ndim not in (3, 4) or 0 in item.shape:
        raise ReceptiveFieldError("images must be (N, C, height, width), or batches of that shape")
    return item[0] if item.ndim == 4 else item


def numbers_of(field: EffectiveReceptiveField) -> dict[str, Any]:
    metrics, row = field.metrics, field.theoretical
    return {
        "layer": field.layer,
        "unit": list(field.unit),
        "grid": list(field.grid),
        "centre_px": list(field.centre),
        "images": field.images,
        "dead_images": field.dead_images,
        "upstream": field.upstream,
        "average": field.average,
        "method": field.method,
        "size_px": metrics.size,
        "pixels_above_4.55_percent": metrics.count,
        "sigma_px": list(metrics.gaussian.sigma),
        "gaussian_r_squared": metrics.gaussian.r_squared,
        "radius_50_px": metrics.radius_50,
        "radius_95_px": metrics.radius_95,
        "area_shares": {f"{100 * s:g} %": a for s, a in zip(SHARES, metrics.areas, strict=True)},
        "share_of_theoretical": metrics.theoretical_share,
        "theoretical": None
        if row is None
        else {
            "status": row.status,
            "reason": row.reason,
            "size_px": list(row.size),
            "local_size_px": list(row.local_size),
            "effective_stride_px": [None if s is None else float(s) for s in row.effective_stride],
        },
    }


def _lighter(picture: bytes) -> bytes:
    buffer = io.BytesIO()
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def write_animation(path: Path | str, pictures: Sequence[bytes], *, seconds: float = 0.8) -> Path:
    """Write an endless GIF whose last frame is shown three times as long."""
    frames = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    size = frames[-1].size
    shown = [(f.resize(size) if f.size != size else f).quantize(128) for f in frames]
    times = [int(1000 * seconds)] * (len(shown) - 1) + [int(3000 * seconds)]
    with replacing(path) as temporary:
        shown[0].save(temporary, format="GIF", save_all=True, append_images=shown[1:], duration=times, loop=0)
    return Path(path)


def _erf_page(title: str, lead: str, fields: Sequence[EffectiveReceptiveField], pictures: Sequence[bytes]) -> str:
    """A page on which one picks a layer: no script, nothing fetched; the last field is shown first."""
    views = [
        {
            "layer": field.layer,
            "alt": f"Effective receptive field of {field.layer}: side {field.metrics.size:.0f} pixels",
            "png": base64.b64encode(picture).decode(),
            "cells": _cells(field),
        }
        for field, picture in zip(fields, pictures, strict=True)
    ]
    return render("erf.html", title=title, lead=lead, columns=_PAGE_COLUMNS, views=views)


def _cells(field: EffectiveReceptiveField) -> tuple[str, ...]:
    metrics, row = field.metrics, field.theoretical
    theory = "not known"
    if row is not None and row.status == "global":
        theory = "global" if row.local_size[0] is None else f"global ({row.local_size[0]} without)"
    elif row is not None and row.status == "exact":
        theory = " × ".join(str(s) for s in dict.fromkeys(row.size))
    share = f"{100 * metrics.theoretical_share:.0f} %" if metrics.theoretical_share else "n/a"
    sigma = " × ".join(f"{s:.1f}" for s in metrics.gaussian.sigma)
    units = f"{field.grid[0]} × {field.grid[1]}"
    return field.layer, units, f"{metrics.size:.1f}", sigma, f"{metrics.radius_50:.1f}", theory, share
