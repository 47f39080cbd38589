"""Quantized networks that are not faster than float on an engine: which layers cost it, and the recipe without them.

An engine decides by itself which operations it has integer kernels for, and how it converts between them. So layers are
judged by the engine's own times, in the float file and in the quantized one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import yaml

from compress.measure.metric import Metric
from compress.measure.quiet import NOT_MEASURED
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
    """Yield the quantized networks slower than float by more than the margin, each engine at its fastest, no layers.

    Args:
        metrics: of a run; what counts is p50 at each batch size.
    """
    best: dict[tuple[str, int | None], dict[str, Metric]] = {}
    for metric in metrics:
        if metric.name == "p50_ms" and metric.value is not None and metric.status == "complete":
            group = best.setdefault((family(metric.engine), metric.batch_size), {})
            known = group.get(metric.variant)
            if known is None or known.value is None or metric.value < known.value:
                group[metric.variant] = metric
    for group in best.values():
        reference = group.get(Variant.FLOAT)
        for variant, metric in group.items():
            if (
                reference is None
                or variant not in QUANTIZED
                or (metric.value or 0.0) < (1 + _MARGIN) * (reference.value or 0.0)
            ):
                continue
            yield SlowRow(
                variant=variant,
                engine=metric.engine,
                float_engine=reference.engine,
                batch_size=metric.batch_size or 1,
                p50_ms=metric.value or 0.0,
                float_p50_ms=reference.value or 0.0,
            )


def costly(row: SlowRow) -> tuple[str, ...]:
    """Return the layers whose loss is worth a rule, the costliest first."""
    least = max(_MARGIN_MS, _LEAST * sum(cost.lost_ms for cost in row.layers))
    return tuple(cost.layer for cost in row.layers if cost.lost_ms >= least and cost.lost_ms > _MARGIN * cost.float_ms)


def slower_sentences(rows: Sequence[SlowRow]) -> tuple[str, ...]:
    """Return what is said of each network: how much slower it is, which layers cost the most, and what is faster."""
    return tuple(_sentence(row) + _mixed(row) for row in rows)


def _mixed(row: SlowRow) -> str:
    """The network that leaves layers in float, where one was built; else the command that builds it."""
    if row.mixed is None:
        return ". `bench RUN --mixed` builds and times the network without them" if costly(row) else ""
    found, count = row.mixed, len(row.mixed.layers)
    if found.unquiet:
        return f". What PTQ gains with layers in float was {NOT_MEASURED}; `bench RUN --mixed` measures it again"
    ratio = found.p50_ms / found.float_p50_ms if found.float_p50_ms else 1.0
    score = f" and has {found.score}" if found.score else ""
    verdict = "" if ratio < 1 else ", so that float is the faster one here"
    return (
        f". With {count} {'layer' if count == 1 else 'layers'} in float, PTQ takes {ratio:.2f} of float's time "
        f"({_ms(found.p50_ms)} against {_ms(found.float_p50_ms)} ms, in turn){score}{verdict} ({found.recipe})"
    )


def _sentence(row: SlowRow) -> str:
    ratio = row.p50_ms / row.float_p50_ms if row.float_p50_ms else 1.0
    start = (
        f"{display(row.variant)} takes {ratio:.2f} of float's time on {display(row.engine)} at batch {row.batch_size} "
        f"({_ms(row.p50_ms)} against {_ms(row.float_p50_ms)} ms)"
    )
    if row.unquiet:
        return f"{start}; what each layer adds was {NOT_MEASURED}"
    names = set(costly(row))
    if not names:
        more = row.rest_ms - row.float_rest_ms
        return (
            f"{start}; no single layer is slower, and the operations that belong to no layer take {_ms(more)} ms more"
        )
    found = [cost for cost in row.layers if cost.layer in names]
    listed = ", ".join(f"{c.layer} ({_ms(c.quantized_ms)} against {_ms(c.float_ms)})" for c in found[:_NAMED])
    others = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    verb = "layer is" if len(found) == 1 else "layers are"
    lost = sum(cost.lost_ms for cost in found)
    return (
        f"{start}. By the engine's own times {len(found)} {verb} slower there than in float, by {_ms(lost)} ms in all: "
        f"{listed}{others}"
    )


def _ms(value: float) -> str:
    return significant(value)


def rules_text(rows: Sequence[SlowRow]) -> str:
    """Return the lines of a recipe that leave the costly layers in float, in the engine's file alone; "" = none."""
    targets: dict[str, dict[str, None]] = {}
    for row in rows:
        layers = costly(row) if row.mixed is None or row.mixed.unquiet else row.mixed.layers
        targets.setdefault(row.target, {}).update(dict.fromkeys(layers))
    lines = [f"    - {_rule(layer, target)}" for target, layers in targets.items() for layer in layers]
    return "\n".join(["quantization:", "  rules:", *lines]) if lines else ""


def _rule(layer: str, target: str) -> str:
    """Return a rule in YAML, which takes a name such as 1.0 for a number unless it is quoted."""
    rule: dict[str, object] = {"match": layer, "enable": False, **({"target": target} if target else {})}
    return yaml.safe_dump(rule, default_flow_style=True, sort_keys=False, width=10_000).strip()
