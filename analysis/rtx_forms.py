"""Which form of ResNet-50 moves the fewest activation bytes as a TensorRT-RTX engine; needs no GPU.

    python analysis/rtx_forms.py --out results/rtx_forms

Exports one network in the forms of `compress.pipeline.explore`, builds each for each compute capability, and audits the
engines by their build logs. The weights are random, with BatchNorm statistics of real activations: bytes, types and
kernels do not depend on them, agreement does and is there to show that the forms compute the same. Two quiet cores take
about six minutes; --quick takes a ResNet-18 at 64 px, one capability and one minute. Run again after a stop: forms that
the JSON file has from the same command are kept.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import tempfile
from pathlib import Path

import torch

from compress.data import BatchPlan, DataSpec, load_data
from compress.engines.engine_findings import unknown_part
from compress.engines.tensorrt_options import TensorRTOptions
from compress.files import write_json, write_text
from compress.measure import describe_machine
from compress.models import build_model
from compress.pipeline.explore import FORMS, Explorer, FormResult, best
from compress.recipe import parse_recipe

PEERS = {"ModelOpt 0.47's ONNX": 143.0, "ONNX Runtime's Q/DQ (S8S8)": 115.0}
"""MB an image at SM 89, ResNet-50 at 224 px, measured with the same library and the same count of bytes."""


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
    command = f"python analysis/rtx_forms.py --sm {sms} --device {arguments.device} --batch-size {arguments.batch_size}"
    command += " --quick" * arguments.quick
    kept = rows_of(arguments.out.with_suffix(".json"), command)
    with tempfile.TemporaryDirectory() as folder:
        explorer = prepared(name, size, Path(folder), tuple(map(int, sms.split(","))), arguments)
        for form in FORMS:
            if form.name not in kept:
                kept[form.name] = list(explorer.explore([form]))
                write(arguments.out, name, size, [row for rows in kept.values() for row in rows], command, explorer)
    print(arguments.out.with_suffix(".md").read_text())


def rows_of(path: Path, command: str) -> dict[str, list[FormResult]]:
    """Rows by form that an earlier run of the same command left."""
    if not path.is_file():
        return {}
    document = json.loads(path.read_text())
    kept: dict[str, list[FormResult]] = {}
    for row in document["rows"] if document["command"] == command else []:
        kept.setdefault(row["form"], []).append(FormResult(**{**row, "overrides": tuple(row["overrides"])}))
    return kept


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
    write_text(out.with_suffix(".md"), "\n".join(lines) + "\n")


def _about(command: str, explorer: Explorer) -> str:
    return (
        f"`{command}`; no GPU: engines are built for the compute capability and audited by the verbose build log. MB "
        "an image: activations that all kernels read and write, once for each kernel. Least ms: for a batch of "
        f"{explorer.batch_size} under the roofs of {explorer.device}, a bound and no measurement. Agreement and SQNR: "
        f"of the ONNX file in ONNX Runtime with the float network, {len(explorer.images)} images, random weights."
    )


def _row(result: FormResult) -> str:
    if result.error:
        why = re.sub(r"^.*?Error Code \d+: ", "", " ".join(result.error.split())).replace("|", "/")
        return f"| {result.form} | not built: {why.partition('. In ')[0][:140]} | | | | | | |"
    cells = (
        f"{result.activation_bytes / 1e6:.1f}{unknown_part(result.untold)}",
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
    if not any(result.int8_share >= 0.5 for result in results):
        return ["No form is finished that computes in 8 bits."]
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
