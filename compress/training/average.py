"""The running mean of the weights, evaluated and saved in place of the last step's weights if a recipe asks for it.

After step t the mean takes a share 1 - d of the weights, d = min(decay, (1 + t) / (10 + t)), so that the first weights
do not linger (the schedule of TensorFlow's ExponentialMovingAverage). Only trainable parameters are averaged, learned
ranges among them; buffers, BatchNorm's statistics too, are those of the last step. A mean near the end of a training
is a better network than any of its points (Polyak and Juditsky, 1992); under quantization it also stops weights from
hopping between two integers (Nagel et al., arXiv 2203.11086).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from compress.errors import CheckpointError


class WeightAverage:
    """Running mean of a model's trainable parameters.

    Args:
        model: model whose parameters are averaged; the mean begins at their present values.
        decay: largest share of the mean that a step preserves, 0 to 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.means = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the mean with the weights after `step` steps, counted from 1."""
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.means.values()), [p.data for p in self.parameters.values()], share)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the model the mean's weights while the block runs, and restore its own afterwards."""
        own = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.install()
        try:
            yield
        finally:
            _copy(own, self.parameters)

    def install(self) -> None:
        """Give the model the mean's weights."""
        _copy(self.means, self.parameters)

    def load(self, means: Mapping[str, Tensor]) -> None:
        """Take over the means of a checkpoint.

        Raises:
            CheckpointError: they belong to other parameters.
        """
        if means.keys() != self.means.keys() or any(means[n].shape != m.shape for n, m in self.means.items()):
            raise CheckpointError(
                f"the checkpoint holds a mean of {len(means)} weights, and the model trains {len(self.means)} others: "
                "build the model as it was"
            )
        _copy(means, self.means)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.data.copy_(source[name])
