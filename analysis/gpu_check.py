"""Whether kernels, fusion, recorded steps and the engine `cuda` work on this machine's GPU: a verdict a line.

    python -m analysis.gpu_check

Networks of random weights: steps of training of six families, each float and quantized, launch by launch, recorded and
compiled (milliseconds, over float's launch by launch); where there are several GPUs, a process on each; the engine on
four of them against exact arithmetic; the tests that skip without a GPU. About eight minutes on an H100. It ends with 1
if a verdict is not OK.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import compress
from analysis.cuda_engine.networks import images, qdq_file
from compress.engines.cuda.engine import CudaEngine
from compress.engines.cuda.tuning import differences, repeated_ms

FAMILIES = ("resnet50", "mobilenet_v2", "efficientnet_b0", "vit_b_16", "swin_t", "convnext_tiny")
PARALLEL = ("resnet50", "vit_b_16")
ENGINES = ("resnet50", "mobilenet_v2", "vit_b_16", "convnext_tiny")
TESTS = ("tests/kernels", "tests/qat_fusion", "tests/training/test_cuda.py", "tests/engines/cuda", "tests/data")
_SAME = 0.02
"""Largest distance of a first loss from that of the plain network, in bf16."""

Row = tuple[str, str, bool]
"""What was tried, what was seen, whether it is as it should be."""


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument(
        "--parallel", nargs="*", default=list(PARALLEL), help="networks that a process on each GPU trains"
    )
    parser.add_argument("--engines", nargs="*", default=list(ENGINES))
    parser.add_argument("--tests", nargs="*", default=list(TESTS))
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: a minute a network")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        return _worker(asked.worker, asked.batch)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    bad = 0
    for what, seen, good in _rows(asked):
        print(f"{'OK ' if good else 'BAD'} | {what:28} | {seen}", flush=True)
        bad += not good
    return int(bad > 0)


def _rows(asked: argparse.Namespace) -> Iterator[Row]:
    modes = ("eager", "recorded") if asked.no_compile else ("eager", "recorded", "compiled")
    for name in asked.families:
        yield _tried(f"train {name}", partial(_training, name, asked.batch, modes))
    for name in asked.parallel if torch.cuda.device_count() > 1 else ():
        yield _tried(f"processes {name}", partial(_processes, name, asked.batch))
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
        torch.compiler.reset()
        torch.cuda.empty_cache()


def _training(name: str, batch: int, modes: tuple[str, ...]) -> tuple[str, bool]:
    """Milliseconds of a step, float and quantized; the first losses agree in every mode."""
    model, x, y = _network(name), *_batch(batch)
    qmodel = compress.quantize(model.eval(), x[:2], [x])
    losses, times = {}, {}
    for kind, source in (("plain", qmodel), ("float", model), ("int8", qmodel)):
        for mode in modes[:1] if kind == "plain" else modes:
            found = _step(copy.deepcopy(source).train(), kind == "int8", mode, x, y)
            losses[kind, mode], times[kind, mode] = found
    base = times["float", "eager"]
    text = ", ".join(f"{kind} {mode} {ms:.1f} ({ms / base:.2f})" for (kind, mode), ms in times.items())
    far = max(abs(losses["int8", mode] / losses["plain", "eager"] - 1) for mode in modes)
    return f"{text}; loss within {far:.4f}", far <= _SAME


def _network(name: str) -> nn.Module:
    """Random weights, the same in every process, and nothing that draws numbers in a step."""
    torch.manual_seed(0)
    model: nn.Module = torchvision.models.get_model(name, weights=None).cuda().to(memory_format=torch.channels_last)
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
    """Images a second of a process on each GPU, over one; recorded steps train as DistributedDataParallel does."""
    rows = {}
    for world in (1, torch.cuda.device_count()):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        command += ["-m", "analysis.gpu_check", "--worker", name, "--batch", str(batch)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr[-500:], False
        rows[world] = json.loads(done.stdout.splitlines()[-1])
    rates = {kind: {world: world * batch / row[kind] * 1e3 for world, row in rows.items()} for kind in rows[1]["kinds"]}
    text = ", ".join(f"{kind} {r[world]:.0f} images/s ({r[world] / r[1]:.2f}x)" for kind, r in rates.items())
    far = max(row["far"] for row in rows.values())
    return f"{world} GPUs over one: {text}; weights within {far:.1e}", far <= 1e-5


def _worker(name: str, batch: int) -> int:
    """Train in one of several processes; the first prints milliseconds of a step and how far apart weights are."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    try:
        model, x, y = _network(name), *_batch(batch, rank)
        qmodel = compress.quantize(model.eval(), x[:2], [x])
        tried = {
            (kind, mode): copy.deepcopy(source).train()
            for kind, source in (("float", model), ("int8", qmodel))
            for mode in ("recorded", "parallel")
        }
        if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
            tried["synchronized", "recorded"] = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model)).train()
        times = {"entropy calibration": _calibration(model, x)}
        times |= {f"{kind} {mode}": _step(net, kind == "int8", mode, x, y)[1] for (kind, mode), net in tried.items()}
        weights = torch.cat([p.detach().flatten() for p in tried["int8", "recorded"].parameters()])
        first = weights.clone()
        dist.broadcast(first, 0)
        other = torch.cat([p.detach().flatten() for p in tried["int8", "parallel"].parameters()])
        far = torch.stack([(weights - first).norm(), (weights - other).norm()]).max() / other.norm()
        dist.all_reduce(far, dist.ReduceOp.MAX)
        if rank == 0:
            print(json.dumps({**times, "kinds": list(times), "far": float(far)}))
    finally:
        dist.destroy_process_group()
    return 0


def _calibration(model: nn.Module, x: Tensor) -> float:
    """Milliseconds of a batch in each process when all together calibrate on 8,192 images."""
    activations = compress.ActivationSpec(calibrator="entropy")
    qmodel = compress.insert_quantizers(copy.deepcopy(model).eval(), x[:1], compress.QuantSpec(activations=activations))
    several = dist.get_world_size() > 1
    compress.calibrate(qmodel, [x], all_reduce=several)  # ends on the host
    batches, start = [x] * (8192 // len(x) // dist.get_world_size()), time.perf_counter()
    compress.calibrate(qmodel, batches, all_reduce=several)
    return (time.perf_counter() - start) / len(batches) * 1e3


def _step(model: nn.Module, fused: bool, mode: str, x: Tensor, y: Tensor) -> tuple[float, float]:
    """(the first loss, milliseconds of a step)."""
    run = compress.fuse_for_training(model) if fused else model
    call = torch.compile(run) if mode == "compiled" else run
    if mode == "parallel":
        call = DistributedDataParallel(run, device_ids=[x.get_device()], gradient_as_bucket_view=True)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(call(x), y)

    def plainly(x: Tensor, y: Tensor) -> Tensor:
        value = loss(x, y)
        value.backward()
        return value.detach()

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    step = compress.record_step(model, loss) if mode == "recorded" else plainly
    first, start = 0.0, 0.0
    for index in range(16):
        value = step(x, y)
        optimizer.step()
        optimizer.zero_grad()
        if index in {0, 5}:  # compiled and recorded by then
            torch.cuda.synchronize()
            first, start = first or float(value), time.perf_counter()
    torch.cuda.synchronize()
    return first, (time.perf_counter() - start) / 10 * 1e3


def _engine(name: str, batch: int, folder: Path) -> tuple[str, bool]:
    """Milliseconds of a batch, and codes that differ from exact arithmetic by more than rounding."""
    engine = compress.build_engine(qdq_file(name, folder), "cuda", batch_size=batch, floats="layers")
    assert isinstance(engine, CudaEngine)
    with engine:
        given = {engine.inputs[0].name: images(batch, 224).cuda()}
        ms = repeated_ms(partial(engine.run_tensors, given))
        program = engine.program({t.name: t.shape for t in engine.inputs})
        found = differences(program.executor, program.split(given)[0])
    wrong, differing = sum(d.wrong for d in found), sum(d.differing for d in found)
    return f"{ms:.3f} ms for {batch}; {differing} codes differ, {wrong} steps wrong", not wrong


def _tests(folders: list[str]) -> tuple[str, bool]:
    """The tests of what runs on a GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *folders]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    return " / ".join([line for line in lines if line.startswith("FAILED")] + lines[-1:])[:600], result.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
