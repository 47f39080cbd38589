"""The result in one sentence and a few large figures.

The comparison does compression the least favour: the fastest quantized row against the fastest float row of one engine
at the smallest batch size (OpenVINO runs float in bf16 where it can).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from compress.measure.latency import BUSY, NOT_MEASURED
from compress.measure.metric import PAIRED, Judged, Metric, judged_by
from compress.records.files import IntervalRow
from compress.records.summary import SummaryRow, best_variant, family, summary_columns, summary_table, variants_of
from compress.support.meters import amount_of
from compress.support.text import display, fixed, in_bytes, plain, scored, signed, significant
from compress.variants import Variant

_EQUAL = 0.02  # a speed-up within 2 % is no difference
_UNTRAINED = (
    "The float network is untrained (random weights, train.epochs 0), so that no accuracy of this run says anything. "
)


@dataclass(frozen=True, kw_only=True)
class KeyFigure:
    """A large figure with what it means."""

    value: str
    label: str


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
    """The gain of a run and its cost.

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
    accuracy = None if untrained else _accuracy(_judged_beside(rows, before, after), after, judged, interval)
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


def _judged_beside(
    rows: Sequence[SummaryRow], before: SummaryRow | None, after: SummaryRow | None
) -> SummaryRow | None:
    """The float row in the precision of `after`, which the interval is of."""
    same = (row for row in rows if after and row.variant == Variant.FLOAT and row.engine == after.engine)
    return next((row for row in same if row.score is not None), before)


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
    sign = 1 if judged.direction == "higher" else -1
    best = max(known, key=lambda row: sign * (row.score or 0.0))
    value = judged.text(best.score or 0.0)
    return f"The float model reaches {value} {judged.title} on {display(best.engine)}; nothing was quantized yet."


def summary_text(title: str, subtitle: str, sentence: str, metrics: Sequence[Metric]) -> str:
    lines = [summary_columns(metrics), *(row.cells() for row in summary_table(metrics))]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    head = f"{title} ({subtitle})" if subtitle else title
    return "\n".join([head, sentence, "", *map(plain, rows)]) if len(rows) > 1 else f"{head}\n{sentence}"
