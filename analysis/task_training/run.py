"""Trains, quantizes and measures networks of many tasks through their recipes; data are a user's own or drawn."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from analysis.common.recipes import run_all, write_table
from analysis.common.study import gpu_software, listed, option, study_options, table
from analysis.task_training.sizes import planned
from compress.files import write_text
from compress.records.files import read_run, recipe_value

HEAD = ("task", "metric", "images", "engine", "float", "PTQ", "SQNR", "QAT", "SQNR", "epochs")
RECIPES = {
    "rfdn": ("super-resolution", "photographs"),
    "lraspp": ("lraspp-camvid", "camvid"),
    "fcn_resnet50": ("fcn_resnet50-camvid", "camvid"),
    "deeplabv3": ("deeplabv3-camvid", "camvid"),
    "yolo": ("yolo-bccd", "bccd"),
    "ssdlite": ("ssdlite-bccd", "bccd"),
    "retinanet": ("retinanet-bccd", "bccd"),
    "rtdetr": ("detr-scenes", "scenes"),
    "dfine": ("detr-scenes", "scenes"),  # with model.options.family=d_fine
    **{name: (name, "") for name in ("pose", "depth", "video", "points")},  # drawn in memory
}


def main() -> None:
    o = study_options(
        __doc__,
        option("--camvid", default="camvid", help="folder of CamVid"),
        option("--bccd", default="bccd", help="folder of BCCD"),
        option("--photographs", default="photographs", help="folder of images for super-resolution"),
        option("--scenes", default="scenes", help="folder that examples/scenes.py wrote"),
        option("--networks", nargs="+", choices=RECIPES, default=list(RECIPES)),
        option("--seconds", type=float, help="of float training: sets the epochs by a few timed steps"),
        option("--intervals", action="store_true", help="only the table of the runs so far with intervals"),
        option("--set", action="append", default=[], help="key=value for every recipe"),
        out="runs/task_training",
    )
    if not o.intervals:
        runs = (
            planned(recipe, [f"data.root={vars(o).get(data, 'null')}", *o.set], o.out / name, o.seconds)
            for name, (recipe, data) in RECIPES.items()
            if name in o.networks
        )
        print(write_table("INT8 by task", run_all(runs, o.out), o.out / "task_training.md"))
    print(write_intervals(o.out, [name for name in o.networks if (o.out / name / "intervals.json").is_file()]))


def write_intervals(folder: Path, names: Iterable[str]) -> str:
    runs, cells = {name: read_run(folder / name) for name in names}, list[list[str]]()
    found = {(name, row.engine, row.variant): row for name, run in runs.items() for row in run.intervals}
    sqnr = {
        (name, m.engine, m.variant): m.value for name, run in runs.items() for m in run.metrics if m.name == "sqnr_db"
    }
    write_text(
        folder / "tasks.jsonl",
        "".join(json.dumps({"task": key[0], **asdict(row)}) + "\n" for key, row in found.items()),
    )
    for task, engine in dict.fromkeys(key[:2] for key in found if not key[1].startswith("torch")):
        plain = found.get((task, engine, "float"), found[task, "torch", "float"])
        cells.append([task, f"{plain.metric}, {plain.unit}", str(plain.images), engine, f"{plain.value:.2f}"])
        for key in ((task, engine, "ptq"), (task, engine, "qat")):
            row, change = found[key], "{difference:+.3f}: {difference_low:+.3f} to {difference_high:+.3f}"
            cells[-1] += [f"{row.value:.2f} ({change.format(**asdict(row))})", f"{sqnr[key]:.1f} dB"]
        cells[-1].append(" + ".join(str(recipe_value(runs[task], part, "epochs")) for part in ("train", "qat")))
    lines = [*table(HEAD, cells), "", f"{listed(gpu_software('onnxruntime', 'openvino'))}.", ""]
    return write_text(folder / "tasks.md", "\n".join(lines)).read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
