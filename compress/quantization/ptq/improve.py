"""The methods of `QuantSpec` beyond calibration, each switched on by itself, in this order.

1. `smooth` rescales the float network's norms, from images, before quantizers are placed;
2. `relu6` and `equalize` rescale its layers, without images (`float_graph`);
3. ranges are calibrated;
4. `adaround` and the empirical `bias_correction` process the layers in one walk: a layer is rounded, then its bias is
   corrected, and the inputs of the next layer include both;
5. or `reconstruct` learns roundings and ranges block by block, before the bias correction;
6. the analytic `bias_correction` follows from the quantized weights, `auto` from means of inputs too, without a walk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from compress.errors import QuantizationError
from compress.graph.canonical import canonical_graph
from compress.graph.compare import Reference
from compress.graph.inputs import Inputs
from compress.graph.ops import tensor_of
from compress.graph.report import attach_report
from compress.quantization.ptq.adaround import Rounder
from compress.quantization.ptq.bias_correction import (
    IMAGES,
    correct_bias_analytic,
    correct_bias_means,
    correct_to_targets,
)
from compress.quantization.ptq.reconstruct import reconstruct
from compress.quantization.ptq.smoothquant import smooth
from compress.quantization.ptq.walk import Visit, walk
from compress.quantization.report import Correction, QuantizationReport, Smoothing, quantization_report_of
from compress.quantization.spec import QuantSpec
from compress.support.progress import Progress


def needs_data_twice(spec: QuantSpec) -> bool:
    learned = spec.adaround is not None or spec.reconstruct is not None
    return isinstance(spec.smooth, float) or learned or spec.bias_correction == "empirical"


def smoothed(
    model: nn.Module,
    example_inputs: Inputs,
    batches: Iterable[Any],
    spec: QuantSpec,
    *,
    all_reduce: bool = False,
    progress: Progress | None = None,
) -> tuple[nn.Module, Smoothing | None]:
    """Smooth a copy of a float model if `spec` asks for it; otherwise the model itself and None are returned."""
    if not isinstance(spec.smooth, (int, float)):
        return model, None
    reference = Reference.of(model, example_inputs)
    graph_module = canonical_graph(model, example_inputs, fold=False)
    done = smooth(graph_module, batches, alpha=spec.smooth, all_reduce=all_reduce, progress=progress)
    reference.check(graph_module, "smoothing")
    return graph_module, done


@torch.no_grad()
def improve(
    qmodel: fx.GraphModule,
    batches: Iterable[Any],
    spec: QuantSpec,
    *,
    seen: Sequence[Any] = (),
    smoothing: Smoothing | None = None,
    folder: Path | None = None,
    all_reduce: bool = False,
    progress: Progress | None = None,
) -> QuantizationReport:
    """Apply the rounding and bias correction of `spec` to a calibrated network, in place; return the report.

    With `all_reduce` every process learns on its own images, and all take the result of rank 0. AdaRound saves finished
    layers in `folder`, to go on from after a stop. `smoothing`, of `smoothed`, is for the report. `bias_correction:
    auto` looks at `seen`, some of the batches, and leaves what `reconstruct` learned.
    """
    report = quantization_report_of(qmodel)
    if report.prepared is None:
        raise QuantizationError(
            "the model was not made by insert_quantizers: improve needs the spec that it was made with"
        )
    paths, rounds = [site.path for site in report.placement.weights], spec.adaround is not None
    before = paths if spec.bias_correction == "analytic" or rounds else []
    weights = {path: tensor_of(qmodel.get_submodule(path)).detach().clone() for path in before}
    blocks = reconstruct(qmodel, batches, spec.reconstruct, progress=progress) if spec.reconstruct else ()
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
        rows = correct_bias_analytic(qmodel, report.prepared.moments, weights=weights)
    elif spec.bias_correction == "auto" and spec.batchnorm == "fold" and spec.reconstruct is None:
        rows = correct_bias_means(qmodel, seen, weights)
    if all_reduce and (rounding or rows or blocks):
        for tensor in (*qmodel.parameters(), *qmodel.buffers()):
            torch.distributed.broadcast(tensor.data, 0)
    report = replace(report, smoothing=smoothing, rounding=rounding, reconstruction=blocks, corrections=rows)
    attach_report(qmodel, report)
    return report
