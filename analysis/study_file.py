"""The other half of a unit of the study: from a network in a file to a row with what its ONNX file says.

The network is exported; the file's size and zeros are read; its accuracy is that of the file on the whole evaluation
split, run node by node in integer arithmetic on the device (onnx_on_torch.py); and ONNX Runtime runs the same file on
the CPU on as many images as the setting allows, to see whether it names the same classes.
"""

from __future__ import annotations

import queue
import time
from pathlib import Path
from typing import Any, cast

import torch
from onnx_on_torch import OnnxOnTorch
from study_unit import Row, Setting, validation
from torch import Tensor, fx, nn

import compress
from compress.data import BatchPlan, Split
from compress.errors import CompressError
from compress.export.audit import audit_sparsity
from compress.measure.sizes import model_sizes

EVALUATION_BATCH = 100


class Finisher:
    """Makes rows of networks; the evaluation split is drawn once."""

    def __init__(self, setting: Setting, device: str, folder: Path, threads: int) -> None:
        self.setting, self.device, self.folder, self.threads = setting, torch.device(device), folder, threads
        self.split: Split = validation(setting, self.device)

    def row(self, job: Row) -> Row:
        """The row of a job that `study_unit.run_unit` handed on; its file is removed."""
        began, file = time.perf_counter(), Path(job["file"])
        model: nn.Module = torch.load(file, weights_only=False)
        row = {key: value for key, value in job.items() if key not in ("file", "masked")}
        example = self._images(2).cpu()
        opset = 21 if "W4A8" in job["method"] else 19  # the first that has INT4
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
        """Share of images on which ONNX Runtime names the same class, and of how many; why not, if it cannot."""
        count = max(8, min(512, len(self.split), int(self.setting.ort_gmacs * 1e9 / max(1, job["dense_macs"]))))
        spread = torch.linspace(0, len(self.split) - 1, count).long().tolist()
        images = self.split.load(spread, epoch=None, device=self.device)[0].cpu()
        try:
            with compress.build_engine(onnx, "onnxruntime", threads=self.threads) as engine:
                named = [int(engine.run({"input": x[None].numpy()})["logits"].argmax()) for x in images]
        except CompressError as error:
            return {"ort_agreement": None, "ort_images": 0, "ort_reason": str(error)[:200]}
        same = torch.tensor(named) == logits[spread].argmax(1).cpu()
        return {"ort_agreement": 100 * same.float().mean().item(), "ort_images": count}


def sizes(onnx: Path, model: nn.Module, masked: list[str]) -> Row:
    """Bytes of the file and of its weights, these with the masked ones packed (half of them, 2 bits each), and 2:4."""
    total = model_sizes(onnx)
    row: Row = {"file_bytes": total.file_bytes, "weight_bytes": total.weight_bytes}
    if masked:
        width = 1 if isinstance(model, fx.GraphModule) else 4
        elements = sum(cast(Tensor, model.get_submodule(name).weight).numel() for name in masked)
        prefixes = tuple(f"/{name.replace('.', '/')}/" for name in masked)
        found = [r.violations or 0 for r in audit_sparsity(onnx) if r.name.startswith(prefixes)]
        row["packed_bytes"] = total.weight_bytes - elements * (width - (width + 2 / 8) / 2)
        row["violations"] = sum(found) if len(found) == len(masked) else None
    return row


def finish_all(jobs: Any, results: Any, setting: Setting, device: str, folder: Path, threads: int) -> None:
    """Finish jobs until None comes; what is put into `results` is ("row", row) or ("failed", row, reason)."""
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
        except Exception as error:  # one file's failure is a row that says so, whatever it is
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            results.put(("failed", job["network"], job["seed"], job["method"], reason))
