"""Exports a network of the study to ONNX and evaluates the file.

The file's size and zeros are read; its accuracy is measured on the whole evaluation split, node by node in integer
arithmetic on the device (`onnx_on_torch`); and ONNX Runtime runs the same file on the CPU, on as many images as the
setting allows, to compare the predicted classes.
"""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

import compress
from analysis.common.study import Row
from analysis.shapes_accuracy.onnx_on_torch import OnnxOnTorch
from analysis.shapes_accuracy.setting import Setting
from analysis.shapes_accuracy.unit import validation
from compress.audit.onnx import audit_sparsity
from compress.data import BatchPlan, Split
from compress.errors import CompressError
from compress.export.names import module_prefix
from compress.measure.sizes import model_sizes

EVALUATION_BATCH = 100


class Finisher:
    """Completes rows with the figures of the exported files; the evaluation split is drawn once."""

    def __init__(self, setting: Setting, device: str, folder: Path, threads: int) -> None:
        self.setting, self.device, self.folder, self.threads = setting, torch.device(device), folder, threads
        self.split: Split = validation(setting, self.device)

    def row(self, job: Row) -> Row:
        """Return the complete row of a job of `run_unit`, and remove its file."""
        began, file = time.perf_counter(), Path(job["file"])
        model: nn.Module = torch.load(file, weights_only=False)
        row = {key: value for key, value in job.items() if key not in ("file", "masked")}
        example = self._images(2).cpu()
        opset = 21 if "W4A8" in job["method"] else 19  # 21 is the first with INT4
        onnx = self.folder / f"{file.stem}.onnx"
        split = self.split
        compress.export_onnx(model, example, onnx, opset=opset, preprocessing=split.preprocessing, labels=split.labels)
        row |= sizes(onnx, model, job["masked"])
        logits = self._logits(onnx)
        targets = self.split.targets.to(self.device)  # type: ignore[attr-defined]
        row |= {
            "top1": 100 * (logits.argmax(1) == targets).float().mean().item(),
            "images": len(targets),
        }
        row |= self._onnxruntime(onnx, logits, job)
        for path in (file, onnx):
            path.unlink(missing_ok=True)
        return row | {"finish_s": time.perf_counter() - began}

    def _images(self, count: int) -> Tensor:
        return self.split.load(list(range(count)), epoch=None, device=self.device)[0]

    def _logits(self, onnx: Path) -> Tensor:
        network = OnnxOnTorch(onnx, self.device)
        plan = BatchPlan(batch_size=EVALUATION_BATCH)
        return torch.cat([network(images) for images, _ in self.split.batches(plan, device=self.device)])

    def _onnxruntime(self, onnx: Path, logits: Tensor, job: Row) -> Row:
        """Return the share of images on which ONNX Runtime predicts the same class, or the reason why it cannot run."""
        count = max(8, min(512, len(self.split), int(self.setting.ort_gmacs * 1e9 / max(1, job["dense_macs"]))))
        spread = torch.linspace(0, len(self.split) - 1, count).long().tolist()
        images = self.split.load(spread, epoch=None, device=self.device)[0].cpu()
        try:
            with compress.build_engine(onnx, "onnxruntime", threads=self.threads) as engine:
                predicted = [int(engine.run({"input": x[None].numpy()})["logits"].argmax()) for x in images]
        except CompressError as error:
            return {"ort_agreement": None, "ort_images": 0, "ort_reason": str(error)[:200]}
        same = torch.tensor(predicted) == logits[spread].argmax(1).cpu()
        return {"ort_agreement": 100 * same.float().mean().item(), "ort_images": count}


def sizes(onnx: Path, model: nn.Module, masked: list[str]) -> Row:
    """Return the bytes of the file and of its weights, dense and packed for 2:4 kernels, and the 2:4 violations."""
    total = model_sizes(onnx)
    row: Row = {"file_bytes": total.file_bytes, "weight_bytes": total.weight_bytes}
    if masked:
        width = 1 if isinstance(model, fx.GraphModule) else 4
        elements = sum(cast(Tensor, model.get_submodule(name).weight).numel() for name in masked)
        prefixes = tuple(map(module_prefix, masked))
        found = [r.violations or 0 for r in audit_sparsity(onnx) if r.name.startswith(prefixes)]
        row["packed_bytes"] = total.weight_bytes - elements * (width - (width + 2 / 8) / 2)
        row["violations"] = sum(found) if len(found) == len(masked) else None
    return row


def finish_all(jobs: Any, results: Any, setting: Setting, device: str, folder: Path, threads: int) -> None:
    """Complete jobs until None comes; put ("row", row) or ("failed", network, seed, method, reason) into `results`."""
    torch.set_num_threads(threads)
    finisher = Finisher(setting, device, folder, threads)
    while True:
        try:
            job = jobs.get(timeout=1.0)
        except queue.Empty:
            continue
        if job is None:
            return
        try:
            results.put(("row", finisher.row(job)))
        except Exception as error:  # any failure of one file is noted with its reason
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            results.put(("failed", job["network"], job["seed"], job["method"], reason))
