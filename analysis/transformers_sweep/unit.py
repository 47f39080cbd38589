"""One network of the study: quantized, trained for a step, exported, and its file compared with fake quantization.

`python -m analysis.transformers_sweep.unit ViTForImageClassification` prints the row of a network as a line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, fx, nn

import compress
from analysis.common.study import Row
from analysis.sweep.unit import decibel, described, pictures, settle
from analysis.transformers_sweep.networks import build, networks
from compress.errors import CompressError
from compress.graph.inputs import named_tensors

SAME_DB = 40.0
MARGIN_DB = 3.0
RUNTIME_DB = 20.0
_RESULTS = ("logits", "class_queries_logits", "predicted_depth", "last_hidden_state", "feature_maps_0")
_BEFORE_SELECTION = ("enc_outputs_class",)
"""Scores of all places, among which a detector of two stages selects the best."""


def study(name: str) -> Row:
    """Return the row of one network; it says whether the network was refused or an error was raised."""
    row: Row = {"stage": "build"}
    try:
        _study(name, row)
        same = row["sqnr_file_db"] >= min(SAME_DB, row["sqnr_moved_db"] - MARGIN_DB)
        agrees = same and row["sqnr_engine_db"] >= RUNTIME_DB
        row |= {"status": "ok"} if agrees else {"status": "failed", "error": "the file differs from fake quantization"}
    except CompressError as error:
        row |= {"status": "refused", "error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        row |= {"status": "failed", "error": text, "at": f"{Path(where.filename).name}:{where.lineno}"}
    return row


def _study(name: str, row: Row) -> None:
    torch.set_num_threads(1)
    network = networks()[name]
    model = build(network)
    images = pictures(12, network.pixels)
    settle(_Called(model), images)
    row |= {"task": network.task, "parameters": sum(p.numel() for p in model.parameters()), "stage": "quantize"}
    batches = [{"pixel_values": part} for part in images.split(4)]
    spec = compress.QuantSpec(target="onnxruntime")
    qmodel = compress.quantize(model, batches[0], batches[:2], spec=spec)
    row |= described(qmodel) | {"training": qmodel.report.training, "stage": "compare"}
    moved = images[8:] + 1e-5 * torch.randn(images[8:].shape, generator=torch.Generator().manual_seed(1))
    names: tuple[str, ...] = _RESULTS
    if selects_of_equals(qmodel, images[8:]):
        names, row["tied"] = _BEFORE_SELECTION, True
    with torch.no_grad():
        reference, result, beside = (
            result_of(m(pixel_values=x), names) for m, x in _pairs(model, qmodel, images[8:], moved)
        )
    row |= {"sqnr_float_db": decibel(reference, result), "sqnr_moved_db": decibel(result, beside), "stage": "export"}
    with tempfile.TemporaryDirectory() as folder:
        file = compress.export_onnx(qmodel, batches[0], Path(folder) / "model.onnx")
        row["stage"] = "engine"
        for key, plain in (("sqnr_file_db", True), ("sqnr_engine_db", False)):
            row[key] = decibel(result, _from_file(file, images[8:], names, plain=plain))
    row["stage"] = "train"
    train_step(qmodel, batches[0])
    del row["stage"]


def _pairs(model: nn.Module, qmodel: fx.GraphModule, images: Tensor, moved: Tensor) -> list[tuple[nn.Module, Tensor]]:
    return [(model, images), (qmodel, images), (qmodel, moved)]


def selects_of_equals(qmodel: fx.GraphModule, images: Tensor) -> bool:
    """Return True if a top-k has to leave out one of equal scores; torch and ONNX do not choose the same one."""
    watch = _Selections(qmodel)
    with torch.no_grad():
        watch.run(images)
    return watch.tied


class _Selections(fx.Interpreter):
    """Runs a graph and looks at the scores of each top-k."""

    tied = False

    def run_node(self, n: fx.Node) -> Any:
        if n.target in (torch.topk, "topk"):
            found: Any = self.map_nodes_to_values(n.args, n)
            scores, count, *rest = found
            axis: Any = rest[0] if rest else n.kwargs.get("dim", -1)
            ordered = scores.sort(axis, descending=True).values
            if ordered.shape[axis] > count:
                self.tied |= bool((ordered.select(axis, count - 1) == ordered.select(axis, count)).any())
        return super().run_node(n)


def _from_file(file: Path, images: Tensor, results: tuple[str, ...], *, plain: bool) -> Tensor:
    """Return the result of a file on ONNX Runtime: node by node as it is written, or with its integer kernels."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    levels = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_DISABLE_ALL if plain else levels.ORT_ENABLE_ALL
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [tensor.name for tensor in session.get_outputs()]
    values = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return result_of({name: torch.from_numpy(value) for name, value in zip(names, values, strict=True)}, results)


class _Called(nn.Module):
    """A network of transformers that is called with pictures."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Any:
        return self.model(pixel_values=images)


def result_of(output: Any, names: tuple[str, ...] = _RESULTS) -> Tensor:
    """Return the tensor of an output that networks are compared by, the first of `names`, channels last."""
    tensors = dict(named_tensors(output))
    name = next((name for name in names if name in tensors), next(iter(tensors)))
    value = tensors[name]
    return value.movedim(1, -1).flatten(0, -2) if value.dim() == 4 else value.flatten(0, -2)


def train_step(qmodel: fx.GraphModule, batch: dict[str, Tensor]) -> None:
    """Take a step of quantization-aware training.

    Raises:
        RuntimeError: a gradient or a result is not finite, or no weight has a gradient.
    """
    qmodel.train()
    optimizer = torch.optim.SGD(qmodel.parameters(), lr=1e-3)
    results = [x for _, x in named_tensors(qmodel(**batch)) if x.is_floating_point()]
    loss = torch.stack([x.square().mean() for x in results if x.requires_grad]).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in qmodel.named_parameters() if p.grad is not None}
    broken = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    if broken or not any(bool(gradient.any()) for gradient in gradients.values()):
        raise RuntimeError(f"gradients are not finite, or all zero: {', '.join(broken[:3])}")
    optimizer.step()
    with torch.no_grad():
        if not bool(result_of(qmodel.eval()(**batch)).isfinite().all()):
            raise RuntimeError("the results after the step are not finite")


if __name__ == "__main__":
    print(json.dumps(study(sys.argv[1])))
