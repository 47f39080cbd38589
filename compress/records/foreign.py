"""Engines that were given a file placed for another engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from compress.engines.registry import suits, target_of
from compress.records.run import RunData, recipe_tree
from compress.records.summary import family
from compress.support.text import display
from compress.variants import QUANTIZED


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
    """Targets named by a recipe's tree; none where it quantizes nothing."""
    section = tree.get("quantization") if isinstance(tree, dict) else None
    found = section.get("target") if isinstance(section, dict) else None
    return [str(name) for name in found] if isinstance(found, list) else [found] if isinstance(found, str) else []
