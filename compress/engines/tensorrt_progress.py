"""How far a build is, from the phases that the builder tells of: they nest, and each counts its own steps.

A phase of n steps that runs inside step k of its parent fills a part of that step. So one number, from 0 to 1, tells
how far the whole is, and one bar shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

from compress.progress import Progress

UNITS = 100
"""Steps of the bar."""


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class PhaseMeter:
    """Nested phases as one share that never falls."""

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._share = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """A phase of `steps` steps begins inside `parent`."""
        above = parent
        while above in self._phases and above != name:
            above = self._phases[above].parent
        if above != name:  # a name that comes back inside itself tells nothing new
            self._phases[name] = _Phase(parent=parent, steps=max(1, steps))

    def step(self, name: str, index: int) -> None:
        """Step `index` of a phase, counted from 0, is done."""
        phase = self._phases.get(name)
        if phase is not None:
            phase.done = max(phase.done, index + 1)

    def finish(self, name: str) -> None:
        """A phase has ended; what it fills of its parent's step stays until that step is done."""
        phase = self._phases.get(name)
        if phase is not None:
            phase.done = phase.steps

    def share(self) -> float:
        """How much of the whole is done, 0 to 1."""
        roots = [name for name, phase in self._phases.items() if phase.parent not in self._phases]
        self._share = max([self._share, *(self._of(name) for name in roots)])
        return self._share

    def _of(self, name: str) -> float:
        phase = self._phases[name]
        inside = [self._of(child) for child, other in self._phases.items() if other.parent == name]
        running = max((part for part in inside if part < 1), default=0.0)
        return min(1.0, (phase.done + running) / phase.steps)


class BuildProgress:
    """Moves one bar of `UNITS` steps as phases tell of themselves."""

    def __init__(self, listener: Progress, task: str) -> None:
        self._listener, self._task, self._shown = listener, task, 0
        self.meter = PhaseMeter()
        listener.start(task, UNITS)

    def tell(self) -> None:
        """Show how far the build is."""
        reached = int(UNITS * self.meter.share())
        if reached > self._shown:
            self._listener.advance(self._task, reached - self._shown)
            self._shown = reached

    def finish(self, *, whole: bool) -> None:
        """End the bar; a build that succeeded fills it."""
        if whole and self._shown < UNITS:
            self._listener.advance(self._task, UNITS - self._shown)
        self._listener.finish(self._task)
