"""Checkpoints and weights, loaded completely or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CheckpointError, first_few
from compress.models.by_name import mask_hint
from compress.quantization.quantizer import LOWEST
from compress.training.best import BestWeights, WeightAverage, best_state
from compress.training.tensor_file import Contents, read_tensors, write_tensors

_SINCE = {"data_digest": 2}
"""Keys of an identity by the first format that has them."""


def save_model(model: nn.Module, path: Path | str, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write the `state_dict`, tied weights once, with a JSON document.

    Raises:
        CheckpointError: a state that is no tensor, or a file that cannot be written.
    """
    return write_tensors(path, "model", _model_state(model), dict(metadata or {}))


def load_model(model: nn.Module, path: Path | str) -> dict[str, Any]:
    """Load what `save_model` wrote; return the metadata.

    Raises:
        CheckpointError: missing, truncated, foreign, or another model; nothing is loaded.
    """
    contents = read_tensors(path, "model")
    _check_model(contents.path, contents.tensors, model)
    model.load_state_dict(contents.tensors)
    return contents.data


def save_checkpoint(
    path: Path | str,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    identity: Mapping[str, Any],
    position: Mapping[str, Any],
    average: WeightAverage | None = None,
    best: BestWeights | None = None,
) -> Path:
    """Write a training, whole or not at all.

    `load_checkpoint` needs the same `identity`.

    Raises:
        CheckpointError: a state that is no tensor, or a file that cannot be written.
    """
    tensors = {f"model.{name}": tensor for name, tensor in _model_state(model).items()}
    for name, state in _optimizer_states(model, optimizer).items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items() if value is not None}
    if average is not None:
        tensors |= {f"average.{name}": mean for name, mean in average.means.items()}
    if best is not None:
        tensors |= {f"best.{name}": tensor for name, tensor in best.state.items()}
    data = {"identity": dict(identity), "position": dict(position), "scaler": scaler.state_dict()}
    return write_tensors(path, "checkpoint", tensors, data)


def load_checkpoint(
    path: Path | str,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    identity: Mapping[str, Any],
    average: WeightAverage | None = None,
) -> dict[str, Any]:
    """Restore `save_checkpoint`; return the position.

    Raises:
        CheckpointError: missing, truncated, foreign, another identity or model; nothing is loaded.
    """
    contents = read_checkpoint(path, identity)
    return restore_checkpoint(contents, model=model, optimizer=optimizer, scaler=scaler, average=average)


def read_checkpoint(path: Path | str, identity: Mapping[str, Any]) -> Contents:
    """Read a checkpoint of the training `identity`; raises as `load_checkpoint`."""
    contents = read_tensors(path, "checkpoint")
    there, position = (contents.data.get(key) for key in ("identity", "position"))
    if not isinstance(there, dict) or not isinstance(position, dict):
        raise CheckpointError(
            f"{contents.path} is damaged: its header has no identity or no position. Start a new training"
        )
    here = {
        key: value
        for key, value in json.loads(json.dumps(dict(identity))).items()
        if key in there or contents.version >= _SINCE.get(key, 1)
    }
    different = [
        f"{key} ({there.get(key, 'absent')!r} there, {here.get(key, 'absent')!r} here)"
        for key in sorted(there.keys() | here.keys())
        if there.get(key) != here.get(key)
    ]
    if different:
        raise CheckpointError(
            f"{contents.path} belongs to another training: {', '.join(different)}. Resume with the values it was "
            "started with, or start a new training in another folder"
        )
    return contents


def restore_checkpoint(
    contents: Contents,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    average: WeightAverage | None = None,
    best: BestWeights | None = None,
) -> dict[str, Any]:
    """Into model, optimizer and scaler; raises as `load_checkpoint`."""
    weights = {name.removeprefix("model."): t for name, t in contents.tensors.items() if name.startswith("model.")}
    _check_model(contents.path, weights, model)
    states = _read_optimizer(contents, model, optimizer)
    if average is not None:
        prefix = "average."
        average.load({n.removeprefix(prefix): t for n, t in contents.tensors.items() if n.startswith(prefix)})
    if best is not None:
        best.load(best_state(contents.tensors))
    model.load_state_dict(weights)
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    if scaler.is_enabled():
        try:
            scaler.load_state_dict(contents.data["scaler"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{contents.path} holds no state of the gradient scaler that fp16 needs ({error}). Start a new training"
            ) from error
    position: dict[str, Any] = contents.data["position"]
    return position


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Any] = model.state_dict()
    for name, value in state.items():
        if nn.parameter.is_lazy(value):
            raise CheckpointError(f"{name} has no shape yet (a lazy module): run the model once, then save it")
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"the model's state {name!r} is a {type(value).__name__}: only tensors are saved; make it a buffer, or "
                "register it as not persistent"
            )
    return state


def _check_model(path: str, got: Mapping[str, Tensor], model: nn.Module) -> None:
    expected = model.state_dict()
    common = expected.keys() & got.keys()
    mismatched = [
        f"{name} ({got[name].dtype} {tuple(got[name].shape)} there, "
        f"{expected[name].dtype} {tuple(expected[name].shape)} here)"
        for name in expected
        if name in common and (got[name].shape, got[name].dtype) != (expected[name].shape, expected[name].dtype)
    ]
    complaints = {
        "missing": [name for name in expected if name not in common and not name.endswith(f".{LOWEST}")],
        "unexpected": [name for name in got if name not in common and not name.endswith(f".{LOWEST}")],
        "different": mismatched,
    }
    parts = [f"{len(names)} {kind}: {first_few(names)}" for kind, names in complaints.items() if names]
    if parts:
        raise CheckpointError(
            f"{path} is of another model ({'; '.join(parts)}). Nothing was loaded; build the model as it was "
            "when the file was written (name, number of classes, quantization, sparsity)"
            f"{mask_hint(complaints['missing'], complaints['unexpected'])}"
        )


def _optimizer_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    states: Mapping[Any, dict[str, Tensor]] = optimizer.state
    return {name: states[parameter] for name, parameter in model.named_parameters() if parameter in states}


def _read_optimizer(
    contents: Contents, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[int, dict[str, Tensor]]:
    """Return each parameter's state by its index in the optimizer."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index = {names[parameter]: i for i, parameter in enumerate(order)}
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in contents.tensors.items():
        if not name.startswith("optimizer."):
            continue
        parameter_name, _, key = name.removeprefix("optimizer.").rpartition(".")
        parameter = order[index[parameter_name]] if parameter_name in index else None
        if parameter is None or tensor.shape not in (parameter.shape, torch.Size()):
            raise CheckpointError(
                f"{contents.path} holds an optimizer state {name} of shape {tuple(tensor.shape)} that fits no "
                "trainable parameter of this model. Nothing was loaded; build the model as it was, with the same "
                "layers frozen"
            )
        same = key != "step" and tensor.shape == parameter.shape
        states.setdefault(index[parameter_name], {})[key] = (
            torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor) if same else tensor
        )
    return states
