"""Which keys may change on a resume: those of steps not yet taken."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.variants import Variant

_QUANTIZED = tuple(v.step for v in Variant if v.is_quantized)
_TRAINED = tuple(v.step for v in Variant if v.trained_from)
SENSITIVITY = "sensitivity"
TARGETS_STEP = "targets"
"""Ending of the step that makes a trained network for further targets."""
_FILES = ("export", "engines", "engine_audit", "evaluate", "bench", "end_to_end")

STEPS: dict[str, tuple[str, ...]] = {
    "data.root": (),
    "data.workers": (),
    "data.max_pixels": (),
    "quantization": (*_QUANTIZED, *_FILES, SENSITIVITY),
    "qat": (*_TRAINED, *_FILES),
    "sparsity": ("mask", Variant.SPARSE.step, *_FILES),
    "finetune": (Variant.SPARSE.step, *_TRAINED, *_FILES),
    "export": _FILES,
    "export.require": ("engine_audit",),
    "bench": _FILES[1:],
    "search": (),
}
"""Steps that depend on a section or key; the longest name counts. Every step depends on any other key."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A key that differs between two recipes.

    Attributes:
        key: its path, or that of a section that one lacks.
        words: with both values.
    """

    key: str
    words: str

    def binding(self, taken: Collection[str]) -> list[str]:
        """Taken steps that depend on the key."""
        parts = self.key.split(".")
        names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
        steps = next((STEPS[name] for name in names if name in STEPS), None)
        return [step for step in taken if steps is None or step.removesuffix(f".{TARGETS_STEP}") in steps]


def differences(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> Iterator[Difference]:
    """Yield the keys that differ between two recipes as trees."""
    for key in {**there, **here}:
        old, new = there.get(key), here.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from differences(old, new, f"{prefix}{key}.")
        elif old != new:
            section = isinstance(old, dict) or isinstance(new, dict)
            values = "" if section else f" ({old!r} there, {new!r} here)"
            yield Difference(key=f"{prefix}{key}", words=f"{prefix}{key}{values}")


def taken_steps(folder: Path, finished: Collection[str]) -> list[str]:
    """Finished steps, the training of a checkpoint, a begun study."""
    suffix = ".checkpoint.safetensors"
    begun = (path.name.removesuffix(suffix) for path in sorted(folder.glob(f"*{suffix}")))
    studied = [SENSITIVITY] if any(folder.glob(f"{SENSITIVITY}-*.json")) else []
    return list(dict.fromkeys((*finished, *begun, *studied)))
