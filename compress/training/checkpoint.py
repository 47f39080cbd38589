"""Checkpoints and weights as safetensors files that are whole or absent, and that load completely or not at all.

A model's file holds the tensors of its `state_dict` under their plain names; a checkpoint holds them as `model.*`,
beside `optimizer.<parameter>.<state>` and, where weights are averaged, `average.<parameter>`. Both hold one JSON
document in their header. Loading runs no code. A file is written under another name and renamed, so that a process
that is killed at any moment leaves the previous one. Before anything is copied into a model, every name, shape and type
is compared.

A checkpoint belongs to one training: its `identity` (the spec, the batch size, the data) is in the header, and a
training whose identity differs is refused, because the learning rate of step k, the images of step k and therefore
the result would be neither training's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from compress.errors import CheckpointError, first_few
from compress.files import replacing
from compress.training.average import WeightAverage
from compress.weights import mask_hint

VERSION = 1
HEADER = "compress"  # the key of our JSON among the file's metadata


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of a model's file or of a checkpoint.

    Attributes:
        path: the file.
        tensors: tensors by name, on the CPU; names that share memory hold the same tensor.
        data: the caller's JSON document.
    """

    path: str
    tensors: dict[str, Tensor]
    data: dict[str, Any]


def save_model(model: nn.Module, path: Path | str, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write the model's `state_dict`, whole or not at all.

    Args:
        model: on any device, in any memory format; tied weights are stored once.
        path: path of the safetensors file.
        metadata: JSON document that `load_model` returns.

    Raises:
        CheckpointError: a state that is not a tensor, or a file that cannot be written.
    """
    return _write(path, "model", _model_state(model), dict(metadata or {}))


def load_model(model: nn.Module, path: Path | str) -> dict[str, Any]:
    """Copy the weights that `save_model` wrote into `model` and return their metadata.

    Raises:
        CheckpointError: a missing, truncated or foreign file, or names, shapes or types that differ from the model's
            (all are named, nothing is loaded).
    """
    contents = _read(path, "model")
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
) -> Path:
    """Write everything that a training needs to go on, whole or not at all.

    Args:
        path: path of the safetensors file.
        model: model whose state is written.
        optimizer: optimizer whose state is written, by parameter name.
        scaler: gradient scaler whose state is written; empty if it is not enabled.
        identity: JSON document that identifies the training; `load_checkpoint` must be given the same.
        position: JSON document with the position in the training.
        average: the running mean of the weights, if there is one.

    Raises:
        CheckpointError: a state that is not a tensor, or a file that cannot be written.
    """
    tensors = {f"model.{name}": tensor for name, tensor in _model_state(model).items()}
    for name, state in _optimizer_states(model, optimizer).items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items() if value is not None}
    if average is not None:
        tensors |= {f"average.{name}": mean for name, mean in average.means.items()}
    data = {"identity": dict(identity), "position": dict(position), "scaler": scaler.state_dict()}
    return _write(path, "checkpoint", tensors, data)


def load_checkpoint(
    path: Path | str,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    identity: Mapping[str, Any],
    average: WeightAverage | None = None,
) -> dict[str, Any]:
    """Restore the states of model, optimizer and scaler that `save_checkpoint` wrote, and return the position.

    Raises:
        CheckpointError: a missing, truncated or foreign file, another identity (the differing keys are named), or
            another model; nothing is loaded then.
    """
    contents = read_checkpoint(path, identity)
    return restore_checkpoint(contents, model=model, optimizer=optimizer, scaler=scaler, average=average)


def read_checkpoint(path: Path | str, identity: Mapping[str, Any]) -> Contents:
    """Read a checkpoint of the training that `identity` describes; raises as `load_checkpoint` does."""
    contents = _read(path, "checkpoint")
    there, here = contents.data["identity"], json.loads(json.dumps(dict(identity)))
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
) -> dict[str, Any]:
    """Copy a checkpoint's contents into model, optimizer and scaler; raises as `load_checkpoint` does."""
    weights = {name.removeprefix("model."): t for name, t in contents.tensors.items() if name.startswith("model.")}
    _check_model(contents.path, weights, model)
    states = _read_optimizer(contents, model, optimizer)
    if average is not None:
        prefix = "average."
        average.load({n.removeprefix(prefix): t for n, t in contents.tensors.items() if n.startswith(prefix)})
    model.load_state_dict(weights)
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    if scaler.is_enabled():
        scaler.load_state_dict(contents.data["scaler"])
    position: dict[str, Any] = contents.data["position"]
    return position


@contextmanager
def writing(path: Path | str) -> Iterator[Path]:
    """`compress.files.replacing`, whose failures (a full disk, a read-only folder) become a CheckpointError."""
    try:
        with replacing(path) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write {path}: {error}. An older file there is unchanged; free space, or choose another folder"
        ) from error


def _write(path: Path | str, kind: str, tensors: Mapping[str, Tensor], data: dict[str, Any]) -> Path:
    alone, shared = _without_shared_memory(tensors)
    header = {"kind": kind, "version": VERSION, "torch": torch.__version__, "shared": shared, "data": data}
    with writing(path) as temporary:
        save_file(alone, temporary, metadata={HEADER: json.dumps(header)})
    return Path(path)


def _read(path: Path | str, kind: str) -> Contents:
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get(HEADER, "null"))
            if not isinstance(header, dict) or header.get("kind") != kind:
                got = header.get("kind") if isinstance(header, dict) else "safetensors file of another program"
                raise CheckpointError(f"{path} is a {got}, not a {kind} that compress wrote: name the right file")
            if header["version"] > VERSION:
                raise CheckpointError(
                    f"{path} has format version {header['version']} and this compress reads up to {VERSION}: upgrade it"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no {kind} at {path}: check the path, or start a new training") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no whole safetensors file ({error}): it was truncated or is of another program; "
            "take a good copy, or start a new training"
        ) from error
    tensors |= {alias: tensors[name] for alias, name in header["shared"].items()}
    return Contents(path=str(path), tensors=tensors, data=header["data"])


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Any] = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"the model's state {name!r} is a {type(value).__name__}: only tensors are saved; make it a buffer, or "
                "register it as not persistent"
            )
    return state


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return CPU copies that own their memory, and alias -> name for tensors that are the same one (tied weights)."""
    copies: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        place = (tensor.device, storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and first.setdefault(place, name) != name:
            shared[name] = first[place]
            continue
        owned = storage not in storages and tensor.nbytes == tensor.untyped_storage().nbytes()
        storages.add(storage)
        copy = tensor.detach().cpu().contiguous()
        copies[name] = copy if owned else copy.clone()
    return copies, shared


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
        "missing": [name for name in expected if name not in common],
        "unexpected": [name for name in got if name not in common],
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
    """Return the state of each parameter, by its index in the optimizer, in the parameter's memory format."""
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
