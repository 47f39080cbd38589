"""Converts the nested phases that the builder reports into one progress bar."""

from __future__ import annotations

from dataclasses import dataclass

from compress.support.progress import Progress

UNITS = 100
"""Steps of the bar."""


@dataclass
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class PhaseMeter:
    """Combines nested phases into one share that never falls."""

    def __init__(self) -> None:
        self._phases: dict[str, _Phase] = {}
        self._share = 0.0

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """Begin a phase of `steps` steps inside `parent`."""
        above = parent
        while above in self._phases and above != name:
            above = self._phases[above].parent
        if above != name:  # a phase inside itself is ignored
            self._phases[name] = _Phase(parent=parent, steps=max(1, steps))

    def step(self, name: str, index: int) -> None:
        """Complete step `index` of a phase, counted from 0."""
        phase = self._phases.get(name)
        if phase is not None:
            phase.done = max(phase.done, index + 1)

    def finish(self, name: str) -> None:
        """End a phase; the part of its parent's step that it fills stays until that step is done."""
        phase = self._phases.get(name)
        if phase is not None:
            phase.done = phase.steps

    def share(self) -> float:
        """Return the share of the whole that is done, 0 to 1."""
        roots = [name for name, phase in self._phases.items() if phase.parent not in self._phases]
        self._share = max([self._share, *(self._of(name) for name in roots)])
        return self._share

    def _of(self, name: str) -> float:
        phase = self._phases[name]
        inside = [self._of(child) for child, other in self._phases.items() if other.parent == name]
        running = max((part for part in inside if part < 1), default=0.0)
        return min(1.0, (phase.done + running) / phase.steps)


class BuildProgress:
    """Moves one bar of `UNITS` steps as phases begin and end."""

    def __init__(self, listener: Progress, task: str) -> None:
        self._listener, self._task, self._shown = listener, task, 0
        self.meter = PhaseMeter()
        listener.start(task, UNITS)

    def update(self) -> None:
        """Show the progress of the build."""
        reached = int(UNITS * self.meter.share())
        if reached > self._shown:
            self._listener.advance(self._task, reached - self._shown)
            self._shown = reached

    def finish(self, *, whole: bool) -> None:
        """End the bar; a build that succeeded fills it."""
        if whole and self._shown < UNITS:
            self._listener.advance(self._task, UNITS - self._shown)
        self._listener.finish(self._task)
