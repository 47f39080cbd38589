"""What calibration images say about a placement: branches that none opens, and concats of ranges that lie far apart."""

from __future__ import annotations

import glob
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from compress.errors import CompressWarning, DeadTensorError
from compress.quantization.placement.decisions import CLOSED, FAR_APART, Placement
from compress.quantization.placement.view import GraphView, Node
from compress.quantization.spec import QuantSpec, Rule

T = TypeVar("T")
_APART = 3.0
"""Largest over smallest range of tensors with one scale, of which the smallest has another consumer."""


class ClosedError(DeadTensorError):
    """A tensor that is always zero, with rules that leave its consumers float, and a warning that says so."""

    def __init__(self, error: DeadTensorError, consumers: list[str]) -> None:
        super().__init__(error.quantizers)
        self.rules = tuple(Rule(match=name, enable=False, reason=CLOSED) for name in consumers)
        self.warning = (
            f"{', '.join(error.quantizers)} are zero on every calibration image, and {', '.join(consumers)}, which "
            "consume them, stay float: calibrate with images that reach them, if there are any"
        )


@contextmanager
def closed_branches(inputs: Collection[str], *placements: Placement) -> Iterator[None]:
    """Turn a `DeadTensorError` into a `ClosedError`, with rules for the consumers in these placements.

    An input of the network that is always zero stays an error: its images are black.
    """
    try:
        yield
    except DeadTensorError as error:
        if isinstance(error, ClosedError):
            raise
        sites = [site for placement in placements for site in placement.activations if site.name in error.quantizers]
        if any(tensor in inputs for site in sites for tensor, _ in site.edges):
            raise
        names = dict.fromkeys(consumer for site in sites for _, consumer in site.edges)
        rows = [row for placement in placements for row in placement.decisions if row.quantizer in error.quantizers]
        paths = {weight.path.replace(".", "_"): weight.path for p in placements for weight in p.weights}
        # An operation that needs a pair at its output, as on ONNX Runtime, is float with the consumers of that pair.
        around = {name for row in rows for name in row.layer.split()}
        names |= dict.fromkeys(name for name in paths.values() if name in around)
        names |= dict.fromkeys(tensor for site in sites for tensor, _ in site.edges if tensor in around)
        raise ClosedError(error, [paths.get(name, name) for name in names]) from None


def around_closed(quantize: Callable[[QuantSpec], T], spec: QuantSpec, batches: Iterable[Any]) -> T:
    """Quantize, again with the consumers float where branches are closed; each time a warning says so."""
    while True:
        try:
            return quantize(spec)
        except ClosedError as error:
            if iter(batches) is batches or set(error.rules) <= set(spec.rules):
                raise DeadTensorError(error.quantizers) from None
            warnings.warn(error.warning, CompressWarning, stacklevel=2)
            spec = replace(spec, rules=(*spec.rules, *error.rules))


def concats_apart(view: GraphView, placement: Placement, ranges: Mapping[str, float]) -> tuple[Rule, ...]:
    """Rules for concats whose one scale would cost another consumer of an input most of its resolution.

    `ranges`: largest magnitudes, on some images, of the tensors that `shared_tensors` names.
    """
    nodes, found = {node.name: node for node in view.nodes}, dict[str, float]()
    for site in placement.activations:
        most = max((ranges.get(tensor, 0.0) for tensor, _ in site.edges), default=0.0)
        tensors = {tensor: [nodes[c] for t, c in site.edges if t == tensor] for tensor, _ in site.edges}
        others = [t for t, users in tensors.items() if any(not _leads_to_concat(user) for user in users)]
        least = min((ranges[tensor] for tensor in others if ranges.get(tensor)), default=most)
        if least and most > _APART * least:
            for user in (user for users in tensors.values() for user in users if _leads_to_concat(user)):
                found[_concat_after(user).layer] = most / least
    return tuple(
        Rule(match=glob.escape(name), enable=False, reason=f"{FAR_APART}: {times:.0f} times")
        for name, times in found.items()
    )


def shared_tensors(placement: Placement) -> list[str]:
    sites = [dict.fromkeys(tensor for tensor, _ in site.edges) for site in placement.activations]
    return [tensor for site in sites if len(site) > 1 for tensor in site]


def _concat_after(node: Node) -> Node:
    """The concat that a tensor goes to through operations with one consumer, or the last operation."""
    while node.kind != "concat" and node.traits.commutes_with_quantization and len(node.consumers) == 1:
        node = node.consumers[0]
    return node


def _leads_to_concat(node: Node) -> bool:
    return _concat_after(node).kind == "concat"
