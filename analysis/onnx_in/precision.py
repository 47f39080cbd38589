"""Files of the study in fp16: types of products in TensorRT-RTX's build for SM 89 and dB to float, beside AutoCast.

A step is `cast` (`compress.cast_onnx`), `autocast` (ModelOpt's, with the same images), or a target and the precision of
what `compress.quantize_onnx` leaves float. Each adds its row to a file, and a repeated command goes on with those that
have none. dB are of the least output, on images that no range was measured on: with each result rounded as the file
says and every operation by itself, and as ONNX Runtime computes the file.
"""

import subprocess
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from analysis.common.study import Row, append_row, option, read_rows, sqnr, study_options
from analysis.onnx_in.forms import Form, batches, forms, pages
from analysis.onnx_in.run import results
from compress import QuantSpec, audit_engine, audit_onnx, build_tensorrt, cast_onnx, quantize_onnx
from compress.engines.tensorrt.options import TensorRTOptions
from compress.errors import EngineError
from compress.export.casting import widened
from compress.onnx_ptq.source import load_source
from compress.quantization import TARGETS

STEPS = ("cast", "autocast", *(f"{target} {precision}" for target in TARGETS for precision in ("fp16", "fp32")))
AUTOCAST = """
import sys, numpy, onnx
from modelopt.onnx.autocast import convert_to_mixed_precision
data = dict(numpy.load(sys.argv[2]))
onnx.save(convert_to_mixed_precision(sys.argv[1], keep_io_types=True, calibration_data=data), sys.argv[3])
"""


def main() -> None:
    arguments = study_options(
        __doc__,
        option("--only", default="", help="origins and names that contain this text"),
        option("--steps", nargs="+", default=list(STEPS), choices=STEPS),
        option("--autocast", default="python", help="interpreter of an environment with nvidia-modelopt[onnx]"),
        out="results",
    )
    file = arguments.out / "onnx_precision.jsonl"
    done = {(row["origin"], row["name"], row["step"]) for row in read_rows(file)}
    for form, step in product(forms(), arguments.steps):
        row = {"origin": form.origin, "name": form.name, "step": step}
        if arguments.only in f"{form.origin} {form.name}" and tuple(row.values()) not in done:
            append_row(file, row | measured(form, step, arguments.autocast))


def measured(form: Form, step: Any, python: str) -> Row:
    with tempfile.TemporaryDirectory() as name:
        path, out = form.make(Path(name)), Path(name) / "made.onnx"
        make = pages if form.origin.startswith(("rapid", "ddddocr")) else batches
        data, (unseen,) = make(path, count=2), make(path, count=1, seed=1)
        try:
            if step == "cast":
                cast_onnx(path, out, batches=data)
            elif step == "autocast":
                np.savez(out.with_name("data.npz"), **data[0])
                subprocess.run(
                    (python, "-c", AUTOCAST, path, out.with_name("data.npz"), out),
                    check=True,
                    capture_output=True,
                    text=True,
                    timeout=600,
                )
            else:
                target, precision = step.split()
                quantize_onnx(path, data, spec=QuantSpec(target=target), out=out, precision=precision)
            return _found(path, out, unseen)
        except Exception as error:  # a row of the study
            said = " ".join(str(getattr(error, "stderr", "") or error).split())[-300:]
            return {"reason": f"{type(error).__name__}: {said}"}


def _found(path: Path, out: Path, unseen: dict[str, Any]) -> Row:
    model, rows = onnx.load(out), audit_onnx(out).rows
    exact = results(load_source(path, quantized=True).proto, unseen, plain=True)
    for value in (value for value in model.graph.input if value.name in unseen):
        for side, size in zip(value.type.tensor_type.shape.dim, unseen[value.name].shape, strict=True):
            side.dim_value = size
    onnx.save(model, out.with_name("fixed.onnx"))
    return {
        "file": Counter(row.type_on("tensorrt") for row in rows),
        "engine": _engine(out.with_name("fixed.onnx")),
        "casts": sum(node.op_type == "Cast" for node in model.graph.node),
        "written_db": round(_least(exact, results(widened(model), unseen, plain=True)), 1),
        "runtime_db": round(_least(exact, results(onnx.load(out), unseen)), 1),
    }


def _engine(path: Path) -> Counter[str] | str:
    try:
        built = build_tensorrt(path, options=TensorRTOptions(sms=(89,)))
    except EngineError as error:  # zero points, or operators that TensorRT lacks: the file is measured nevertheless
        return " ".join(str(error).split())[-300:]
    return Counter(layer.precision for layer in audit_engine(built.path).weighted)


def _least(exact: list[np.ndarray], found: list[np.ndarray]) -> float:
    return min(sqnr([a], [b]) for a, b in zip(exact, found, strict=True) if a.dtype.kind == "f" and a.any())


if __name__ == "__main__":
    main()
