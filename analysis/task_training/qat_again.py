"""QAT of networks whose float weights are there, in several ways side by side on one GPU, and packs what they end with.

    python -m analysis.task_training.qat_again --camvid camvid --bccd bccd --floats FLOATS --out OUT --only yolo

`FLOATS` holds `<network>.safetensors`. The float network is evaluated and not trained; `WAYS` says what differs. The
weights come back as INT8 codes (`pack`), and `python -m analysis.task_training.judge` measures them on the engines.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from analysis.task_training.networks import NETWORKS
from analysis.task_training.pack import Packer
from analysis.task_training.together import Finished, Running, end, start, wait
from compress.variants import Variant


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of quantization-aware training.

    Attributes:
        network: key of `NETWORKS`.
        epochs: of QAT.
        changes: keys of the network's recipe that differ.
        seed: of the order and the augmentation of pictures.
    """

    network: str
    epochs: int = 20
    changes: tuple[str, ...] = ()
    seed: int = 0


_LONGER = ("qat.lr=0.0002", "qat.ema_decay=0.98")
_TAUGHT = ("qat.lr=0.0001", "qat.ema_decay=0.98", "qat.distill=true", "qat.distill_weight=0.9")
_LRASPP = "lraspp_mobilenet_v3_large"
WAYS: Mapping[str, Way] = {
    "yolo-before": Way(network="yolo", changes=("qat.lr=0.00005",)),
    **{f"yolo-longer-{seed}": Way(network="yolo", changes=_LONGER, seed=seed) for seed in range(3)},
    **{f"yolo-taught-{seed}": Way(network="yolo", changes=_TAUGHT, seed=seed) for seed in range(3)},
    "lraspp-openvino": Way(network=_LRASPP, epochs=8, changes=("quantization.target=openvino",)),
    "lraspp-onnxruntime": Way(network=_LRASPP, epochs=8, changes=("quantization.target=onnxruntime",)),
}


def begin(label: str, way: Way, arguments: argparse.Namespace) -> Running:
    """Start the process of a way; its run folder is `<runs>/<label>/<network>`."""
    data = arguments.camvid if NETWORKS[way.network].base.endswith("camvid") else arguments.bccd
    epochs = arguments.epochs or way.epochs
    sets = [f"model.weights={arguments.floats / way.network}.safetensors", "qat.precision=fp32", "qat.fused=off"]
    sets += ["quantization.target=openvino", f"data.seed={way.seed}", f"qat.seed={way.seed}", *way.changes]
    more = ["--train-only", "--epochs", "0", "--qat-epochs", str(epochs), "--engines", "openvino"]
    more += ["--pixels", *map(str, arguments.pixels)] if arguments.pixels else []
    more += [word for one in (*sets, *arguments.set) for word in ("--set", one)]
    return {f"{label}/{way.network}": start(way.network, data, arguments.runs / label, more, threads=1)}


def table(runs: Path, names: list[str]) -> Iterator[str]:
    """Yield the metric after QAT, in torch, or the end of the log where there is none."""
    for name in names:
        file = runs / name / "qat.csv"
        if file.is_file() and (rows := list(csv.DictReader(file.open()))):
            last = rows[-1]
            kept = {key: value for key, value in last.items() if key in ("epoch", "train_loss", "val_map", "val_miou")}
            yield f"{name} {kept}"
        else:
            log = runs / f"{name}.log"
            yield f"{name}: " + " | ".join(log.read_text(errors="replace").splitlines()[-4:])


def main() -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--camvid", required=True)
    parser.add_argument("--bccd", required=True)
    parser.add_argument("--floats", type=Path, required=True, help="folder of <network>.safetensors")
    parser.add_argument("--out", type=Path, required=True, help="takes small.tar.gz and pieces of the weights")
    parser.add_argument("--runs", type=Path, default=Path("runs/qat_again"))
    parser.add_argument("--only", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--epochs", type=int, help="of QAT, in place of each way's own")
    parser.add_argument("--pixels", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--set", action="append", default=[], help="key=value of every recipe")
    parser.add_argument("--budget-s", type=float, default=180.0, help="seconds for everything")
    arguments = parser.parse_args()
    deadline = time.time() + arguments.budget_s - 12
    running: Running = {}
    for label in arguments.only:
        running |= begin(label, WAYS[label], arguments)
    packer = Packer(arguments.runs, arguments.out, None, weights=(Variant.QAT.weights_file,))
    finished = Finished(running, packer)
    try:
        wait(running, finished, deadline)
    finally:
        end(running)
        finished.close()
        print("\n".join(table(arguments.runs, list(running))), flush=True)


if __name__ == "__main__":
    main()
