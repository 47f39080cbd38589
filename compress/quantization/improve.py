"""Post-training quantization made better, each way switched on alone in `QuantSpec`: the order they go in.

1. `smooth` rescales the float network's norms (needs images, before quantizers are placed);
2. `relu6` and `equalize` rescale its layers (needs none, `prepare`);
3. ranges are calibrated;
4. `adaround` and the empirical `bias_correction` go through the layers in one walk: a layer is rounded, then its bias
   is corrected, then the next layer sees both;
5. the analytic `bias_correction` needs no walk: it reads what the weights became.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from compress.errors import QuantizationError
from compress.graph.canonical import canonical_graph
from compress.graph.inputs import Inputs
from compress.graph.trace import preserve
from compress.progress import Progress
from compress.quantization.adaround import Rounder, Rounding
from compress.quantization.bias_correction import IMAGES, Correction, correct_bias_analytic, correct_to_targets
from compress.quantization.insert import placement_of
from compress.quantization.prepare import Prepared
from compress.quantization.smoothquant import Smoothing, smooth
from compress.quantization.spec import QuantSpec
from compress.quantization.walk import Visit, walk


@dataclass(frozen=True, kw_only=True)
class Improvements:
    """What was done beside rounding to nearest; `qmodel.improvements`.

    Attributes:
        prepared: ReLU6 and equalization.
        smoothing: of norms; None when it was not asked for.
        rounding: a row a layer, from AdaRound.
        corrections: a row a layer, from bias correction.
    """

    prepared: Prepared
    smoothing: Smoothing | None = None
    rounding: tuple[Rounding, ...] = ()
    corrections: tuple[Correction, ...] = ()

    def notes(self) -> list[str]:
        """One sentence each, for a run's report."""
        found = []
        if self.prepared.relu6:
            found.append(f"{len(self.prepared.relu6)} ReLU6 became ReLU, which changes activations above 6")
        if (done := self.prepared.equalization) is not None:
            found.append(f"equalized {len(done.pairs)} pairs of layers{_left(len(done.refused))}")
        if self.smoothing is not None:
            found.append(f"smoothed {len(self.smoothing.norms)} norms{_left(len(self.smoothing.refused))}")
        if self.rounding:
            learned = [row for row in self.rounding if not row.reason]
            found.append(f"AdaRound learned {len(learned)} layers{_left(len(self.rounding) - len(learned))}")
        if self.corrections:
            done_ = [row for row in self.corrections if not row.reason]
            found.append(f"corrected {len(done_)} biases{_left(len(self.corrections) - len(done_))}")
        return found


def _left(count: int) -> str:
    return f" ({count} left, each with its reason)" if count else ""


def needs_data_twice(spec: QuantSpec) -> bool:
    """Whether calibration data are read more than once."""
    return spec.smooth is not None or spec.adaround is not None or spec.bias_correction == "empirical"


def smoothed(
    model: nn.Module,
    example_inputs: Inputs,
    batches: Iterable[Any],
    spec: QuantSpec,
    *,
    all_reduce: bool = False,
    progress: Progress | None = None,
) -> nn.Module:
    """A smoothed copy of a float model, or the model itself where `spec` asks for no smoothing.

    Raises:
        ModelError: the model cannot be traced.
        QuantizationError: no norm can be smoothed.
    """
    if spec.smooth is None:
        return model
    graph_module = canonical_graph(model, example_inputs, fold=False)
    done = smooth(graph_module, batches, alpha=spec.smooth, all_reduce=all_reduce, progress=progress)
    preserve(graph_module, "smoothing", done)
    return graph_module


@torch.no_grad()
def improve(
    qmodel: fx.GraphModule,
    batches: Iterable[Any],
    spec: QuantSpec,
    *,
    smoothing: Smoothing | None = None,
    folder: Path | None = None,
    all_reduce: bool = False,
    progress: Progress | None = None,
) -> Improvements:
    """Round and correct a calibrated network as `spec` says; in place.

    Args:
        qmodel: from `insert_quantizers` with the same spec, calibrated.
        batches: the calibration data, once more.
        spec: what to do.
        smoothing: what was smoothed before, for the report.
        folder: where AdaRound keeps finished layers, to go on from after a stop.
        all_reduce: every process learns on its own images, and all take the result of rank 0.
        progress: hears of each layer.

    Returns:
        What was done; also at `qmodel.improvements`.

    Raises:
        QuantizationError: analytic correction without BatchNorm statistics.
        CalibrationError: no batches.
    """
    prepared = getattr(qmodel, "prepared", None)
    if not isinstance(prepared, Prepared):
        raise QuantizationError(
            "the model was not made by insert_quantizers: improve needs the spec that it was made with"
        )
    paths = [site.path for site in placement_of(qmodel).weights]
    kept = paths if spec.bias_correction == "analytic" else []
    weights = {path: cast(Tensor, qmodel.get_submodule(path).weight).detach().clone() for path in kept}
    rounder = None
    if spec.adaround is not None:
        rounder = Rounder(spec.adaround, folder=folder, progress=progress, total=len(paths))
    corrections: dict[str, Correction] = {}

    def visit(this: Visit) -> None:
        if rounder is not None:
            rounder.visit(this)
        if spec.bias_correction == "empirical":
            corrections[this.path] = correct_to_targets(this, corrections.get(this.path))

    if rounder is not None or spec.bias_correction == "empirical":
        walk(qmodel, batches, visit, images=spec.adaround.images if spec.adaround else IMAGES)
    rounding = rounder.finish() if rounder is not None else ()
    rows = tuple(corrections.values())
    if spec.bias_correction == "analytic":
        rows = correct_bias_analytic(qmodel, prepared.moments, weights=weights)
    if all_reduce and (rounding or rows):
        for tensor in qmodel.parameters():
            torch.distributed.broadcast(tensor.data, 0)
    done = Improvements(prepared=prepared, smoothing=smoothing, rounding=rounding, corrections=rows)
    preserve(qmodel, "improvements", done)
    return done
