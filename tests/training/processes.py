"""Real processes for the tests: `run_tasks` runs some of the tasks below, each leaves files in a folder of its name.

It is called in a process that has computed nothing (`tests.fresh`), whose forks start at once.
"""

import copy
import functools
import json
import os
import resource
import signal
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import compress
from compress import TrainSpec, fit
from compress.data.base import BatchPlan
from compress.errors import CheckpointError
from compress.training.checkpoint import save_model
from compress.training.distributed import GradientExchange, init_processes
from compress.training.passes import QUIET
from tests.fresh import two_places
from tests.training.toy import CLASSES, Stop, WithAuxiliary, convnet, interrupted_data, smooth, toy_data


def fork(work):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def end_of(child):
    # Wait for a child and return how it ended: its exit code, or minus the signal that killed it.
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked(work):
    return end_of(fork(work))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_rename(suffix, count):
    # Kill this process when it is about to rename a file onto one that ends in `suffix`, for the count-th time.
    #
    # Half of the new file is cut off before, as if the process had died while writing it.
    def hook(event, arguments):
        nonlocal count
        if event == "os.rename" and str(arguments[1]).endswith(suffix):
            count -= 1
            if not count:
                os.truncate(arguments[0], Path(arguments[0]).stat().st_size // 2)
                die()

    sys.addaudithook(hook)


SPEC = TrainSpec(
    epochs=3,
    lr=0.05,
    warmup_epochs=0.5,
    label_smoothing=0.1,
    clip_grad_norm=1.0,
    grad_accumulation=2,
    checkpoint_steps=2,
)


def train(folder, optimizer, progress=QUIET, resume=False):
    model, spec = convnet(), replace(SPEC, optimizer=optimizer)
    report = fit(model, toy_data(), spec, batch_size=5, folder=folder, resume=resume, progress=progress)
    save_model(model, folder / "final.safetensors", {"resumed_from": report.resumed_from, "steps": report.steps})


def killed(folder):
    # For each optimizer a run that nothing stops, and one that is killed six times (5 steps an epoch).
    ends = {}
    for optimizer in ("sgd", "adamw"):
        forked(lambda name=optimizer: train(folder / name / "whole", name))
        place = folder / optimizer / "killed"

        def rename(suffix, count, place=place, name=optimizer):
            die_at_rename(suffix, count)
            train(place, name, resume=True)

        ends[optimizer] = [
            forked(lambda: rename("checkpoint.safetensors", 1)),  # writing the first checkpoint
            forked(lambda p=place, n=optimizer: train(p, n, Stop(4, die), resume=True)),  # in mid-epoch: resumes at 2
            forked(lambda: rename("checkpoint.safetensors", 2)),  # writing the checkpoint of the first epoch's end
            forked(
                lambda: rename(".csv", 2)
            ),  # after that checkpoint, before the table (the first one is the resume's)
            forked(lambda p=place, n=optimizer: train(p, n, Stop(1, die), resume=True)),  # at once
            forked(lambda p=place, n=optimizer: train(p, n, Stop(6, die), resume=True)),
            forked(lambda p=place, n=optimizer: train(p, n, resume=True)),
            forked(lambda p=place, n=optimizer: train(p, n, resume=True)) if optimizer == "sgd" else 0,  # has ended
        ]
    ends["full disk"] = forked(lambda: full_disk(folder / "full"))
    (folder / "ends.json").write_text(json.dumps(ends))


def full_disk(folder):
    try:
        train(folder, "sgd", Stop(1, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))))
    except CheckpointError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        facts = {"message": str(error), "files": sorted(path.name for path in folder.iterdir())}
        train(folder, "sgd", resume=True)
        (folder / "facts.json").write_text(json.dumps(facts))


def two(folder, member):
    return [end_of(child) for child in [fork(lambda place=place: member(folder, place)) for place in two_places()]]


def two_and_one(folder, member):
    ends = [*two(folder, member), forked(lambda: member(folder, {}))]
    (folder / "ends.json").write_text(json.dumps(ends))


def member(folder, environment):
    processes = init_processes("cpu", environment=environment)
    who = f"{processes.world_size}-{processes.rank}"
    facts = {"is_main": processes.is_main, "exchange": exchange(processes)}
    options = {"device": None, "processes": processes, "batch_size": 7}  # shares of 4 and 3
    spec = TrainSpec(epochs=2, lr=0.05, warmup_epochs=0.5, grad_accumulation=2, clip_grad_norm=0.5)

    model = smooth(seed=processes.rank)  # rank 0's weights are to be everybody's
    place = folder / f"files-{processes.world_size}"
    report = fit(model, toy_data(), spec, folder=place, **options)
    save_model(model, folder / f"smooth-{who}.safetensors")
    facts["history"] = [(row.train_loss, row.train_top1, row.val_top1) for row in report.history]
    facts["accuracy"] = vars(compress.evaluate(model, toy_data().val, **options))

    stopped = folder / f"stopped-{processes.world_size}"
    spec = replace(spec, checkpoint_steps=1)
    try:
        fit(smooth(), interrupted_data(loads=10), spec, folder=stopped, **options)
    except KeyboardInterrupt:
        resumed = smooth(seed=5)
        facts["resumed_from"] = fit(resumed, toy_data(), spec, folder=stopped, resume=True, **options).resumed_from
        save_model(resumed, folder / f"resumed-{who}.safetensors")

    fit(rounded := smooth(), toy_data(), replace(spec, gradients="bf16"), folder=None, **options)
    save_model(rounded, folder / f"rounded-{who}.safetensors")
    crossed = smooth(seed=0 if processes.world_size > 1 else 5)  # two are stopped, and one goes on
    try:
        data = interrupted_data(loads=10) if processes.world_size > 1 else toy_data()
        fit(crossed, data, spec, folder=folder / "crossed", resume=True, **options)
        save_model(crossed, folder / "crossed.safetensors")
    except KeyboardInterrupt:
        pass

    fit(with_aux := WithAuxiliary(), toy_data(), spec, folder=None, **options)
    save_model(with_aux, folder / f"auxiliary-{who}.safetensors")

    torch.manual_seed(0)
    normed = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(108, CLASSES))
    fit(normed, toy_data(), TrainSpec(epochs=1, warmup_epochs=0), folder=None, **{**options, "batch_size": 8})
    save_model(normed, folder / f"normed-{who}.safetensors")
    torch.manual_seed(0)
    shared = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, CLASSES)
    )
    kept = dict(shared.named_modules())
    spec = TrainSpec(epochs=2, warmup_epochs=0, sync_batchnorm=True)
    report = fit(shared, toy_data(), spec, folder=None, **options)  # shares of 4 and 3
    save_model(shared, folder / f"shared-{who}.safetensors")
    facts["shared"] = [row.train_loss for row in report.history]
    facts["restored"] = all(dict(shared.named_modules())[name] is module for name, module in kept.items())
    facts["shares"] = [
        len(targets)
        for _, targets in toy_data().train.batches(BatchPlan(batch_size=7, rank=processes.rank, world_size=2))
    ]
    facts["recorded"] = recorded(processes)
    facts["exchanged"] = exchanged(processes) if processes.world_size > 1 else None
    (folder / f"facts-{who}.json").write_text(json.dumps(facts))
    processes.close()


def recorded(processes):
    torch.manual_seed(0)
    x, y, part = torch.randn(8, 5), torch.arange(8) % CLASSES, slice(processes.rank, None, processes.world_size)
    torch.manual_seed(processes.rank)  # rank 0's weights are to be everybody's
    model = nn.Linear(5, CLASSES)
    step = compress.record_step(model, lambda x, y: nn.functional.cross_entropy(model(x), y))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        step(x[part], y[part])
        step(x[part], y[part])  # a second batch of the same step
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.tolist()


def exchanged(processes):
    torch.manual_seed(0)
    x, y, part = torch.randn(8, 3, 6, 6), torch.arange(8) % CLASSES, slice(processes.rank, None, processes.world_size)
    model, unused = convnet().eval().to(memory_format=torch.channels_last), nn.Linear(2, 2)
    nn.functional.cross_entropy(model(x), y).backward()
    whole = [parameter.grad for parameter in model.parameters()]
    exchange = GradientExchange([*model.parameters(), *unused.parameters()], bucket_bytes=300)
    far, strides = [], []
    for block in (exchange.afterwards, exchange.meanwhile, exchange.meanwhile):
        model.zero_grad()
        with block():
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        if block == exchange.meanwhile:
            exchange.exchange()
        pairs = list(zip((parameter.grad for parameter in model.parameters()), whole, strict=True))
        far += [float((found - expected).abs().max()) for found, expected in pairs]
        strides += [found.stride() == expected.stride() for found, expected in pairs]
    return {"far": max(far), "strides": all(strides), "unused": unused.weight.grad is None, "count": len(far)}


def widened(folder):
    ends = [forked(lambda: widened_member(folder, {})), *two(folder, widened_member)]
    (folder / "ends.json").write_text(json.dumps(ends))


def widened_member(folder, environment):
    processes = init_processes("cpu", environment=environment)
    alone = processes.world_size == 1
    spec = TrainSpec(epochs=2, lr=0.05, warmup_epochs=0.5, grad_accumulation=2, clip_grad_norm=0.5, checkpoint_steps=1)
    model, data = smooth(seed=0 if alone else 5), interrupted_data(loads=10) if alone else toy_data()
    options = {"device": None, "processes": processes, "batch_size": 7}
    try:
        fit(model, data, spec, folder=folder / "run", resume=not alone, **options)
        save_model(model, folder / f"widened-{processes.rank}.safetensors")
    except KeyboardInterrupt:
        pass
    processes.close()


def dying(folder):
    # Two processes, of which the second fails in a step; and again, where it is killed. The first has 30 s then.
    ends = []
    for end in (fail, die):
        first, second = [fork(lambda place=place, end=end: dying_member(place, end)) for place in two_places()]
        failed = os.waitpid(second, 0)[1]
        late = threading.Timer(30, os.kill, (first, signal.SIGKILL))
        late.start()
        ends += [os.waitstatus_to_exitcode(status) for status in (os.waitpid(first, 0)[1], failed)]
        late.cancel()
    (folder / "ends.json").write_text(json.dumps(ends))


def fail():
    raise ValueError("the second process fails on purpose")


def dying_member(environment, end):
    processes = init_processes("cpu", environment=environment)
    data = toy_data() if processes.is_main else interrupted_data(5, end)
    fit(smooth(), data, TrainSpec(epochs=9), folder=None, batch_size=8, processes=processes)


class Tokens(nn.Module):
    # A parameter of the whole network and a layer norm: the fused graph has no layer that holds them.
    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.LayerNorm(4), nn.Linear(64, CLASSES)
        self.position = nn.Parameter(0.1 * torch.randn(16, 4))

    def forward(self, images):
        tokens = self.embed(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(nn.functional.gelu(tokens)).flatten(1))


def sharded_member(folder, environment):
    # Two processes each hold half of every parameter (FSDP2) of a quantized network, in a loop of their own.
    processes = init_processes("cpu", environment=environment)
    torch.manual_seed(0)
    x, y = torch.randn(8, 3, 6, 6), torch.arange(8) % CLASSES
    start = compress.quantize(Tokens().eval(), x[:2], [x])
    for fused in (False, True):
        qmodel = copy.deepcopy(start).train()
        run = compress.fuse_for_training(qmodel) if fused else qmodel
        if processes.world_size > 1:
            mesh = init_device_mesh("cpu", (processes.world_size,))
            for layer in [] if fused else [m for m in qmodel.children() if next(m.parameters(), None) is not None]:
                fully_shard(layer, mesh=mesh)
            fully_shard(run, mesh=mesh)
        optimizer = torch.optim.SGD(qmodel.parameters(), lr=0.1, momentum=0.9)
        for _ in range(4):
            part = slice(processes.rank, None, processes.world_size)
            nn.functional.cross_entropy(run(x[part]), y[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = {n: p.full_tensor() if isinstance(p, DTensor) else p.detach() for n, p in qmodel.named_parameters()}
        held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in qmodel.parameters())
        path = folder / f"{'fused' if fused else 'plain'}-{processes.world_size}-{processes.rank}.safetensors"
        save_file({**{n: p.contiguous() for n, p in whole.items()}, "held": torch.tensor(held)}, path)
    processes.close()


def exchange(processes):
    rank = torch.tensor([float(processes.rank), 1.0])

    def refuse():
        raise compress.CompressError("no")

    try:
        processes.on_main(refuse)
        refused = False
    except compress.CompressError:
        refused = True
    return {
        "sum": processes.all_reduce_sum(rank).tolist(),
        "object": processes.broadcast_object({"from": processes.rank}),
        "on_main": processes.on_main(lambda: processes.rank),
        "refused": refused,
        "kept": rank.tolist() == [processes.rank, 1.0],
    }


TASKS = {
    "killed": killed,
    "pair": functools.partial(two_and_one, member=member),
    "widened": widened,
    "sharded": functools.partial(two_and_one, member=sharded_member),
    "dying": dying,
}


def run_tasks(folder, names):
    for name in names:
        place = folder / name
        place.mkdir()
        TASKS[name](place)
