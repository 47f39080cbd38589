"""Parity by layer on engines."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, fx

from compress.data.base import BatchPlan, Split
from compress.data.load import load_data
from compress.engines.registry import target_of
from compress.errors import EngineError, RecipeError, RunError
from compress.export.onnx import export_onnx
from compress.measure.layer_parity import TOLERANCE, LayerParity, layer_parity
from compress.pipeline.again import finished_run, network, variants_in
from compress.pipeline.steps.training import build_float
from compress.quantization.ptq.quantize import quantize_targets
from compress.recipe.tree import Recipe
from compress.variants import Variant

ENGINES = ("onnxruntime", "openvino")

Results = dict[str, LayerParity | EngineError]


def parity_of_recipe(
    recipe: Recipe, *, images: int = 8, engines: Sequence[str] = ENGINES, tolerance: float = TOLERANCE
) -> Results:
    """Quantize the recipe's untrained model, export it, and compare each engine, or say why not.

    `images`: number of evaluation images. `tolerance`: share of elements that may differ by more than one step.

    Raises:
        RecipeError: no `quantization` section.
    """
    if recipe.quantization is None:
        raise RecipeError("parity compares a quantized network, and the recipe has quantization: null")
    data = load_data(recipe.data)
    model = build_float(recipe).model.eval()
    plan = BatchPlan(
        batch_size=recipe.data.batch_size, limit=min(recipe.quantization.calibration_images, len(data.train))
    )
    batches = [x for x, _ in data.train.batches(plan)]
    networks = quantize_targets(model, batches[0][:2], batches, spec=recipe.quantization)
    example, seen = batches[0][:2], _images(data.val, images)
    first, results = next(iter(networks.values())), Results()
    for engine in engines:
        qmodel = networks.get(target_of(engine) or "tensorrt", first)
        results |= _compare(qmodel, example, seen, [engine], tolerance)
    return results


def parity_of_run(
    folder: Path, *, variant: str = "", images: int = 8, engines: Sequence[str] = ENGINES, tolerance: float = TOLERANCE
) -> Results:
    """Export a run's quantized network and compare each engine; `variant` "" = the last. See `parity_of_recipe`.

    Raises:
        RunError: no such network.
    """
    known = [name for name in variants_in(folder) if name.is_quantized]
    chosen = Variant.named(variant) if variant or not known else known[-1]
    if chosen not in known:
        held = ", ".join(known) or "none"
        wanted = f" {variant!r}" if variant else ""
        raise RunError(f"{folder} holds no quantized network{wanted} (there is: {held}); ptq and qat make them")
    run = finished_run(folder)
    seen, results = _images(run.data.val, images), Results()
    for engine in engines:
        qmodel = network(run, *run.key(chosen, target_of(engine)))
        if isinstance(qmodel, fx.GraphModule):  # always, for a quantized variant
            results |= _compare(qmodel, run.example, seen, [engine], tolerance)
    return results


def _images(split: Split, count: int) -> Tensor:
    return next(iter(split.batches(BatchPlan(batch_size=count, limit=count))))[0]


def _compare(
    qmodel: fx.GraphModule, example: Tensor, images: Tensor, engines: Sequence[str], tolerance: float
) -> Results:
    results: Results = {}
    with tempfile.TemporaryDirectory() as folder:
        path = export_onnx(qmodel.cpu(), example, Path(folder) / "model.onnx")
        for engine in engines:
            precision = "f32" if engine == "openvino" else None
            try:
                results[engine] = layer_parity(
                    qmodel, path, images, engine=engine, precision=precision, tolerance=tolerance
                )
            except EngineError as error:
                results[engine] = error
    return results
