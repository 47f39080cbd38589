"""One unit of the ablation, in a process of its own: train a network, or measure the rows of a case.

Every row is written when it is finished, and training continues from its last checkpoint, so that little is lost when
a unit is stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import compress
from analysis.common.study import Row
from analysis.ptq_ablation.cases import ADAROUND, CALIBRATION, CASES, NETWORKS, Case
from compress.data.base import BatchPlan, DataSet
from compress.files import write_json
from compress.measure.machine import describe_machine
from compress.quantization.report import quantization_report_of
from compress.quantization.sensitivity.compare import sqnr
from compress.training.checkpoint import load_model, save_model
from compress.training.loop import fit
from compress.training.spec import TrainSpec


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The files of a unit's results, and the options that change them.

    Attributes:
        cache: folder of weights and rows.
        epochs: factor on the epochs of each network.
        steps: steps of AdaRound for a layer.
    """

    cache: Path
    epochs: float = 1.0
    steps: int = ADAROUND.steps

    def arguments(self) -> list[str]:
        """Return the options as arguments of this module."""
        return ["--cache", str(self.cache), "--epochs", f"{self.epochs:g}", "--steps", str(self.steps)]

    def rows(self, case: str, seed: int) -> Path:
        """Return the file of the rows of a case and seed."""
        return self.cache / f"rows-{self.steps}-{self.epochs:g}" / f"{case}-{seed}.json"

    def training(self, network: str, seed: int) -> TrainSpec:
        """Return how a network is trained."""
        spec = NETWORKS[network]()[2]
        return replace(spec, seed=seed, epochs=max(1, round(spec.epochs * self.epochs)), evaluate_every=100)

    def weights(self, network: str, seed: int) -> Path:
        """Return the file of a trained network."""
        return self.cache / f"{network}-{seed}-{self.training(network, seed).epochs}.safetensors"


def train(network: str, seed: int, setup: Setup) -> None:
    """Train a network and write its weights."""
    torch.manual_seed(seed)
    model, data_spec, _ = NETWORKS[network]()
    path = setup.weights(network, seed)
    data = compress.load_data(data_spec)
    report = fit(
        model, data, setup.training(network, seed), batch_size=64, folder=setup.cache, resume=True, name=path.stem
    )
    save_model(model, path)
    print(f"top-1 {report.final.top1:.4f}")


def trained(network: str, seed: int, setup: Setup) -> tuple[nn.Module, DataSet]:
    """Return the float network and its data."""
    model, data_spec, _ = NETWORKS[network]()
    load_model(model, setup.weights(network, seed))
    return model.eval(), compress.load_data(data_spec)


def read_rows(name: str, seed: int, setup: Setup) -> dict[str, Row]:
    """Return the finished rows of a case and seed, by name."""
    path = setup.rows(name, seed)
    found: dict[str, Row] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def missing(name: str, seed: int, setup: Setup) -> list[str]:
    """Return the rows of a case and seed that are not measured yet."""
    found = read_rows(name, seed, setup)
    return [row for row in ("float", *CASES[name].rows) if row not in found]


def measure_case(name: str, seed: int, setup: Setup) -> None:
    """Measure and write the missing rows of a case and seed."""
    rows = read_rows(name, seed, setup)
    machine = describe_machine()
    where = {"cpu": machine.cpu, "torch": torch.__version__}
    for row in missing(name, seed, setup):
        rows[row] = {**measure(CASES[name], row, seed, setup), "machine": where}
        write_json(setup.rows(name, seed), rows)
    lowest = min(rows.values(), key=lambda found: float(found["top1"]))
    print(f"{len(rows)} rows, top-1 {100 * lowest['top1']:.2f} to {100 * rows['float']['top1']:.2f} % (float)")


def measure(case: Case, row: str, seed: int, setup: Setup) -> Row:
    """Quantize as one row says, and compare with the float network on the evaluation split."""
    model, data = trained(case.network, seed, setup)
    example = next(iter(data.val.batches(BatchPlan(batch_size=8, limit=8))))[0]
    if case.change is not None:
        model = case.change(model, example, seed).eval()
    spec, seconds = None, 0.0
    network: nn.Module = model
    if row != "float":
        changes = dict(case.rows[row])
        if "adaround" in changes:
            changes["adaround"] = replace(changes["adaround"], steps=setup.steps)
        spec = replace(case.base, **changes)
        batches = [x for x, _ in data.train.batches(BatchPlan(batch_size=64, limit=CALIBRATION))]
        start = time.perf_counter()
        network = compress.quantize(model, example[:2], batches, spec=spec)
        seconds = time.perf_counter() - start
    correct, logits, reference = 0, [], []
    with torch.no_grad():
        for images, targets in data.val.batches(BatchPlan(batch_size=100)):
            logits.append(network(images))
            reference.append(model(images))
            correct += int((logits[-1].argmax(1) == targets).sum())
    noise = sqnr(torch.cat(reference), torch.cat(logits)) if spec is not None else None
    notes = [] if spec is None else quantization_report_of(network).notes()
    return {"top1": correct / len(data.val), "sqnr_db": noise, "seconds": seconds, "notes": notes}


def main() -> None:
    """Train a network, or measure a case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("train", "measure"))
    parser.add_argument("name", help="name of the network or the case")
    parser.add_argument("seed", type=int)
    parser.add_argument("--cache", type=Path, default=Path("runs/ptq_ablation"))
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=ADAROUND.steps)
    a = parser.parse_args()
    torch.set_num_threads(1)
    setup = Setup(cache=a.cache, epochs=a.epochs, steps=a.steps)
    (train if a.task == "train" else measure_case)(a.name, a.seed, setup)


if __name__ == "__main__":
    main()
