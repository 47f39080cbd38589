"""Some calibration images, and the tensors of a float graph on them: what `auto` decides by in torch models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import length_hint
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from compress.graph.inputs import Batches, model_inputs
from compress.graph.ops import Watching

T = TypeVar("T")

IMAGES = 32
"""Images that are looked at; for scales the even ones measure ranges, the others the error."""
_BATCHES = 8
"""Batches that are looked at where they cannot be split into images."""
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError)
"""Errors that torch raises for inputs of the wrong shape or type."""


def some_of(batches: Batches) -> tuple[list[Any], Batches]:
    """Batches from all over the data, or the first ones of what can be read once; and all batches."""
    if isinstance(batches, Sequence):
        return list(batches[:: -(-len(batches) // IMAGES) or 1]), batches
    source, seen, images = iter(batches), list[Any](), 0
    for batch in source:
        seen.append(batch)
        images += _length(batch)
        if images >= IMAGES:
            break
    return seen, (chain(seen, source) if source is batches else _Begun(batches, seen, source))


class _Begun:
    """Batches whose first pass has begun: it goes on after what was read."""

    def __init__(self, batches: Batches, seen: Sequence[Any], rest: Iterator[Any]) -> None:
        self.batches, self.seen = batches, seen
        self.rest: Iterator[Any] | None = rest

    def __iter__(self) -> Iterator[Any]:
        if self.rest is None:
            return iter(self.batches)
        rest, self.rest = self.rest, None
        return chain(self.seen, rest)

    def __length_hint__(self) -> int:
        return length_hint(self.batches)


@torch.no_grad()
def on_images(
    work: Callable[[Sequence[tuple[Tensor, ...]]], T],
    graph_module: fx.GraphModule,
    batches: Sequence[Any],
    *,
    all_reduce: bool,
) -> T | None:
    """Return what `work` finds on single images of batches, or on whole ones, as rank 0 does; None on none."""
    found = _found(work, graph_module, batches) if batches else None
    if all_reduce:
        box = [found]
        torch.distributed.broadcast_object_list(box, 0)
        (found,) = box
    return found


def _found(
    work: Callable[[Sequence[tuple[Tensor, ...]]], T], graph_module: fx.GraphModule, batches: Sequence[Any]
) -> T | None:
    try:
        return work(list(_images(graph_module, batches)))
    except _FAILURES:  # the first dimension of its inputs is no batch
        try:
            return work([model_inputs(graph_module, batch) for batch in batches[:_BATCHES]])
        except _FAILURES:  # calibration meets the same batch, and describes it
            return None


def tensors_of(graph_module: fx.GraphModule, names: frozenset[str], inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The results of the nodes of these names, float32, on the CPU."""
    found: dict[str, Tensor] = {}

    def keep(name: str, x: Tensor) -> None:
        found[name] = x.detach().float().cpu()

    Watching(graph_module, names, keep).run(*inputs)
    return found


def _images(graph_module: fx.GraphModule, batches: Sequence[Any]) -> Iterator[tuple[Tensor, ...]]:
    """Yield single images, evenly spread over the batches."""
    places = [(batch, place) for batch in batches for place in range(_length(batch))]
    chosen = [places[i * len(places) // IMAGES] for i in range(IMAGES)] if len(places) > IMAGES else places
    for batch, start in chosen:
        yield tuple(x[start : start + 1] for x in model_inputs(graph_module, batch))


def _length(batch: Any) -> int:
    while isinstance(batch, (tuple, list, Mapping)) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return len(batch) if isinstance(batch, Tensor) and batch.ndim else 1
