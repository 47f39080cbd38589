"""Makes networks smaller by several methods at equal measured latency, fine-tunes them alike, and compares accuracy.

Each stage can run on a machine of its own: `floats` and `train` want a GPU, `find` and `time` an idle CPU. Every row is
written as it is made, and a stage that is run again leaves out what has rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from analysis.common.study import command_line, gpu_software, study_parser
from analysis.search_study.find import find_all
from analysis.search_study.judge import export_all, judge_all, time_all
from analysis.search_study.report import write
from analysis.search_study.subjects import GROUPS
from analysis.search_study.train import train_floats, train_found
from compress.measure import describe_machine

STAGES = {
    "floats": train_floats,
    "find": find_all,
    "train": train_found,
    "export": export_all,
    "judge": judge_all,
    "time": time_all,
}
_FOLDERS = {"--data", "--folder", "--floats", "--found", "--weights", "--out"}


def main() -> None:
    """Run a stage for the groups that the command line names, and write the page after those that measure."""
    o = _options()
    o.out.mkdir(parents=True, exist_ok=True)
    o.found = o.found or o.out
    torch.backends.cudnn.benchmark = False  # it would search anew for the shapes of every network, 20 s each
    machine = describe_machine()
    about = {
        "command": command_line(_without_folders()),
        "software": gpu_software("onnxruntime", "openvino", "optuna", "torch-pruning"),
        "machine": {"cpu": machine.cpu, "cores": machine.usable_cores},
    }
    (o.out / f"about-{o.stage}.json").write_text(json.dumps(about) + "\n")
    STAGES[o.stage](o)
    if o.stage in {"judge", "time"}:
        print(write(o.out))


def _options() -> argparse.Namespace:
    parser = study_parser(__doc__, out="results/search/search_study")
    parser.add_argument("--stage", choices=STAGES, required=True)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=["mobilenet", "resnet56", "shapes", "criteria"])
    parser.add_argument("--data", help="folder of cifar-10-batches-py")
    parser.add_argument("--folder", default="/tmp/search_study", help="of exported networks and of searches")
    parser.add_argument("--floats", type=Path, default=Path("floats"), help="folder of trained float networks")
    parser.add_argument("--found", type=Path, help="folder of found.jsonl; default: --out")
    parser.add_argument("--weights", type=Path, default=Path("weights"), help="folder that `train` wrote weights to")
    parser.add_argument("--budget-s", type=float, default=600, help="of a training")
    parser.add_argument("--float-epochs", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=8, help="of fine-tuning")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lanes", type=int, default=8, help="networks that train at a time")
    parser.add_argument("--networks", type=int, default=9, help="timed for the latency model")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--images", type=int, default=128, help="that a search looks at")
    parser.add_argument("--search-s", type=float, default=300, help="after which a search begins no further trial")
    parser.add_argument("--processes", type=int, default=2, help="that find or judge side by side")
    parser.add_argument("--loads", type=int, default=3, help="of a measurement while finding")
    parser.add_argument("--timing-s", type=float, default=0.3, help="for each network of a load")
    parser.add_argument("--repeats", type=int, default=7, help="loads of the timings at the end")
    parser.add_argument("--train-images", type=int)
    parser.add_argument("--val-images", type=int)
    return parser.parse_args()


def _without_folders() -> list[str]:
    """Return this process's arguments without folders of one machine."""
    words = sys.argv[1:]
    return ["DIR" if before in _FOLDERS else word for before, word in zip(["", *words], words, strict=False)]


if __name__ == "__main__":
    main()
