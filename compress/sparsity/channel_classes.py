"""Classes of channels: which channels of which tensors move together, and which nothing distinguishes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from scipy.cluster.hierarchy import DisjointSet
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Use:
    """An axis of a parameter or buffer that runs along channels.

    Attributes:
        rows: (first, end) on axis 0 for which this holds, as in grouped convolutions; None = all rows.
        rows: (first, end) on axis 0 for which this holds, as in grouped convolutions; None = all rows.
        role: `in` = columns of a consumer, `out` = rows of a producer, `vector` = one value for each channel.
        numbers: (length of the axis,) int64, the channel's number at each position.
    """

    path: str
    axis: int
    rows: tuple[int, int] | None
    role: str
    numbers: Tensor


@dataclass(kw_only=True)
class Channels:
    """All channel numbers of a network.

    Attributes:
        tied: the numbers as a disjoint set; a subset is a class.
        names: name of each class by the representative of its subset.
        reasons: why a number may not move.
        uses: axes of tensors, by the tensor's id, axis and rows.
        marks: numbers that occur together in one place.
    """

    tied: DisjointSet = field(default_factory=DisjointSet)
    names: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    uses: dict[tuple[int, int, tuple[int, int] | None], Use] = field(default_factory=dict)
    marks: list[Tensor] = field(default_factory=list)

    def fresh(self, count: int, *, reason: str | None = None) -> Tensor:
        """Return new numbers, each a class of its own; with a reason they may not move."""
        first = len(self.names)
        numbers = torch.arange(first, first + count)
        for number in range(first, first + count):
            self.tied.add(number)
            self.names[number] = number
        if reason is not None:
            self.pin(numbers, reason)
        return numbers

    def pin(self, numbers: Tensor, reason: str) -> None:
        """Forbid these channels to move; the first reason counts."""
        for number in numbers.unique().tolist():
            self.reasons.setdefault(number, reason)

    def find(self, number: int) -> int:
        """The class of a number, named by its smallest member."""
        return self.names[self.tied[number]]

    def classes(self, numbers: Tensor) -> Tensor:
        """The class of each number."""
        unique, inverse = numbers.unique(return_inverse=True)
        return torch.tensor([self.find(x) for x in unique.tolist()], dtype=torch.int64)[inverse]

    def tie(self, left: Tensor, right: Tensor) -> None:
        """Make the channels at the same place of both one class."""
        for a, b in torch.stack([left.flatten(), right.flatten()], dim=1).unique(dim=0).tolist():
            name = min(self.find(a), self.find(b))
            self.tied.merge(a, b)
            self.names[self.tied[a]] = name

    def mark(self, numbers: Tensor) -> None:
        """Distinguish these channels, which occur together, from all others."""
        self.marks.append(numbers.flatten())

    def use(
        self, tensor: Tensor, path: str, axis: int, numbers: Tensor, *, role: str, rows: tuple[int, int] | None = None
    ) -> None:
        """Note that the axis runs along these channels; two uses of a tensor are tied."""
        key = (id(tensor), axis, rows)
        if key in self.uses:
            self.tie(self.uses[key].numbers, numbers)
        else:
            self.uses[key] = Use(path=path, axis=axis, rows=rows, role=role, numbers=numbers)

    def pinned(self) -> dict[int, str]:
        """The reason why a class may not move, by class."""
        pinned: dict[int, str] = {}
        for number, reason in self.reasons.items():
            pinned.setdefault(self.find(number), reason)
        return pinned

    def interchangeable(self) -> list[list[int]]:
        """Groups of classes with the same tensors, equally often, in the same blocks of the same weights."""
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

    `classes` are at each position; one at several positions receives them in order. `moves` maps classes to those whose
    content they receive, a bijection.
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
