"""Weights into a model: no code runs, names are compared, all or nothing."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from compress.errors import CheckpointError, first_few
from compress.files import expand_user

Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""For each name whose shape differs: the shape in the file, and in the model."""

SUFFIXES = (".safetensors", ".pt", ".pth", ".th", ".ckpt", ".bin")

_WRAPPERS = ("state_dict", "model_state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.", "model.")
_AUXILIARY = ("aux1.", "aux2.", "AuxLogits.")  # used in training alone, by googlenet and inception_v3
_OLD_DENSENET = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")  # names before torchvision 0.3


def load_weights(model: nn.Module, path: Path | str, *, num_classes: int | None = None) -> tuple[str, ...]:
    """Load the file at `path` into `model`.

    Args:
        model: unchanged if anything does not fit.
        path: .safetensors, or of `torch.save(model.state_dict())`.
        num_classes: of the data; a classifier for another number is then left out.

    Returns:
        A sentence for each change, such as a removed prefix.

    Raises:
        CheckpointError: the file is missing, truncated, holds more than tensors, or does not fit.
    """
    state = read_state_dict(path)
    return load_state(model, state, source=str(path), num_classes=num_classes)


def read_state_dict(path: Path | str) -> dict[str, Tensor]:
    """Tensors of a file, on the CPU, unwrapped; no code of it runs.

    Raises:
        CheckpointError: missing, truncated or other content.
    """
    path = expand_user(path)
    if not path.is_file():
        raise CheckpointError(f"there is no weights file {path}")
    if path.suffix not in SUFFIXES:
        raise CheckpointError(f"{path} is not a weights file by its name; allowed endings: {', '.join(SUFFIXES)}")
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds Python objects besides tensors, or is damaged, and was not loaded, since such objects can "
            f"run code. Save model.state_dict() instead of the model ({_first_line(error)})"
        ) from error
    except Exception as error:  # a damaged file can make a reader of pickles fail in any way
        raise CheckpointError(f"{path} is truncated or not a weights file ({_first_line(error)})") from error
    return _tensors(content, path)


def load_state(
    model: nn.Module, state: Mapping[str, Tensor], *, source: str, num_classes: int | None = None
) -> tuple[str, ...]:
    """Load named tensors into `model`, all or none; see `load_weights`.

    Raises:
        CheckpointError: tensors missing, unexpected or of another shape.
    """
    return fit_state(model, state, source=source, num_classes=num_classes).notes


class Loaded(NamedTuple):
    """What was done to the tensors of a file.

    Attributes:
        other_classes: of a classifier left out, or None.
    """

    notes: tuple[str, ...]
    other_classes: int | None


def fit_state(model: nn.Module, state: Mapping[str, Tensor], *, source: str, num_classes: int | None = None) -> Loaded:
    """As `load_state`; returns the number of classes of a misfit classifier."""
    own = model.state_dict()
    fitted, notes = _renamed(state, own)
    missing = [name for name in own if name not in fitted and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in fitted if name not in own]
    shapes = {
        n: (tuple(t.shape), tuple(own[n].shape)) for n, t in fitted.items() if n in own and t.shape != own[n].shape
    }
    others = None if num_classes is None else _classes_of_foreign_head(shapes, num_classes)
    if missing or unexpected or (shapes and others is None):
        raise CheckpointError(_misfit(source, missing, unexpected, shapes))
    if others is not None:
        notes.append(
            f"{source} classifies {others} classes, not {num_classes}: its classifier ({', '.join(shapes)}) was left "
            f"out, and the model has a new one"
        )
        fitted = {name: tensor for name, tensor in fitted.items() if name not in shapes}
    # The model's own dictionary has the layers' versions, which some files lack
    own.update(fitted)
    model.load_state_dict(own)
    return Loaded(tuple(notes), others)


def _tensors(content: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not named tensors; save model.state_dict()")
    for wrapper in _WRAPPERS:
        if isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
            break
    foreign = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
    if foreign or not content:
        raise CheckpointError(
            f"{path} does not hold named tensors alone (others: {first_few(foreign)}); save model.state_dict(), or "
            f"that under one of the names {', '.join(_WRAPPERS)}"
        )
    return {str(name): value for name, value in content.items()}


def _renamed(state: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return `state` under the model's names, without known prefixes, and a note for each change."""
    named, notes = dict(state), []
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in named) and not any(name.startswith(prefix) for name in own):
            named = {name.removeprefix(prefix): tensor for name, tensor in named.items()}
            notes.append(f"the prefix {prefix!r} was taken off all names")
    for prefix in _AUXILIARY:
        if any(name.startswith(prefix) for name in named) and not any(name.startswith(prefix) for name in own):
            named = {name: tensor for name, tensor in named.items() if not name.startswith(prefix)}
            notes.append(f"the auxiliary classifier {prefix.removesuffix('.')!r} was left out")
    return {_OLD_DENSENET.sub(r"\1\2", name): tensor for name, tensor in named.items()}, notes


def _classes_of_foreign_head(shapes: Shapes, num_classes: int) -> int | None:
    """The file's number of classes if nothing else differs, else None."""
    counts = set()
    for there, here in shapes.values():
        if not there or not here or there[1:] != here[1:] or here[0] % num_classes:
            return None
        anchors = here[0] // num_classes  # of a detector: it has outputs for each class and anchor
        if there[0] % anchors:
            return None
        counts.add(there[0] // anchors)
    return counts.pop() if len(counts) == 1 else None


def _misfit(source: str, missing: list[str], unexpected: list[str], shapes: Shapes) -> str:
    reshaped = [f"{name} {there} in the file, {here} in the model" for name, (there, here) in shapes.items()]
    parts = (
        f"{len(missing)} missing in the file ({first_few(missing)})" if missing else "",
        f"{len(unexpected)} unexpected ({first_few(unexpected)})" if unexpected else "",
        f"{len(reshaped)} of another shape ({first_few(reshaped)})" if reshaped else "",
    )
    hint = mask_hint(missing, unexpected)
    return f"{source} belongs to another model; nothing was loaded{hint}: {'; '.join(part for part in parts if part)}"


def mask_hint(missing: Iterable[str], unexpected: Iterable[str]) -> str:
    """Advice where file and model differ by masks, or "".

    >>> mask_hint(["fc.parametrizations.weight.0.mask"], ["fc.weight"])
    ' (the file is of a dense network and the model is masked: load it before sparsify)'
    """
    mask = ".parametrizations.weight.0.mask"
    if any(name.endswith(mask) for name in unexpected):
        return " (the file is of a masked network: call sparsify before loading it, or save it after squash_masks)"
    if any(name.endswith(mask) for name in missing):
        return " (the file is of a dense network and the model is masked: load it before sparsify)"
    return ""


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
