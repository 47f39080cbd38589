"""Quantized networks that are not faster than float: which layers cost it, by the engine's own times."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import yaml

from compress.measure.latency import NOT_MEASURED
from compress.measure.metric import Metric
from compress.records.rows import SlowRow
from compress.records.summary import family
from compress.support.text import display, significant
from compress.variants import QUANTIZED, Variant

_NAMED = 4
_MARGIN = 0.05
"""Share of its time by which a network or a layer must be slower than float to be called slower."""
_MARGIN_MS = 0.005
"""Least loss of a layer that clocks around single kernels resolve."""
_LEAST = 0.02
"""Share of what all layers lose that one must lose to be left in float."""

RULES_TITLE = "In a recipe these lines leave the layers in float which the engine runs faster so:"


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
    """Layers worth a rule, the costliest first."""
    least = max(_MARGIN_MS, _LEAST * sum(cost.lost_ms for cost in row.layers))
    return tuple(cost.layer for cost in row.layers if cost.lost_ms >= least and cost.lost_ms > _MARGIN * cost.float_ms)


def slower_sentences(rows: Sequence[SlowRow]) -> tuple[str, ...]:
    """How much slower, which layers, and what is faster."""
    return tuple(_sentence(row) + _mixed(row) for row in rows)


def _mixed(row: SlowRow) -> str:
    """The mixed network, or the command that builds it."""
    if row.mixed is None:
        return ". `bench RUN --mixed` builds and times the network without them" if costly(row) else ""
    found, count = row.mixed, len(row.mixed.layers)
    if found.unquiet:
        return f". What PTQ gains with layers in float was {NOT_MEASURED}; `bench RUN --mixed` measures it again"
    score = f" and has {found.score}" if found.score else ""
    verdict = "" if found.p50_ms < found.float_p50_ms else ", so that float is the faster one here"
    return (
        f". With {count} {'layer' if count == 1 else 'layers'} in float, PTQ takes "
        f"{_times(found.p50_ms, found.float_p50_ms, 'ms, in turn')}{score}{verdict} ({found.recipe})"
    )


def _sentence(row: SlowRow) -> str:
    start = (
        f"{display(row.variant)} takes "
        f"{_times(row.p50_ms, row.float_p50_ms, 'ms', f' on {display(row.engine)} at batch {row.batch_size}')}"
    )
    if row.unquiet:
        return f"{start}; what each layer adds was {NOT_MEASURED}"
    names = set(costly(row))
    found = [cost for cost in row.layers if cost.layer in names]
    if not found:
        more = significant(row.rest_ms - row.float_rest_ms)
        return f"{start}; no single layer is slower, and the operations that belong to no layer take {more} ms more"
    listed = [f"{c.layer} ({significant(c.quantized_ms)} against {significant(c.float_ms)})" for c in found[:_NAMED]]
    others = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    verb = "layer is" if len(found) == 1 else "layers are"
    lost = significant(sum(cost.lost_ms for cost in found))
    return (
        f"{start}. By the engine's own times {len(found)} {verb} slower there than in float, by {lost} ms in all: "
        f"{', '.join(listed)}{others}"
    )


def _times(ms: float, float_ms: float, unit: str, where: str = "") -> str:
    ratio = ms / float_ms if float_ms else 1.0
    return f"{ratio:.2f} of float's time{where} ({significant(ms)} against {significant(float_ms)} {unit})"


def rules_text(rows: Sequence[SlowRow]) -> str:
    """Lines of a recipe that leave costly layers float in the engine's file; "" = none."""
    targets: dict[str, dict[str, None]] = {}
    for row in rows:
        layers = costly(row) if row.mixed is None or row.mixed.unquiet else row.mixed.layers
        targets.setdefault(row.target, {}).update(dict.fromkeys(layers))
    lines = []
    for target, names in targets.items():
        for layer in names:
            rule = {"match": layer, "enable": False} | ({"target": target} if target else {})
            # in YAML, because a name such as 1.0 is a number there unless it is quoted
            text = yaml.safe_dump(rule, default_flow_style=True, sort_keys=False, width=10_000)
            lines.append(f"    - {text.strip()}")
    return "\n".join(["quantization:", "  rules:", *lines]) if lines else ""
