"""The channels and blocks that a method keeps, as text: any machine applies it to the same weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from compress.search.network import Scores, apply
from compress.search.space import WIDTH, Configuration, widths_of
from compress.search.structure import Structure, analyse

Removal = tuple[str, bool, Sequence[int]]
"""A module, whether its output channels went, and which."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The part of a float network that is kept; without any field the whole.

    Attributes:
        configuration: elements of `compress.search` that are not as the float network has them.
        kept: positions of the channels that stay, by group of channels.
        history: Torch-Pruning's record of what it removed.
    """

    configuration: Configuration = field(default_factory=dict)
    kept: Mapping[str, Sequence[int]] = field(default_factory=dict)
    history: Sequence[Removal] = ()


class Whole:
    """A float network that choices are applied to.

    Args:
        network: on the CPU, in evaluation mode; not changed.
        images: some pictures.
    """

    def __init__(self, network: nn.Module, images: Tensor) -> None:
        self.network, self.images = network.eval(), images

    @cached_property
    def structure(self) -> Structure:
        """Groups of channels and residual blocks."""
        return analyse(self.network, self.images[:2])

    def choice(self, configuration: Configuration, scores: Scores) -> Choice:
        """Return a configuration with the channels that these scores let stay."""
        sizes = {f"{WIDTH} {name}": str(len(group.classes)) for name, group in self.structure.groups.items()}
        changed = {element: choice for element, choice in configuration.items() if sizes.get(element) != choice}
        kept = {
            name: sorted(scores[name].argsort(descending=True, stable=True)[:count].tolist())
            for name, count in widths_of(changed).items()
        }
        return Choice(configuration=changed, kept=kept)

    def make(self, choice: Choice) -> nn.Module:
        """Return the network that a choice leaves, with the float network's weights."""
        if choice.history:
            return self._replayed(choice.history)
        scores = {name: torch.zeros(len(group.classes)) for name, group in self.structure.groups.items()}
        for name, positions in choice.kept.items():
            scores[name][list(positions)] = 1.0
        return apply(self.structure, choice.configuration, scores)

    def _replayed(self, history: Sequence[Removal]) -> nn.Module:
        import torch_pruning  # optional: a peer

        small = copy.deepcopy(self.network)
        graph = torch_pruning.DependencyGraph().build_dependency(small, self.images[:2])
        graph.load_pruning_history([(name, out, list(positions)) for name, out, positions in history])
        return small
