"""The forward and the backward pass of a batch, as launches or as one CUDA graph.

A step of a small network takes the GPU less time than its launches take the host. `RecordedPasses` records the two
passes once and replays them: one launch, whatever the network. Gradients then lie where they lay when they were
recorded; the optimizer, clipping, schedules and everything else around the passes stay as they are. The numbers are
those of the passes one by one, random ones too: torch's generator counts on in a replay as it would without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CompressError, RecipeError
from compress.tasks import Task
from compress.training.damping import damping_loss, damping_strength
from compress.training.distributed import Processes
from compress.training.evaluate import autocast
from compress.training.features import FeaturePairs
from compress.training.losses import training_loss
from compress.training.spec import QATSpec, TrainSpec

_EAGER_STEPS = 3
"""Steps before the recording, in which kernels are compiled, algorithms chosen and buffers made."""


class Passes:
    """Adds a batch's gradients to those of the model.

    Args:
        forward: from images to the task's outputs.
        teach: the same of the teacher; None = there is none.
        features: layers of both whose outputs are compared, watched already; None = there are none.
        model: that is trained.
        task: loss and hits.
        spec: of the training.
        scaler: of the loss, in fp16.
        device: that computes.
    """

    def __init__(
        self,
        forward: Callable[[Any], Any],
        teach: Callable[[Any], Any] | None,
        features: FeaturePairs | None = None,
        *,
        model: nn.Module,
        task: Task,
        spec: TrainSpec,
        scaler: torch.amp.GradScaler,
        device: torch.device,
    ) -> None:
        self.forward, self.teach, self.features, self.model, self.task = forward, teach, features, model, task
        self.spec, self.scaler, self.device = spec, scaler, device

    def __call__(self, images: Any, targets: Any, *, factor: float, done: float) -> Tensor:
        """Compute both passes.

        Args:
            images: of a batch.
            targets: of a batch.
            factor: of the loss.
            done: share of the training that is over.

        Returns:
            [summed loss, correct, images], float64, on the device.
        """
        with autocast(self.device, self.spec.precision):
            outputs = self.forward(images)
            with torch.no_grad():
                taught = None if self.teach is None else self.teach(images)
        features = None if self.features is None else self.features.distance()
        loss = training_loss(self.task, outputs, targets, taught, self.spec, features)
        if isinstance(self.spec, QATSpec) and self.spec.damping:
            loss = loss + damping_strength(self.spec.damping, done) * damping_loss(self.model)
        self.scaler.scale(loss * factor).backward()
        mean = loss.detach().double()
        with torch.no_grad():
            correct = None if self.task.correct is None else self.task.correct(outputs, targets).double()
        hits = mean.new_zeros(()) if correct is None else correct
        return torch.stack([mean * len(targets), hits, mean.new_full((), len(targets))])


def recordable(spec: TrainSpec, processes: Processes, device: torch.device) -> bool:
    """Whether the passes of a training are recorded.

    Raises:
        RecipeError: they are asked for, and there are several processes.
    """
    if spec.cuda_graphs and processes.world_size > 1:
        raise RecipeError(
            f"cuda_graphs records the passes of one process, and there are {processes.world_size}: leave it out"
        )
    return spec.cuda_graphs and device.type == "cuda"


class RecordedPasses:
    """`Passes` that are recorded as a CUDA graph after a few steps, and again if what they compute changes.

    They may not depend on anything but the batch, the model's state and torch's random numbers: a graph repeats what
    the host decided when it was recorded. A batch of another shape is computed one by one.

    Args:
        passes: on a GPU, of one process, whose gradients are None before each call.
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._side = torch.cuda.Stream(passes.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._key: Any = None
        self._eager = 0
        self._batch: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))
        self._sums = torch.empty(0)
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []

    def __call__(self, images: Any, targets: Any, *, factor: float, done: float) -> Tensor:
        """See `Passes.__call__`.

        Raises:
            RecipeError: targets that are no tensor.
            CompressError: the passes cannot be recorded.
        """
        if not isinstance(images, Tensor) or not isinstance(targets, Tensor):
            raise RecipeError("cuda_graphs records batches of two tensors, and this task's are none; leave it out")
        modes = tuple(module.training for module in self._passes.model.modules())
        key = (images.shape, images.stride(), targets.shape, factor, modes)
        if key != self._key and (self._key is None or modes != self._key[-1]):
            self._key, self._eager, self._graph = key, 0, None
        if key != self._key:
            return self._passes(images, targets, factor=factor, done=done)
        if self._graph is None and self._eager < _EAGER_STEPS:
            self._eager += 1
            return self._beside(images, targets, factor=factor, done=done)
        if self._graph is None:
            self._record(images, targets, factor=factor, done=done)
        self._batch[0].copy_(images)
        self._batch[1].copy_(targets)
        assert self._graph is not None
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._sums.clone()

    def _beside(self, images: Tensor, targets: Tensor, **options: float) -> Tensor:
        """Compute on a stream of its own, so that autograd keeps nothing of the stream that waits for the graph."""
        current = torch.cuda.current_stream(self._passes.device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            sums = self._passes(images, targets, **options)
        current.wait_stream(self._side)
        return sums

    def _record(self, images: Tensor, targets: Tensor, **options: float) -> None:
        self._batch = images.clone(), targets.clone()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._passes.device)
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another thread may make pictures
                self._sums = self._passes(*self._batch, **options)
        except RuntimeError as error:
            raise CompressError(
                f"the passes of a step cannot be recorded as a CUDA graph ({str(error).splitlines()[0]}): the network "
                "or its loss makes the host wait for the GPU; leave cuda_graphs out"
            ) from error
        self._gradients = [(parameter, parameter.grad) for parameter in self._passes.model.parameters()]
        self._graph = graph
