"""ResNet-50 as fp16, INT8 and 2:4 INT8 on a GPU: accuracy against the GPU's time.

    python -m analysis.gpu_tradeoff.run

Times of the engine `cuda` on a quantized file and on its 2:4 copy, and of fp16 by torch.compile, which has compiled in
a process of its own. gpu_tradeoff.json is written after every number; the report takes top-1 from `shapes_accuracy`.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper

from analysis.common.study import BudgetSpentError, Row, command_line, gpu_software, study_parser, time_limit
from analysis.cuda_engine.baseline import SETTINGS, Baseline
from analysis.cuda_engine.call_time import call_ms
from analysis.cuda_engine.networks import image_size, images, qdq_file
from compress.engines import build_engine
from compress.engines.cuda.engine import CudaEngine
from compress.files import write_json
from compress.sparsity.masks import nm_mask
from compress.variants import Variant

FLOAT, INT8, SPARSE = str(Variant.FLOAT), str(Variant.PTQ), str(Variant.SPARSE_PTQ)
_BEGIN = time.monotonic()


def main() -> None:
    """Measure times until all are done or the time has run out."""
    parser = study_parser(__doc__, out="results/h100")
    parser.add_argument("--network", default="resnet50")
    parser.add_argument("--batch", type=int, default=128, help="images of a timed batch")
    parser.add_argument("--budget-s", type=float, default=1e6, help="seconds after which the study ends")
    parser.add_argument("--files", type=Path, default=Path("/tmp/cuda_engine_files"))
    parser.add_argument("--plan", type=Path, help="plan file with kernels that were measured before")
    parser.add_argument("--device", default="cuda", help="cpu: tries the study without a GPU, in exact arithmetic")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    study = Study(arguments)
    with suppress(BudgetSpentError), time_limit(arguments.budget_s):
        study.times()
    study.write("done")
    os._exit(0)  # a process that still compiles would keep the terminal's pipe open


class Study:
    """The rows so far."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.device = torch.device(arguments.device)
        self.rows: dict[str, Row] = {
            FLOAT: {"variant": FLOAT, "engine": "torch.compile (f16)"},
            INT8: {"variant": INT8, "engine": "cuda (f16)"},
            SPARSE: {"variant": SPARSE, "engine": "cuda (f16)"},
        }
        self.report: Row = {
            "command": command_line(), "machine": gpu_software("triton"), "network": arguments.network,
            "batch": arguments.batch, "pixels": image_size(arguments.network),
            "baseline": SETTINGS, "rows": list(self.rows.values()),
        }  # fmt: skip

    def write(self, what: str) -> None:
        """Write the file, and tell what has been done after how many seconds."""
        self.report["seconds"] = round(time.monotonic() - _BEGIN)
        write_json(self.arguments.out / "gpu_tradeoff.json", self.report)
        print(f"{self.report['seconds']:4d} s: {what}", file=sys.stderr, flush=True)

    def times(self) -> None:
        """The GPU's time for a batch of each network; weights are random, which times do not depend on."""
        name, batch = self.arguments.network, self.arguments.batch
        baseline = Baseline(name, batch) if self.device.type == "cuda" else None
        dense = qdq_file(name, self.arguments.files)
        sparse = sparse_copy(dense, self.arguments.files / f"{name}-2-4.onnx")
        self.write("files")
        for variant, path in ((INT8, dense), (SPARSE, sparse)):
            options = {"device": self.arguments.device}
            options |= {} if self.arguments.plan is None else {"plan": str(self.arguments.plan)}
            engine = cast(CudaEngine, build_engine(path, "cuda", batch_size=batch, **options))
            x = {engine.inputs[0].name: images(batch, image_size(name)).to(self.device)}
            if self.device.type == "cuda":
                self.rows[variant]["gpu_p50_ms"], _ = call_ms(partial(engine.run_tensors, x))
            self.write(f"{variant}: {self.rows[variant]}")
            engine.close()
        if baseline is not None:
            found = baseline.measured(60.0)
            self.rows[FLOAT] |= {"gpu_p50_ms": found["fp16_ms"]} if "fp16_ms" in found else found
        self.write(f"{FLOAT}: {self.rows[FLOAT]}")


def sparse_copy(path: Path, out: Path) -> Path:
    """Write a copy of a quantized file with the two smallest of every four codes along the input channels at zero."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        codes = numpy_helper.to_array(tensor)
        if codes.dtype == np.int8 and codes.ndim in (2, 4) and codes.shape[1] % 4 == 0:
            tensor.CopyFrom(numpy_helper.from_array(two_of_four(codes), tensor.name))
    onnx.save(model, out)
    return out


def two_of_four(codes: NDArray[np.int8]) -> NDArray[np.int8]:
    """Return codes (O, I, ...) with the two smallest magnitudes of every four neighbours along I at zero."""
    return np.where(nm_mask(torch.from_numpy(codes.astype(np.float32)), 2, 4).numpy(), codes, np.int8(0))


if __name__ == "__main__":
    main()
