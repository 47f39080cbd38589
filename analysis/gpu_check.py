"""Check kernels, fusion, recorded steps and the engine `cuda` on this machine's GPUs; print one verdict a line.

    python -m analysis.gpu_check

It times training steps of nine networks with random weights, float and quantized: eager, as CUDA graphs, compiled,
and both. It prints milliseconds, and time and memory relative to float beside the goal. `--curves` trains networks
plain and fused, in bf16, and compares their losses. With several GPUs it also checks data-parallel and sharded steps,
calibration and JPEG loading, one process a GPU. The engine is compared with exact integers, step by step, and with
ONNX Runtime's outputs, in batches of several sizes, on six networks, and tests that need a GPU are run. The exit
status is 1 if a verdict is not OK.
"""

import argparse
import copy
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from PIL import Image
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import compress
from analysis.common.networks import random_network
from analysis.common.qat_variants import NETWORKS
from analysis.common.study import option, study_options
from analysis.cuda_engine.networks import images, qdq_file
from compress.data import DataSpec
from compress.data.base import BatchPlan, DataSet
from compress.data.load import load_data
from compress.data.memory import MemorySplit
from compress.engines.cuda.engine import CudaEngine
from compress.engines.cuda.program import differences, repeated_ms
from compress.measure.parity import sqnr_db
from compress.training.distributed import broadcast_state, init_processes

TRANSFORMERS = ("swin_t", "convnext_tiny", "convnextv2_tiny", "vit_s", "deit_small_patch16_224", "vit_b_16")
CNNS = ("efficientnet_b0", "mobilenet_v2", "resnet50")
# Largest time and memory of a quantized step, over float's.
GOALS = {**dict.fromkeys(TRANSFORMERS, (0.85, 0.75)), **dict.fromkeys(CNNS, (0.70, 0.55))}
PARALLEL = ("resnet50", "vit_b_16")
ENGINES = ("resnet50", "mobilenet_v2", "vit_b_16", "convnext_tiny", "nest_tiny", "yolo_n")
TESTS = ("tests/kernels", "tests/qat_fusion", "tests/training/test_cuda.py", "tests/engines/cuda", "tests/data")
# SQNR of outputs of random networks, which amplify a tie: right ones had 25 dB and more, wrong ones 10 and less.
_LEAST_DB = 18.0
# Largest distance of a loss from that of the plain network, in bf16.
_SAME = 0.02
# Steps of float training and of each curve of quantized training, and those that a point of a curve is the mean of.
_FLOAT_STEPS, _STEPS, _POINT = 160, 240, 20
# Relative change of the weights, a rounding to bf16, that says how far runs of the same training end from one another,
# and the largest distance of a fused one, over that.
_NUDGE, _NOISE = 2.0**-9, 2.0
# Least speed of several GPUs, over that many times one.
_PARALLEL_GOALS = {"int8 recorded": 3.7 / 4, "entropy calibration": 3.5 / 4}
_SYNCHRONIZED, _FROM_FILES = 0.8, 0.9
_FILE_IMAGES = 32768  # a process and epoch

# What was tried, what was seen, whether it is as it should be.
Row = tuple[str, str, bool]


def main() -> int:
    asked = study_options(
        __doc__,
        option("--families", nargs="*", default=list(GOALS)),
        option("--curves", nargs="*", default=(), help="networks whose losses are compared, 240 steps each"),
        option(
            "--parallel", nargs="*", default=[*PARALLEL, "files"], help="networks that a process on each GPU trains"
        ),
        option("--engines", nargs="*", default=list(ENGINES)),
        option("--tests", nargs="*", default=list(TESTS)),
        option("--no-compile", action="store_true", help="leave torch.compile out: a minute a network"),
        option("--batch", type=int, default=64),
        option("--worker", nargs=2, help=argparse.SUPPRESS),
    )
    if asked.worker:
        kind, name = asked.worker
        {"train": _train, "curves": _curves, "parallel": _parallel, "files": _files}[kind](name, asked)
        return 0
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    bad = 0
    for what, seen, good in _rows(asked):
        print(f"{'OK ' if good else 'BAD'} | {what:28} | {seen}", flush=True)
        bad += not good
    return int(bad > 0)


def _rows(asked: argparse.Namespace) -> Iterator[Row]:
    yield from _trained(asked)
    for name in asked.parallel if torch.cuda.device_count() > 1 else ():
        yield _tried(f"processes {name}", partial(_from_files if name == "files" else _processes, name, asked.batch))
    with TemporaryDirectory() as folder:
        for name in asked.engines:
            yield _tried(f"engine cuda {name}", partial(_engine, name, asked.batch, Path(folder)))
    if asked.tests:
        yield _tried("tests", lambda: _tests(asked.tests))


def _tried(what: str, action: Callable[[], tuple[str, bool]]) -> Row:
    try:
        return what, *action()
    except Exception as error:  # any failure is a row of the table, and the others follow
        return what, f"{type(error).__name__}: {str(error)[:300]}", False
    finally:
        torch.cuda.empty_cache()


def _called(*options: str, processes: int = 0, **environment: str) -> Any:
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes else []
    command = [sys.executable, *start, "-m", "analysis.gpu_check", "--worker", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])
    return json.loads(done.stdout.splitlines()[-1])


def _trained(asked: argparse.Namespace) -> Iterator[Row]:
    free: SimpleQueue[int] = SimpleQueue()
    for gpu in range(torch.cuda.device_count()):
        free.put(gpu)
    options = ["--batch", str(asked.batch), *(["--no-compile"] if asked.no_compile else [])]

    def row(kind: str, name: str) -> Row:
        gpu = free.get()
        try:
            return _tried(f"{kind} {name}", lambda: _called(kind, name, *options, CUDA_VISIBLE_DEVICES=str(gpu)))
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(torch.cuda.device_count()) as pool:
        jobs = [("train", name) for name in asked.families] + [("curves", name) for name in asked.curves]
        for done in as_completed([pool.submit(row, *job) for job in jobs]):
            yield done.result()


def _train(name: str, asked: argparse.Namespace) -> None:
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 4
    model, x, y = _network(name), *_batch(asked.batch)
    qmodel = compress.quantize(model.eval(), x[:2], [x]).cpu()
    sources, failed = {"plain": qmodel, "float": model.cpu(), "int8": qmodel}, ""
    modes = ("eager", "recorded") if asked.no_compile else ("eager", "recorded", "compiled", "compiled recorded")
    found: dict[tuple[str, str], Step] = {}
    for kind, mode in [("plain", "eager"), *product(("float", "int8"), modes)]:
        gc.collect()
        torch.cuda.empty_cache()
        try:
            if mode != "compiled recorded":  # whose network has been compiled
                net = copy.deepcopy(sources[kind]).cuda().train()
                run = compress.fuse_for_training(net) if kind == "int8" else net
                call = torch.compile(run) if mode == "compiled" else run
            net.load_state_dict(sources[kind].state_dict())
            found[kind, mode] = _step(net, call, x, y, recorded="recorded" in mode)
        except Exception as error:
            failed += f"; {kind} {mode}: {type(error).__name__}: {str(error)[:200]}"
    if {("plain", "eager"), ("float", "recorded"), ("int8", "recorded")} - found.keys():
        raise RuntimeError(failed)
    text = ", ".join(f"{kind} {mode} {step[1]:.1f}" for (kind, mode), step in found.items())
    fastest = {kind: min(step[1] for (own, _), step in found.items() if own == kind) for kind in ("float", "int8")}
    time_ratio = fastest["int8"] / fastest["float"]
    memory = found["int8", "recorded"][2] / found["float", "recorded"][2]
    far = max(
        abs(a / b - 1)
        for (kind, _), step in found.items()
        for a, b in zip(step[0], found["plain", "eager"][0], strict=True)
        if kind == "int8"
    )
    most_time, most_memory = GOALS[name]
    text += f" ms; fastest {time_ratio:.2f} of float (goal {most_time}), memory {memory:.2f} ({most_memory})"
    good = time_ratio <= most_time and memory <= most_memory and far <= _SAME and not failed
    print(json.dumps([f"{text}; losses within {far:.4f}{failed}", good]))


def _curves(name: str, asked: argparse.Namespace) -> None:
    spec = DataSpec(name="shapes", image_size=64, num_classes=20, train_images=asked.batch * 40)
    split, model = load_data(spec).train, _network(name)
    batches = [
        (F.interpolate(x, size=224).contiguous(memory_format=torch.channels_last), y)
        for epoch in range(-(-(_FLOAT_STEPS + _STEPS) // 40))
        for x, y in split.batches(BatchPlan(batch_size=asked.batch, epoch=epoch), device=torch.device("cuda"))
    ]
    first, losses = [x for x, _ in batches[:4]], {}
    _trained_on(batches[:_FLOAT_STEPS], model.train(), model, 5e-4, recorded=False)
    qmodel = compress.quantize(model.eval(), first[0][:2], first)
    for way in ("plain", "nudged", "nudged again", "eager", "recorded"):
        net = copy.deepcopy(qmodel).train()
        for parameter in net.parameters() if "nudged" in way else ():
            parameter.data *= 1 + _NUDGE * torch.randn_like(parameter)
        run = compress.fuse_for_training(net) if way in {"eager", "recorded"} else net
        values = _trained_on(batches[-_STEPS:], net, run, 1e-4, recorded=way == "recorded")
        losses[way] = torch.stack(values).view(-1, _POINT).mean(1)
    far = {way: float((curve - losses["plain"]).abs().mean()) for way, curve in losses.items() if way != "plain"}
    noise = max(far["nudged"], far["nudged again"])
    last = ", ".join(f"{way} {float(curve[-1]):.3f}" for way, curve in losses.items())
    text = f"losses from {float(losses['plain'][0]):.3f} to {last}"
    text += "; distance from plain " + ", ".join(f"{way} {value:.4f}" for way, value in far.items())
    print(json.dumps([text, max(far["eager"], far["recorded"]) <= _NOISE * noise]))


def _trained_on(
    batches: list[tuple[Tensor, Tensor]],
    model: nn.Module,
    call: Callable[[Tensor], Tensor],
    rate: float,
    *,
    recorded: bool,
) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    step, losses = _step_of(model, call, recorded=recorded), []
    for x, y in batches:
        losses.append(step(x, y).clone())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _network(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = NETWORKS[name].make() if name in NETWORKS else random_network(name)
    model = model.cuda().to(memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, nn.Dropout | torchvision.ops.StochasticDepth):
            module.p = 0.0
    for parameter in model.parameters():
        if not bool(parameter.any()):
            nn.init.normal_(parameter, std=0.02)  # a head of zeros has no range
    return model


def _batch(size: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    x = images(size * (rank + 1), 224)[-size:].cuda().contiguous(memory_format=torch.channels_last)
    return x, torch.arange(size, device="cuda") + size * rank


def _processes(name: str, batch: int) -> tuple[str, bool]:
    world = torch.cuda.device_count()
    rows = {n: _called("parallel", name, "--batch", str(batch), processes=n) for n in (1, world)}
    rates = {kind: {n: n * batch / row["ms"][kind] * 1e3 for n, row in rows.items()} for kind in rows[1]["ms"]}
    text = ", ".join(f"{kind} {r[world]:.0f} images/s ({r[world] / r[1]:.2f}x)" for kind, r in rates.items())
    far = [max(both) for both in zip(*(row["far"] for row in rows.values()), strict=True)]
    good = max(far) <= 1e-5 and all(
        rates[kind][world] / rates[kind][1] >= n * world for kind, n in _PARALLEL_GOALS.items()
    )
    if "synchronized recorded" in rates:
        kept = rates["synchronized recorded"][world] / rates["float recorded"][world]
        text, good = f"{text}, synchronized keeps {kept:.2f} (goal {_SYNCHRONIZED})", good and kept >= _SYNCHRONIZED
    apart = "; weights recorded from the first process's {:.0e}, from parallel {:.0e}, from sharded {:.0e}".format(*far)
    return f"{world} GPUs over one: {text}{apart}", good


def _parallel(name: str, asked: argparse.Namespace) -> None:
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    try:
        model, x, y = _network(name), *_batch(asked.batch, rank)
        qmodel = compress.quantize(model.eval(), x[:2], [x])
        broadcast_state(qmodel, x.device)  # each process has calibrated on images of its own
        tried = {
            (kind, mode): copy.deepcopy(source).train()
            for kind, source in (("float", model), ("int8", qmodel))
            for mode in ("recorded", "parallel", "sharded")
        }
        if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
            tried["synchronized", "recorded"] = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model)).train()
        times = {"entropy calibration": _calibration(model, x)}
        for (kind, mode), net in tried.items():
            if mode == "sharded":  # FSDP2 shards tensors in the usual order alone
                net.to(memory_format=torch.contiguous_format)
            run = compress.fuse_for_training(net) if kind == "int8" else net
            if mode == "parallel":
                run = DistributedDataParallel(run, device_ids=[rank], gradient_as_bucket_view=True)
            elif mode == "sharded":
                fully_shard(run)
            times[f"{kind} {mode}"] = _step(net, run, x, y, recorded=mode == "recorded")[1]
        weights, other, sharded = (_weights(tried["int8", mode]) for mode in ("recorded", "parallel", "sharded"))
        first = weights.clone()
        dist.broadcast(first, 0)
        far = torch.stack([(weights - w).norm() for w in (first, other, sharded)]) / other.norm()
        dist.all_reduce(far, dist.ReduceOp.MAX)
        if rank == 0:
            print(json.dumps({"ms": times, "far": far.tolist()}))
    finally:
        dist.destroy_process_group()


def _weights(model: nn.Module) -> Tensor:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def _calibration(model: nn.Module, x: Tensor) -> float:
    activations = compress.ActivationSpec(calibrator="entropy")
    qmodel = compress.insert_quantizers(copy.deepcopy(model).eval(), x[:1], compress.QuantSpec(activations=activations))
    several = dist.get_world_size() > 1
    compress.calibrate(qmodel, [x], all_reduce=several)  # ends on the host
    batches, start = [x] * (8192 // len(x) // dist.get_world_size()), time.perf_counter()
    compress.calibrate(qmodel, batches, all_reduce=several)
    return (time.perf_counter() - start) / len(batches) * 1e3


def _from_files(name: str, batch: int) -> tuple[str, bool]:
    world = torch.cuda.device_count()
    with TemporaryDirectory() as folder:
        write_jpegs(Path(folder), train=_FILE_IMAGES * world, val=batch * world)
        memory, files = _called("files", folder, "--batch", str(batch), processes=world)
    text = f"{world} GPUs: from memory {memory:.0f} images/s, from files {files:.0f}, {files / memory:.2f} of it"
    return f"{text} (goal {_FROM_FILES})", files / memory >= _FROM_FILES


def write_jpegs(folder: Path, *, distinct: int = 64, **images: int) -> None:
    """Write `images` (count by split) of 500 x 375 pixels and about 78 kB in ten classes; only some are distinct."""
    random = np.random.default_rng(0)
    for index in range(distinct):
        coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), np.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        noisy = np.asarray(coarse, np.float32) + random.normal(0, 12, (375, 500, 3))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{index}.jpg", quality=90)
    for split, count in images.items():
        for index in range(count):
            place = folder / split / str(index % 10)
            place.mkdir(parents=True, exist_ok=True)
            os.link(folder / f"{index % distinct}.jpg", place / f"{index}.jpg")


def _files(folder: str, asked: argparse.Namespace) -> None:
    processes = init_processes()
    model = torchvision.models.resnet50(num_classes=10).to(processes.device)
    spec = compress.DataSpec(name="folder", root=folder, image_size=224, decode="gpu", workers=8)
    files = compress.load_data(spec)
    pixels = torch.randint(256, (len(files.train), 3, 224, 224), dtype=torch.uint8, device=processes.device)
    labels, preprocessing = files.train.labels, files.train.preprocessing
    targets = torch.arange(len(pixels)) % len(labels)
    memory = MemorySplit(pixels, targets, labels=labels, preprocessing=preprocessing, seed=0)
    qmodel = compress.quantize(model.eval(), pixels[:2] / 255, [pixels[:64] / 255])
    training = compress.QATSpec(
        epochs=2,
        evaluate_every=2,
        lr=1e-5,
        precision="bf16",
        distill=False,
        cuda_graphs=True,
    )
    rates = []
    for split in (memory, files.train):
        data, size = DataSet(train=split, val=files.val), asked.batch * processes.world_size
        report = compress.fit(qmodel, data, training, batch_size=size, folder=None, processes=processes)
        rates.append(report.history[-1].images_per_s)
    if processes.is_main:
        print(json.dumps(rates))
    processes.close()


# The first and the last loss, milliseconds, the GPU's peak memory in bytes.
Step = tuple[list[float], float, int]


def _step_of(
    model: nn.Module, call: Callable[[Tensor], Tensor], *, recorded: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(call(x), y)

    def plainly(x: Tensor, y: Tensor) -> Tensor:
        value = loss(x, y)
        value.backward()
        return value.detach()

    return compress.record_step(model, loss) if recorded else plainly


def _step(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, *, recorded: bool) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    step = _step_of(model, call, recorded=recorded)
    torch.cuda.reset_peak_memory_stats()
    losses, start = [], 0.0
    for index in range(16):
        value = step(x, y)
        optimizer.step()
        optimizer.zero_grad()
        if index in {0, 5, 15}:  # compiled and recorded by the second
            torch.cuda.synchronize()
            losses.append(float(value))
            ms, start = (time.perf_counter() - start) / 10 * 1e3, time.perf_counter()
    return [losses[0], losses[-1]], ms, torch.cuda.max_memory_allocated()


def _engine(name: str, batch: int, folder: Path) -> tuple[str, bool]:
    """Milliseconds of a batch, and codes that differ from exact arithmetic by more than rounding."""
    engine = compress.build_engine(qdq_file(name, folder), "cuda", batch_size=batch, floats="layers")
    assert isinstance(engine, CudaEngine)
    with engine:
        given = {engine.inputs[0].name: images(batch, engine.inputs[0].shape[2]).cuda()}
        ms = repeated_ms(partial(engine.run_tensors, given))
        program = engine.program({t.name: t.shape for t in engine.inputs})
        found = differences(program.executor, program.split(given)[0])
    wrong, differing = sum(d.wrong for d in found), sum(d.differing for d in found)
    decibels = _beside_onnxruntime(qdq_file(name, folder))
    text = f"{ms:.3f} ms for {batch}; {differing} codes differ, {wrong} steps wrong; {decibels:.0f} dB to ONNX Runtime"
    return text, not wrong and decibels > _LEAST_DB


def _beside_onnxruntime(file: Path) -> float:
    """Least SQNR of whole outputs of one engine for several sizes of the batch: steps alone may each be right."""
    with compress.build_engine(file, "cuda", tune="no") as engine, compress.build_engine(file, "onnxruntime") as other:
        (tensor,) = engine.inputs
        x = images(4, tensor.shape[2]).numpy()
        pairs = [(other.run({tensor.name: x[:n]}), engine.run({tensor.name: x[:n]})) for n in (4, 1, 3, 4)]
    return min(sqnr_db(expected[name], found[name]) for expected, found in pairs for name in expected)


def _tests(folders: list[str]) -> tuple[str, bool]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *folders]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    return " / ".join([line for line in lines if line.startswith("FAILED")] + lines[-1:])[:600], result.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
