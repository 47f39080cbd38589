"""Three networks that quantization ruins, mended by the accuracy debugger, as torch models and as ONNX files.

MobileNetV2 and ViT are those of `analysis.ptq_ablation`, trained here on scikit-learn's digits; the YOLO has random
weights, so that it is judged by signal to noise.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import compress
from analysis.common.study import Row, listed, software, study_parser
from analysis.ptq_ablation.cases import NETWORKS, PER_TENSOR, WHOLE, widen, with_outliers
from compress.data.base import BatchPlan
from compress.files import write_json, write_text
from compress.imports import imported
from compress.measure import describe_machine
from compress.pipeline.studies.mend import Goal, MendReport, mend_file, mend_model
from compress.quantization.sensitivity.probe import Effect
from compress.training import fit, load_model, save_model

SIDE = 64
"""Pixels of the YOLO's images."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A network with a fault.

    Attributes:
        title: what is wrong with it.
        make: returns the float network, batches to calibrate with, and batches to judge by, with targets or without.
        spec: how it is quantized.
        goal: when it is mended.
    """

    title: str
    make: Callable[[Path], tuple[nn.Module, list[Tensor], list[Any]]]
    spec: compress.QuantSpec
    goal: Goal


def digits(network: str, change: Callable[[nn.Module, Tensor, int], nn.Module]) -> Callable[[Path], Any]:
    """Return the maker of a network of `ptq_ablation`, trained once, with its fault put in."""

    def make(cache: Path) -> tuple[nn.Module, list[Tensor], list[Any]]:
        torch.manual_seed(0)
        model, data_spec, training = NETWORKS[network]()
        data, path = compress.load_data(data_spec), cache / f"{network}-0-{training.epochs}.safetensors"
        if path.is_file():
            load_model(model, path)
        else:
            cache.mkdir(parents=True, exist_ok=True)
            fit(model, data, training, batch_size=64, folder=cache, resume=True, name=path.stem)
            save_model(model, path)
        train, val = (list(split.batches(BatchPlan(batch_size=64))) for split in (data.train, data.val))
        return change(model.eval(), train[0][0][:2], 0).eval(), [x for x, _ in train[:4]], val

    return make


def yolo(cache: Path) -> tuple[nn.Module, list[Tensor], list[Any]]:
    """Return a YOLO that decodes its boxes, with BatchNorm statistics of smooth random images."""
    torch.manual_seed(0)
    network: Any = imported("examples.yolo:Yolo", key="network", error=compress.CompressError, what="a network")
    model: nn.Module = network(3, width=8, decoded=(SIDE, SIDE))
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None
    images = [nn.functional.interpolate(torch.randn(8, 3, 16, 16), size=SIDE, mode="bicubic") for _ in range(6)]
    with torch.no_grad():
        for _ in range(3):
            model.train()(images[0])
    return model.eval(), images[:4], images[4:]


CASES = {
    "MobileNetV2, one scale a weight tensor": Case(
        title="channels rescaled (sigma 1), one scale for each weight tensor", make=digits("mobilenet_v2", widen),
        spec=replace(PER_TENSOR, target="openvino", insist=False), goal=Goal(drop=0.5),
    ),
    "ViT with outlier channels": Case(
        title="3 channels of each LayerNorm times 100", make=digits("vit", with_outliers),
        spec=compress.QuantSpec(target="openvino", activations=WHOLE), goal=Goal(drop=0.5),
    ),
    "YOLO, head quantized": Case(
        title="decoding of boxes and DFL quantized (head: quantize)", make=yolo,
        spec=compress.QuantSpec(target="openvino", head="quantize", activations=WHOLE), goal=Goal(sqnr_db=30),
    ),
}  # fmt: skip


class Plain(nn.Module):
    """A network that is no GraphModule, which torch's older exporter takes for its own kind of graph."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Any:
        """Return what the network does."""
        return self.network(images)


def export(model: nn.Module, example: Tensor, path: Path) -> Path:
    """Write the float network with torch's older exporter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Plain(model).eval(), (example,), str(path), dynamo=False, opset_version=17, input_names=["images"],
            dynamic_axes={"images": {0: "batch"}},
        )  # fmt: skip
    return path


def main() -> None:
    """Mend each network twice, and write what was found."""
    parser = study_parser(__doc__, out="results")
    parser.add_argument("--cache", type=Path, default=Path("runs/mend"), help="folder of the trained weights")
    parser.add_argument("--only", help="part of a network's name; the rows of others stay")
    arguments = parser.parse_args()
    file = arguments.out / "mend.json"
    rows: list[Row] = json.loads(file.read_text())["rows"] if arguments.only and file.is_file() else []
    for name, case in CASES.items():
        if arguments.only is None or arguments.only in name:
            rows = [row for row in rows if row["network"] != name] + measure(name, case, arguments)
            document = {
                "command": "python -m analysis.mend.run", "machine": describe_machine().to_dict(), "rows": rows,
                "software": software("torch", "onnxruntime", "openvino"),
            }  # fmt: skip
            write_json(file, document)
            write_text(file.with_suffix(".md"), markdown(document))


def measure(name: str, case: Case, arguments: argparse.Namespace) -> list[Row]:
    """Return a row for the torch model and one for its file."""
    model, batches, images = case.make(arguments.cache)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        file = export(model, batches[0][:2], Path(folder) / "float.onnx")
        makers: dict[str, Callable[[], MendReport]] = {
            "torch model": lambda: mend_model(model, batches, images, case.spec, case.goal),
            "ONNX file": lambda: mend_file(file, batches, case.spec, case.goal, images=images),
        }
        for form, make in makers.items():
            start = time.perf_counter()
            found = make()
            print(name, form, found.mended.met, [change.text for change in found.mended.changes], flush=True)
            rows.append({"network": name, "fault": case.title, "form": form, "seconds": time.perf_counter() - start}
                        | row(found))  # fmt: skip
    return rows


def row(found: MendReport) -> Row:
    """Return what the table shows of a result."""
    seen, mended = found.mended.diagnosis, found.mended
    return {
        "goal": mended.goal, "met": mended.met, "float": seen.float_score, "images": seen.images,
        "first": None if seen.first is None else f"{seen.first.tensor} ({seen.first.sqnr_db:.1f} dB)",
        "before": effect(seen.quantized), "after": effect(mended.effect),
        "causes": [f"{r.layer}: {c.text}" for r in seen.rows[:3] for c in r.causes[:1]],
        "changes": [{"text": c.text, "because": c.cause, "without": None if c.without is None else effect(c.without)}
                    for c in mended.changes],
        "prices": {price.label: price.ratio for price in found.prices}, "not_timed": found.not_timed,
    }  # fmt: skip


def effect(value: Effect) -> str:
    """Return an effect in words."""
    score = "" if value.score is None else f", {100 * value.score:.1f} %"
    return f"{value.sqnr_db:.1f} dB{score}"


def markdown(document: Row) -> str:
    """Return the page."""
    machine = document["machine"]
    lines = [
        "# Three ruined networks, mended by the accuracy debugger", "",
        f"`{document['command']}` on {machine['cpu']}; {listed(document['software'])}. Accuracy is that of fake "
        "quantization on the evaluation images. Time: of the mended network over that of the network as specified, "
        "on OpenVINO, batch 1, in turn (a busy machine: an indication).", "",
        "| network | form | float | as specified | mended | goal | changes | time | took s |", "|---" * 9 + "|",
    ]  # fmt: skip
    for one in document["rows"]:
        score = "" if one["float"] is None else f"{100 * one['float']:.1f} %"
        changes = "; ".join(change["text"] for change in one["changes"]) or "none"
        time_ratio = one["prices"].get("as specified")
        lines.append(
            f"| {one['network']} | {one['form']} | {score} | {one['before']} | {one['after']} | {one['goal']}: "
            f"{'met' if one['met'] else 'not met'} | {changes} | {'' if time_ratio is None else f'{time_ratio:.2f}'} | "
            f"{one['seconds']:.0f} |"
        )
    for one in document["rows"]:
        lines += ["", f"## {one['network']}, {one['form']}", "", f"Fault: {one['fault']}. First tensor that diverges: "
                  f"{one['first'] or 'none'}. The noisiest layers:", ""]  # fmt: skip
        lines += [f"- {cause}" for cause in one["causes"]] or ["- no cause is known"]
        lines += ["", *(f"Changed: {c['text']} (without it {c['without']})." for c in one["changes"])]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
