"""Which form of ResNet-50 moves the fewest activation bytes as a TensorRT-RTX engine; needs no GPU.

    python analysis/rtx_forms.py --out results/rtx_forms

Exports one network in the forms of `compress.pipeline.explore` and, from the INT8 one, an FP8 form; builds each for
each compute capability; audits the engines by their build logs. The weights are random, with BatchNorm statistics of
real activations: bytes, types and kernels do not depend on them, agreement does and is there to show that the forms
compute the same. Two cores take about six minutes; --quick takes a ResNet-18 at 64 px, one capability and one minute.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from compress.data import BatchPlan, DataSpec, load_data
from compress.engines.tensorrt_options import TensorRTOptions
from compress.errors import CompressError
from compress.files import write_json, write_text
from compress.measure import describe_machine
from compress.models import build_model
from compress.pipeline.explore import FORMS, Explorer, FormResult, best, with_overrides
from compress.recipe import parse_recipe

PEERS = {"ModelOpt 0.47's ONNX": 143.0, "ONNX Runtime's Q/DQ (S8S8)": 115.0}
"""MB an image at SM 89, ResNet-50 at 224 px, measured with the same library and the same count of bytes."""

FP8_LARGEST = 448.0


def main() -> None:
    """Build all forms and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/rtx_forms"))
    parser.add_argument("--sm", default="80,86,89,120")
    parser.add_argument("--device", default="rtx4090")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    name, size, sms = ("resnet18", 64, "89") if arguments.quick else ("resnet50", 224, arguments.sm)
    with tempfile.TemporaryDirectory() as folder:
        explorer = prepared(name, size, Path(folder), tuple(map(int, sms.split(","))), arguments)
        results = [*explorer.explore(FORMS), *fp8(explorer)]
    command = f"python analysis/rtx_forms.py --sm {sms} --device {arguments.device} --batch-size {arguments.batch_size}"
    write(arguments.out, name, size, results, command + " --quick" * arguments.quick, explorer)


def prepared(name: str, size: int, folder: Path, sms: tuple[int, ...], arguments: argparse.Namespace) -> Explorer:
    """The network, with BatchNorm statistics of images, and what it is calibrated and judged on."""
    torch.manual_seed(0)
    tree = {"model": {"name": name}, "data": {"name": "shapes", "image_size": size}}
    recipe = parse_recipe({**tree, "quantization": {"activations": {"calibrator": "max"}}})
    split = load_data(DataSpec(name="shapes", image_size=size, train_images=64)).train
    batches = [images for images, _ in split.batches(BatchPlan(batch_size=16))]
    model = build_model(recipe.model, num_classes=1000)
    with torch.no_grad():
        for batch in batches:
            model.train()(batch)
    return Explorer(
        model=model.eval(),
        recipe=recipe,
        example=batches[0][:2],
        calibration=batches[:2],
        images=torch.cat(batches)[:32],
        folder=folder,
        options=TensorRTOptions(sms=sms, batch=(1, arguments.batch_size, arguments.batch_size)),
        device=arguments.device,
        batch_size=arguments.batch_size,
    )


def fp8(explorer: Explorer) -> list[FormResult]:
    """The form with scales behind the layers, its integers turned into FP8."""
    form = next(f for f in FORMS if f.name == "INT8, fp16, scales behind")
    path = explorer.export(with_overrides(explorer.recipe, form.overrides), "fp8")
    proto = onnx.load(path)
    to_fp8(proto)
    onnx.save(proto, path)
    rows = []
    for sm in explorer.options.sms:
        row = FormResult(form="FP8, fp16, scales behind", overrides=("made by analysis/rtx_forms.py",), sm=sm)
        try:
            audit = explorer.build(path, sm)
        except CompressError as error:
            rows.append(replace(row, error=str(error)))
            continue
        rows.append(
            replace(
                row,
                kernels=audit.kernels,
                activation_bytes=audit.activation_bytes,
                weight_bytes=audit.weight_bytes,
                int8_share=audit.share("int8", "fp8"),
                least_ms=explorer.least_ms(audit),
            )
        )
    return rows


def to_fp8(proto: onnx.ModelProto) -> None:
    """Make every INT8 quantizer one of FP8 (E4M3) with the same range, and round the weights to it, in place."""
    tensors = {tensor.name: tensor for tensor in proto.graph.initializer}
    done: set[str] = set()
    for node in proto.graph.node:
        if node.op_type not in {"QuantizeLinear", "DequantizeLinear"}:
            continue
        scale, zero = tensors[node.input[1]], tensors[node.input[2]]
        if scale.name not in done:
            value = numpy_helper.to_array(scale)
            scale.CopyFrom(numpy_helper.from_array((value * (127 / FP8_LARGEST)).astype(value.dtype), scale.name))
            done.add(scale.name)
        if zero.data_type != TensorProto.FLOAT8E4M3FN:
            zero.CopyFrom(helper.make_tensor(zero.name, TensorProto.FLOAT8E4M3FN, zero.dims, [0.0] * size_of(zero)))
        weight = tensors.get(node.input[0])
        if weight is not None and weight.data_type == TensorProto.INT8:
            values = numpy_helper.to_array(weight).astype(np.float32) * (FP8_LARGEST / 127)
            weight.CopyFrom(
                helper.make_tensor(weight.name, TensorProto.FLOAT8E4M3FN, weight.dims, values.ravel().tolist())
            )


def size_of(tensor: onnx.TensorProto) -> int:
    """Elements of a tensor; 1 of a scalar."""
    return int(np.prod(tensor.dims)) if tensor.dims else 1


def write(out: Path, name: str, size: int, results: list[FormResult], command: str, explorer: Explorer) -> None:
    """The table as JSON and markdown."""
    machine, version = describe_machine().to_dict(), importlib.metadata.version("tensorrt_rtx")
    write_json(
        out.with_suffix(".json"),
        {
            "command": command,
            "machine": machine,
            "tensorrt_rtx": version,
            "model": name,
            "image_size": size,
            "device": explorer.device,
            "batch_size": explorer.batch_size,
            "peers_mb_at_sm_89": PEERS,
            "rows": [result.to_dict() for result in results],
        },
    )
    lines = [
        f"# {name}, {size} px: forms of export as TensorRT-RTX {version} builds them",
        "",
        _about(command, explorer),
    ]
    columns = ["form", "MB an image", "kernels", "weights MB", "8-bit macs", "least ms", "agreement", "SQNR dB"]
    for sm in dict.fromkeys(result.sm for result in results):
        lines += ["", f"## SM {sm}", "", f"| {' | '.join(columns)} |", "|---|" + "---:|" * (len(columns) - 1)]
        rows = [result for result in results if result.sm == sm]
        lines += [_row(result) for result in sorted(rows, key=lambda r: (bool(r.error), r.activation_bytes))]
        lines += [f"| {peer} | {mb:.1f} | | | | | | |" for peer, mb in PEERS.items() if sm == 89 and name == "resnet50"]
    lines += ["", "## What to take", "", *_verdict(results, explorer)]
    overrides = dict.fromkeys((r.form, r.overrides) for r in results)
    lines += ["", "## The forms", "", "| form | overrides of the recipe |", "|---|---|"]
    lines += [f"| {form} | {_overrides(given)} |" for form, given in overrides]
    print(write_text(out.with_suffix(".md"), "\n".join(lines) + "\n").read_text())


def _about(command: str, explorer: Explorer) -> str:
    return (
        f"`{command}`; no GPU: engines are built for the compute capability and audited by the verbose build log. MB "
        "an image: activations that all kernels read and write, once for each kernel. Least ms: for a batch of "
        f"{explorer.batch_size} under the roofs of {explorer.device}, a bound and no measurement. Agreement and SQNR: "
        f"of the ONNX file in ONNX Runtime with the float network, {len(explorer.images)} images, random weights."
    )


def _row(result: FormResult) -> str:
    if result.error:
        return f"| {result.form} | not built: {' '.join(result.error.split())[:140].replace('|', '/')} | | | | | | |"
    cells = (
        f"{result.activation_bytes / 1e6:.1f}",
        str(result.kernels),
        f"{result.weight_bytes / 1e6:.1f}",
        f"{result.int8_share:.0%}",
        "" if result.least_ms is None else f"{result.least_ms:.3f}",
        "" if result.agreement is None else f"{result.agreement:.1%}",
        "" if result.sqnr_db is None else f"{result.sqnr_db:.1f}",
    )
    return f"| {result.form} | {' | '.join(cells)} |"


def _overrides(given: tuple[str, ...]) -> str:
    return " ".join(f"`{text if len(text) < 80 else text[:77] + '...'}`" for text in given) or "none"


def _verdict(results: list[FormResult], explorer: Explorer) -> list[str]:
    lines = []
    fewest, eight = best(results, least_agreement=0.0), best(results, least_agreement=0.0, int8=True)
    for sm, form in fewest.items():
        timed = [r for r in results if r.sm == sm and r.least_ms is not None and not r.error]
        quick = min(timed, key=lambda r: r.least_ms or 0.0)
        lines.append(
            f"- SM {sm}: fewest bytes {form.form} ({form.activation_bytes / 1e6:.1f} MB); of the INT8 forms "
            f"{eight[sm].form} ({eight[sm].activation_bytes / 1e6:.1f} MB); lowest bound on time under the roofs of "
            f"{explorer.device} {quick.form} ({quick.least_ms:.3f} ms)"
        )
    return lines


if __name__ == "__main__":
    main()
