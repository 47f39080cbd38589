"""The page of a search."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from compress.files import write_bytes, write_json, write_text
from compress.plots.results import Mark, draw_front
from compress.plots.style import styled
from compress.recipe.tree import Recipe
from compress.report.blocks import (
    FIGURES,
    Block,
    Bullets,
    Details,
    Document,
    KeyFigure,
    Picture,
    Section,
    Table,
    Text,
    Tiles,
    code,
    number,
    table,
    to_html,
    to_markdown,
)
from compress.report.figures import Plan, picture_of
from compress.search.models import Check
from compress.search.search import FLOAT_POINT, Outcome, Point
from compress.search.space import BLOCK, FORMAT, WIDTH, formats_of, left_out, widths_of
from compress.support.text import MISSING, scored

_X = "time over that of the float network"
_Y = "error of the outputs before fine-tuning"


def write_search_report(outcome: Outcome, *, recipe: Recipe) -> tuple[Path, Path]:
    """Write report.md, report.html, figures/front.png and front.json into the run folder."""
    folder, document = outcome.folder, search_document(outcome, recipe=recipe)
    markdown, page = to_markdown(document), to_html(document)
    picture = next(block for section in document.sections for block in section.blocks if isinstance(block, Picture))
    write_bytes(folder / FIGURES / f"{picture.name}.png", picture.png)
    write_json(folder / "front.json", _json(outcome))
    return write_text(folder / "report.md", markdown), write_text(folder / "report.html", page)


def search_document(outcome: Outcome, *, recipe: Recipe) -> Document:
    lab = outcome.front.lab
    sections = (
        Section("front", "Front", (_picture(outcome), _points_table(outcome))),
        Section("networks", "Fine-tuned networks", _attempt_blocks(outcome)),
        Section("layers", "What each layer got, and why", _layer_blocks(outcome)),
        Section("uniform", "Uniform choices", _baseline_blocks(outcome)),
        Section("models", "How good the predictions were", _model_blocks(outcome)),
        Section("notes", "Notes", _notes(outcome)),
    )
    return Document(
        title=f"Search: {recipe.model.name} on {lab.engine}",
        subtitle=(
            f"Asked for: {outcome.bound.words}. {len(outcome.front.points) - 1} configurations of "
            f"{lab.space.size:.3g} were built and measured, batch {lab.spec.batch_size}."
        ),
        headline=outcome.advice,
        tiles=Tiles(_tiles(outcome)),
        sections=sections,
    )


def _tiles(outcome: Outcome) -> tuple[KeyFigure, ...]:
    made, metric = outcome.chosen, outcome.metric
    if made is None:
        return (KeyFigure(value=MISSING, label="no network keeps the bound"),)
    return (
        KeyFigure(value=made.ratio_text(2), label="of the float network's latency"),
        KeyFigure(value=f"{made.ms:.3g} ms", label=f"a run of {outcome.front.lab.spec.batch_size} on the engine"),
        KeyFigure(value=metric.text(made.score), label=f"{metric.title} on the engine"),
        KeyFigure(value=f"{0.0 - made.drop:+.2f}", label="points to the float network"),
    )


def _picture(outcome: Outcome) -> Picture:
    marks = _marks(outcome)
    plan = Plan(
        caption="Each mark is a network that was built, exported and timed on the engine; point at it for its choices.",
        alt=f"Error against time of {len(marks)} networks",
        draw=lambda form: draw_front(marks, form, x_label=_X, y_label=_Y),
    )
    with styled():
        return picture_of("front", "Every configuration that was measured", plan)


def _marks(outcome: Outcome) -> list[Mark]:
    on_front = {point.label for point in outcome.front.front}
    chosen = outcome.chosen.label if outcome.chosen else ""
    rows = []
    for point in outcome.front.points:
        kind = "baseline" if point.is_baseline else "trial"
        kind = "chosen" if point.label == chosen else "front" if point.label in on_front else kind
        figures = point.figures
        text = f"{point.label}: time {figures.ratio_text()}, error {figures.distance:.3g}\n{_words(outcome, point)}"
        rows.append(Mark(x=figures.ratio, y=figures.distance, kind=kind, text=text))
    return rows


def _words(outcome: Outcome, point: Point) -> str:
    largest = {**outcome.front.lab.space.largest()}
    changed = [f"{e} {c}" for e, c in point.configuration.items() if largest.get(e) != c or c in {"int8", "int4"}]
    formats = {c for e, c in point.configuration.items() if e.startswith(FORMAT)}
    if len(formats) == 1:
        changed = [f"all {formats.pop()}", *(text for text in changed if not text.startswith(FORMAT))]
    return ", ".join(changed) or "as it was"


def _points_table(outcome: Outcome) -> Table:
    metric = outcome.metric
    on_front = outcome.front.front
    rows = [
        (
            point.label,
            point.figures.ratio_text(),
            f"{point.figures.ms:.3f}",
            f"{point.figures.distance:.3g}",
            MISSING if point.figures.agreement is None else f"{100 * point.figures.agreement:.1f}",
            metric.text(outcome.scores[point.label]) if point.label in outcome.scores else MISSING,
        )
        for point in on_front
    ]
    return table(
        "network",
        number("time"),
        number("ms"),
        number("error"),
        number("agrees %"),
        number(f"{metric.title}, {outcome.images} images"),
        rows=rows,
    )


def _attempt_blocks(outcome: Outcome) -> tuple[Block, ...]:
    metric = outcome.metric
    rows = [
        (
            f"{made.folder} ({made.label})",
            made.variant,
            made.ratio_text(),
            f"{made.ms:.3f}",
            metric.text(made.score),
            scored(made.drop, metric.unit),
            "yes" if outcome.bound.keeps(made) else "no",
        )
        for made in outcome.attempts
    ]
    lost = f"{metric.amount} lost".strip()
    columns = ("network", "variant", number("time"), number("ms"), number(metric.title), number(lost))
    return (
        Text(
            "Each was fine-tuned with the float network as its teacher, quantized, exported, and measured on the "
            "engine in turn with the float network. Its folder holds the weights, the files and a report of its own."
        ),
        table(*columns, "keeps the bound", rows=rows),
    )


def _layer_blocks(outcome: Outcome) -> tuple[Block, ...]:
    front, point = outcome.front, outcome.point
    lab, model = front.lab, front.timed.model
    before = {cost.path: model.layer(cost) for cost in lab.costs.of({})}
    now = {cost.path: model.layer(cost) for cost in lab.costs.of(point.configuration)}
    formats, widths = formats_of(lab.structure, point.configuration), widths_of(point.configuration)
    why = _reasons(outcome)
    owners = {layer: name for name, group in lab.structure.groups.items() for layer in group.producers}
    unit_of = {layer: unit for unit, layers in lab.structure.units.items() for layer in layers}
    gone = {layer: name for name in left_out(point.configuration) for layer in lab.structure.blocks[name].layers}
    rows = []
    for row in lab.structure.layers:
        group = owners.get(row.path)
        size = len(lab.structure.groups[group].classes) if group else 0
        channels = f"{widths.get(group, size)} of {size}" if group else "all"
        block = gone.get(row.path)
        reasons = (
            [why.get(f"{BLOCK} {block}")]
            if block
            else [why.get(f"{WIDTH} {group}"), why.get(f"{FORMAT} {unit_of[row.path]}")]
        )
        rows.append(
            (
                row.path,
                "left out" if block else formats[row.path],
                "" if block else channels,
                f"{100 * before[row.path]:.1f}",
                f"{100 * now.get(row.path, 0.0):.1f}",
                "; ".join(reason for reason in reasons if reason),
            )
        )
    columns = (code("layer"), "format", "channels", number("% of time"), number("now"))
    text = (
        "Times are predicted, in percent of the float network's. The last column is what the next choice of that "
        "layer's group or block would have changed, by the models: time in percent of the float network's, and error."
    )
    return Text(text), table(*columns, "the next choice", rows=rows)


def _reasons(outcome: Outcome) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    for other in outcome.front.otherwise(outcome.point):
        found.setdefault(other.element, []).append(
            f"{other.choice}: {100 * other.time:+.1f} % time, {other.distance:+.4f} error"
        )
    return {element: ", ".join(parts) for element, parts in found.items()}


def _baseline_blocks(outcome: Outcome) -> tuple[Block, ...]:
    rows = []
    for point in outcome.front.points:
        if not point.is_baseline:
            continue
        equal = [p for p in outcome.front.front if p.figures.ratio <= point.figures.ratio]
        best = min(equal, key=lambda p: p.figures.distance) if equal else None
        rows.append(
            (
                point.label,
                point.figures.ratio_text(),
                f"{point.figures.distance:.3g}",
                f"{best.figures.distance:.3g} ({best.label})" if best is not None else MISSING,
            )
        )
    text = "What one tries without a search, and the least error of the front in the same time. Before fine-tuning."
    return Text(text), table("choice", number("time"), number("error"), "the front in that time", rows=rows)


def _model_blocks(outcome: Outcome) -> tuple[Block, ...]:
    front = outcome.front
    rank, block = front.accuracy_check(), front.timed.model.block
    trials = [point for point in front.points if point.label != FLOAT_POINT]
    twice = front.repeat_check
    again = (
        f"Latency, {len(twice.measured)} of these networks timed twice, before the search and in it: median difference "
        f"{100 * twice.median_error:.1f} %, rank correlation {_rank(twice)}; predictions cannot come closer than that."
    )
    blocks = (
        f"The engine computes {block} channels at a time: a width in between takes as long as the next multiple of "
        f"{block}."
    )
    lines = (
        *_check_lines(front.candidate_check, "candidates, each predicted by a model that was fitted without it"),
        *((again,) if twice.measured else ()),
        *_check_lines(front.latency_check, "networks before the search, none of them in the model at that time"),
        f"Latency was fitted to {len(front.timed.samples)} networks; {front.timed.cached} of their times were on disk.",
        *((blocks,) if block > 1 else ()),
        f"Error of the outputs: rank correlation {_number_of(rank)} of sums of single choices with what was measured.",
    )
    rows = [
        (
            p.label,
            f"{p.predicted_ratio:.3f}",
            p.figures.ratio_text(),
            f"{p.predicted_distance:.3g}",
            f"{p.figures.distance:.3g}",
        )
        for p in trials
    ]
    columns = ("network", number("time, predicted"), number("measured"), number("error, predicted"))
    return Bullets(lines), Details("All candidates", (table(*columns, number("measured"), rows=rows),))


def _notes(outcome: Outcome) -> tuple[Block, ...]:
    failed = [f"{label} could not be measured: {reason}" for label, reason in outcome.front.failed.items()]
    lines = (*outcome.front.notes, *failed)
    return (Bullets(lines),) if lines else (Text("None.", note=True),)


def _json(outcome: Outcome) -> dict[str, object]:
    front = outcome.front
    return {
        "bound": asdict(outcome.bound),
        "advice": outcome.advice,
        "chosen": asdict(outcome.chosen) if outcome.chosen else None,
        "attempts": [asdict(made) for made in outcome.attempts],
        "points": [asdict(point) for point in front.points],
        "front": [point.label for point in front.front],
        "scores": dict(outcome.scores),
        "latency_check": _finite(asdict(front.latency_check)),
        "candidate_check": _finite(asdict(front.candidate_check)),
        "repeat_check": _finite(asdict(front.repeat_check)),
        "accuracy_check": _finite({"distance": front.accuracy_check()}),
    }


def _finite(tree: dict[str, float]) -> dict[str, object]:
    """Numbers as JSON has them: null in the place of NaN."""
    return {k: _finite_value(v) for k, v in tree.items()}


def _finite_value(value: object) -> object:
    if isinstance(value, tuple):
        return [_finite_value(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_lines(seen: Check, what: str) -> Iterator[str]:
    if seen.measured:
        yield (
            f"Latency, {len(seen.measured)} {what}: median error {100 * seen.median_error:.1f} %, rank correlation "
            f"{_rank(seen)}."
        )


def _rank(seen: Check) -> str:
    low, high = seen.interval
    between = f" (95 % interval {low:.2f} to {high:.2f})" if math.isfinite(low) else ""
    return f"{_number_of(seen.spearman)}{between}"


def _number_of(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else MISSING
