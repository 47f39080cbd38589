"""The report of a run as blocks: result, how it came about, how to repeat it.

A part without data is left out, with a line that says why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from compress.audit.engine import unknown_part
from compress.errors import RunError
from compress.files import write_bytes, write_text
from compress.measure.latency import BUSY, NOT_MEASURED
from compress.measure.metric import PAIRED, Judged, Metric, judged_by
from compress.quantization.placement.decisions import Decision
from compress.recipe.tree import Recipe
from compress.records.files import (
    EngineRow,
    IntervalRow,
    LayerRow,
    RunData,
    is_untrained,
    read_run,
    recipe_tree,
    recipe_value,
)
from compress.records.summary import (
    RULES_TITLE,
    SummaryRow,
    best_variant,
    engines_of,
    family,
    foreign_files,
    rules_text,
    shown_rows,
    slower_sentences,
    summary_columns,
    summary_notes,
    summary_table,
    unavailable_engines,
    variants_of,
)
from compress.report.blocks import (
    FIGURES,
    Block,
    Bullets,
    Code,
    Column,
    Details,
    Document,
    Gallery,
    KeyFigure,
    Picture,
    Section,
    Shown,
    Table,
    Text,
    Tiles,
    code,
    number,
    table,
    to_html,
    to_markdown,
)
from compress.report.figures import Absent, draw_figures, moved, pictures
from compress.support.meters import amount_of, metric_title
from compress.support.text import (
    MISSING,
    display,
    finite,
    fixed,
    image_size_text,
    in_bytes,
    plain,
    scored,
    signed,
    significant,
)
from compress.tasks.segmentation import figure_name, palette
from compress.variants import Variant
from compress.version import DISTRIBUTION

_EQUAL = 0.02  # a speed-up within 2 % is no difference
_UNTRAINED = (
    "The float network is untrained (random weights, train.epochs 0), so that no accuracy of this run says anything. "
)


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The result in words, and its figures."""

    sentence: str
    tiles: tuple[KeyFigure, ...]


def headline(
    metrics: Iterable[Metric],
    *,
    bits: frozenset[int] = frozenset(),
    intervals: Sequence[IntervalRow] = (),
    untrained: bool = False,
) -> Headline:
    """The gain of a run and its cost, in one sentence and a few large figures.

    The comparison does compression the least favour: the fastest quantized row against the fastest float row of one
    engine at the smallest batch size (OpenVINO runs float in bf16 where it can).

    Args:
        metrics: of the run.
        bits: widths of its quantizers; {8} lets the sentence say INT8.
        intervals: of the metric; the sentence says where a difference is not measurable.
        untrained: random float weights, which the sentence says in the place of accuracy.
    """
    metrics = tuple(metrics)
    rows, judged = summary_table(metrics), judged_by(metrics)
    variant, start = _variant(metrics), _UNTRAINED if untrained else ""
    if variant is None:
        return Headline(sentence=start + _nothing_compared(rows, judged), tiles=())
    subject = f"INT8 ({display(variant)})" if bits == {8} else f"The {display(variant)} model"
    before, after = _fairest(rows, variant) or _by_accuracy(rows, variant)
    tiles, parts = [], []
    interval = next((i for i in intervals if after and (i.variant, i.engine) == (variant, after.engine)), None)
    # the float row in the precision of `after`, which the interval is of
    same = (row for row in rows if after and row.variant == Variant.FLOAT and row.engine == after.engine)
    beside = next((row for row in same if row.score is not None), before)
    accuracy = None if untrained else _accuracy(beside, after, judged, interval)
    for said in (_speed(before, after, _paired(metrics, after)), accuracy, _size(before, after)):
        if said:
            parts.append(said[0])
            tiles.append(said[1])
    agreement = next((m for m in metrics if m.name == "agreement" and m.variant == variant and _on(m, after)), None)
    if agreement and agreement.value is not None:
        label = f"of answers: {display(agreement.engine)} finds the class that fake quantization finds"
        tiles.append(KeyFigure(value=f"{fixed(agreement.value, 2)} %", label=label))
    if not parts:
        return Headline(sentence=f"{start}{subject} has no number that can be set beside float's.", tiles=tuple(tiles))
    return Headline(sentence=f"{start}{subject} {_joined(parts)}.", tiles=tuple(tiles))


def _variant(metrics: Sequence[Metric]) -> str | None:
    best = best_variant(metrics)
    if best is not None and best[0] != Variant.FLOAT:
        return best[0]
    others = [v for v in variants_of(metrics) if v != Variant.FLOAT]
    return next((v for v in reversed(others) if any(m.variant == v and m.value is not None for m in metrics)), None)


def _fairest(rows: Sequence[SummaryRow], variant: str) -> tuple[SummaryRow, SummaryRow] | None:
    for name in dict.fromkeys(family(row.engine) for row in rows):
        timed = [row for row in rows if family(row.engine) == name and row.p50_ms is not None]
        batches = [{row.batch_size for row in timed if row.variant == v} for v in (Variant.FLOAT, variant)]
        common = [b for b in batches[0] & batches[1] if b is not None]
        if common:
            at = [row for row in timed if row.batch_size == min(common)]
            first, second = (
                min((r for r in at if r.variant == v), key=lambda r: r.p50_ms or 0.0) for v in (Variant.FLOAT, variant)
            )
            return first, second
    return None


def _by_accuracy(rows: Sequence[SummaryRow], variant: str) -> tuple[SummaryRow | None, SummaryRow | None]:
    """Untimed: the first engine that has the metric of both."""
    by_key = {(row.engine, row.variant): row for row in reversed(rows) if row.score is not None}
    engines = [
        e for e in dict.fromkeys(r.engine for r in rows) if (e, Variant.FLOAT) in by_key and (e, variant) in by_key
    ]
    return (by_key[engines[0], Variant.FLOAT], by_key[engines[0], variant]) if engines else (None, None)


def _paired(metrics: Sequence[Metric], after: SummaryRow | None) -> tuple[float, float, float] | None:
    """Speed over float's as measured in turn, and the ends of its interval."""
    if after is None:
        return None
    place = (after.variant, after.engine, after.batch_size)
    found = {m.name: m.value for m in metrics if (m.variant, m.engine, m.batch_size) == place and m.value is not None}
    ratio, low, high = (found.get(name) for name in PAIRED)
    return None if ratio is None or low is None or high is None else (ratio, low, high)


def _speed(
    before: SummaryRow | None, after: SummaryRow | None, paired: tuple[float, float, float] | None
) -> tuple[str, KeyFigure] | None:
    if not before or not after or before.p50_ms is None or not after.p50_ms:
        return None
    if "p50_ms" in before.partial | after.partial:
        words = f"has a speed that was {NOT_MEASURED}"
        return words, KeyFigure(value="not measured", label=f"speed: {BUSY}; measure again with `bench`")
    ratio, low, high = paired or (before.p50_ms / after.p50_ms, 0.0, 0.0)
    if paired and low <= 1 <= high and abs(ratio - 1) >= _EQUAL:
        words = "shows no measurable difference of speed from float"
    elif abs(ratio - 1) < _EQUAL:
        words = "is as fast as float"
    elif ratio > 1:
        words = f"is {ratio:.2g}× faster than float" if ratio < 10 else f"is {ratio:.0f}× faster than float"
    else:
        words = f"is {1 / ratio:.2g}× slower than float"
    times = f"p50 {_change(significant(before.p50_ms), significant(after.p50_ms), 'ms')}"
    if paired:
        ends = f"95 % interval {fixed(low, 2)} to {fixed(high, 2, '×')}"
        words, times = f"{words} ({ends})", f"{times}, {ends}"
    place = f"on {display(after.engine)}"
    if before.engine != after.engine:
        place = f"on {display(family(after.engine))}, which runs float fastest as {_precision(before.engine)}"
    return (
        f"{words} at batch {after.batch_size} {place}",
        KeyFigure(value=fixed(ratio, 2, "×"), label=f"the speed of float at batch {after.batch_size} {place}, {times}"),
    )


def _accuracy(
    before: SummaryRow | None, after: SummaryRow | None, judged: Judged, interval: IntervalRow | None
) -> tuple[str, KeyFigure] | None:
    if not before or not after or before.score is None or after.score is None:
        return None
    change, title, unit = after.score - before.score, judged.title, judged.unit
    from_to = _change(scored(before.score, unit), scored(after.score, unit), unit)
    moved, tile = scored(abs(change), unit), signed(change, unit)
    amount = amount_of(unit)
    if interval is not None and not interval.measurable and before.engine == after.engine:
        ends = f"{signed(interval.difference_low)} to {signed(interval.difference_high)}"
        label = f"no measurable change of {title} on {interval.images} images ({from_to}; 95 % interval {ends})"
        return f"shows no measurable change of {title} ({from_to})", KeyFigure(value=tile, label=label)
    if tile.startswith("±"):
        words = f"keeps {title} at {judged.text(after.score)}"
    else:
        better = (change > 0) == (judged.direction == "higher")
        if judged.direction == "lower":
            verb, what = ("lowers" if better else "raises"), f"{title} by {moved} {amount}".rstrip()
        else:
            verb = "gains" if better else "loses"
            what = f"{moved} {f'{amount} of ' if amount else ''}{title}"
        words = f"{verb} {what} ({from_to})"
    return words, KeyFigure(value=tile, label=f"{f'{amount} of ' if amount else ''}{title} ({from_to})")


def _size(before: SummaryRow | None, after: SummaryRow | None) -> tuple[str, KeyFigure] | None:
    if not before or not after or before.file_bytes is None or after.file_bytes is None or not before.file_bytes:
        return None
    ratio = after.file_bytes / before.file_bytes
    from_to = _change(in_bytes(before.file_bytes), in_bytes(after.file_bytes))
    return f"takes {ratio:.2f} of the file size", KeyFigure(
        value=fixed(ratio, 2), label=f"of the file size ({from_to})"
    )


def _precision(engine: str) -> str:
    return display(engine.partition(" (")[2].rstrip(")")) or display(engine)


def _change(before: str, after: str, unit: str = "") -> str:
    return f"{before} → {after} {unit}".strip().replace(" ", "\u00a0")


def _on(metric: Metric, row: SummaryRow | None) -> bool:
    return row is None or metric.engine == row.engine


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])}, and {parts[-1]}"


def _nothing_compared(rows: Sequence[SummaryRow], judged: Judged) -> str:
    known = [row for row in rows if row.score is not None]
    if not known:
        return "This run has measured nothing yet."
    best = max(known, key=lambda row: (1 if judged.direction == "higher" else -1) * (row.score or 0.0))
    value = judged.text(best.score or 0.0)
    return f"The float model reaches {value} {judged.title} on {display(best.engine)}; nothing was quantized yet."


def summary_text(title: str, subtitle: str, sentence: str, metrics: Sequence[Metric]) -> str:
    lines = [summary_columns(metrics), *(row.cells() for row in summary_table(metrics))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    head = f"{title} ({subtitle})" if subtitle else title
    return "\n".join([head, sentence, "", *map(plain, rows)]) if len(rows) > 1 else f"{head}\n{sentence}"


def engine_blocks(engines: Sequence[EngineRow]) -> Iterator[Block]:
    unmet = [f"{display(e.variant)} on {display(e.engine)}: {text}" for e in engines for text in e.unmet]
    if unmet:
        yield Text("Not what export.require asks:")
        yield Bullets(tuple(unmet))
    audited = [e for e in engines if e.layers]
    if audited:
        masked = any(e.sparse_kernels for e in audited)
        yield table(
            "variant",
            "engine",
            number("kernels"),
            number("activations an image"),
            number("in fp16 (estimate)"),
            number("weights"),
            number("macs in INT8 %"),
            *(["layers with 2:4 weights"] if masked else []),
            rows=[(*_summary(e), *([e.sparse_kernels or "none"] if masked else [])) for e in audited],
        )
    for engine in audited:
        lines = tuple(f.text for f in engine.findings) + ((engine.advice,) if engine.advice else ())
        if lines:
            yield Text(f"{display(engine.variant)} on {display(engine.engine)}, from the {engine.source}:")
            yield Bullets(lines)
    for engine in audited:
        title = f"Layers of {display(engine.variant)} on {display(engine.engine)} ({len(engine.layers)} kernels)"
        yield Details(title, (_layers(engine),))


def _summary(engine: EngineRow) -> tuple[str, ...]:
    return (
        display(engine.variant),
        display(engine.engine),
        str(engine.kernels),
        moved(engine),
        in_bytes(engine.fp16_bytes),
        in_bytes(engine.weight_bytes),
        f"{100 * engine.int8_share:.1f}",
    )


def _layers(engine: EngineRow) -> Table:
    return table(
        code("layer"),
        "kind",
        "role",
        "reads",
        "writes",
        "computes in",
        number("bytes an image"),
        "kernel",
        rows=[
            (
                layer.onnx_nodes[0] if layer.onnx_nodes else layer.name,
                layer.kind,
                layer.role,
                " ".join(layer.input_types) or "none",
                " ".join(layer.output_types) or "none",
                layer.precision or "no product",
                f"{layer.activation_bytes:,.0f}{unknown_part(layer.unknown_sizes)}",
                "sparse" if layer.sparse else layer.tactic or "chosen when it runs",
            )
            for layer in engine.layers
        ],
    )


PER_CLASS = ("iou_", "ap_")  # beginnings of the names of figures of single classes
_FEW_IMAGES = 20
_MOST_COLOURS = 40


def interval_blocks(run: RunData) -> Iterator[Block]:
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
        rows=[
            (
                display(row.engine),
                display(row.variant),
                fixed(row.value, 2),
                f"{row.low:.2f} to {row.high:.2f}",
                signed(row.difference),
                f"{signed(row.difference_low)} to {signed(row.difference_high)}",
                "measurable" if row.measurable else "no measurable change",
            )
            for row in rows
        ],
    )
    images = rows[0].images
    few = f" {images} images are few: such intervals are too narrow." if images < _FEW_IMAGES else ""
    yield Text(
        f"Intervals are of a paired bootstrap over the {images} evaluation images, 1,000 resamples; those of top-1, "
        "and those of networks whose answers are equal, are exact ones of the binomial distribution. Where that of the "
        f"difference holds zero, these images show no change.{few}",
        note=True,
    )


def predictions_section(run: RunData, precision: Block | Absent | None) -> list[Section]:
    classes = class_table(run.metrics, class_names(run))
    if not run.predictions and precision is None and classes is None:
        return []
    further = [block for block in (classes, precision) if block is not None and not isinstance(block, Absent)]
    return [Section("predictions", "What the networks see", (*prediction_blocks(run), *further))]


def prediction_blocks(run: RunData) -> Iterator[Block]:
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
        yield Gallery(columns=_column_titles(columns), rows=tuple(rows), legend=class_colours(run))
    yield Text("Images spread evenly over the evaluation split, chosen before anything was measured.", note=True)


def _labelled(rows: Sequence[tuple[Shown | None, ...]], columns: Sequence[tuple[str, str]]) -> Gallery:
    """Each image once, with what every network says of it: the pixels of a classifier's images are all the same."""
    once = []
    for row in rows:
        there = [(title, shown) for title, shown in zip(_column_titles(columns), row, strict=True) if shown is not None]
        texts = "; ".join(f"{title}: {shown.text}" for title, shown in there)
        once.append(replace(there[0][1], text=texts, alt=texts) if there else None)
    return Gallery(columns=tuple(f"image {i + 1}" for i in range(len(once))), rows=(tuple(once),))


def _column_titles(columns: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    return tuple(f"{display(v)}, {display(e)}" if e else "truth" for v, e in columns)


def _bytes(run: RunData, file: str) -> bytes | None:
    path = (run.folder / file).resolve()
    if not path.is_relative_to(run.folder.resolve()):
        raise RunError(f"predictions.json names {file!r}, which is outside the run folder")
    return path.read_bytes() if path.is_file() else None


def class_names(run: RunData) -> tuple[str, ...]:
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


def build_document(run: RunData, drawn: Mapping[str, Picture | Absent]) -> Document:
    bits = frozenset(row.num_bits for row in run.placement if row.num_bits is not None)
    top = headline(run.metrics, bits=bits, intervals=run.intervals, untrained=is_untrained(run))
    title, subtitle = _titles(run)
    sections = (
        Section("results", "Results", tuple(_results(run, drawn))),
        *predictions_section(run, drawn.get("precision")),
        *(
            [Section("end-to-end", "From images to classes", tuple(_figure(drawn, "end_to_end")))]
            if run.end_to_end is not None
            else []
        ),
        Section("parity", "Does the engine compute what was trained?", tuple(_parity(run))),
        Section("training", "Training", tuple(_figure(drawn, "training"))),
        Section("noise", "Where accuracy goes", tuple(_noise(run, drawn))),
        Section("bytes", "Where the bytes went", tuple(_figure(drawn, "bytes"))),
        Section("placement", "What is quantized, what is float, and why", tuple(_placement(run, drawn))),
        Section("file", "What is in the exported file", tuple(_audit(run))),
        *([Section("engines", "What the engines made of it", tuple(_engines(run, drawn)))] if run.engines else []),
        Section("machine", "Machine and versions", tuple(_machine(run))),
        Section("method", "How it was measured", tuple(_method(run))),
        Section("recipe", "Recipe", tuple(_recipe(run))),
    )
    return Document(
        title=title,
        subtitle=subtitle,
        headline=top.sentence,
        tiles=Tiles(top.tiles),
        summary=summary_text(title, subtitle, top.sentence, run.metrics),
        sections=sections,
    )


def _titles(run: RunData) -> tuple[str, str]:
    """(title, subtitle) from the recipe; the folder's name where there is none."""
    keys = (("model", "name"), ("data", "name"), ("data", "image_size"), ("quantization", "target"))
    name, data, size, target = (recipe_value(run, *path) for path in keys)
    parts = [
        f"on {data}" if data else "",
        image_size_text(size) if isinstance(size, (int, list)) and size else "",
        f"quantizers placed for {_listed(target)}" if target else "",
    ]
    return plain(str(name or run.folder.resolve().name)), plain(", ".join(part for part in parts if part))


def _listed(target: object) -> str:
    return ", ".join(display(str(name)) for name in (target if isinstance(target, list) else [target]))


def _figure(drawn: Mapping[str, Picture | Absent], name: str) -> Iterator[Block]:
    item = drawn[name]
    yield Text(f"No figure “{item.title}”: {item.reason}.", note=True) if isinstance(item, Absent) else item


def _results(run: RunData, drawn: Mapping[str, Picture | Absent]) -> Iterator[Block]:
    rows = shown_rows(run.metrics)
    if rows:
        titles = summary_columns(run.metrics)
        columns = [Column(title=t, align="left" if i in (0, 2) else "right") for i, t in enumerate(titles)]
        yield Table(columns=tuple(columns), rows=tuple(row.cells() for row in rows), group_by=2)
        starred = " * marks a partial number." if any(row.partial for row in rows) else ""
        yield Text(
            "Speed-up: p50 of float over p50 of the row, on the same engine, precision and batch size. File: the ONNX "
            "file, or the engine's own where it has one; “of float” is its share of the float file." + starred,
            note=True,
        )
    else:
        yield _absence(run, "metrics.json", "No results", "it holds no number")
    yield from pair_blocks(run.metrics)
    yield from interval_blocks(run)
    notes = (*summary_notes(run.metrics), *foreign_files(run), *slower_sentences(run.slower))
    if notes:
        yield Bullets(notes)
    if rules := rules_text(run.slower):
        yield Text(RULES_TITLE)
        yield Code(rules, "yaml")
    away = unavailable_engines(run.metrics)
    if away:
        yield Text("Engines that are not available here:")
        yield Bullets(tuple(f"{display(engine)}: {reason}" for engine, reason in away.items()))
    if run.notes:
        yield Text("What happened on the way:")
        yield Bullets(tuple(run.notes))
    yield from _figure(drawn, "accuracy_latency")
    yield from _figure(drawn, "latency")
    others = [m for m in run.metrics if m.value is not None]
    if others:
        every = table(
            code("metric"),
            "variant",
            "engine",
            number("batch"),
            number("value"),
            "unit",
            "status",
            rows=[
                (
                    m.name,
                    display(m.variant),
                    display(m.engine) if m.engine else "any",
                    str(m.batch_size) if m.batch_size is not None else "any",
                    f"{m.value:.10g}",
                    m.unit,
                    m.status,
                )
                for m in others
            ],
        )
        yield Details(f"Every number ({len(others)} rows, from metrics.json)", (every,))


def pair_blocks(metrics: Sequence[Metric]) -> Iterator[Block]:
    found = {
        (m.name, m.variant, m.engine, m.batch_size): m for m in metrics if m.name in PAIRED and m.value is not None
    }
    rows = []
    for (name, *place), metric in found.items():
        ends = [found.get((end, *place)) for end in PAIRED[1:]]  # type: ignore[arg-type]
        if name == PAIRED[0] and None not in ends:
            low, high = (fixed(end.value, 2, "×") for end in ends if end is not None)
            where = (display(metric.engine), str(metric.batch_size), display(metric.variant))
            rows.append((*where, fixed(metric.value, 2, "×"), f"{low} to {high}", metric.method))
    if rows:
        columns = (number("speed of float"), number("95 % interval"), "how")
        yield table("engine", number("batch"), "variant", *columns, rows=rows)


def _parity(run: RunData) -> Iterator[Block]:
    pairs = dict.fromkeys((m.engine, m.variant) for m in run.metrics if m.name in ("agreement", "sqnr_db") and m.engine)
    order = engines_of(run.metrics)
    found = {(m.engine, m.variant, m.name): m for m in reversed(run.metrics)}
    rows = []
    for engine, variant in sorted(pairs, key=lambda pair: order.index(pair[0])):
        agreement, sqnr = (found.get((engine, variant, name)) for name in ("agreement", "sqnr_db"))
        if (agreement and agreement.value is not None) or (sqnr and sqnr.value is not None):
            values = fixed(agreement.value if agreement else None, 2), fixed(sqnr.value if sqnr else None, 1)
            rows.append((display(engine), display(variant), *values))
    if not rows:
        yield Text("No engine was compared with fake quantization in this run.", note=True)
        return
    yield Text(
        "Each engine against fake quantization in torch, on the same images: the share of images (of pixels in "
        "segmentation) that get the same class, and the signal to quantization noise ratio of the outputs. Where they "
        "are high, the metric seen in training is that of the engine."
    )
    yield table("engine", "variant", number("agreement %"), number("SQNR dB"), rows=rows)


def _noise(run: RunData, drawn: Mapping[str, Picture | Absent]) -> Iterator[Block]:
    yield from _figure(drawn, "sqnr")
    yield from _figure(drawn, "histograms")
    if run.layers:
        layers = table(
            code("layer"),
            "kind",
            number("macs"),
            number("weights"),
            number("float"),
            number("quantized"),
            number("weight SQNR dB"),
            number("output SQNR dB"),
            rows=[_layer_row(row) for row in run.layers],
        )
        yield Details(f"All layers ({len(run.layers)} rows, from layers.json)", (layers,))


def _layer_row(row: LayerRow) -> tuple[str, ...]:
    def decibel(value: float | None) -> str:
        return fixed(value, 1) if value is not None and (finite(value) or value > 0) else MISSING

    return (
        row.name,
        row.kind,
        f"{row.macs:,}" if row.macs is not None else "unknown",
        f"{row.weight_elements:,}" if row.weight_elements else "none",
        in_bytes(row.float_weight_bytes) if row.weight_elements else "none",
        in_bytes(row.quantized_weight_bytes) if row.quantized_weight_bytes is not None else "float",
        decibel(row.weight_sqnr_db),
        decibel(row.activation_sqnr_db),
    )


def _placement(run: RunData, drawn: Mapping[str, Picture | Absent]) -> Iterator[Block]:
    if not run.placement:
        yield _absence(run, "placement.csv", "No placement", "it holds no decision")
        return
    quantized = [row for row in run.placement if row.decision == "quantize"]
    floats = [row for row in run.placement if row.decision != "quantize"]
    modules = len({row.quantizer or row.tensor for row in quantized})
    widths = Counter(f"INT{row.num_bits}" if row.num_bits else "unknown width" for row in quantized).most_common()
    sizes = f"all {widths[0][0]}" if len(widths) == 1 else ", ".join(f"{count} in {width}" for width, count in widths)
    yield Text(
        f"{modules} quantizers are placed on {len(quantized)} tensors ({sizes or 'none'}); {len(floats)} "
        "decisions leave a tensor float."
    )
    for title, rows in (("quantized because", quantized), ("float because", floats)):
        if rows:
            yield table(code("rule"), number("tensors"), title, rows=_reasons(rows))
    if "block" in drawn:
        yield from _figure(drawn, "block")
    yield Details(
        f"Every decision ({len(run.placement)} rows, from placement.csv)",
        (
            table(
                code("tensor"),
                code("layer"),
                "decision",
                number("bits"),
                "scales",
                code("rule"),
                "reason",
                rows=[
                    (
                        row.tensor,
                        row.layer,
                        row.decision,
                        str(row.num_bits) if row.num_bits is not None else "float",
                        _scales(row.decision, row.axis, row.signed),
                        row.rule,
                        row.reason,
                    )
                    for row in run.placement
                ],
            ),
        ),
    )


def _reasons(rows: Sequence[Decision]) -> list[tuple[str, str, str]]:
    """(rule, count, example), the most frequent first."""
    by_rule: dict[str, list[str]] = {}
    for row in rows:
        by_rule.setdefault(row.rule, []).append(row.reason)
    ordered = sorted(by_rule.items(), key=lambda item: -len(item[1]))
    return [
        (rule, str(len(reasons)), reasons[0] if len(set(reasons)) == 1 else f"for example: {reasons[0]}")
        for rule, reasons in ordered
    ]


def _scales(decision: str, axis: int | None, signed: bool | None) -> str:
    if decision != "quantize":
        return "none"
    sign = "" if signed is None else ", signed" if signed else ", unsigned"
    return ("per tensor" if axis is None else f"per channel (axis {axis})") + sign


def _audit(run: RunData) -> Iterator[Block]:
    if not run.operations:
        yield _absence(run, "audit.json", "No audit of the exported file", "it lists no operation")
        return
    counts = []
    for variant in dict.fromkeys(row.variant for row in run.operations):
        rows = [row for row in run.operations if row.variant == variant]
        whole = sum(row.int8 for row in rows)
        elements = sum(row.weight_elements for row in rows)
        covered = sum(row.weight_elements for row in rows if row.int8)
        share = f"{100 * covered / elements:.2f}" if elements else "unknown"
        counts.append((display(variant), str(whole), str(len(rows) - whole), share))
    yield Text("Operations with weights, as the ONNX file holds them: INT8 when input and weight are.")
    yield table("variant", number("INT8"), number("float"), number("of weights INT8 %"), rows=counts)
    left = [row for row in run.operations if not row.int8 and row.variant != Variant.FLOAT]
    if left:
        cells = [(display(row.variant), row.name, row.op_type, row.reason or "no reason given") for row in left]
        listed = table("variant", code("operation"), "type", "why it is not INT8", rows=cells)
        yield listed if len(cells) <= 8 else Details(f"Operations that are not INT8 ({len(cells)} rows)", (listed,))


def _engines(run: RunData, drawn: Mapping[str, Picture | Absent]) -> Iterator[Block]:
    if "engines" in drawn:
        yield from _figure(drawn, "engines")
    yield from engine_blocks(run.engines)


def _machine(run: RunData) -> Iterator[Block]:
    if not run.environment:
        yield _absence(run, "environment.json", "No machine", "it is empty")
        return
    yield table("what", "value", rows=[(key, value) for key, value in flattened(run.environment)])


def flattened(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, text) of nested mappings.

    >>> flattened({"os": "Linux", "versions": {"torch": "2.11"}, "gpus": [], "memory_bytes": 2_000_000_000})
    [('os', 'Linux'), ('versions.torch', '2.11'), ('gpus', 'none'), ('memory', '2.00 GB')]
    """
    if isinstance(value, Mapping) and value:
        return [
            pair for key, item in value.items() for pair in flattened(item, f"{prefix}.{key}" if prefix else str(key))
        ]
    name = prefix.replace("_", " ")
    if isinstance(value, (list, tuple)) and value:
        if any(isinstance(item, (Mapping, list, tuple)) for item in value):
            return [pair for i, item in enumerate(value) for pair in flattened(item, f"{prefix}[{i}]")]
        return [(name, ", ".join(str(item) for item in value))]
    if isinstance(value, bool):
        return [(name, "yes" if value else "no")]
    if prefix.endswith("_bytes") and isinstance(value, (int, float)):
        return [(name.removesuffix(" bytes"), in_bytes(value))]
    if isinstance(value, float):
        return [(name, f"{value:g}")]
    if value is None:
        return [(name, "unknown")]
    return [(name, str(value) if value not in ("", (), []) and value != {} else "none")]


def _method(run: RunData) -> Iterator[Block]:
    methods: dict[str, dict[str, None]] = {}
    batches: dict[str, set[int]] = {}
    for m in run.metrics:
        if m.method and m.value is not None:
            methods.setdefault(m.name, {})[m.method] = None
            if m.batch_size is not None:
                batches.setdefault(m.method, set()).add(m.batch_size)
    rows: dict[str, list[str]] = {}
    for name, method in methods.items():
        rows.setdefault("; ".join(_with_batches(method, batches)), []).append(name)
    if not rows:
        yield Text("metrics.json tells no method." if run.metrics else f"{run.absent.get('metrics.json')}.", note=True)
        return
    yield table(code("metrics"), "how", rows=[(", ".join(names), how) for how, names in rows.items()])
    yield Text(
        f"p50, p90 and p99 are percentiles of the time of one run of a batch; {significant(1e6)} bytes are a MB.",
        note=True,
    )


def _with_batches(methods: Iterable[str], batches: Mapping[str, set[int]]) -> list[str]:
    several = list(methods)
    if len(several) == 1:
        return several
    return [f"batch {', '.join(map(str, sorted(batches[m])))}: {m}" if m in batches else m for m in several]


def _recipe(run: RunData) -> Iterator[Block]:
    if not run.recipe:
        yield _absence(run, "recipe.yaml", "No recipe", "it is empty")
        return
    tree = recipe_tree(run)
    if isinstance(tree, dict) and (own := _changed(tree, yaml.safe_load(Recipe().to_yaml()))):
        yield Text("What differs from the defaults:")
        yield Code(yaml.safe_dump(own, sort_keys=False, allow_unicode=True), "yaml")
    yield Details("As resolved, with every default (recipe.yaml)", (Code(run.recipe, "yaml"),))


def _changed(tree: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in tree.items():
        usual = default.get(key)
        if isinstance(value, dict) and isinstance(usual, dict):
            if inner := _changed(value, usual):
                found[key] = inner
        elif value != usual:
            found[key] = value
    return found


def _absence(run: RunData, file: str, what: str, empty: str) -> Text:
    return Text(f"{what}: {run.absent.get(file) or f'{file} is there, but {empty}'}.", note=True)


_SAME = 0.02  # latencies within 2 % are called equal, as in headlines


def write_comparison(first: Path | str, second: Path | str) -> tuple[Path, Path]:
    """Write `comparison-<second>.md` and `.html` into the first run's folder."""
    runs = (read_run(first), read_run(second))
    if runs[0].folder.resolve() == runs[1].folder.resolve():
        raise RunError(f"{first} and {second} are the same folder: name two runs")
    document = compare_runs(*runs)
    stem = f"comparison-{runs[1].folder.resolve().name}"
    return (
        write_text(runs[0].folder / f"{stem}.md", to_markdown(document)),
        write_text(runs[0].folder / f"{stem}.html", to_html(document)),
    )


def compare_runs(first: RunData, second: RunData) -> Document:
    names = _names(first, second)
    pairs = list(_pairs(first, second))
    if not pairs:
        raise RunError(
            f"{first.folder} and {second.folder} have no variant on the same engine and batch size in common: nothing "
            "can be compared"
        )
    results = table_of(pairs, names, first)
    both = zip(names, (first, second), strict=True)
    said = [
        f"{name}: {headline(run.metrics, intervals=run.intervals, untrained=is_untrained(run)).sentence}"
        for name, run in both
    ]
    recipes = [recipe_tree(run) for run in (first, second)]
    machines = [{**(run.environment or {}), "load_average": None} for run in (first, second)]
    same = "Both were measured on the same machine with the same versions."
    sections = (
        Section("figures", "Figures of both", (results, _note(names))),
        Section("recipes", "Keys that differ", (_differing(code("key"), names, recipes, "The recipes are the same."),)),
        Section("machines", "Machines", (_differing("what", names, machines, same),)),
    )
    return Document(
        title=f"{names[0]} and {names[1]}",
        subtitle="two runs compared",
        headline=" ".join(said),
        tiles=Tiles(()),
        summary="\n".join([*said, "", *(" | ".join(row) for row in results.rows)]),
        sections=sections,
    )


def table_of(pairs: list[tuple[SummaryRow, SummaryRow]], names: tuple[str, str], run: RunData) -> Table:
    title = summary_columns(run.metrics)[3]
    columns = [number(f"{title}, {name}") for name in names] + [number("difference")]
    columns += [number(f"p50 ms, {name}") for name in names] + [number("ratio")]
    return table("engine", number("batch"), "variant", *columns, rows=[_row(*pair) for pair in pairs])


def _row(one: SummaryRow, other: SummaryRow) -> tuple[str, ...]:
    change = None if one.score is None or other.score is None else other.score - one.score
    ratio = MISSING if not one.p50_ms or other.p50_ms is None else fixed(other.p50_ms / one.p50_ms, 2, "×")
    ratio = "not measured" if "p50_ms" in one.partial | other.partial else ratio
    return (
        display(one.engine),
        "not timed" if one.batch_size is None else str(one.batch_size),
        display(one.variant),
        scored(one.score, one.unit),
        scored(other.score, other.unit),
        MISSING if change is None else signed(change, one.unit),
        significant(one.p50_ms),
        significant(other.p50_ms),
        ratio,
    )


def _pairs(first: RunData, second: RunData) -> Iterator[tuple[SummaryRow, SummaryRow]]:
    there = {(row.engine, row.batch_size, row.variant): row for row in summary_table(second.metrics)}
    if judged_by(first.metrics).name != judged_by(second.metrics).name:
        raise RunError(
            f"{first.folder} is judged by {judged_by(first.metrics).title} and {second.folder} by "
            f"{judged_by(second.metrics).title}: runs of one task can be compared"
        )
    for row in summary_table(first.metrics):
        if (key := (row.engine, row.batch_size, row.variant)) in there:
            yield row, there[key]


def _names(first: RunData, second: RunData) -> tuple[str, str]:
    paths = (first.folder.resolve(), second.folder.resolve())
    if paths[0].name != paths[1].name:
        return plain(paths[0].name), plain(paths[1].name)
    return plain(f"{paths[0].parent.name}/{paths[0].name}"), plain(f"{paths[1].parent.name}/{paths[1].name}")


def _note(names: tuple[str, str]) -> Text:
    return Text(
        f"Differences and ratios are {names[1]} against {names[0]}; a busy machine gives no ratio. Both were measured "
        f"at different times: a ratio of latencies within {100 * _SAME:.0f} % says nothing, and on different machines "
        "none does.",
        note=True,
    )


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, plain(str(value))


def _differing(title: Column | str, names: tuple[str, str], trees: Sequence[Any], equal: str) -> Block:
    facts = [dict(_leaves(tree)) for tree in trees]
    keys = [key for key in dict.fromkeys([*facts[0], *facts[1]]) if facts[0].get(key) != facts[1].get(key)]
    rows = [(key, *(fact.get(key, MISSING) for fact in facts)) for key in keys]
    return table(title, *names, rows=rows) if rows else Text(equal)


def write_report(folder: Path | str) -> tuple[Path, Path]:
    """Write figures, report.md and report.html over earlier ones; equal input gives equal files.

    The pages are written last; a figure without data any more is removed.

    Returns:
        (report.md beside figures/, report.html that holds them).
    """
    run = read_run(folder)
    drawn = draw_figures(run)
    document = build_document(run, drawn)
    markdown, page = to_markdown(document), to_html(document)
    for picture in pictures(drawn):
        write_bytes(run.folder / FIGURES / f"{picture.name}.png", picture.png)
    for name in set(drawn) - {picture.name for picture in pictures(drawn)}:
        (run.folder / FIGURES / f"{name}.png").unlink(missing_ok=True)
    return write_text(run.folder / "report.md", markdown), write_text(run.folder / "report.html", page)


CARD_FILE = "model_card.md"
_PIPELINES = {
    "classification": "image-classification",
    "segmentation": "image-segmentation",
    "detection": "object-detection",
    "restoration": "image-to-image",
    "own": "other",
}


def write_card(folder: Path | str) -> Path:
    run = read_run(folder)
    return write_text(run.folder / CARD_FILE, card_of(run))


def card_of(run: RunData) -> str:
    recipe: dict[str, Any] = yaml.safe_load(run.recipe or "") or {}
    rows = [row for row in summary_table(run.metrics) if row.score is not None]
    once = {(row.variant, row.engine): row for row in reversed(rows)}  # the score is the same for every batch size
    model, data = (str((recipe.get(part) or {}).get("name", "")) for part in ("model", "data"))
    task = str(recipe.get("task", "classification"))
    front = {
        "library_name": "onnx",
        "pipeline_tag": _PIPELINES.get(task, task),
        "tags": ["compress", "onnx", "quantization", *sorted({row.variant for row in rows})],
        "model-index": [{"name": model, "results": [_result(run, row, task, data) for row in reversed(once.values())]}],
    }
    titles = summary_columns(run.metrics)
    table = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    table += [f"| {' | '.join(row.cells())} |" for row in rows]
    machine = (run.environment or {}).get("cpu") or (run.environment or {}).get("machine") or "see environment.json"
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n\n# {model}, compressed\n\n"
        f"Made by {DISTRIBUTION} from the recipe below. Every number is an engine's, measured on {machine}; "
        f"`report.html` says how.\n\n"
        + "\n".join(table)
        + f"\n\n## Recipe\n\n```yaml\n{(run.recipe or '').strip()}\n```\n"
    )


def _result(run: RunData, row: SummaryRow, task: str, data: str) -> dict[str, Any]:
    judged = judged_by(run.metrics)
    return {
        "task": {"type": _PIPELINES.get(task, task)},
        "dataset": {"name": data, "type": data},
        "metrics": [
            {
                "type": judged.name,
                "name": f"{judged.title}, {display(row.variant)} on {display(row.engine)}",
                "value": round(float(row.score or 0.0), 4),
            }
        ],
    }
