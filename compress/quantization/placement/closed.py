"""Branches that no calibration image opens: their tensors are zero on all of them, and the layers behind stay float."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from compress.errors import CompressWarning, DeadTensorError
from compress.quantization.placement.decisions import CLOSED, Placement
from compress.quantization.spec import QuantSpec, Rule

T = TypeVar("T")


class ClosedError(DeadTensorError):
    """As its base class, with what to do about it.

    Attributes:
        rules: leave the consumers of these tensors float.
        warning: says so.
    """

    def __init__(self, error: DeadTensorError, consumers: list[str]) -> None:
        super().__init__(error.quantizers)
        self.rules = tuple(Rule(match=name, enable=False, reason=CLOSED) for name in consumers)
        self.warning = (
            f"{', '.join(error.quantizers)} are zero on every calibration image, and {', '.join(consumers)}, which "
            "consume them, stay float: calibrate with images that reach them, if there are any"
        )


@contextmanager
def closed_branches(inputs: Collection[str], *placements: Placement) -> Iterator[None]:
    """Raise a `ClosedError` in the place of a `DeadTensorError`, with rules for the consumers in these placements.

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
        # A layer that needs a pair at its output, as on ONNX Runtime, is float with the consumers of that pair.
        around = {name for row in rows for name in row.layer.split()}
        names |= dict.fromkeys(name for name in paths.values() if name in around)
        raise ClosedError(error, [paths.get(name, name) for name in names]) from None


def around_closed(quantize: Callable[[QuantSpec], T], spec: QuantSpec, batches: Iterable[Any]) -> T:
    """Quantize, and where branches are closed again with their consumers float; each time it is warned of.

    Raises:
        DeadTensorError: the batches can be read once only, or a tensor that is always zero is quantized for others.
    """
    while True:
        try:
            return quantize(spec)
        except ClosedError as error:
            if iter(batches) is batches or set(error.rules) <= set(spec.rules):
                raise DeadTensorError(error.quantizers) from None
            warnings.warn(error.warning, CompressWarning, stacklevel=2)
            spec = replace(spec, rules=(*spec.rules, *error.rules))
