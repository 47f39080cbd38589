"""BatchNorm over batches of several processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm

from compress.training.distributed import Processes
from compress.training.spec import TrainSpec


@contextmanager
def synchronized(model: nn.Module, spec: TrainSpec, processes: Processes) -> Iterator[None]:
    """Share statistics while the block runs; in place, names stay.

    Nothing with one process or without `spec.sync_batchnorm`.
    """
    swapped: list[tuple[nn.Module, str, nn.Module]] = []
    if spec.sync_batchnorm and processes.world_size > 1:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
                    setattr(parent, name, _shared(child, processes.device.type))
                    swapped.append((parent, name, child))
    try:
        yield
    finally:
        for parent, name, child in swapped:
            child.train(getattr(parent, name).training)
            setattr(parent, name, child)


class HostBatchNorm(_BatchNorm):
    """Synchronized BatchNorm for CPUs, which torch's SyncBatchNorm does not support."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, ...) by mean and variance over processes, in training mode."""
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        axes = [0, *range(2, input.dim())]
        values = input.double()
        count = values.new_tensor([values.numel() / values.shape[1]])
        sums = all_reduce(torch.cat([values.sum(axes), values.square().sum(axes), count]))
        total, squares, count = sums.split([len(sums) // 2, len(sums) // 2, 1])
        mean = total / count
        variance = squares / count - mean.square()
        self._remember(mean.detach(), variance.detach() * count / (count - 1))
        shape = [1, -1, *(1 for _ in axes[1:])]
        normal = ((values - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)).to(input.dtype)
        if self.weight is None:
            return normal
        return normal * self.weight.view(shape) + self.bias.view(shape)

    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)


def _shared(layer: _BatchNorm, device: str) -> _BatchNorm:
    """Return a synchronized layer over the same parameters and statistics."""
    kind: type[_BatchNorm] = nn.SyncBatchNorm if device == "cuda" else HostBatchNorm
    made = kind(
        layer.num_features,
        eps=layer.eps,
        momentum=layer.momentum,
        affine=layer.affine,
        track_running_stats=layer.track_running_stats,
    )
    made.weight, made.bias = layer.weight, layer.bias
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        setattr(made, name, getattr(layer, name))
    return made.train(layer.training)
