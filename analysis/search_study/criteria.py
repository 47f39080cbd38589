"""Which criterion leaves the better network after fine-tuning, at equal predicted latency? On one core of a CPU.

A small network is trained, a search fits its latency model, and each criterion then removes blocks of channels until
that model predicts the bound. All networks are fine-tuned alike. A row is written as soon as a network is done, and a
study that is run again leaves out what has rows.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from analysis.common.cifar import NETWORKS
from analysis.common.study import command_line, read_rows, software, study_parser
from analysis.low_bits.step import PAD, SIDE, Images, Training
from analysis.search_study import data
from analysis.search_study.criteria_page import OURS, ROWS, write
from analysis.search_study.files import append
from analysis.search_study.subjects import CRITERIA, Subject
from compress.engines.registry import ENGINES
from compress.files import write_json
from compress.graph.inputs import flat_tensors
from compress.measure import describe_machine
from compress.search.cache import cache_path
from compress.search.criteria import channel_scores
from compress.search.front import Front
from compress.search.lab import Lab, build
from compress.search.network import Scores, distance
from compress.search.search import search
from compress.search.space import WIDTH, Configuration, widths_of
from compress.search.spec import SearchSpec
from compress.search.start import best_within

_SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
_BATCH, _LOOSE = 128, 1.2


@dataclass(frozen=True)
class Chosen:
    """A network to be fine-tuned: the channels and blocks that are kept, and the scores that chose them."""

    configuration: Configuration
    scores: Scores


def main() -> None:
    """Study the seeds that the command line names, and write the page."""
    parser = study_parser(__doc__, out="results/search/criteria")
    parser.add_argument("--network", choices=NETWORKS, default="resnet14_strided")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--latency", type=float, default=0.5)
    parser.add_argument("--engine", default="onnxruntime")
    parser.add_argument("--data", required=True, help="folder of cifar-10-batches-py")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/criteria"), help="of float networks and searches")
    parser.add_argument("--train-images", type=int, default=20_000)
    parser.add_argument("--val-images", type=int)
    parser.add_argument("--float-epochs", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=2, help="of fine-tuning")
    parser.add_argument("--images", type=int, default=512, help="that the search looks at")
    parser.add_argument("--networks", type=int, default=12, help="timed for the latency model")
    parser.add_argument("--trials", type=int, default=8, help="of the search; each is fine-tuned, too")
    parser.add_argument("--block", type=int, help="channels that the engine computes at a time; default: measured now")
    parser.add_argument("--minutes", type=float, default=60, help="after which no further network begins")
    o = parser.parse_args()
    torch.set_num_threads(1)
    o.until = time.perf_counter() + 60 * o.minutes
    machine = describe_machine()
    o.cache.mkdir(parents=True, exist_ok=True)
    o.out.mkdir(parents=True, exist_ok=True)
    about = {
        "command": command_line(["DIR" if word == o.data else word for word in sys.argv[1:]]),
        "software": software("torch", o.engine, "optuna"),
        "machine": {"cpu": machine.cpu, "cores": machine.usable_cores},
    }
    (o.out / "about-criteria.json").write_text(json.dumps(about) + "\n")
    split = data.load("cifar10", o.data, train=o.train_images, val=o.val_images, device=torch.device("cpu"))
    images = Images(split, torch.device("cpu"))
    for seed in o.seeds:
        study_seed(o, images, seed)
    write(o.out)


def study_seed(o: Namespace, images: Images, seed: int) -> None:
    """Train the float network of a seed, make it smaller by every criterion, and fine-tune all of them."""
    subject = Subject(network=o.network, seed=seed, engine=o.engine, bound=o.latency)
    network = trained(o, images, subject)
    float_hits = hits(network, images)
    front = searched(o, images, subject, network)
    done = {(row["seed"], row["method"]) for row in read_rows(o.out / ROWS)}
    for label, chosen in chosen_networks(front, o.latency).items():
        if (seed, label) in done or time.perf_counter() > o.until:
            continue
        lab, begun = replace(front.lab, scores=chosen.scores), time.perf_counter()
        small = build(lab, chosen.configuration)
        before, far = hits(small, images), distance_of(small, lab)
        fine_tuned(o, small, network, images, subject)
        after = hits(small, images)
        np.save(o.cache / f"{subject.name}-{label}.npy", after)
        row = {
            "network": o.network, "seed": seed, "method": label, "bound": o.latency,
            "block": lab.block, "float_top1": 100 * float_hits.mean(),
            "predicted": front.timed.model.predict(lab.costs.of(chosen.configuration)),
            "macs": macs(lab, chosen.configuration) / macs(lab, {}), "distance": far,
            "predicted_distance": front.accuracy.predict(chosen.configuration),
            "before": 100 * before.mean(), "after": 100 * after.mean(), "pictures": len(after),
            "over": {name: paired(after, other) for name, other in _others(o, subject, label).items()},
            "widths": widths_of(chosen.configuration),
            "epochs": o.epochs, "float_epochs": o.float_epochs, "train_images": len(images.targets),
            "seconds": time.perf_counter() - begun,
        }  # fmt: skip
        append(o.out / ROWS, row)
        short = {key: row[key] for key in ("seed", "method", "predicted", "distance", "before", "after", "seconds")}
        print(json.dumps(short), flush=True)


def macs(lab: Lab, configuration: Configuration) -> float:
    """Multiply-accumulates of a network for one image."""
    return sum(cost.macs for cost in lab.costs.of(configuration))


@torch.no_grad()
def distance_of(network: nn.Module, lab: Lab) -> float:
    """The error of a network's outputs on the pictures held back, as the search measures it."""
    images = torch.cat(list(lab.held))
    return distance(*(flat_tensors(one.eval()(images)) for one in (network, lab.structure.graph)))


def trained(o: Namespace, images: Images, subject: Subject) -> nn.Module:
    """Return the float network of a subject, trained unless the folder has it."""
    path = o.cache / f"{subject.name}.safetensors"
    torch.manual_seed(subject.seed)
    network = NETWORKS[subject.network]()
    if path.is_file():
        network.load_state_dict(load_file(path))
        return network.eval()
    network.to(memory_format=torch.channels_last).train()
    spec, state = subject.training(o.float_epochs), copy.deepcopy(network.state_dict())
    made = Training(network, None, images.fork(), spec, _BATCH, "eager", bfloat16=True)
    result = made.run(state, subject.seed, spec.epochs)
    print(f"{subject.name}: float {result.top1:.2f} %, {result.images_per_s:.0f} images/s", flush=True)
    network.zero_grad(set_to_none=True)
    network.to(memory_format=torch.contiguous_format)
    save_file(network.state_dict(), path)
    return network.eval()


def fine_tuned(o: Namespace, small: nn.Module, teacher: nn.Module, images: Images, subject: Subject) -> None:
    """Fine-tune a network in place with the float network as teacher; it ends in evaluation mode."""
    small.to(memory_format=torch.channels_last).train()
    taught = copy.deepcopy(teacher).to(memory_format=torch.channels_last).eval()
    spec, state = subject.tuning(o.epochs), copy.deepcopy(small.state_dict())
    Training(small, taught, images.fork(), spec, _BATCH, "eager", bfloat16=True).run(state, subject.seed, spec.epochs)
    small.to(memory_format=torch.contiguous_format).eval()


def searched(o: Namespace, images: Images, subject: Subject, network: nn.Module) -> Front:
    """Fit the models of latency and accuracy, and try some networks of the space, by `compress.search`."""
    pixels = images.pixels[: o.images, PAD : PAD + SIDE, PAD : PAD + SIDE].permute(0, 3, 1, 2)
    pictures = ((pixels.float() - images.mean) / images.std).contiguous()
    spec = SearchSpec(
        widths=_SHARES, formats=("float",), blocks=False, images=o.images, networks=o.networks, trials=o.trials,
        threads=1, seed=subject.seed,
    )  # fmt: skip
    out = o.cache / subject.name
    if o.block:
        version = ENGINES[o.engine].availability().version
        write_json(cache_path(o.engine, version, o.cache / "times", what="block"), {"block": o.block})
    loose = min(_LOOSE * o.latency, 0.99)  # noise of a busy machine must not end the search without a front
    return search(
        network, pictures[:2], list(pictures.split(64)), engine=o.engine, latency=loose, spec=spec, out=out,
        cache=o.cache / "times", resume=(out / "plan.json").is_file(),
    )  # fmt: skip


def chosen_networks(front: Front, bound: float) -> dict[str, Chosen]:
    """Networks by label: of every criterion at the bound, the dense one, and those that the search tried."""
    lab = front.lab
    size = {name: len(group.classes) for name, group in lab.structure.groups.items()}
    generator = torch.Generator().manual_seed(lab.spec.seed)
    scores = {name: channel_scores(lab.structure, name, lab.fit) for name in CRITERIA}
    scores["random"] = {name: torch.rand(count, generator=generator) for name, count in size.items()}

    def predicted(configuration: Configuration) -> float:
        return front.timed.model.predict(lab.costs.of(configuration))

    found = {OURS: Chosen(best_within(lab.space, front.accuracy.distance, predicted, bound) or {}, lab.scores)}
    for name, own in scores.items():
        found[name] = Chosen(within(own, lab.block, predicted, bound), own)
        if name == CRITERIA[-1]:
            found["uniform"] = Chosen(uniform_within(lab, predicted, bound), lab.scores)
            found["dense"] = Chosen({}, lab.scores)
    tried = {f"tried: {point.label}": point.configuration for point in front.points if point.configuration}
    return found | {label: Chosen(configuration, lab.scores) for label, configuration in tried.items()}


def within(scores: Scores, block: int, predict: Callable[[Configuration], float], bound: float) -> Configuration:
    """Remove blocks of channels, those of the least mean score over their group's mean first, until a bound is kept.

    Afterwards the blocks that went are taken back, the most important first, while the bound allows it: so networks of
    all criteria end close below it.
    """
    rows = sorted(block_scores(scores, block))
    widths = {name: len(own) for name, own in scores.items()}
    gone = []
    for score, name in rows:
        if predict(_configuration(widths)) <= bound:
            break
        gone.append((score, name))
        widths[name] -= block
    for _, name in reversed(gone):
        wider = {**widths, name: widths[name] + block}
        if predict(_configuration(wider)) <= bound:
            widths = wider
    return _configuration(widths)


def block_scores(scores: Scores, block: int) -> Iterator[tuple[float, str]]:
    """Mean score of each block of channels over its group's mean, least first; the last block of a group stays."""
    for name, own in scores.items():
        ordered = (own / own.mean().clamp_min(1e-12)).sort().values
        for part in ordered[len(ordered) % block :].split(block)[:-1]:
            yield float(part.mean()), name


def uniform_within(lab: Lab, predict: Callable[[Configuration], float], bound: float) -> Configuration:
    """The largest share of the channels of every group, in blocks, that keeps a bound."""
    for share in np.arange(1, 0, -1 / 64):
        widths = {
            name: max(lab.block, round(share * len(group.classes) / lab.block) * lab.block)
            for name, group in lab.structure.groups.items()
        }
        if predict(_configuration(widths)) <= bound:
            break
    return _configuration(widths)


def _configuration(widths: Mapping[str, int]) -> dict[str, str]:
    return {f"{WIDTH} {name}": str(count) for name, count in widths.items()}


@torch.no_grad()
def hits(network: nn.Module, images: Images) -> NDArray[np.bool_]:
    """Return True for each test picture that the network classifies rightly in float32, (N,)."""
    network.eval().to(memory_format=torch.channels_last)
    pixels, targets = images.val
    found: list[Tensor] = [
        network(((part.float() - images.mean) / images.std).contiguous(memory_format=torch.channels_last)).argmax(1)
        == classes
        for part, classes in zip(pixels.split(500), targets.split(500), strict=True)
    ]
    network.to(memory_format=torch.contiguous_format)
    return np.asarray(torch.cat(found).numpy())


def paired(left: NDArray[np.bool_], right: NDArray[np.bool_]) -> tuple[float, float]:
    """Difference of two accuracies on the same pictures in points, and half of its 95 % interval."""
    difference = 100 * (left.astype(float) - right.astype(float))
    return float(difference.mean()), float(1.96 * difference.std(ddof=1) / len(difference) ** 0.5)


def _others(o: Namespace, subject: Subject, label: str) -> dict[str, NDArray[np.bool_]]:
    """Hits of the network of our own criterion, which comes first."""
    path = o.cache / f"{subject.name}-{OURS}.npy"
    return {OURS: np.load(path)} if path.is_file() and label != OURS else {}


if __name__ == "__main__":
    main()
