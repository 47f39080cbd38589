"""Latency of ResNet-50 at 224 px on this CPU: each target beside the INT8 model that NNCF makes of the same network."""

import json
import os
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

import compress
from analysis.common.networks import random_network, with_statistics
from analysis.common.study import Row, command_line, option, study_options
from compress.data.base import BatchPlan
from compress.files import write_json, write_text
from compress.measure.latency import latency_ratio, measure_latency
from compress.measure.machine import describe_machine

IMAGES = 64
NNCF = """
import sys, numpy as np, nncf, openvino as ov
model = ov.Core().read_model(sys.argv[1])
images = np.load(sys.argv[2])
data = nncf.Dataset(list(images), lambda x: {"input": x[None]})
ov.save_model(nncf.quantize(model, data, subset_size=len(images)), sys.argv[3], compress_to_fp16=False)
print(nncf.__version__)
"""


def main() -> None:
    arguments = study_options(
        __doc__,
        option("--nncf-python", type=Path, help="Python interpreter of an environment that has nncf"),
        option("--runs", type=int, default=200),
        option("--threads", type=int, default=2),
        out="results",
    )
    with tempfile.TemporaryDirectory() as name:
        files, version = build(Path(name), arguments.nncf_python)
        rows = time_files(files, arguments.runs, arguments.threads)
    machine = describe_machine().to_dict() | {"load_average": os.getloadavg()[0]}
    document = {"command": command_line(), "machine": machine, "nncf": version, "rows": rows}
    file = write_json(arguments.out / "cpu_latency.json", document)
    print(write_text(file.with_suffix(".md"), markdown(json.loads(file.read_text()))).read_text())


def build(folder: Path, nncf_python: Path | None) -> tuple[dict[str, Path], str]:
    """Write float and INT8 files of one network, and return them with the version of NNCF.

    BatchNorm has the statistics of images, so that folding leaves the size of the activations as it is.
    """
    split = compress.load_data(compress.DataSpec(name="shapes", image_size=224, train_images=IMAGES)).train
    batches = [images for images, _ in split.batches(BatchPlan(batch_size=16))]
    model = with_statistics(random_network("resnet50"), *batches)
    files = {"float": compress.export_onnx(model, batches[0][:1], folder / "float.onnx")}
    for target in ("openvino", "onnxruntime", "tensorrt"):
        qmodel = compress.quantize(model, batches[0][:2], batches, spec=compress.QuantSpec(target=target))
        files[f"target {target}"] = compress.export_onnx(qmodel, batches[0][:1], folder / f"{target}.onnx")
    if nncf_python is None:
        return files, ""
    np.save(folder / "images.npy", torch.cat(batches).numpy())
    command = [
        str(nncf_python),
        "-c",
        NNCF,
        *(str(p) for p in (files["float"], folder / "images.npy", folder / "nncf.xml")),
    ]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return files | {"NNCF": folder / "nncf.xml"}, done.stdout.split()[-1]


def time_files(files: dict[str, Path], runs: int, threads: int) -> list[Row]:
    rows: list[Row] = []
    for engine in ("openvino", "onnxruntime"):
        with ExitStack() as stack:
            built = {}
            for name, path in files.items():
                if engine == "onnxruntime" and path.suffix != ".onnx":
                    continue
                for precision in ("f32", None) if engine == "openvino" and name == "float" else (None,):
                    made = compress.build_engine(path, engine, batch_size=1, threads=threads, precision=precision)
                    built[f"{name}, {made.info.label}"] = stack.enter_context(made)
            timed = measure_latency(built, batch_size=1, runs=runs, seconds=60)
            reference = next((t for t in timed if t.label.startswith("NNCF")), timed[0])
            rows += [
                {
                    "variant": t.label,
                    "p50_ms": t.p50_ms,
                    "p90_ms": t.p90_ms,
                    "p99_ms": t.p99_ms,
                    "ratio": latency_ratio(t, reference),
                    "to": reference.label,
                    "runs": t.runs,
                }
                for t in timed
            ]
    return rows


def markdown(document: Row) -> str:
    machine = document["machine"]
    lines = [
        "# ResNet-50, 224 px, batch 1, on the CPU",
        "",
        f"`{document['command']}`; {machine['cpu']}, {machine['cores']} cores; "
        f"NNCF {document['nncf'] or 'absent'}; load average {machine['load_average']:.1f} (the benchmark's own threads "
        "included). Variants in turn; the ratio is the median over rounds.",
        "",
        "| variant | p50 ms | p90 ms | p99 ms | ratio | to | runs |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    for row in document["rows"]:
        figures = " | ".join(f"{row[key]:.2f}" for key in ("p50_ms", "p90_ms", "p99_ms"))
        lines.append(f"| {row['variant']} | {figures} | {row['ratio']:.3f} | {row['to']} | {row['runs']} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
