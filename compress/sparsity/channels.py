"""Channels as classes: which channels of which tensors are one and the same, and which may trade places.

Every channel of every tensor has a number. Where an operation ties two channels (an addition, a BatchNorm, a
depthwise convolution) their numbers join one class (union-find). A class is what a permutation moves as a whole:
the producer's rows, the norms' vectors and the readers' columns of that channel.

Two classes may trade places when nothing in the network tells them apart: they occur in the same tensors, as often,
and in the same blocks of the same weights. `interchangeable` groups classes by that signature, so residual sums,
concatenations at any offset, splits, channel shuffles and grouped convolutions need no rule of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Use:
    """An axis of a parameter or buffer that runs along channels.

    Attributes:
        path: of the tensor in the model, such as `layer1.0.conv1.weight`.
        axis: which axis.
        rows: (first, end) on axis 0 that this is about; a grouped convolution has other columns for each group.
        role: `in` = columns of a layer that reads the channels, `out` = rows of the layer that makes them,
            `vector` = one value a channel.
        numbers: (length of the axis,) int64, the channel's number at each position.
    """

    path: str
    axis: int
    rows: tuple[int, int] | None
    role: str
    numbers: Tensor


@dataclass(kw_only=True)
class Channels:
    """All channel numbers of a network, what ties them and what uses them."""

    parents: list[int] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)
    uses: dict[tuple[int, int, tuple[int, int] | None], Use] = field(default_factory=dict)
    marks: list[Tensor] = field(default_factory=list)

    def fresh(self, count: int, *, reason: str | None = None) -> Tensor:
        """`count` new numbers; with a reason they stay where they are."""
        numbers = torch.arange(len(self.parents), len(self.parents) + count)
        self.parents.extend(numbers.tolist())
        if reason is not None:
            self.pin(numbers, reason)
        return numbers

    def pin(self, numbers: Tensor, reason: str) -> None:
        """These channels may not move; the first reason counts."""
        for number in numbers.unique().tolist():
            self.reasons.setdefault(number, reason)

    def find(self, number: int) -> int:
        """The class of a number, named by one of its members."""
        root = number
        while self.parents[root] != root:
            root = self.parents[root]
        while self.parents[number] != root:
            self.parents[number], number = root, self.parents[number]
        return root

    def classes(self, numbers: Tensor) -> Tensor:
        """The class of each number."""
        unique, inverse = numbers.unique(return_inverse=True)
        return torch.tensor([self.find(x) for x in unique.tolist()], dtype=torch.int64)[inverse]

    def tie(self, left: Tensor, right: Tensor) -> None:
        """Each channel of `left` is the same as the one at that place of `right`."""
        for a, b in torch.stack([left.flatten(), right.flatten()], dim=1).unique(dim=0).tolist():
            a, b = self.find(a), self.find(b)
            self.parents[max(a, b)] = min(a, b)

    def mark(self, numbers: Tensor) -> None:
        """These channels occur together in one place, which tells them from all that do not."""
        self.marks.append(numbers.flatten())

    def use(
        self, tensor: Tensor, path: str, axis: int, numbers: Tensor, *, role: str, rows: tuple[int, int] | None = None
    ) -> None:
        """The tensor's axis runs along these channels; a tensor that is used twice ties both uses."""
        key = (id(tensor), axis, rows)
        if key in self.uses:
            self.tie(self.uses[key].numbers, numbers)
        else:
            self.uses[key] = Use(path=path, axis=axis, rows=rows, role=role, numbers=numbers)

    def pinned(self) -> dict[int, str]:
        """Class -> why it may not move."""
        pinned: dict[int, str] = {}
        for number, reason in self.reasons.items():
            pinned.setdefault(self.find(number), reason)
        return pinned

    def interchangeable(self) -> list[list[int]]:
        """Classes that nothing tells apart, group by group, in the order of their numbers."""
        signatures: dict[int, list[tuple[int, int]]] = {}
        for place, numbers in enumerate(self._places()):
            unique, counts = self.classes(numbers).unique(return_counts=True)
            for number, count in zip(unique.tolist(), counts.tolist(), strict=True):
                signatures.setdefault(number, []).append((place, count))
        groups: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for number in sorted(signatures):
            groups.setdefault(tuple(signatures[number]), []).append(number)
        return list(groups.values())

    def _places(self) -> Iterable[Tensor]:
        yield from self.marks
        yield from (use.numbers for use in self.uses.values())


def permute_index(classes: Tensor, moves: dict[int, int]) -> Tensor:
    """Index that moves channels along an axis: position p takes its value from index[p].

    Args:
        classes: (length,) the class at each position.
        moves: class -> the class whose content it receives; a bijection of its keys. Others stay.

    A class that stands at several positions (a flattened picture) receives them in order.
    """
    places: dict[int, list[int]] = {}
    for position, number in enumerate(classes.tolist()):
        places.setdefault(number, []).append(position)
    index = list(range(len(classes)))
    for target, positions in places.items():
        source = moves.get(target, target)
        for position, taken in zip(positions, places[source], strict=True):
            index[position] = taken
    return torch.tensor(index)
