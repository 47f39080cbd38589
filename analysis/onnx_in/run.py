"""Which ONNX files can be quantized, and how near the result is: a table of files by origin and target.

Each file adds its rows to the document at once, and a repeated command goes on with those that have none.
"""

import json
import os
import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

import compress
from analysis.common.study import Row, listed, option, software, sqnr, study_options, table
from analysis.onnx_in.forms import PACKAGES, Form, batches, forms
from compress.engines.base import read_onnx
from compress.errors import CompressError
from compress.files import write_json, write_text
from compress.measure.machine import describe_machine
from compress.onnx_ptq.quantize import quantize_onnx_file
from compress.onnx_ptq.source import load_source
from compress.quantization import TARGETS


def main() -> None:
    arguments = study_options(
        __doc__,
        option("--only", default="", help="origins and names that contain this text"),
        option("--targets", nargs="+", default=list(TARGETS), choices=TARGETS),
        out="results",
    )
    file = arguments.out / "onnx_in.json"
    rows: list[Row] = json.loads(file.read_text())["rows"] if file.is_file() else []
    done = {(row["origin"], row["name"], row["target"]) for row in rows}
    for form in forms():
        targets = arguments.targets[:1] if form.tiny else arguments.targets
        missing = [target for target in targets if (form.origin, form.name, target) not in done]
        if not missing or arguments.only not in f"{form.origin} {form.name}":
            continue
        rows += measured(form, missing)
        print(
            form.origin, form.name, [row.get("sqnr_db", row.get("reason")) for row in rows[-len(missing) :]], flush=True
        )
        document = {
            "command": "python -m analysis.onnx_in.run",
            "machine": describe_machine().to_dict() | {"load_average": os.getloadavg()[0]},
            "software": software(
                "torch", "onnx", "onnxruntime", "timm", "torchvision", *(p[0].split()[0] for p in PACKAGES)
            ),
            "rows": rows,
        }
        write_json(file, document)
        write_text(file.with_suffix(".md"), markdown(document))


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
    audited = compress.audit_onnx(done.path).rows
    (feed,) = batches(path, count=1, seed=1)
    return {
        "status": "quantized",
        "quantizers": len(done.placement.activations),
        "notes": list(done.notes),
        "layers": len(audited),
        "int8_layers": sum(r.int8 for r in audited),
        "seconds": seconds,
        "sqnr_db": round(
            sqnr(*(results(load_source(file, quantized=True).proto, feed)[:1] for file in (path, done.path))), 1
        ),
    }


def results(model: onnx.ModelProto, feed: dict[str, Any], *, plain: bool = False) -> list[np.ndarray]:
    """The outputs on ONNX Runtime; `plain`: every operation by itself, as the file says."""
    # Files in half precision lose accuracy by one optimizer, which compress.engines.onnxruntime turns off too.
    level, options, harmful = ort.GraphOptimizationLevel, ort.SessionOptions(), ["WeightBiasQuantization"]
    options.graph_optimization_level = level.ORT_DISABLE_ALL if plain else level.ORT_ENABLE_ALL
    return list(ort.InferenceSession(model.SerializeToString(), options, disabled_optimizers=harmful).run(None, feed))


def markdown(document: dict[str, Any]) -> str:
    rows = document["rows"]
    quantized = [row for row in rows if row["status"] == "quantized"]
    refused, failed = (sum(row["status"] == status for row in rows) for status in ("refused", "failed"))
    lines = [
        "# ONNX files that can be quantized",
        "",
        f"`{document['command']}` on {document['machine']['cpu']}; {listed(document['software'])}. Random weights, "
        "smooth random pictures; SQNR is that of the first output of the quantized file against the float file on ONNX "
        "Runtime, on pictures that were not calibrated with.",
        "",
        f"{len(quantized)} of {len(rows)} quantized, {refused} refused with a sentence, {failed} failed.",
        "",
    ]
    keys = ("origin", "name", "opset", "target", "int8_layers", "quantizers", "sqnr_db", "seconds")
    lines += table(
        ("origin", "network", "opset", "target", "INT8 layers", "quantizers", "SQNR dB", "s"),
        (
            [f"{row[key]} of {row['layers']}" if key == "int8_layers" else row[key] for key in keys]
            for row in sorted(quantized, key=lambda r: (r["origin"], r["name"], r["target"]))
        ),
    )
    return "\n".join([*lines, "", *_refusals(rows)]) + "\n"


def _refusals(rows: list[Row]) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row["status"] != "quantized":
            text = re.sub(r"\S*/\S+/\S*", "", row["reason"]).replace(row["name"], "FILE").strip()
            text = re.sub(r"has opset \d+;", "has opset N;", text)
            reasons[row["status"], text].append(row["name"])
    lines = ["| | reason | files |", "|---|---|---|"]
    for (status, text), names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        shown = ", ".join(sorted(set(names))[:4])
        lines.append(f"| {status} | {text} | {len(set(names))}: {shown}{', ...' if len(set(names)) > 4 else ''} |")
    return lines if reasons else []


if __name__ == "__main__":
    main()
