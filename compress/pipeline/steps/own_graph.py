"""Networks of ONNX recipes, back into their graph."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from compress.errors import CompressError
from compress.export.spec import ExportSpec
from compress.onnx_ptq.load import load_source
from compress.onnx_ptq.passes import open_batch
from compress.onnx_ptq.quantize import quantize_onnx_file
from compress.pipeline.run import Run
from compress.quantization.spec import QuantSpec


def write_into_own_graph(
    run: Run, model: nn.Module, path: Path, *, spec: QuantSpec, metadata: Mapping[str, str]
) -> bool:
    """Write into the graph of `model.name`.

    Returns:
        True if written, else a note says why not.
    """
    name, batch = run.recipe.model.name, [run.example]
    try:
        reason = _another_form(run.recipe.export) or _unfit(Path(name))
        if not reason:
            quantize_onnx_file(name, batch, spec=spec, out=path, trained=model, metadata=metadata)
    except CompressError as error:
        reason = str(error)
    if reason:
        run.notes.append(f"{path.name} has the nodes of torch's exporter, not those of {name}: {reason}")
        return False
    run.notes.append(f"{path.name} is the graph of {name}, with its nodes and names")
    return True


def _another_form(export: ExportSpec) -> str:
    """Return why the recipe needs an exported file; "" if not."""
    if export.precision != "fp32":
        return f"export.precision is {export.precision}, and the types of a file's own graph stay as they are"
    if export.channel_scales != "weight":
        return f"export.channel_scales is {export.channel_scales}"
    return ""


def _unfit(file: Path) -> str:
    """Return why a run cannot measure this interface; "" if it can."""
    graph = load_source(file).proto.graph
    if not all(open_batch(value) for value in graph.input):
        return "it states the size of its batch, and a run measures several"
    if len(graph.output) != 1:
        return f"it has {len(graph.output)} outputs, and a run finds them by the names that the exporter gives"
    return ""
