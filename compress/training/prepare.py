"""Checks before the first step, on two images."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, fx, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from compress.data.base import Batch, Split
from compress.errors import DataError, ModelError, RecipeError
from compress.graph.inputs import flat_tensors
from compress.qat_fusion.fuse import fuse_for_training, is_fusible, pays_off
from compress.qat_fusion.int8 import Forward
from compress.qat_fusion.regions import compile_regions
from compress.support.meters import whole
from compress.tasks.base import Task
from compress.training.distributed import Processes
from compress.training.evaluate import OutputsOf, modes_restored, outputs_of
from compress.training.passes import FeaturePairs
from compress.training.spec import QATSpec, TrainSpec

_BROADCAST_OPTIONS = ("forward_sync_buffers", "broadcast_buffers")  # the newer name first (torch 2.15)
_NO_BUFFER_BROADCAST: dict[str, Any] = {
    next(name for name in _BROADCAST_OPTIONS if name in inspect.signature(DistributedDataParallel).parameters): False
}

NoSync = Callable[[], AbstractContextManager[None]]
"""Makes a context without averaging of gradients."""


def example_batch(split: Split, device: torch.device, processes: Processes) -> Batch:
    """Two images of `split`, or its only one, (N, C, H, W), and targets.

    Raises:
        DataError: fewer images than processes.
    """
    if len(split) < processes.world_size:
        raise DataError(
            f"the training split holds {len(split)} images for {processes.world_size} processes: it needs at least "
            "one for each"
        )
    return split.load(list(range(min(2, len(split)))), epoch=None, device=device)


def check_models(model: nn.Module, teacher: nn.Module | None, images: Tensor, *, task: Task, spec: TrainSpec) -> None:
    """Refuse models that cannot be trained on the data.

    Raises:
        RecipeError: no teacher.
        ModelError: nothing to train, weights not finite, or outputs unfit for task or teacher.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("the model has no trainable parameter: set requires_grad on those that training may change")
    if broken := not_finite(model):
        raise ModelError(f"the model's parameter {broken} is NaN or infinite before the training: load good weights")
    if spec.distill and teacher is None:
        raise RecipeError("distill is set and no teacher was given: pass the float model, or set distill: false")
    shapes = []
    for one in (model, teacher) if spec.distill else (model,):
        if one is not None:
            outputs = _evaluation_outputs(one, images, task)
            task.check(outputs, images)
            shapes.append(", ".join(str(tuple(tensor.shape)) for tensor in flat_tensors(outputs)))
    if len(set(shapes)) > 1:
        raise ModelError(
            f"the model's logits have shape {shapes[0]} and the teacher's {shapes[1]}: distillation needs the same "
            "classes in both"
        )


def feature_pairs(model: nn.Module, teacher: nn.Module | None, images: Any, spec: TrainSpec) -> FeaturePairs | None:
    """Layers of `spec.distill_features`, tried on two images; None without any.

    Raises:
        RecipeError: missing, unused, or not comparable.
    """
    if not spec.distill_features or teacher is None:
        return None
    pairs = FeaturePairs(model, teacher, spec.distill_features)
    with modes_restored(model), torch.no_grad(), pairs.watched():
        for one in (model.eval(), teacher):
            outputs_of(OutputsOf(one, whole), images)
        pairs.distance()
    return pairs


def to_channels_last(model: nn.Module, images: Tensor, wanted: bool | None, task: Task) -> bool:
    """Convert weights, if `wanted`, or None and the model runs in it; True if done."""
    if wanted is False or not isinstance(images, Tensor) or images.ndim != 4:
        return False
    model.to(memory_format=torch.channels_last)
    if wanted is None:
        try:
            _evaluation_outputs(model, images.contiguous(memory_format=torch.channels_last), task)
        except ModelError:
            model.to(memory_format=torch.contiguous_format)
            return False
    return True


def not_finite(model: nn.Module) -> str | None:
    """Return the first parameter's name that holds NaN or infinity; None = all are finite."""
    names = [name for name, _ in model.named_parameters()]
    finite = torch.stack([parameter.isfinite().all() for parameter in model.parameters()]).tolist()
    return next((name for name, good in zip(names, finite, strict=True) if not good), None)


def wrap(
    model: nn.Module, images: Tensor, *, task: Task, spec: TrainSpec, processes: Processes, device: torch.device
) -> tuple[Callable[[Any], Any], NoSync]:
    """Return the callable that training runs, from images to outputs, and a context without exchange of gradients.

    Buffers are not broadcast: BatchNorm statistics stay apart until averaged.

    Raises:
        QuantizationError: fused, without quantizers.
    """
    if spec.compile:
        keep_compiled()
    forward: Forward = "int8" if isinstance(spec, QATSpec) and spec.fused == "int8" else "float"
    graph = fuse_for_training(model, forward=forward) if _is_fused(model, spec, device) else model
    by_region = spec.compile == "regions" and is_fusible(model)
    if by_region and isinstance(graph, fx.GraphModule):
        graph = compile_regions(graph)
    module: nn.Module = OutputsOf(graph, task.select)
    no_sync: NoSync = nullcontext
    if processes.world_size > 1 and not is_recorded(spec, device):  # recorded passes exchange gradients themselves
        module = DistributedDataParallel(
            module,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=_has_unused_parameters(model, images, task),
            **_NO_BUFFER_BROADCAST,
        )
        if spec.gradients == "bf16":
            module.register_comm_hook(None, bf16_compress_hook)
        no_sync = module.no_sync
    return (torch.compile(module) if spec.compile and not by_region else module), no_sync


def is_recorded(spec: TrainSpec, device: torch.device) -> bool:
    """Return whether the passes of a step become a CUDA graph."""
    return spec.cuda_graphs and device.type == "cuda"


def keep_compiled() -> None:
    """Let torch.compile keep its results in ($XDG_CACHE_HOME or ~/.cache)/compress/compiled, if nothing else is set."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(base / "compress" / "compiled"))
    name = "autograd_cache_allow_custom_autograd_functions"
    if hasattr(functorch_config, name):
        setattr(functorch_config, name, True)


@contextmanager
def surroundings(model: nn.Module, teacher: nn.Module | None, device: torch.device) -> Iterator[None]:
    """Turn on cuDNN's search; restore modes and random state at the end."""
    devices = [device] if device.type == "cuda" else []
    benchmark = torch.backends.cudnn.benchmark
    with torch.random.fork_rng(devices=devices), modes_restored(model, teacher):
        torch.backends.cudnn.benchmark = True  # every batch has the same shape, so the search runs once
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = benchmark


def _is_fused(model: nn.Module, spec: TrainSpec, device: torch.device) -> bool:
    """True for a second, fused graph over the same parameters."""
    if not isinstance(spec, QATSpec) or spec.fused == "off" or spec.distill_features:
        return False
    return spec.fused in {"on", "int8"} or (pays_off(device) and is_fusible(model))


def _evaluation_outputs(model: nn.Module, images: Tensor, task: Task) -> object:
    with modes_restored(model), torch.no_grad():
        return outputs_of(OutputsOf(model.eval(), task.select), images)


def _has_unused_parameters(model: nn.Module, images: Tensor, task: Task) -> bool:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with modes_restored(model), torch.enable_grad():
        outputs = flat_tensors(OutputsOf(model.eval(), task.select)(images))
        total = torch.stack([tensor.float().sum() for tensor in outputs if tensor.is_floating_point()]).sum()
        return None in torch.autograd.grad(total, parameters, allow_unused=True)
