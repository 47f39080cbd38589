"""Runs plans on the CPU: by the reference, or by the Triton kernels in their interpreter, and compares codes."""

from dataclasses import replace

import numpy as np
import torch

from compress.engines.cuda import reference
from compress.engines.cuda.executor import Executor, bind_reference
from compress.engines.cuda.plan.layout import lay_out
from compress.engines.cuda.plan.lower import make_plan
from tests.engines.cuda.qdq import all_values

CPU = torch.device("cpu")


def executor(path, batch=2, sizes=None):
    layout = lay_out(make_plan(path, sizes, batch_size=batch, dtype=torch.float32))
    return Executor(layout, [bind_reference(step, layout, CPU) for step in layout.steps], CPU)


def run(path, x):
    x = torch.from_numpy(np.asarray(x))
    return {name: value.numpy() for name, value in executor(path, batch=len(x)).run({"input": x}).items()}


def kinds(path, batch=2):
    steps = lay_out(make_plan(path, batch_size=batch)).steps
    return [type(s).__name__ + (f" {s.op}" if hasattr(s, "op") else "") for s in steps]


def ties(step, tensors):
    found = {}
    for factor in (1 - 1e-6, 1 + 1e-6):
        moved = with_grid(step, factor)
        if moved is not None:
            for name, value in reference.compute(moved, tensors).items():
                found.setdefault(name, []).append(value)
    return found


def with_grid(step, factor):
    # A step whose result is put on a grid of another scale; None for one that writes no codes.
    inner = getattr(step, "epilogue", step)
    out = getattr(inner, "out", None)
    if out is None or out.grid is None:
        return None
    grid = replace(out.grid, scale=tuple(factor * scale for scale in out.grid.scale))
    changed = replace(inner, out=replace(out, grid=grid))
    return changed if inner is step else replace(step, epilogue=changed)


def compare_steps(path, x):
    # Every step of a plan on ONNX Runtime's own inputs of it, against ONNX Runtime.
    #
    # Returns:
    # (tensors compared, codes compared, codes that differ, largest relative error of values). Codes differ by one at
    # most, or this fails. One that a millionth more or less of the scale explains lies on a tie and is not counted.
    x = np.asarray(x)
    known = all_values(path, {"input": x})
    run = executor(path, batch=len(x))
    tensors = run.start({"input": torch.from_numpy(x)})
    compared = codes = differ = 0
    worst = 0.0
    for index, step in enumerate(run.layout.steps):
        near = ties(step, tensors)
        run.step(index, tensors)
        for name in step.writes:
            if name not in known or name not in tensors:
                continue
            expected = torch.from_numpy(np.array(known[name]))
            if expected.dtype == torch.uint8:
                expected = (expected.int() - 128).to(torch.int8)
            result = tensors[name]
            assert result.shape == expected.shape, (step.name, name)
            compared += 1
            if expected.dtype == torch.int8:
                off = (result.int() - expected.int()).abs()
                assert off.max() <= 1, (step.name, name, int(off.max()), int((off > 1).sum()))
                if name in near:
                    off[torch.stack([near_tie == expected for near_tie in near[name]]).any(0)] = 0
                codes, differ = codes + off.numel(), differ + int(off.count_nonzero())
            else:
                scale = expected.double().norm().clamp_min(1e-9)
                worst = max(worst, float((result.double() - expected.double()).norm() / scale))
            tensors[name] = result.copy_(expected) if name in run.layout.places else expected
    return compared, codes, differ, worst
