"""Three networks that quantization ruins, mended by the accuracy debugger, as torch models and as ONNX files.

MobileNetV2 and ViT are those of `analysis.ptq_ablation`, trained here on scikit-learn's digits; the YOLO was trained on
pictures of blood cells (recipes/yolo-bccd.yaml), and its mAP decides.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from analysis.common.study import Row, listed, software, study_parser
from analysis.mend.cases import CASES, Case
from compress.files import write_json, write_text
from compress.measure import describe_machine
from compress.meters import score_text
from compress.pipeline.studies.mend import MendReport, mend_file, mend_model
from compress.quantization.sensitivity.probe import Effect

FORMS = ("torch model", "ONNX file")


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
    parser.add_argument("--yolo", type=Path, help="run folder of recipes/yolo-bccd.yaml, for the YOLO")
    parser.add_argument("--bccd", type=Path, help="folder of its pictures")
    parser.add_argument("--only", help="part of a network's name; the rows of others stay")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    arguments = parser.parse_args()
    file = arguments.out / "mend.json"
    rows: list[Row] = json.loads(file.read_text())["rows"] if file.is_file() else []
    for name, case in CASES.items():
        if arguments.only is not None and arguments.only not in name:
            continue
        for made in measure(name, case, arguments):
            rows = sorted(
                [row for row in rows if (row["network"], row["form"]) != (name, made["form"])] + [made],
                key=lambda row: (list(CASES).index(row["network"]), FORMS.index(row["form"])),
            )
            document = {
                "command": "python -m analysis.mend.run --yolo RUN --bccd DIR", "machine": describe_machine().to_dict(),
                "software": software("torch", "onnxruntime", "openvino"), "rows": rows,
            }  # fmt: skip
            write_json(file, document)
            write_text(file.with_suffix(".md"), markdown(document))


def measure(name: str, case: Case, arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for the torch model and one for its file; none if the arguments lack what the case needs."""
    ready = case.make(arguments)
    if ready is None:
        print(f"{name}: left out, it needs --yolo and --bccd", flush=True)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = export(ready.model, ready.batches[0][:2], Path(folder) / "float.onnx")
        makers: dict[str, Callable[[], MendReport]] = {
            FORMS[0]: lambda: mend_model(
                ready.model, ready.batches, ready.images, case.spec, case.goal, metric=ready.metric
            ),
            FORMS[1]: lambda: mend_file(
                file, ready.batches, case.spec, case.goal, images=ready.images, metric=ready.metric
            ),
        }
        for form in arguments.forms:
            start = time.perf_counter()
            found = makers[form]()
            print(name, form, found.mended.met, [change.text for change in found.mended.changes], flush=True)
            spent = {"seconds": time.perf_counter() - start}
            yield {"network": name, "fault": case.title, "form": form} | spent | row(found)


def row(found: MendReport) -> Row:
    """Return what the table shows of a result."""
    seen, mended = found.mended.diagnosis, found.mended
    return {
        "goal": mended.goal, "met": mended.met, "float": score_text(seen.float_score, seen.unit), "images": seen.images,
        "first": None if seen.first is None else f"{seen.first.tensor} ({seen.first.sqnr_db:.1f} dB)",
        "before": effect(seen.quantized, seen.unit), "after": effect(mended.effect, seen.unit),
        "causes": [f"{r.layer}: {c.text}" for r in seen.rows[:3] for c in r.causes[:1]],
        "changes": [
            {"text": c.text, "because": c.cause, "without": None if c.without is None else effect(c.without, seen.unit)}
            for c in mended.changes
        ],
        "prices": {price.label: price.ratio for price in found.prices}, "not_timed": found.not_timed,
    }  # fmt: skip


def effect(value: Effect, unit: str) -> str:
    """Return an effect in words."""
    score = "" if value.score is None else f", {score_text(value.score, unit)}"
    return f"{value.sqnr_db:.1f} dB{score}"


def markdown(document: Row) -> str:
    """Return the page."""
    machine = document["machine"]
    lines = [
        "# Three ruined networks, mended by the accuracy debugger", "",
        f"`{document['command']}` on {machine['cpu']}; {listed(document['software'])}. Accuracy is that of fake "
        "quantization on the evaluation images: top-1 of MobileNetV2 and ViT, COCO's mAP of the YOLO, on 64 pictures. "
        "Time: of the mended network over that of the network as specified, on the target's engine, batch 1, in "
        "turn (a busy machine: an indication).", "",
        "| network | form | float | as specified | mended | goal | changes | time | took s |", "|---" * 9 + "|",
    ]  # fmt: skip
    for one in document["rows"]:
        changes = "; ".join(change["text"] for change in one["changes"]) or "none"
        time_ratio = one["prices"].get("as specified")
        lines.append(
            f"| {one['network']} | {one['form']} | {one['float']} | {one['before']} | {one['after']} | {one['goal']}: "
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
