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
from analysis.low_bits.opened import opened
from analysis.low_bits.step import DEVICE, Images, Training
from compress.quantization.learned import freeze_scales, learn_scales
from compress.quantization.offsets import learn_offsets
from compress.quantization.weight_norm import bake_weights, normalize_weights

CALIBRATION = 512


def float_model(job: Job, state: dict[str, Tensor] | None = None) -> nn.Module:
    """Return the float network on the device, with `state` if it is given."""
    model = NETWORKS[job.network]().to(DEVICE)
    if state is not None:
        model.load_state_dict(state)
    return model.to(memory_format=torch.channels_last)


def seed_state(path: Path, seed: int) -> dict[str, Tensor]:
    """Return the weights of one seed from a file that holds those of several; of seed 0 if this one is not there."""
    tensors = load_file(path, device=str(DEVICE))
    prefix = f"{seed}." if any(key.startswith(f"{seed}.") for key in tensors) else "0."
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def quantized(job: Job, model: nn.Module, images: Images) -> Any:
    """Return the network with quantizers whose scales learn."""
    images.at.zero_()
    x = images.batch(min(CALIBRATION, len(images.targets)))[0].contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        dense = copy.deepcopy(model).eval()
        if sparsity := job.sparsity_spec():
            dense = opened(dense, x[:2])
            compress.sparsify(dense, sparsity, example_inputs=x[:2])
        qmodel = compress.quantize(dense, x[:2], [x], spec=job.quant_spec())
    if job.normalize:
        normalize_weights(qmodel)
    if job.offsets:
        learn_offsets(qmodel, [x])
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
    training = Training(model, teacher, images, job.train_spec(100), batch, mode, mask_end=job.mask_end)
    return training, model, base


def float_file(network: str, *folders: Path) -> Path:
    """Return the file of a float network in the first folder that has it, or in the last one."""
    paths = [folder / f"{network}.safetensors" for folder in folders]
    return next((path for path in paths if path.exists()), paths[-1])


def run(name: str, out: Path, floats: Path, batch: int, mode: str, end: float, data: str) -> None:
    """Train every seed of a job within the seconds that its turn gives, and append a row for each to `rows.jsonl`."""
    job = JOBS[name]
    root = compress.DataSpec(name="cifar10", root=data, image_size=32)
    images = Images(compress.load_data(root), DEVICE)
    training, model, base = prepared(job, images, batch, mode)
    (out / f"{name}.ready").touch()
    turn = out / f"{name}.turn"
    wait(turn, end)
    if not turn.exists():
        return  # the time of all jobs is over
    seconds = float(turn.read_text())
    source = float_file(job.network, out, floats) if job.bits else out / f"{job.network}.safetensors"
    per_epoch = training.seconds_per_epoch()
    epochs = max(1, min(job.most_epochs, int(seconds / per_epoch)))
    training.spec = job.train_spec(epochs)
    kept: dict[str, Tensor] = {}
    about = json.loads((out / "about.json").read_text())
    for seed in range(job.first_seed, job.first_seed + job.seeds):
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
        row |= {"seconds": time.perf_counter() - start, "settings": asdict(job), **about}
        with (out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name} seed {seed}: {found.top1:.2f} of {before} in {epochs} epochs", flush=True)
        ended = copy.deepcopy(model)
        freeze_scales(ended)
        bake_weights(ended)
        if job.sparse:
            compress.squash_masks(ended)
        kept |= {f"{seed}.{k}": v.detach().clone().contiguous().cpu() for k, v in ended.state_dict().items()}
        part = out / f"{name}.part"
        save_file(kept, part)
        part.rename(source if job.bits is None else out / f"{name}.safetensors")


def main() -> None:
    """Run the job that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=JOBS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--floats", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--mode", required=True)
    parser.add_argument("--end", type=float, required=True)
    o = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    run(o.name, o.out, o.floats, o.batch, o.mode, o.end, o.data)


if __name__ == "__main__":
    main()
