"""The figures of a run with their captions, or why one is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from compress.audit.engine import unknown_part
from compress.measure.latency import EndToEnd
from compress.measure.metric import Judged, judged_by
from compress.plots.layers import (
    clipped_share,
    draw_block,
    draw_bytes,
    draw_histograms,
    draw_sqnr,
    interesting,
    sqnr_series,
    weight_groups,
    worst,
)
from compress.plots.results import (
    MOST_CLASSES,
    Point,
    draw_end_to_end,
    draw_engines,
    draw_latency,
    draw_precision,
    draw_tradeoff,
    draw_training,
    phases,
    tradeoff_points,
)
from compress.plots.style import NARROW, WIDE, Format, settle, styled, to_inline_svg, to_png
from compress.quantization.block_graph import BlockGraph
from compress.records.files import EngineRow, RunData
from compress.records.summary import SummaryRow, engines_of, summary_table, variants_of
from compress.report.blocks import Picture
from compress.support.meters import score_text
from compress.support.text import display, finite, in_bytes, plain, significant
from compress.variants import Variant


@dataclass(frozen=True, kw_only=True)
class Absent:
    """A figure that cannot be drawn, and why."""

    title: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A figure that can be drawn."""

    caption: str
    alt: str
    draw: Callable[[Format], Figure]


def draw_figures(run: RunData) -> dict[str, Picture | Absent]:
    drawn: dict[str, Picture | Absent] = {}
    with styled():
        for name, (title, plan) in _FIGURES.items():
            made = plan(run)
            drawn[name] = Absent(title=title, reason=made) if isinstance(made, str) else picture_of(name, title, made)
        if run.block is not None:
            drawn["block"] = picture_of("block", "A block with its quantizers", _block(run.block))
        if run.end_to_end is not None:
            stages = _end_to_end(run.end_to_end.results)
            drawn["end_to_end"] = picture_of("end_to_end", "Where the time of an image goes", stages)
        if run.precision:
            drawn["precision"] = picture_of("precision", "Precision by recall", _precision(run))
        if any(engine.layers for engine in run.engines):
            drawn["engines"] = picture_of("engines", "What the engines move", _engines(run))
    return drawn


def file_sizes(run: RunData) -> list[tuple[str, float]]:
    """(variant, bytes of its ONNX file), float first."""
    sizes: Mapping[str, float] = {
        m.variant: m.value
        for m in reversed(run.metrics)
        if m.name == "file_bytes" and finite(m.value) and m.engine in ("", "onnx")
    }
    return [(variant, sizes[variant]) for variant in variants_of(run.metrics) if variant in sizes]


def picture_of(name: str, title: str, plan: Plan) -> Picture:
    wide, narrow = settle(plan.draw(WIDE)), settle(plan.draw(NARROW))
    key = name.replace("_", "-")
    return Picture(
        name=name,
        title=title,
        caption=plan.caption,
        alt=plan.alt,
        png=to_png(wide),
        svg_wide=to_inline_svg(wide, key=f"{key}-wide", label=plan.alt),
        svg_narrow=to_inline_svg(narrow, key=f"{key}-narrow", label=plan.alt),
    )


def _tradeoff(run: RunData) -> Plan | str:
    intervals = {(row.variant, row.engine): (row.low, row.high) for row in run.intervals}
    points, judged = tradeoff_points(summary_table(run.metrics), intervals), judged_by(run.metrics)
    if not points:
        return f"no engine has both a {judged.title} and a latency in metrics.json"
    with_latency = {point.engine for point in points}
    left_out = [display(e) for e in engines_of(run.metrics) if e not in with_latency]
    more = f" Without both numbers, and so not shown: {', '.join(left_out)}." if left_out else ""
    summary = "; ".join(_point(point, judged) for point in points)
    return Plan(
        caption="Up and to the left is better. Colour is the variant, shape the engine, a line the 95 % interval: "
        "look how far a point moves "
        f"left from its float, and how little it drops.{more}",
        alt=f"Scatter plot of {'top-1 accuracy' if judged.name == 'top1' else judged.title} against p50 latency at "
        f"batch {points[0].batch_size}: "
        f"{summary}.",
        draw=lambda form: draw_tradeoff(points, form, judged=judged),
    )


def _point(point: Point, judged: Judged) -> str:
    return f"{_on(point.variant, point.engine)} {judged.text(point.score)}, {significant(point.p50_ms)} ms"


def _on(variant: str, engine: str) -> str:
    return f"{display(variant)} on {display(engine)}"


def _latency(run: RunData) -> Plan | str:
    rows = [row for row in summary_table(run.metrics) if finite(row.p50_ms) and row.batch_size is not None]
    if not rows:
        return "no engine has a latency in metrics.json"
    gains = [row for row in rows if row.speedup is not None and row.variant != Variant.FLOAT]
    best = max(gains, key=lambda row: row.speedup or 0.0, default=None)
    said = (
        f" The largest speed-up is {best.speedup:.2f}× ({_on(best.variant, best.engine)}, batch {best.batch_size})."
        if best
        else ""
    )
    listed = "; ".join(f"batch {row.batch_size}: {_timed(row)}" for row in rows)
    return Plan(
        caption="Bars end at the median (p50), thin lines at p99: a long line is a latency that one cannot rely on. "
        f"The factor is against float on the same engine and precision.{said}",
        alt=f"Bars of latency: {listed}.",
        draw=lambda form: draw_latency(rows, form),
    )


def _timed(row: SummaryRow) -> str:
    return f"{_on(row.variant, row.engine)} p50 {significant(row.p50_ms)} ms, p99 {significant(row.p99_ms)} ms"


def _training(run: RunData) -> Plan | str:
    parts = phases(run.train, run.qat, run.sparse, run.sparse_qat)
    if not parts:
        return "neither train.csv nor qat.csv holds an epoch: nothing was trained in this run"
    ends, judged = [], judged_by(run.metrics)
    for name, _, rows in parts:
        known = [value for row in rows if (value := row.figure(judged.name)) is not None]
        end = f"ends at {score_text(known[-1], judged.unit)} {judged.title}" if known else "was not evaluated"
        ends.append(f"{name} {end} after {len(rows)} epoch{'s' if len(rows) != 1 else ''}")
    summary = "; ".join(ends)
    summary = summary[0].upper() + summary[1:]
    return Plan(
        caption=f"{summary}. Solid lines: evaluation images; dashed: training images, whose loss includes smoothing "
        "and distillation. The metric here is torch's; the table has the engines'.",
        alt=f"Training curves of loss and {judged.title} by epoch. {summary}.",
        draw=lambda form: draw_training(parts, form, judged=judged),
    )


def _sqnr(run: RunData) -> Plan | str:
    series = sqnr_series(run.layers)
    if not series:
        return (
            "layers.json holds no SQNR" if run.layers else run.absent.get("layers.json", "layers.json holds no layer")
        )
    lows = {title: worst(values) for title, values in series.items()}
    names = "; ".join(f"{title.lower()}: {plain(v[0][0])} ({v[0][1]:.1f} dB)" for title, v in lows.items())
    summary = "; ".join(
        f"{title}: {len(values)} layers, lowest " + ", ".join(f"{plain(n)} {v:.1f} dB" for n, v in lows[title])
        for title, values in series.items()
    )
    return Plan(
        caption="Signal to quantization noise of each layer, higher is better, 6 dB is one bit. The lowest stand out: "
        f"they are the first candidates for a rule that leaves a layer float. Lowest of each: {names}.",
        alt=f"Bars of SQNR per layer in network order. {summary}.",
        draw=lambda form: draw_sqnr(series, form),
    )


def _histograms(run: RunData) -> Plan | str:
    shown = interesting(run.histograms)
    if not shown:
        return run.absent.get("histograms.json", "histograms.json holds no tensor with counts and a positive amax")
    summary = "; ".join(
        f"{plain(h.name)} amax {significant(h.amax)}, clipped {100 * clipped_share(h):.3g} %" for h in shown
    )
    count = f"the {len(shown)} of {len(run.histograms)} tensors" if len(run.histograms) > len(shown) else "the tensors"
    return Plan(
        caption=f"What calibration saw: {count} that quantization is expected to hurt most, by their own histograms. "
        "The dashed line is amax; what lies beyond it is clipped to it. A long thin tail beyond the line is cheap to "
        "clip; a line far right of the bulk wastes steps.",
        alt=f"Histograms of activations with log counts: {summary}.",
        draw=lambda form: draw_histograms(shown, form),
    )


def _bytes(run: RunData) -> Plan | str:
    groups, files = weight_groups(run.layers), file_sizes(run)
    if not groups and not files:
        return "neither layers.json nor metrics.json holds sizes"
    summary = []
    if groups:
        before, after = sum(g[1] for g in groups), sum(g[2] for g in groups)
        top = max(groups, key=lambda g: g[1])
        summary.append(
            f"Weights take {in_bytes(before)} in float and {in_bytes(after)} quantized; {plain(top[0])} holds "
            f"{100 * top[1] / before:.0f} % of them"
        )
    if files:
        summary.append("files: " + ", ".join(f"{display(name)} {in_bytes(size)}" for name, size in files))
    return Plan(
        caption=f"{'; '.join(summary)}. Layers left float count alike on both sides.",
        alt=f"Bars of bytes. {'; '.join(summary)}.",
        draw=lambda form: draw_bytes(groups, files, form),
    )


def _block(graph: BlockGraph) -> Plan:
    named = f"block {plain(graph.block)}" if graph.block else "the network"
    boxes = [box for box in graph.boxes.values() if box.kind in ("int8", "float")]
    whole = [plain(box.title) for box in boxes if box.kind == "int8"]
    floats = [plain(box.title) for box in boxes if box.kind == "float"]
    quantizers = sum(box.kind == "quantizer" for box in graph.boxes.values())
    return Plan(
        caption=f"{named[0].upper()}{named[1:]}, placed for {display(graph.target)}: each box is a kernel with all "
        "that is fused into it; integers flow along the strong lines. A float box among 8-bit ones costs conversions.",
        alt=f"Graph of {named}: {quantizers} quantizers; in 8 bits {', '.join(whole) or 'none'}; in float "
        f"{', '.join(floats) or 'none'}.",
        draw=lambda form: draw_block(graph, form),
    )


def _end_to_end(rows: Sequence[EndToEnd]) -> Plan:
    summary = "; ".join(
        f"{plain(row.label)}, batch {row.batch_size}: "
        + ", ".join(f"{stage} {significant(ms)} ms" for stage, ms in row.stage_ms.items())
        for row in rows
    )
    shares = sorted(row.share("engine") for row in rows)
    methods = dict.fromkeys(plain(row.method) for row in rows)
    told_share = " to ".join(dict.fromkeys(f"{100 * share:.0f}" for share in (shares[0], shares[-1])))
    return Plan(
        caption=f"The engine, with its copies to and from a GPU, takes {told_share} % of the time; a faster engine can "
        "save no more than its part of a bar. " + " ".join(f"{text[:1].upper()}{text[1:]}." for text in methods),
        alt=f"Stacked bars of milliseconds by stage: {summary}.",
        draw=lambda form: draw_end_to_end(rows, form),
    )


def _precision(run: RunData) -> Plan:
    classes = list(dict.fromkeys(row.label for row in run.precision))
    shown = [row for row in run.precision if row.label in classes[:MOST_CLASSES]]
    listed = "; ".join(
        f"{plain(row.label)}, {_on(row.variant, row.engine)}: AP50 {100 * sum(row.precision) / 101:.1f} %"
        for row in shown
    )
    left = f" The first {MOST_CLASSES} of {len(classes)} classes." if len(classes) > MOST_CLASSES else ""
    return Plan(
        caption="Precision, the share of the found boxes that are right, at each recall, the share of the objects that "
        "are found, as the least score falls. A box is right if its overlap (IoU) with an object of its class is at "
        f"least 0.5. Up and to the right is better.{left}",
        alt=f"Curves of precision by recall. {listed}.",
        draw=lambda form: draw_precision(shown, form),
    )


def moved(engine: EngineRow) -> str:
    """Bytes of activations for one image; tensors of unknown size are counted apart."""
    return in_bytes(engine.activation_bytes) + unknown_part(engine.unknown_sizes)


def _engines(run: RunData) -> Plan:
    engines = [engine for engine in run.engines if engine.layers]
    listed = "; ".join(f"{_on(e.variant, e.engine)} {moved(e)}, {e.kernels} kernels" for e in engines)
    return Plan(
        caption="Activations that all kernels of an engine read and write for one image. Amber and red are what a "
        "convolution could have done itself: quantizing its result, adding a residual. A bar that ends right of its "
        "line moves more than fp16 would.",
        alt=f"Stacked bars of activation bytes by kind of kernel: {listed}.",
        draw=lambda form: draw_engines(engines, form),
    )


Planner = Callable[[RunData], Plan | str]
_FIGURES: Mapping[str, tuple[str, Planner]] = {
    "accuracy_latency": ("Accuracy against latency", _tradeoff),
    "latency": ("Latency", _latency),
    "training": ("Loss and accuracy by epoch", _training),
    "sqnr": ("Quantization noise by layer", _sqnr),
    "histograms": ("Activations and their amax", _histograms),
    "bytes": ("Weights and files", _bytes),
}


def pictures(drawn: Mapping[str, Picture | Absent]) -> Sequence[Picture]:
    return [item for item in drawn.values() if isinstance(item, Picture)]
