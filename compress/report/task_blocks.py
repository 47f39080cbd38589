"""Predictions, classes, and which differences are measurable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from compress.errors import RunError
from compress.measure.metric import Metric
from compress.records.files import RunData, recipe_value
from compress.records.rows import IntervalRow
from compress.records.summary import engines_of, variants_of
from compress.report.blocks import Block, Gallery, Section, Shown, Table, Text, number, table
from compress.report.figures import Absent
from compress.support.meters import metric_title
from compress.support.text import MISSING, display, fixed, signed
from compress.tasks.segmentation import figure_name, palette
from compress.variants import Variant

PER_CLASS = ("iou_", "ap_")
"""Beginnings of the names of figures of single classes."""
_FEW_IMAGES = 20
_MOST_COLOURS = 40


def interval_blocks(run: RunData) -> Iterator[Block]:
    """Differences from float with intervals."""
    rows = [row for row in run.intervals if row.variant != Variant.FLOAT]
    if not rows:
        return
    title = metric_title(rows[0].metric)
    yield table(
        "engine",
        "variant",
        number(f"{title} {rows[0].unit}".strip()),
        number("95 % interval"),
        number("against float"),
        number("95 % interval of it"),
        "change",
        rows=[_interval_row(row) for row in rows],
    )
    images = rows[0].images
    few = f" {images} images are few: such intervals are too narrow." if images < _FEW_IMAGES else ""
    yield Text(
        f"Intervals are of a paired bootstrap over the {images} evaluation images, 1,000 resamples; those of top-1, "
        "and those of networks whose answers are equal, are exact ones of the binomial distribution. Where that of the "
        f"difference holds zero, these images show no change.{few}",
        note=True,
    )


def _interval_row(row: IntervalRow) -> tuple[str, ...]:
    return (
        display(row.engine),
        display(row.variant),
        fixed(row.value, 2),
        f"{row.low:.2f} to {row.high:.2f}",
        signed(row.difference),
        f"{signed(row.difference_low)} to {signed(row.difference_high)}",
        "measurable" if row.measurable else "no measurable change",
    )


def predictions_section(run: RunData, precision: Block | Absent | None) -> list[Section]:
    """Predictions, classes and precision, where the run has them."""
    classes = class_table(run.metrics, class_names(run))
    if not run.predictions and precision is None and classes is None:
        return []
    blocks: list[Block] = [*prediction_blocks(run)]
    if classes is not None:
        blocks.append(classes)
    if precision is not None and not isinstance(precision, Absent):
        blocks.append(precision)
    return [Section("predictions", "What the networks see", tuple(blocks))]


def prediction_blocks(run: RunData) -> Iterator[Block]:
    """Images with the truth and what each network found."""
    if not run.predictions:
        yield Text("No predictions were drawn in this run.", note=True)
        return
    columns = list(dict.fromkeys((row.variant, row.engine) for row in run.predictions))
    found = {(row.image, row.variant): row for row in run.predictions}
    rows = []
    for image in dict.fromkeys(row.image for row in run.predictions):
        shown: list[Shown | None] = []
        for variant, engine in columns:
            row = found.get((image, variant))
            where = f" on {display(engine)}" if engine else ""
            data = None if row is None else _bytes(run, row.file)
            if row is None or data is None:
                shown.append(None)
                continue
            alt = f"image {image}, {display(variant)}{where}{f': {row.text}' if row.text else ''}"
            shown.append(Shown(file=row.file, alt=alt, text=row.text, data=data))
        rows.append(tuple(shown))
    if len(columns) > 1 and run.predictions and all(row.text for row in run.predictions):
        yield _labelled(rows, columns)
    else:
        yield Gallery(columns=_titles(columns), rows=tuple(rows), legend=class_colours(run))
    yield Text("Images spread evenly over the evaluation split, chosen before anything was measured.", note=True)


def _labelled(rows: Sequence[tuple[Shown | None, ...]], columns: Sequence[tuple[str, str]]) -> Gallery:
    """Each image once, with what every network says of it: the pixels of a classifier's images are all the same."""
    once = []
    for row in rows:
        there = [(title, shown) for title, shown in zip(_titles(columns), row, strict=True) if shown is not None]
        texts = "; ".join(f"{title}: {shown.text}" for title, shown in there)
        once.append(replace(there[0][1], text=texts, alt=texts) if there else None)
    return Gallery(columns=tuple(f"image {i + 1}" for i in range(len(once))), rows=(tuple(once),))


def _titles(columns: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(f"{display(v)}, {display(e)}" if e else "truth" for v, e in columns)


def _bytes(run: RunData, file: str) -> bytes | None:
    path = (run.folder / file).resolve()
    if not path.is_relative_to(run.folder.resolve()):
        raise RunError(f"predictions.json names {file!r}, which is outside the run folder")
    return path.read_bytes() if path.is_file() else None


def class_names(run: RunData) -> tuple[str, ...]:
    """The recipe's names of classes; none where the data have them."""
    names = recipe_value(run, "data", "classes")
    return tuple(map(str, names)) if isinstance(names, list) else ()


def class_colours(run: RunData) -> tuple[tuple[str, str], ...]:
    """(name, `#rrggbb`) as in drawn masks and boxes."""
    names = class_names(run)
    if recipe_value(run, "task") in ("classification", "own") or not 0 < len(names) <= _MOST_COLOURS:
        return ()
    colours = (f"#{bytes(colour).hex()}" for colour in palette(len(names)).tolist())
    return tuple(zip(names, colours, strict=True))


def class_table(metrics: Sequence[Metric], names: Sequence[str] = ()) -> Table | None:
    """Figures of classes on the first engine that has them for a quantized network; None without any."""
    named = {figure_name(name): name for name in names}
    rows = [m for m in metrics if m.name.startswith(PER_CLASS) and m.value is not None]
    engines = [engine for engine in engines_of(metrics) if any(m.engine == engine for m in rows)]
    engine = next((e for e in engines if not e.startswith("torch")), engines[0] if engines else None)
    if engine is None:
        return None
    variants = [v for v in variants_of(metrics) if any(m.variant == v and m.engine == engine for m in rows)]
    values = {(m.name, m.variant): m.value for m in rows if m.engine == engine}
    cells = []
    for name in dict.fromkeys(m.name for m in rows if m.engine == engine):
        base = values.get((name, Variant.FLOAT))
        figures = [values.get((name, variant)) for variant in variants]
        worst = [value - base for value in figures[1:] if value is not None and base is not None]
        last = signed(worst[-1]) if worst else MISSING
        key = name.partition("_")[2]
        cells.append((named.get(key, key.replace("_", " ")), *(fixed(value, 2) for value in figures), last))
    kind = "IoU" if rows[0].name.startswith("iou_") else "AP"
    titles = [number(f"{display(variant)} {kind} %") for variant in variants]
    last_title = f"{display(variants[-1])} against float" if len(variants) > 1 else "against float"
    return table(f"class, on {display(engine)}", *titles, number(last_title), rows=cells)
