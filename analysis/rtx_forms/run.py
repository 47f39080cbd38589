"""Which form of ResNet-50 moves the fewest activation bytes as a TensorRT-RTX engine; it needs no GPU."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from analysis.common.study import command_line, software, study_parser
from analysis.rtx_forms import report
from compress.data import BatchPlan, DataSpec, load_data
from compress.engines.tensorrt.options import TensorRTOptions
from compress.files import write_json
from compress.measure import describe_machine
from compress.models import build_model
from compress.pipeline.studies.explore import FORMS, Explorer, FormResult
from compress.recipe import parse_recipe

PEERS = {"ModelOpt 0.47's ONNX": 143.0, "ONNX Runtime's Q/DQ (S8S8)": 115.0}
"""MB an image at SM 89, ResNet-50 at 224 px: engines of other tools' files, built and counted in the same way."""


def main() -> None:
    """Build all forms that the JSON file does not hold from the same command, and write the table."""
    parser = study_parser(__doc__, out="results")
    parser.add_argument("--sm", default="80,86,89,120")
    parser.add_argument("--device", default="rtx4090")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="ResNet-18 at 64 px, one SM")
    arguments = parser.parse_args()
    name, size, sms = ("resnet18", 64, "89") if arguments.quick else ("resnet50", 224, arguments.sm)
    path = arguments.out / "rtx_forms.json"
    found = rows_of(path, command_line())
    with tempfile.TemporaryDirectory() as folder:
        explorer = prepared(name, size, Path(folder), tuple(map(int, sms.split(","))), arguments)
        for form in FORMS:
            if form.name not in found:
                found[form.name] = list(explorer.explore([form]))
                write(path, name, size, [row for rows in found.values() for row in rows], explorer)
    print(path.with_suffix(".md").read_text())


def rows_of(path: Path, command: str) -> dict[str, list[FormResult]]:
    """Return rows by form from a file that the same command wrote earlier."""
    if not path.is_file():
        return {}
    document = json.loads(path.read_text())
    found: dict[str, list[FormResult]] = {}
    for row in document["rows"] if document["command"] == command else []:
        found.setdefault(row["form"], []).append(FormResult(**{**row, "overrides": tuple(row["overrides"])}))
    return found


def prepared(name: str, size: int, folder: Path, sms: tuple[int, ...], arguments: argparse.Namespace) -> Explorer:
    """Return the network, with BatchNorm statistics of images, and the images of its calibration and comparison."""
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


def write(path: Path, name: str, size: int, results: list[FormResult], explorer: Explorer) -> None:
    """Write the rows so far as JSON and as a table."""
    document = {
        "command": command_line(),
        "machine": describe_machine().to_dict(),
        "tensorrt_rtx": software("tensorrt-rtx")["tensorrt-rtx"],
        "model": name,
        "image_size": size,
        "device": explorer.device,
        "batch_size": explorer.batch_size,
        "images": len(explorer.images),
        "peers_mb_at_sm_89": PEERS,
        "rows": [result.to_dict() for result in results],
    }
    report.write(write_json(path, document))


if __name__ == "__main__":
    main()
