"""Quantizes one file of the study for each target, and compares it with the float file on ONNX Runtime."""

import tempfile
import time
from pathlib import Path
from typing import Any

import compress
from analysis.common.study import Row, sqnr
from analysis.onnx_in.forms import Form, batches
from compress.engines.base import BuildOptions, read_onnx
from compress.engines.onnxruntime import load
from compress.errors import CompressError
from compress.onnx_ptq.quantize import quantize_onnx_file


def measured(form: Form, targets: list[str]) -> list[Row]:
    rows = []
    with tempfile.TemporaryDirectory() as name:
        path = form.make(Path(name))
        data = batches(path)
        for target in targets:
            row: Row = {"origin": form.origin, "name": form.name, "target": target, "opset": read_onnx(path).opset}
            try:
                row |= _quantized(path, data, target, Path(name))
            except CompressError as error:
                reason = " ".join(str(error).split()).replace(str(path), form.name)
                row |= {"status": "refused", "reason": reason}
            except Exception as error:
                row |= {"status": "failed", "reason": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
            rows.append(row)
    return rows


def _quantized(path: Path, data: list[dict[str, Any]], target: Any, folder: Path) -> Row:
    start = time.perf_counter()
    done = quantize_onnx_file(path, data, spec=compress.QuantSpec(target=target), out=folder / "int8.onnx")
    seconds = round(time.perf_counter() - start, 2)
    audit = compress.audit_onnx(done.path)
    row: Row = {"status": "quantized", "quantizers": len(done.placement.activations), "notes": list(done.notes)}
    row |= {"layers": len(audit.rows), "int8_layers": sum(r.int8 for r in audit.rows), "seconds": seconds}
    return row | {"sqnr_db": _sqnr(path, done.path)}


def _sqnr(before: Path, after: Path) -> float:
    (feed,) = batches(before, count=1, seed=1)
    results = []
    for path in (before, after):
        with load(path, BuildOptions()) as engine:
            results.append([next(iter(engine.run(feed).values()))])
    return round(sqnr(*results), 1)
