"""Distillation of layers' outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compress.errors import RecipeError, near_misses
from compress.graph.inputs import flat_tensors


class FeaturePairs:
    """`pairs` maps the student's modules to the teacher's.

    Raises:
        RecipeError: no such module.
    """

    def __init__(self, student: nn.Module, teacher: nn.Module, pairs: Mapping[str, str]) -> None:
        self.pairs = dict(pairs)
        self.modules = [
            (_module(student, own, "the student"), _module(teacher, other, "the teacher"))
            for own, other in pairs.items()
        ]
        self._seen: dict[tuple[int, int], Tensor] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the layers' outputs while the block runs."""
        handles = [
            module.register_forward_hook(self._recorder(index, side))
            for index, modules in enumerate(self.modules)
            for side, module in enumerate(modules)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._seen.clear()

    def distance(self) -> Tensor:
        """Mean distance since the last call, in float32.

        Raises:
            RecipeError: a layer did not run, or outputs cannot be compared.
        """
        parts = []
        for index, (own, other) in enumerate(self.pairs.items()):
            for side, path in enumerate((own, other)):
                if (index, side) not in self._seen:
                    raise RecipeError(self._not_run(index, side, path))
            parts.append(feature_distance(self._seen[index, 0], self._seen[index, 1], f"{own}: {other}"))
        self._seen.clear()
        return torch.stack(parts).mean()

    def _recorder(self, index: int, side: int) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            tensors = list(flat_tensors(output))
            if tensors:
                self._seen[index, side] = tensors[0].detach() if side else tensors[0]

        return record

    def _not_run(self, index: int, side: int, path: str) -> str:
        which = "the teacher" if side else "the student"
        inner = [
            name for name, child in self.modules[index][side].named_modules() if name and not list(child.children())
        ]
        hint = f", such as {path}.{inner[-1]}" if inner else ""
        return (
            f"distill_features names {path!r} of {which}, which is not called as a module: a traced or quantized "
            f"network calls its layers alone{hint}"
        )


def feature_distance(student: Tensor, teacher: Tensor, pair: str = "") -> Tensor:
    """Distance of outputs (N, C, ...).

    Of one shape: mean squared difference over the teacher's mean square (after FitNets, arXiv 1412.6550, without the
    regressor). Else of attention maps (Zagoruyko and Komodakis, arXiv 1612.03928, equation 2): mean squares over
    channels, of length one.

    Raises:
        RecipeError: dimensions or places that do not match.
    """
    student, teacher = student.float(), teacher.float()
    if student.shape == teacher.shape:
        return F.mse_loss(student, teacher) / teacher.square().mean().clamp_min(1e-12)
    if student.ndim != teacher.ndim or student.ndim < 3:
        raise RecipeError(
            f"distill_features {pair}: outputs of shapes {tuple(student.shape)} and {tuple(teacher.shape)} cannot be "
            "compared; name layers of the same shape, or maps (N, C, H, W) of any number of channels"
        )
    if student.ndim == 4 and student.shape[2:] != teacher.shape[2:]:
        size = (min(student.shape[2], teacher.shape[2]), min(student.shape[3], teacher.shape[3]))
        student, teacher = (F.adaptive_avg_pool2d(one.square(), size).sqrt() for one in (student, teacher))
    maps = [one.square().mean(1 if one.ndim == 4 else 2).flatten(1) for one in (student, teacher)]
    if maps[0].shape != maps[1].shape:
        raise RecipeError(
            f"distill_features {pair}: maps of {tuple(maps[0].shape[1:])} and {tuple(maps[1].shape[1:])} places cannot "
            "be compared"
        )
    own, other = (F.normalize(one, dim=1) for one in maps)
    return (own - other).square().sum(1).mean()


def _module(model: nn.Module, path: str, which: str) -> nn.Module:
    known = dict(model.named_modules())
    if path not in known or not path:
        raise RecipeError(f"distill_features names {path!r}: {which} has no such module{near_misses(path, known)}")
    return known[path]
