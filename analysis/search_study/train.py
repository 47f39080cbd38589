"""Trains several small networks at a time on one GPU, each as a CUDA graph on a stream of its own.

The kernels of such a network do not fill the GPU, so that trainings which take their steps in turn overlap.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from analysis.low_bits.step import DEVICE, Images, Result, Training
from compress.training.spec import TrainSpec

_PAUSE_S = 0.01


class Trainer:
    """Trains at most `lanes` networks at a time, in the order in which they come.

    Args:
        lanes: number of networks.
        batch: images of a step.
    """

    def __init__(self, lanes: int, batch: int) -> None:
        self.lanes, self.batch, self.urgent = asyncio.Semaphore(lanes), batch, 0
        self.mode = "graph" if DEVICE.type == "cuda" else "eager"

    async def train(
        self,
        model: nn.Module,
        teacher: nn.Module | None,
        images: Images,
        spec: TrainSpec,
        *,
        seed: int,
        background: bool = False,
    ) -> Result:
        """Train a network in place; it ends on the CPU, in evaluation mode.

        Args:
            model: to train.
            teacher: on the device, in evaluation mode, or None.
            images: data.
            spec: settings.
            seed: of the order of the images.
            background: take steps only while no other training does.
        """
        async with self.lanes:
            self.urgent += not background
            try:
                return await self._trained(model, teacher, images, spec, seed, background)
            finally:
                self.urgent -= not background

    async def _trained(
        self,
        model: nn.Module,
        teacher: nn.Module | None,
        images: Images,
        spec: TrainSpec,
        seed: int,
        background: bool,
    ) -> Result:
        model.to(DEVICE).to(memory_format=torch.channels_last).train()
        state = {key: value.detach().clone() for key, value in model.state_dict().items()}
        training = Training(model, teacher, images.fork(), spec, self.batch, self.mode)
        steps, stream = training.walk(state, seed, spec.epochs), _stream()
        _finish()
        while True:
            await asyncio.sleep(0)
            while background and self.urgent:
                await asyncio.sleep(_PAUSE_S)
            with _on(stream):
                try:
                    next(steps)
                except StopIteration as ended:
                    result: Result = ended.value
                    break
        _finish()
        model.zero_grad(set_to_none=True)
        model.cpu().to(memory_format=torch.contiguous_format).eval()
        return result


def _stream() -> Any:
    return torch.cuda.Stream() if DEVICE.type == "cuda" else None


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _finish() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
