"""Do networks build with TensorRT-RTX as exported, and with which types? Eight architectures, four kinds, four GPUs.

    python analysis/rtx_builds.py --out results/rtx_builds

Needs no GPU. Every architecture (random weights, BatchNorm statistics of images) is exported in float32, float16,
INT8 with a float16 remainder, and 2:4 sparse INT8; every file is built for every compute capability on its own, and its
build log is read for the types that its convolutions and products multiply in and the activation bytes that it moves.
Figures of a build that ended are kept in the .json as they come: a stopped run goes on where it was, unless --again.
--quick takes two small networks at 64 px and one capability.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import compress
from compress.data import BatchPlan, DataSpec, load_data
from compress.engines.engine_audit import audit_engine
from compress.engines.engine_findings import unknown_part
from compress.engines.nvidia_log import parse_build_log
from compress.engines.tensorrt_build import build_tensorrt
from compress.engines.tensorrt_options import TensorRTOptions
from compress.errors import CompressError
from compress.files import write_json, write_text
from compress.measure import describe_machine
from compress.models import ModelSpec, build_model

KINDS = ("float32", "float16", "INT8 + float16", "2:4 INT8 + float16")
NETWORKS = {
    "resnet50": 224,
    "vgg16_bn": 224,
    "mobilenet_v2": 224,
    "densenet121": 224,
    "inception_v3": 299,
    "efficientnet_b0": 224,
    "convnext_tiny": 224,
    "vit_b_16": 224,
}
QUICK = {"resnet18": 64, "mobilenet_v2": 64}
SMS = (80, 86, 89, 120)

Row = dict[str, Any]


def main() -> None:
    """Build everything that is not built yet, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/rtx_builds"))
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--network", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--sm", nargs="+", type=int, default=list(SMS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    chosen = {name: NETWORKS[name] for name in arguments.network}
    networks, sms = (QUICK, [89]) if arguments.quick else (chosen, arguments.sm)
    path = arguments.out.with_suffix(".json")
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.is_file() and not arguments.again else []
    done = {(row["network"], row["kind"], row["sm"]) for row in rows}
    for name, size in networks.items():
        if all((name, kind, sm) in done for kind in KINDS for sm in sms):
            continue
        with tempfile.TemporaryDirectory() as folder:
            for kind, made in exported(name, size, Path(folder)):
                rows += [row(name, kind, sm, made, arguments.batch_size) for sm in sms if (name, kind, sm) not in done]
                write(arguments, rows)
    write(arguments, rows)


def exported(name: str, size: int, folder: Path) -> Iterator[tuple[str, Path | str]]:
    """Each kind with its ONNX file, or with the reason why there is none."""
    torch.manual_seed(0)
    split = load_data(DataSpec(name="shapes", image_size=size, train_images=32)).train
    batches = [images for images, _ in split.batches(BatchPlan(batch_size=8))]
    model = build_model(ModelSpec(name=name), num_classes=1000)
    with torch.no_grad():
        for batch in batches:
            model.train()(batch)
    model.eval()
    for kind in KINDS:
        print(f"{name} {kind}", flush=True)
        try:
            yield kind, export(kind, model, batches, folder / f"{KINDS.index(kind)}.onnx")
        except CompressError as error:
            yield kind, f"not exported: {error}"


def export(kind: str, model: nn.Module, batches: list[Tensor], path: Path) -> Path:
    """One kind of file."""
    network = copy.deepcopy(model)
    if kind.startswith("2:4"):
        compress.sparsify(network, compress.SparsitySpec(pattern="2:4", permute=False), example_inputs=batches[0][:2])
        compress.squash_masks(network)
    if "INT8" in kind:
        spec = compress.QuantSpec(target="tensorrt", activations=compress.ActivationSpec(calibrator="max"))
        network = compress.quantize(network, batches[0][:2], batches[:2], spec=spec)
    precision = "fp32" if kind == "float32" else "fp16"
    variant = "sparse-ptq" if kind.startswith("2:4") else "ptq" if "INT8" in kind else "float"
    return compress.export_onnx(
        network, batches[0][:2], path, precision=precision, metadata={"compress.variant": variant}
    )


def row(name: str, kind: str, sm: int, made: Path | str, batch: int) -> Row:
    """Build one file for one capability."""
    known: Row = {"network": name, "kind": kind, "sm": sm}
    if isinstance(made, str):
        return {**known, "reason": made}
    options = TensorRTOptions(sms=(sm,), batch=(1, batch, batch))
    start = time.perf_counter()
    try:
        built = build_tensorrt(made, "tensorrt-rtx", options=options, reuse=False)
    except CompressError as error:
        return {**known, "reason": str(error)}
    audit = audit_engine(parse_build_log(built.log), onnx=made)
    return {
        **known,
        "seconds": time.perf_counter() - start,
        "engine_bytes": built.metadata.engine_bytes,
        "types": dict(Counter(layer.precision for layer in audit.weighted)),
        "activation_bytes": audit.activation_bytes,
        "kernels": audit.kernels,
        "untold": audit.untold,
    }


def write(arguments: argparse.Namespace, rows: list[Row]) -> None:
    """The figures so far, as JSON and as a table."""
    command = f"python analysis/rtx_builds.py --batch-size {arguments.batch_size}" + " --quick" * arguments.quick
    if arguments.network != list(NETWORKS):
        command += f" --network {' '.join(arguments.network)}"
    if arguments.sm != list(SMS):
        command += f" --sm {' '.join(map(str, arguments.sm))}"
    version = importlib.metadata.version("tensorrt_rtx")
    document = {"command": command, "tensorrt_rtx": version, "machine": describe_machine().to_dict(), "rows": rows}
    write_json(arguments.out.with_suffix(".json"), document)
    failed = [row for row in rows if "reason" in row]
    capabilities = ", ".join(str(sm) for sm in sorted({row["sm"] for row in rows}))
    lines = [
        "# What builds with TensorRT-RTX",
        "",
        f"`{command}` with TensorRT-RTX {version} on a machine without a GPU. {len(rows) - len(failed)} of {len(rows)} "
        f"builds succeeded, for SM {capabilities}, each on its own. Types are those that convolutions and matrix "
        "products multiply in, by the build log; MB are activations that kernels read and write for one image. Nothing "
        "here was run: times on a GPU are not known.",
        "",
        "| network | kind | SM | convolutions and products | MB an image | kernels | engine MB |",
        "|---|---|---|---|---:|---:|---:|",
        *map(table_line, rows),
    ]
    if failed:
        lines += [
            "",
            "Not built:",
            "",
            *(f"- {r['network']}, {r['kind']}, SM {r['sm']}: {r['reason']}" for r in failed),
        ]
    write_text(arguments.out.with_suffix(".md"), "\n".join(lines) + "\n")


def table_line(row: Row) -> str:
    """One row of the table."""
    head = f"| {row['network']} | {row['kind']} | {row['sm']} |"
    if "reason" in row:
        return f"{head} not built, see below | | | |"
    types = ", ".join(f"{count} {kind}" for kind, count in sorted(row["types"].items(), key=lambda item: -item[1]))
    megabytes = f"{row['activation_bytes'] / 1e6:.1f}{unknown_part(row['untold'])}"
    return f"{head} {types} | {megabytes} | {row['kernels']} | {row['engine_bytes'] / 1e6:.1f} |"


if __name__ == "__main__":
    main()
