"""Which networks build with TensorRT-RTX as exported, and in which types: eight architectures, four kinds, four SMs."""

from __future__ import annotations

import copy
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import compress
from analysis.common.study import Row, command_line, software, study_parser
from compress.audit.engine import audit_listing
from compress.audit.findings import unknown_part
from compress.audit.nvidia_log import parse_build_log
from compress.data import BatchPlan, DataSpec, load_data
from compress.engines.tensorrt.build import build_tensorrt
from compress.engines.tensorrt.options import TensorRTOptions
from compress.errors import CompressError
from compress.export.names import VARIANT_KEY
from compress.files import write_json, write_text
from compress.measure import describe_machine
from compress.models import ModelSpec, build_model

KINDS = ("float32", "float16", "INT8 + float16", "2:4 INT8 + float16")
NETWORKS = {
    **{"resnet50": 224, "vgg16_bn": 224, "mobilenet_v2": 224, "densenet121": 224, "inception_v3": 299},
    **{"efficientnet_b0": 224, "convnext_tiny": 224, "vit_b_16": 224},
}
"""Name -> side of the image, pixels."""
QUICK = {"resnet18": 64, "mobilenet_v2": 64}
SMS = (80, 86, 89, 120)


def main() -> None:
    """Build all combinations that the JSON file does not hold yet, and write the table."""
    parser = study_parser(__doc__, out="results")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--network", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--sm", nargs="+", type=int, default=list(SMS))
    parser.add_argument("--quick", action="store_true", help="two small networks at 64 px, one SM")
    parser.add_argument("--rebuild", action="store_true", help="build everything, also what the JSON file has")
    arguments = parser.parse_args()
    chosen = {name: NETWORKS[name] for name in arguments.network}
    networks, sms = (QUICK, [89]) if arguments.quick else (chosen, arguments.sm)
    path = arguments.out / "rtx_builds.json"
    rows: list[Row] = json.loads(path.read_text())["rows"] if path.is_file() and not arguments.rebuild else []
    done = {(row["network"], row["kind"], row["sm"]) for row in rows}
    for name, size in networks.items():
        if all((name, kind, sm) in done for kind in KINDS for sm in sms):
            continue
        with tempfile.TemporaryDirectory() as folder:
            for kind, made in exported(name, size, Path(folder)):
                rows += [row(name, kind, sm, made, arguments.batch_size) for sm in sms if (name, kind, sm) not in done]
                write(path, rows)
    write(path, rows)


def exported(name: str, size: int, folder: Path) -> Iterator[tuple[str, Path | str]]:
    """Yield each kind with its ONNX file, or with the reason why there is none."""
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
    """Write the ONNX file of one kind."""
    network = copy.deepcopy(model)
    if kind.startswith("2:4"):
        compress.sparsify(network, compress.SparsitySpec(pattern="2:4", permute=False), example_inputs=batches[0][:2])
        compress.squash_masks(network)
    if "INT8" in kind:
        spec = compress.QuantSpec(target="tensorrt", activations=compress.ActivationSpec(calibrator="max"))
        network = compress.quantize(network, batches[0][:2], batches[:2], spec=spec)
    precision = "fp32" if kind == "float32" else "fp16"
    variant = "sparse-ptq" if kind.startswith("2:4") else "ptq" if "INT8" in kind else "float"
    return compress.export_onnx(network, batches[0][:2], path, precision=precision, metadata={VARIANT_KEY: variant})


def row(name: str, kind: str, sm: int, made: Path | str, batch: int) -> Row:
    """Build one file for one compute capability and return its row."""
    known: Row = {"network": name, "kind": kind, "sm": sm}
    if isinstance(made, str):
        return {**known, "reason": made}
    options = TensorRTOptions(sms=(sm,), batch=(1, batch, batch))
    start = time.perf_counter()
    try:
        built = build_tensorrt(made, "tensorrt-rtx", options=options, reuse=False)
    except CompressError as error:
        return {**known, "reason": str(error)}
    audit = audit_listing(parse_build_log(built.log), onnx=made)
    return {
        **known,
        "seconds": time.perf_counter() - start,
        "engine_bytes": built.metadata.engine_bytes,
        "types": dict(Counter(layer.precision for layer in audit.weighted)),
        "activation_bytes": audit.activation_bytes,
        "kernels": audit.kernels,
        "unknown_sizes": audit.unknown_sizes,
    }


def write(path: Path, rows: list[Row]) -> None:
    """Write the rows so far as JSON and as a table."""
    command, version = command_line(), software("tensorrt-rtx")["tensorrt-rtx"]
    document = {"command": command, "tensorrt_rtx": version, "machine": describe_machine().to_dict(), "rows": rows}
    write_json(path, document)
    write_text(path.with_suffix(".md"), markdown(document))


def markdown(document: Row) -> str:
    """Return the table, with the builds that failed and their reasons last."""
    rows = document["rows"]
    failed = [row for row in rows if "reason" in row]
    capabilities = ", ".join(str(sm) for sm in sorted({row["sm"] for row in rows}))
    lines = [
        "# What builds with TensorRT-RTX",
        "",
        f"`{document['command']}` with TensorRT-RTX {document['tensorrt_rtx']} on a machine without a GPU. "
        f"{len(rows) - len(failed)} of {len(rows)} builds succeeded, for SM {capabilities}, each on its own. Types are "
        "those in which convolutions and matrix products multiply, from the build log; MB are activations that kernels "
        "read and write for one image. No engine was run: times on a GPU are not known.",
        "",
        "| network | kind | SM | convolutions and products | MB an image | kernels | engine MB |",
        "|---|---|---|---|---:|---:|---:|",
        *map(table_line, rows),
    ]
    if failed:
        lines += ["", "Not built:", ""]
        lines += [f"- {r['network']}, {r['kind']}, SM {r['sm']}: {r['reason']}" for r in failed]
    return "\n".join(lines) + "\n"


def table_line(row: Row) -> str:
    """Return one row of the table."""
    head = f"| {row['network']} | {row['kind']} | {row['sm']} |"
    if "reason" in row:
        return f"{head} not built, see below | | | |"
    types = ", ".join(f"{count} {kind}" for kind, count in sorted(row["types"].items(), key=lambda item: -item[1]))
    megabytes = f"{row['activation_bytes'] / 1e6:.1f}{unknown_part(row['unknown_sizes'])}"
    return f"{head} {types} | {megabytes} | {row['kernels']} | {row['engine_bytes'] / 1e6:.1f} |"


if __name__ == "__main__":
    main()
