"""One job in a process of its own: compile while others train, wait for its turn, train each seed, write the rows."""

from __future__ import annotations

import argparse
import copy
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import compress
from analysis.common.cifar import NETWORKS
from analysis.low_bits.jobs import JOBS, Job
from analysis.low_bits.step import DEVICE, Images, Training
from compress.quantization.learned import freeze_scales, learn_scales
from compress.quantization.weight_norm import bake_weights, normalize_weights

CALIBRATION = 512


def float_model(job: Job, state: dict[str, Tensor] | None = None) -> nn.Module:
    """Return the float network on the device, with `state` if it is given."""
    model = NETWORKS[job.network]().to(DEVICE)
    if state is not None:
        model.load_state_dict(state)
    return model.to(memory_format=torch.channels_last)


def seed_state(path: Path, seed: int) -> dict[str, Tensor]:
    """Return the weights of one seed from a file that holds those of all."""
    prefix = f"{seed}."
    return {k.removeprefix(prefix): v for k, v in load_file(path, device=str(DEVICE)).items() if k.startswith(prefix)}


def quantized(job: Job, model: nn.Module, images: Images) -> Any:
    """Return the network with quantizers whose scales learn."""
    images.at.zero_()
    x = images.batch(min(CALIBRATION, len(images.targets)))[0].contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        qmodel = compress.quantize(copy.deepcopy(model).eval(), x[:2], [x], spec=job.quant_spec())
    if job.normalize:
        normalize_weights(qmodel)
    learn_scales(qmodel)
    return qmodel.to(memory_format=torch.channels_last)


def wait(path: Path, deadline: float) -> None:
    """Wait until a file is there."""
    while not path.exists() and time.time() < deadline:
        time.sleep(0.1)


def prepared(job: Job, images: Images, batch: int, mode: str) -> tuple[Training, nn.Module, nn.Module]:
    """Return the recorded training, its network and the float network: of fresh weights, replaced before each run."""
    torch.manual_seed(0)
    base = float_model(job)
    if job.bits is None:
        return Training(base, None, images, job.train_spec(100), batch, mode), base, base
    model = quantized(job, base, images)
    teacher = base.eval() if job.distill else None
    return Training(model, teacher, images, job.train_spec(100), batch, mode), model, base


def run(name: str, out: Path, floats: Path, seconds: float, batch: int, mode: str, end: float, data: str) -> None:
    """Train every seed of a job within `seconds` each, and append a row for each to `rows.jsonl`."""
    job = JOBS[name]
    root = compress.DataSpec(name="cifar10", root=data, image_size=32)
    images = Images(compress.load_data(root), DEVICE)
    training, model, base = prepared(job, images, batch, mode)
    source = floats / f"{job.network}.safetensors"
    print(f"{name}: ready", flush=True)
    wait(out / f"{name}.turn", end)
    per_epoch = training.seconds_per_epoch()
    epochs = max(1, min(job.most_epochs, int(seconds / per_epoch)))
    training.spec = job.train_spec(epochs)
    kept: dict[str, Tensor] = {}
    for seed in range(job.seeds):
        torch.manual_seed(seed)
        start = time.perf_counter()
        before = None
        if job.bits is None:
            state = float_model(job).state_dict()
        else:
            base.load_state_dict(seed_state(source, seed))
            before = images.top1(base)
            state = quantized(job, base, images).state_dict()
        left = end - time.time()
        found = training.run(state, seed, epochs, deadline=time.perf_counter() + left)
        row = {"job": name, "seed": seed, **asdict(found), "float_top1": before, "mode": mode, "batch": batch}
        row |= {"seconds": time.perf_counter() - start, "settings": asdict(job)}
        with (out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name} seed {seed}: {found.top1:.2f} of {before} in {epochs} epochs", flush=True)
        ended = copy.deepcopy(model)
        freeze_scales(ended)
        bake_weights(ended)
        kept |= {f"{seed}.{k}": v.detach().clone().contiguous().cpu() for k, v in ended.state_dict().items()}
        target = source if job.bits is None else out / f"{name}.safetensors"
        save_file(kept, target)


def main() -> None:
    """Run the job that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=JOBS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--floats", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--end", type=float, required=True)
    o = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    run(o.name, o.out, o.floats, o.seconds, o.batch, o.mode, o.end, o.data)


if __name__ == "__main__":
    main()
