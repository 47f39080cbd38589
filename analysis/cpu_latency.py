"""Latency of ResNet-50 at 224 px on this CPU: our placements beside the INT8 model that NNCF makes of the same network.

    python analysis/cpu_latency.py --nncf-python /path/to/venv/bin/python --out results/cpu_latency

All variants run in turn in one process, batch 1; the figures are ratios of medians, round by round. NNCF is used here
only, from an environment of its own (pip install nncf openvino onnx); without --nncf-python its row is left out.
Nothing else should run on the machine; the load is written down beside the figures.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import torchvision

import compress
from compress.data import BatchPlan
from compress.files import write_json, write_text
from compress.measure import describe_machine, latency_ratio, measure_latency

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
    """Build the files, time them, write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nncf-python", type=Path, help="interpreter of an environment that has nncf")
    parser.add_argument("--out", type=Path, default=Path("results/cpu_latency"))
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files, version = build(folder, arguments.nncf_python)
        rows = time_files(files, arguments.runs, arguments.threads)
    write(arguments.out, rows, version, f"--runs {arguments.runs} --threads {arguments.threads}")


def build(folder: Path, nncf_python: Path | None) -> tuple[dict[str, Path], str]:
    """Float and INT8 files of one network with BatchNorm statistics of real activations."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50()
    split = compress.load_data(compress.DataSpec(name="shapes", image_size=224, train_images=IMAGES)).train
    batches = [images for images, _ in split.batches(BatchPlan(batch_size=16))]
    with torch.no_grad():
        for batch in batches:
            model.train()(batch)
    model.eval()
    files = {"float": compress.export_onnx(model, batches[0][:1], folder / "float.onnx")}
    for target in ("openvino", "onnxruntime", "tensorrt"):
        qmodel = compress.quantize(model, batches[0][:2], batches, spec=compress.QuantSpec(target=target))
        files[f"target {target}"] = compress.export_onnx(qmodel, batches[0][:1], folder / f"{target}.onnx")
    if nncf_python is None:
        return files, ""
    np.save(folder / "images.npy", torch.cat(batches).numpy())
    command = [nncf_python, "-c", NNCF, files["float"], folder / "images.npy", folder / "nncf.xml"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return files | {"NNCF": folder / "nncf.xml"}, done.stdout.split()[-1]


def time_files(files: dict[str, Path], runs: int, threads: int) -> list[dict[str, object]]:
    """Rows for OpenVINO (all files) and ONNX Runtime (the ONNX files), each engine's variants in turn."""
    rows: list[dict[str, object]] = []
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


def write(out: Path, rows: list[dict[str, object]], version: str, options: str) -> None:
    """The table as JSON and markdown."""
    machine = describe_machine().to_dict()
    load = os.getloadavg()[0]
    document = {"machine": machine, "nncf": version, "load": load, "rows": rows}
    write_json(out.with_suffix(".json"), document)
    lines = [
        "# ResNet-50, 224 px, batch 1, on the CPU",
        "",
        f"`python analysis/cpu_latency.py {options}`; {machine['cpu']}, {machine['cores']} cores; "
        f"NNCF {version or 'absent'}; load average {load:.1f} (the benchmark's own threads included). In turn; "
        "the ratio is the median over rounds.",
        "",
        "| variant | p50 ms | p90 ms | p99 ms | ratio | to | runs |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    for row in rows:
        figures = " | ".join(f"{row[key]:.2f}" for key in ("p50_ms", "p90_ms", "p99_ms"))
        lines.append(f"| {row['variant']} | {figures} | {row['ratio']:.3f} | {row['to']} | {row['runs']} |")
    print(write_text(out.with_suffix(".md"), "\n".join(lines) + "\n").read_text())


if __name__ == "__main__":
    main()
