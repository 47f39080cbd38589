"""The table of variants by engines, the same in terminal and pages; quantized networks that are not faster than float.

A speed-up compares p50 with float on the same engine, precision and batch size alone; `summary_notes` says why a number
is n/a.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from compress.engines.registry import suits, target_of
from compress.errors import first_few
from compress.measure.latency import NOT_MEASURED
from compress.measure.metric import Metric, judged_by
from compress.records.files import RunData, SlowRow, recipe_tree
from compress.support.text import display, fixed, in_bytes, scored, significant
from compress.variants import QUANTIZED, Variant

_SCORE_AT = 3
_COLUMNS = ("engine", "batch", "variant", "p50 ms", "speed-up", "p99 ms", "images/s", "file", "of float")


def summary_columns(metrics: Iterable[Metric]) -> tuple[str, ...]:
    return (*_COLUMNS[:_SCORE_AT], judged_by(metrics).column, *_COLUMNS[_SCORE_AT:])


_PER_BATCH = ("p50_ms", "p90_ms", "p99_ms", "images_per_s")
_OF_THE_FILE = ("", "onnx")
_NAMED = 3  # places that a note names; more are counted
# Figures of files; those of a run for several targets name the engine that the file was made for.
_SIZES = ("file_bytes", "weight_bytes")
_ROW_METRICS = ("p50_ms", "p99_ms", "images_per_s", "file_bytes")


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """A variant on an engine at a batch size. None = not measured.

    Attributes:
        score: of the judging metric, on this engine.
        speedup: None if either p50 is partial.
    """

    engine: str
    batch_size: int | None
    variant: str
    score: float | None = None
    unit: str = "%"
    p50_ms: float | None = None
    p99_ms: float | None = None
    images_per_s: float | None = None
    speedup: float | None = None
    file_bytes: float | None = None
    size_ratio: float | None = None
    partial: frozenset[str] = frozenset()

    def cells(self) -> tuple[str, ...]:
        """Text under `summary_columns`; * marks a partial number."""

        def mark(name: str, text: str) -> str:
            return f"{text}*" if name in self.partial else text

        return (
            display(self.engine),
            str(self.batch_size) if self.batch_size is not None else "not timed",
            display(self.variant),
            mark("score", scored(self.score, self.unit)),
            mark("p50_ms", significant(self.p50_ms)),
            "not measured" if "p50_ms" in self.partial else fixed(self.speedup, 2, "×"),
            mark("p99_ms", significant(self.p99_ms)),
            mark("images_per_s", significant(self.images_per_s)),
            mark("file_bytes", in_bytes(self.file_bytes)),
            fixed(self.size_ratio, 3),
        )


def summary_table(metrics: Iterable[Metric]) -> tuple[SummaryRow, ...]:
    """A row for each (engine, batch size, variant) with a number, float first.

    Engines and variants come in the metrics' order.
    """
    metrics = tuple(metrics)
    index = _Index(metrics)
    variants = variants_of(metrics)
    rows = []
    for engine in engines_of(metrics):
        if engine in unavailable_engines(metrics):
            continue
        timed = sorted({m.batch_size for m in metrics if m.engine == engine and _timing(m) and m.batch_size})
        shown: list[SummaryRow] = []
        for batch_size in timed:
            shown += [row for v in variants if (row := _row(index, v, engine, batch_size)) and _timed(row)]
        with_timing = {row.variant for row in shown}
        untimed = (_row(index, v, engine, None) for v in variants if v not in with_timing)
        rows += shown + [row for row in untimed if row and row.score is not None]
    return tuple(rows)


def shown_rows(metrics: Iterable[Metric]) -> tuple[SummaryRow, ...]:
    """The rows of `summary_table` that a reader compares: without torch's, which are not timed, where others are."""
    rows = summary_table(metrics)
    timed = any(row.batch_size is not None for row in rows)
    return tuple(row for row in rows if not timed or row.batch_size is not None or not row.engine.startswith("torch"))


def best_variant(metrics: Iterable[Metric]) -> tuple[str, str] | None:
    """The network to ship and the reason; None if nothing was measured beside float.

    It is the network of the best metric, at equal metrics the faster one, of those smaller or faster than float on the
    first engine that measured one, in the precision in which it runs float fastest; float, if that is slower.
    """
    metrics = tuple(metrics)
    rows, judged = [row for row in summary_table(metrics) if row.score is not None], judged_by(metrics)
    made = [row for row in rows if row.variant != Variant.FLOAT]
    if not made:
        return None
    near = [row for row in made if (family(row.engine), row.batch_size) == (family(made[0].engine), made[0].batch_size)]
    of_float = {(row.engine, row.batch_size): row.p50_ms for row in rows if row.variant == Variant.FLOAT}
    place = min(near, key=lambda row: of_float.get((row.engine, row.batch_size)) or math.inf)
    here = {row.variant: row for row in rows if (row.engine, row.batch_size) == (place.engine, place.batch_size)}
    before = here.pop(Variant.FLOAT, None)
    sign = 1 if judged.direction == "higher" else -1
    gained = [row for row in here.values() if _gain(row) * _SLOWER > 1 or (row.size_ratio or 1.0) < _SLOWER]
    best = max(
        gained or here.values(),
        key=lambda row: (sign * float(scored(row.score, row.unit).replace(",", "")), _gain(row)),
    )
    where = f"on {display(best.engine)}{'' if best.batch_size is None else f', batch {best.batch_size}'}"
    if before is not None and _gain(best) < _SLOWER:
        return Variant.FLOAT, f"{display(best.variant)} is {1 / _gain(best):.2f}x slower than float {where}"
    faster = "as fast as" if _gain(best) <= 1 else f"{_gain(best):.2f}x faster than"
    speed = "" if best.speedup is None else f"{faster} float {where}, "
    size = "" if best.size_ratio is None else f", {best.size_ratio:.2f} of the file"
    beside = "" if before is None else f" (float {judged.text(before.score or 0.0)})"
    return best.variant, f"{speed}{judged.title} {judged.text(best.score or 0.0)}{beside}{size}"


_SLOWER = 0.95  # a network counts as slower, faster or smaller than float from 5 % on


def _gain(row: SummaryRow) -> float:
    return 1.0 if row.speedup is None else row.speedup


def summary_notes(metrics: Iterable[Metric]) -> tuple[str, ...]:
    metrics = tuple(metrics)
    away = unavailable_engines(metrics)
    names: dict[tuple[str, str, str], list[str]] = {}
    for m in metrics:
        if m.status != "complete" and m.engine not in away:
            where = f"{display(m.variant)} on {display(m.engine)}" if m.engine else display(m.variant)
            batch = f", batch {m.batch_size}" if m.batch_size is not None else ""
            names.setdefault((where + batch, m.status, m.reason), []).append(m.name)
    places: dict[tuple[str, str, str], list[str]] = {}
    for (place, status, reason), of_place in names.items():
        places.setdefault((", ".join(of_place), status, reason), []).append(place)
    found = [
        f"{first_few(where, _NAMED)}: {what} {status}: {reason}" for (what, status, reason), where in places.items()
    ]
    return (*found, *_never_asked(metrics))


def _never_asked(metrics: Sequence[Metric]) -> Iterator[str]:
    rows = summary_table(metrics)
    every: dict[str, set[str]] = {}
    gaps: dict[str, dict[str, set[str]]] = {}
    sizes = {
        engine: {row.batch_size for row in rows if row.engine == engine} - {None} for engine in engines_of(metrics)
    }
    for row in rows:
        batch = f", batch {row.batch_size}" if len(sizes.get(row.engine, ())) > 1 and row.batch_size else ""
        name = display(row.variant) + batch
        every.setdefault(row.engine, set()).add(name)
        for gap in _gaps(row, metrics):
            gaps.setdefault(gap, {}).setdefault(row.engine, set()).add(name)
    for gap, where in gaps.items():
        places = [
            display(engine) if names == every[engine] else f"{display(engine)} ({'; '.join(sorted(names))})"
            for engine, names in where.items()
        ]
        yield f"{gap}, anywhere" if where == every and len(where) > 1 else f"{', '.join(places)}: {gap}"


def _gaps(row: SummaryRow, metrics: Sequence[Metric]) -> Iterator[str]:
    stated = {
        m.name
        for m in metrics
        if m.variant == row.variant
        and m.engine in (row.engine, *_OF_THE_FILE)
        and (not _timing(m) or row.batch_size in (None, m.batch_size))
    }
    if row.batch_size is None:
        if not stated & set(_PER_BATCH):
            yield "not timed in this run"
        return
    if row.p50_ms is not None and row.speedup is None:
        partial = any(
            m.name == "p50_ms" and m.status == "partial" and (m.engine, m.batch_size) == (row.engine, row.batch_size)
            for m in metrics
        )
        yield f"speed-up {NOT_MEASURED}" if partial else "no speed-up, as float was not timed there"
    score = judged_by(metrics).name
    values = {score: row.score, **{name: getattr(row, name) for name in _ROW_METRICS}}
    yield from (f"{name} not measured" for name, value in values.items() if value is None and name not in stated)


def unavailable_engines(metrics: Iterable[Metric]) -> dict[str, str]:
    by_engine: dict[str, list[Metric]] = {}
    for m in metrics:
        if m.engine and m.name not in _SIZES:
            by_engine.setdefault(m.engine, []).append(m)
    return {
        engine: _merged(dict.fromkeys(m.reason for m in items))
        for engine, items in by_engine.items()
        if all(m.status == "unavailable" for m in items)
    }


def _merged(reasons: Iterable[str]) -> str:
    """Reasons in one line; what several say alike after their ", but " is said once."""
    starts: dict[str, list[str]] = {}
    for reason in reasons:
        start, but, rest = reason.partition(", but ")
        starts.setdefault(but + rest if but else reason, []).append(start if but else "")
    return "; ".join(", ".join(filter(None, causes)) + rest for rest, causes in starts.items())


def engines_of(metrics: Iterable[Metric]) -> tuple[str, ...]:
    metrics = tuple(metrics)
    timed = {m.engine for m in metrics if _timing(m) and m.value is not None}
    return tuple(sorted(dict.fromkeys(m.engine for m in metrics if m.engine), key=lambda e: e not in timed))


def variants_of(metrics: Iterable[Metric]) -> tuple[str, ...]:
    return tuple(sorted(dict.fromkeys(m.variant for m in metrics), key=lambda v: v != Variant.FLOAT))


def family(engine: str) -> str:
    """The engine without its precision.

    >>> family("openvino (bf16)")
    'openvino'
    """
    return engine.partition(" (")[0]


class _Index:
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._items: dict[tuple[str, str], list[Metric]] = {}
        self.judged = judged_by(metrics)
        for m in metrics:
            self._items.setdefault((m.name, m.variant), []).append(m)

    def find(self, name: str, variant: str, engine: str, batch_size: int | None) -> Metric | None:
        items = self._items.get((name, variant), [])
        mine = [m for m in items if m.engine == engine]
        if name in _PER_BATCH:
            return next((m for m in mine if m.batch_size == batch_size), None)
        if name == "file_bytes" and not mine and family(engine) != "torch":
            made_for = [m for m in items if m.engine and m.engine == target_of(family(engine))]
            mine = made_for or [m for m in items if m.engine in _OF_THE_FILE]
        return next((m for m in mine if m.batch_size == batch_size), mine[0] if mine else None)

    def value(self, name: str, variant: str, engine: str, batch_size: int | None) -> float | None:
        metric = self.find(name, variant, engine, batch_size)
        return metric.value if metric else None

    def comparable_ms(self, variant: str, engine: str, batch_size: int | None) -> float | None:
        metric = self.find("p50_ms", variant, engine, batch_size)
        return metric.value if metric and metric.status == "complete" else None


def _row(index: _Index, variant: str, engine: str, batch_size: int | None) -> SummaryRow:
    found = {name: index.find(name, variant, engine, batch_size) for name in _ROW_METRICS}
    found["score"] = index.find(index.judged.name, variant, engine, batch_size)
    values = {name: metric.value if metric else None for name, metric in found.items()}
    place = (variant, engine, batch_size)
    return SummaryRow(
        engine=engine,
        batch_size=batch_size,
        variant=variant,
        unit=index.judged.unit,
        speedup=_ratio(index.comparable_ms(Variant.FLOAT, engine, batch_size), index.comparable_ms(*place)),
        size_ratio=_ratio(values["file_bytes"], index.value("file_bytes", Variant.FLOAT, engine, batch_size)),
        partial=frozenset(name for name, m in found.items() if m and m.status == "partial"),
        **values,
    )


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _timing(metric: Metric) -> bool:
    return metric.name in _PER_BATCH


def _timed(row: SummaryRow) -> bool:
    return row.p50_ms is not None or row.p99_ms is not None or row.images_per_s is not None


_LISTED = 4
_MARGIN = 0.05  # share of its time by which a network or a layer must be slower than float to be called slower
_MARGIN_MS = 0.005  # least loss of a layer that clocks around single kernels resolve
_LEAST = 0.02  # share of what all layers lose that one must lose to be left in float

RULES_TITLE = "These lines of a recipe keep in float the layers that the engine runs faster in float:"


def not_faster(metrics: Iterable[Metric]) -> Iterator[SlowRow]:
    """Rows without layers of networks slower than float by more than the margin, each engine at its fastest."""
    best: dict[tuple[str, int], dict[str, tuple[float, str]]] = {}
    for metric in metrics:
        if metric.name == "p50_ms" and metric.value is not None and metric.status == "complete":
            group = best.setdefault((family(metric.engine), metric.batch_size or 1), {})
            if metric.value < group.get(metric.variant, (math.inf, ""))[0]:
                group[metric.variant] = (metric.value, metric.engine)
    for (_, batch_size), group in best.items():
        float_ms, float_engine = group.pop(Variant.FLOAT, (math.inf, ""))
        for variant, (ms, engine) in group.items():
            if variant in QUANTIZED and ms >= (1 + _MARGIN) * float_ms:
                yield SlowRow(
                    variant=variant,
                    engine=engine,
                    float_engine=float_engine,
                    batch_size=batch_size,
                    p50_ms=ms,
                    float_p50_ms=float_ms,
                )


def costly(row: SlowRow) -> tuple[str, ...]:
    least = max(_MARGIN_MS, _LEAST * sum(cost.lost_ms for cost in row.layers))
    return tuple(cost.layer for cost in row.layers if cost.lost_ms >= least and cost.lost_ms > _MARGIN * cost.float_ms)


def slower_sentences(rows: Sequence[SlowRow]) -> tuple[str, ...]:
    return tuple(map(_sentence, rows))


def _sentence(row: SlowRow) -> str:
    ratio = row.p50_ms / row.float_p50_ms if row.float_p50_ms else 1.0
    start = (
        f"{display(row.variant)} takes {ratio:.2f} of float's time on {display(row.engine)} at batch {row.batch_size} "
        f"({significant(row.p50_ms)} against {significant(row.float_p50_ms)} ms)"
    )
    if row.unquiet:
        return f"{start}; what each layer adds was {NOT_MEASURED}"
    names = set(costly(row))
    found = [cost for cost in row.layers if cost.layer in names]
    if not found:
        more = significant(row.rest_ms - row.float_rest_ms)
        return f"{start}; no single layer is slower, and the operations that belong to no layer take {more} ms more"
    listed = (f"{c.layer} ({significant(c.quantized_ms)} against {significant(c.float_ms)})" for c in found)
    verb = "layer is" if len(found) == 1 else "layers are"
    lost = significant(sum(cost.lost_ms for cost in found))
    return (
        f"{start}. By the engine's own times {len(found)} {verb} slower there than in float, by {lost} ms in all: "
        f"{first_few(listed, _LISTED)}. `sensitivity --from RUN --set quantization.target={family(row.engine)} "
        f"--costs {family(row.engine)} --max-drop 1` finds the fastest formats that lose at most a point"
    )


def rules_text(rows: Sequence[SlowRow]) -> str:
    """Lines of a recipe that leave costly layers float in the engine's file; "" = none."""
    targets: dict[str, dict[str, None]] = {}
    for row in rows:
        targets.setdefault(row.target, {}).update(dict.fromkeys(costly(row)))
    lines = []
    for target, names in targets.items():
        for layer in names:
            rule = {"match": layer, "enable": False} | ({"target": target} if target else {})
            # in YAML, because a name such as 1.0 is a number there unless it is quoted
            text = yaml.safe_dump(rule, default_flow_style=True, sort_keys=False, width=10_000)
            lines.append(f"    - {text.strip()}")
    return "\n".join(["quantization:", "  rules:", *lines]) if lines else ""


def foreign_files(run: RunData) -> tuple[str, ...]:
    """A sentence for each of them: it computes the same, but not all in integers."""
    return tuple(_sentences(run))


def _sentences(run: RunData) -> Iterator[str]:
    targets = _targets(recipe_tree(run))
    if not targets:
        return
    measured = (family(m.engine) for m in run.metrics if m.engine and m.variant in QUANTIZED and m.value is not None)
    for engine in dict.fromkeys(measured):
        if not suits(engine, targets):
            placed = ", ".join(display(name) for name in targets)
            yield (
                f"{display(engine)} was given files whose quantizers are placed for {placed}, and runs fewer of their "
                "layers in integers than of its own: it may be slower than float. quantization.target: "
                f"[{', '.join([*targets, str(target_of(engine))])}] makes both"
            )


def _targets(tree: Any) -> list[str]:
    section = tree.get("quantization") if isinstance(tree, dict) else None
    found = section.get("target") if isinstance(section, dict) else None
    return [str(name) for name in found] if isinstance(found, list) else [found] if isinstance(found, str) else []
