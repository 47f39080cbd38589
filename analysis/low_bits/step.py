"""Training of a small network with everything on the GPU: data, augmentation, step and learning rate.

A step of a network of this size takes less time on the GPU than its launches take on the host. So the network is
compiled (`torch.compile`), and the whole step, from the choice of images to the new weights, is recorded as one CUDA
graph and replayed. The host writes the learning rate and reads nothing.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.data.base import DataSet
from compress.sparsity.masks import nm_mask
from compress.sparsity.parametrization import LearnedMask, masked_layers
from compress.sparsity.schedule import select, shrink_masked
from compress.sparsity.selection import Moment, gumbel_noise
from compress.sparsity.spec import SparsitySpec
from compress.tasks import classification
from compress.training.damping import damping_loss, damping_strength
from compress.training.losses import training_loss
from compress.training.optim import learning_rate, parameter_groups
from compress.training.spec import QATSpec, TrainSpec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAD, SIDE = 4, 32
MASK_STEPS = 20
"""Steps between two choices of masks that move."""
TASK = classification(10)


class Images:
    """CIFAR-10 on the device, augmented by shifts of up to 4 pixels and mirroring.

    Attributes:
        at: (), the next batch of the epoch; the step advances it.
    """

    def __init__(self, data: DataSet, device: torch.device) -> None:
        split: Any = data.train
        padded = torch.nn.functional.pad(split.images, (PAD, PAD, PAD, PAD))
        self.pixels = padded.permute(0, 2, 3, 1).contiguous().to(device)  # (N, 40, 40, 3) uint8
        self.targets = split.targets.to(device)
        val: Any = data.val
        self.val = val.images.to(device), val.targets.to(device)
        self.mean = torch.tensor(split.preprocessing.mean, device=device).view(1, 3, 1, 1) * 255
        self.std = torch.tensor(split.preprocessing.std, device=device).view(1, 3, 1, 1) * 255
        self.side = torch.arange(SIDE, device=device)
        self._begin()

    def _begin(self) -> None:
        count, device = len(self.targets), self.targets.device
        self.order = torch.arange(count, device=device)
        self.shift = torch.full((count, 2), PAD, device=device)
        self.flip = torch.zeros(count, dtype=torch.bool, device=device)
        self.at = torch.zeros((), dtype=torch.int64, device=device)

    def fork(self) -> Images:
        """Return the same pictures with an epoch of their own, for another training at the same time."""
        other = copy.copy(self)
        other._begin()
        return other

    def shuffle(self, generator: torch.Generator) -> None:
        """Draw an epoch's order and augmentation."""
        count = len(self.order)
        self.order.copy_(torch.randperm(count, generator=generator))
        self.shift.copy_(torch.randint(0, 2 * PAD + 1, (count, 2), generator=generator))
        self.flip.copy_(torch.rand(count, generator=generator) < 0.5)
        self.at.zero_()

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Return the next images (size, 3, 32, 32), channels last, and their classes."""
        chosen = self.order[self.at * size + torch.arange(size, device=self.order.device)]
        shift, flip = self.shift[chosen], self.flip[chosen]
        rows = shift[:, :1] + self.side
        columns = shift[:, 1:] + torch.where(flip[:, None], SIDE - 1 - self.side, self.side)
        pixels = self.pixels[chosen[:, None, None], rows[:, :, None], columns[:, None, :]]
        self.at += 1
        return (pixels.permute(0, 3, 1, 2).float() - self.mean) / self.std, self.targets[chosen]

    @torch.no_grad()
    def top1(self, model: nn.Module) -> float:
        """Return the accuracy on the 10,000 test images, in percent, in float32."""
        model.eval()
        hits = torch.zeros((), device=self.targets.device)
        for images, targets in zip(self.val[0].split(1000), self.val[1].split(1000), strict=True):
            x = ((images.float() - self.mean) / self.std).contiguous(memory_format=torch.channels_last)
            hits += (model(x).argmax(1) == targets).sum()
        return 100 * hits.item() / len(self.val[1])


class Momentum:
    """SGD with Nesterov momentum in operations that a CUDA graph records; the learning rate is a tensor."""

    def __init__(self, model: nn.Module, spec: TrainSpec, lr: Tensor) -> None:
        self.groups = cast("list[dict[str, Any]]", parameter_groups(model, spec.weight_decay))
        self.lr, self.momentum = lr, spec.momentum
        self.buffers = [[torch.zeros_like(p) for p in group["params"]] for group in self.groups]

    def reset(self) -> None:
        """Forget all steps."""
        torch._foreach_zero_([b for buffers in self.buffers for b in buffers])

    @torch.no_grad()
    def step(self) -> None:
        """Take one step."""
        for group, buffers in zip(self.groups, self.buffers, strict=True):
            params: list[Any] = group["params"]
            grads: Any = [p.grad for p in params]
            if group["weight_decay"]:
                grads = torch._foreach_add(grads, params, alpha=group["weight_decay"])
            torch._foreach_mul_(buffers, self.momentum)
            torch._foreach_add_(buffers, grads)
            update = torch._foreach_add(grads, buffers, alpha=self.momentum)
            torch._foreach_mul_(update, self.lr)
            torch._foreach_sub_(params, update)


class Adam:
    """AdamW with the same interface."""

    def __init__(self, model: nn.Module, spec: TrainSpec, lr: Tensor) -> None:
        groups: list[Any] = parameter_groups(model, spec.weight_decay)
        on_gpu = lr.device.type == "cuda"
        self.inner = torch.optim.AdamW(groups, lr=lr if on_gpu else spec.lr, capturable=on_gpu)
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.step = self.inner.step

    def reset(self) -> None:
        """Forget all steps."""
        for state in self.inner.state.values():
            for value in state.values():
                value.zero_()


@dataclass
class Result:
    """A finished training: top-1 in percent, epochs, and images a second."""

    top1: float
    epochs: int
    images_per_s: float


class Training:
    """A network with its recorded step; `run` trains it from a state, as often as there are seeds.

    Args:
        model: network on the device, in channels_last.
        teacher: float network to learn from, or None.
        images: data.
        spec: lr, decay, distillation and damping; precision as `bfloat16` says.
        batch: images of a step.
        mode: `compiled` (torch.compile and a CUDA graph), `graph` (a CUDA graph alone) or `eager`.
        mask_end: share of the steps after which masks that move or are learned stay.
        bfloat16: forward passes in bfloat16; None = on GPUs.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module | None,
        images: Images,
        spec: TrainSpec,
        batch: int,
        mode: str,
        *,
        mask_end: float = 0.8,
        bfloat16: bool | None = None,
    ) -> None:
        self.model, self.images, self.spec, self.batch, self.mode = model, images, spec, batch, mode
        compiled = mode == "compiled"
        self.forward: Callable[[Tensor], Tensor] = torch.compile(model, dynamic=False) if compiled else model
        self.teach = None if teacher is None else (torch.compile(teacher, dynamic=False) if compiled else teacher)
        device = images.targets.device
        self.bfloat16 = device.type == "cuda" if bfloat16 is None else bfloat16
        self.lr, self.damping = torch.zeros((), device=device), torch.zeros((), device=device)
        make = Adam if spec.optimizer == "adamw" else Momentum
        self.optimizer: Any = make(model, spec, self.lr)
        self.loss = torch.zeros((), device=device)
        self.steps_per_epoch = len(images.targets) // batch
        layers = masked_layers(model).values()
        self.moving = [layer for layer in layers if layer.part.straight_through]
        self.learned = [layer for layer in layers if isinstance(layer.part, LearnedMask)]
        self.mask_end, self.at = mask_end, torch.ones(5, device=device)  # the fields of Moment, in order
        self.step = self._record() if mode != "eager" else self._step

    def _step(self) -> None:
        x, targets = self.images.batch(self.batch)
        x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bfloat16):
            outputs = self.forward(x)
            with torch.no_grad():
                taught = None if self.teach is None else self.teach(x)
        loss = training_loss(TASK, outputs, targets, taught, self.spec)
        if isinstance(self.spec, QATSpec) and self.spec.damping:
            loss = loss + self.damping * damping_loss(self.model)
        loss.backward()
        self.loss.copy_(loss.detach())
        self.optimizer.step()
        for layer in self.moving:
            shrink_masked(layer, self.lr * SparsitySpec().sr_ste_decay)
        if self.learned:
            self._select()

    def _select(self) -> None:
        """Train the choice of learned masks and draw the next ones; the host writes the settings."""
        count, lr, scale, temperature, noise = self.at.unbind()
        now = Moment(count=count, lr=lr, scale=scale, temperature=temperature, noise=noise)
        for layer in self.learned:
            part = cast(LearnedMask, layer.part)
            select(layer, now, gumbel_noise(tuple(part.logits.shape), part.logits.device))
            part.probe.detach().zero_()

    def _record(self) -> Callable[[], None]:
        """Return a function that replays the step as a CUDA graph."""
        self.model.train()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(4):
                self._step()
                self.model.zero_grad(set_to_none=True)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._step()
        return graph.replay

    def seconds_per_epoch(self) -> float:
        """Return the time of an epoch, from a few steps at a learning rate of zero."""
        self.model.train()
        self.images.at.zero_()
        few = max(1, min(40, self.steps_per_epoch // 4))
        for _ in range(few):
            self._one()
        self._finish()
        start = time.perf_counter()
        for _ in range(few):
            self._one()
        self._finish()
        return (time.perf_counter() - start) / few * self.steps_per_epoch

    def run(self, state: dict[str, Tensor], seed: int, epochs: int, deadline: float = math.inf) -> Result:
        """Train from `state` for some epochs of half a cosine; stop before `deadline` (time.perf_counter)."""
        steps = self.walk(state, seed, epochs, deadline)
        while True:
            try:
                next(steps)
            except StopIteration as ended:
                return cast(Result, ended.value)

    def walk(
        self, state: dict[str, Tensor], seed: int, epochs: int, deadline: float = math.inf
    ) -> Generator[None, None, Result]:
        """Train as `run` does, and stop after every step, so that several trainings can share a GPU."""
        self.model.load_state_dict(state)
        self.optimizer.reset()
        generator = torch.Generator().manual_seed(seed)
        steps, warm = epochs * self.steps_per_epoch, round(self.spec.warmup_epochs * self.steps_per_epoch)
        start, done = time.perf_counter(), 0
        for epoch in range(epochs):
            self.model.train()
            self.images.shuffle(generator)
            for at in range(epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch):
                self._set_rates(at, steps, warm)
                self._one()
                if at % MASK_STEPS == 0 and at < self.mask_end * steps:
                    self._choose_masks()
                yield
            done = epoch + 1
            if done % 5 == 0:
                self._finish()
                if time.perf_counter() > deadline or not math.isfinite(self.loss.item()):
                    break
        self._finish()
        rate = done * self.steps_per_epoch * self.batch / (time.perf_counter() - start)
        return Result(self.images.top1(self.model), done, rate)

    def _one(self) -> None:
        if self.mode == "eager":
            self.model.zero_grad(set_to_none=True)
        self.step()

    @torch.no_grad()
    def _choose_masks(self) -> None:
        """Give layers with moving masks (SR-STE) the 2:4 masks of their weights as they are now."""
        for layer in self.moving:
            layer.mask.copy_(nm_mask(layer.original, 2, 4))

    def _set_selection(self, step: int, steps: float) -> None:
        """Write the settings of learned masks; after `steps` the best patterns stay."""
        share = min(1.0, step / steps)
        now = Moment.at(share, count=step + 1, updates=steps)
        still = float(share < 1)
        for i, value in enumerate((now.count, still * now.lr, now.scale, now.temperature, still)):
            self.at[i].fill_(value)

    def _set_rates(self, step: int, steps: int, warm: int) -> None:
        rate = learning_rate(step, steps=steps, warmup_steps=warm, peak=self.spec.lr, schedule="cosine")
        self.lr.fill_(rate)
        if self.learned:
            self._set_selection(step, self.mask_end * steps)
        if isinstance(self.spec, QATSpec) and self.spec.damping:
            self.damping.fill_(damping_strength(self.spec.damping, step / steps))

    def _finish(self) -> None:
        if self.lr.is_cuda:
            torch.cuda.synchronize()
