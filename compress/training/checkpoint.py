"""Checkpoints and weights, in files with a checksum that are written and loaded completely or not at all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from compress.errors import CheckpointError, first_few
from compress.files import parse_json, replacing
from compress.models.by_name import mask_hint
from compress.quantization.quantizer import LOWEST
from compress.support.validation import parse

VERSION = 2
# Keys of our JSON in the metadata, and of the checksum in it.
HEADER, CHECKSUM = "compress", "sha256"


@dataclass(frozen=True, kw_only=True)
class Header:
    """The JSON document of a file.

    Attributes:
        kind: `model` or `checkpoint`.
        shared: alias -> name, stored once.
        data: the caller's document.
    """

    kind: str
    version: int
    torch: str
    shared: dict[str, str]
    data: dict[str, Any]


# For each earlier format, what makes the next one's header.
_UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    1: lambda header: {"torch": "unknown", "shared": {}, **header, "version": 2}
}


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of a file; tensors are on the CPU, shared names hold one tensor, `data` is the caller's document."""

    path: str
    version: int
    tensors: dict[str, Tensor]
    data: dict[str, Any]


@contextmanager
def writing(path: Path | str) -> Iterator[Path]:
    try:
        with replacing(path) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write {path}: {error}. An older file there is unchanged; free space, or choose another folder"
        ) from error


def write_tensors(path: Path | str, kind: str, tensors: Mapping[str, Tensor], data: dict[str, Any]) -> Path:
    alone, shared = _without_shared_memory(tensors)
    header = {"kind": kind, "version": VERSION, "torch": torch.__version__, "shared": shared, "data": data}
    text = json.dumps({**header, CHECKSUM: _checksum(header, alone)})
    with writing(path) as temporary:
        save_file(alone, temporary, metadata={HEADER: text})  # one key alone: the order of several is random
    return Path(path)


def read_tensors(path: Path | str, kind: str) -> Contents:
    try:
        with safe_open(path, framework="pt") as file:
            tree = parse_json((file.metadata() or {}).get(HEADER, "null"))
            checksum = tree.pop(CHECKSUM, None) if isinstance(tree, dict) else None
            header, version = _header(path, kind, tree)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no {kind} at {path}: check the path, or start a new training") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no whole safetensors file ({error}): it was truncated or is of another program; "
            "take a good copy, or start a new training"
        ) from error
    if version > 1 and checksum != _checksum(tree, tensors):
        raise _damaged(path, "its contents do not agree with its checksum")
    unknown = [name for name in header.shared.values() if name not in tensors]
    if unknown:
        raise _damaged(path, f"its header names a tensor {unknown[0]!r}, which it does not hold")
    tensors |= {alias: tensors[name] for alias, name in header.shared.items()}
    return Contents(path=str(path), version=version, tensors=tensors, data=header.data)


def _header(path: Path | str, kind: str, tree: Any) -> tuple[Header, int]:
    if not isinstance(tree, dict) or tree.get("kind") != kind:
        got = tree.get("kind") if isinstance(tree, dict) else "safetensors file of another program"
        raise CheckpointError(f"{path} is a {got}, not a {kind} that compress wrote: name the right file")
    written = tree.get("version")
    if type(written) is not int or written < 1:
        raise _damaged(path, f"its format version is {written!r}")
    if written > VERSION:
        raise CheckpointError(
            f"{path} has format version {written} and this compress reads up to {VERSION}: upgrade it"
        )
    for version in range(written, VERSION):
        tree = _UPGRADES[version](tree)
    header, lines = parse(Header, tree)
    if header is None:
        raise _damaged(path, "; ".join(lines))
    return header, written


def _damaged(path: Path | str, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {reason}. Take a good copy, or start a new training")


def _checksum(header: dict[str, Any], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(header).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if tensor.numel():
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """CPU copies that own their memory, and alias -> name for tied tensors."""
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


class BestWeights:
    """The epoch with the best metric, the first of equals, on the CPU."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.state: dict[str, Tensor] = {}

    def keep(self) -> None:
        self.state = {name: t.detach().to("cpu", copy=True) for name, t in self.model.state_dict().items()}

    def install(self) -> None:
        if self.state:
            self.model.load_state_dict(self.state)

    def load(self, state: Mapping[str, Tensor]) -> None:
        own = self.model.state_dict()
        if state and (state.keys() != own.keys() or any(state[n].shape != t.shape for n, t in own.items())):
            raise CheckpointError("the checkpoint's best epoch is of another model: build the model as it was")
        self.state = dict(state)


class WeightAverage:
    """Running mean of a model's trainable parameters; buffers are those of the last step.

    After step t the mean takes a share 1 - min(decay, (1 + t) / (10 + t)). Weights stop hopping between two integers
    (Nagel et al., arXiv 2203.11086).

    Args:
        decay: 0 to 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.means = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        share = 1 - min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.means.values()), [p.data for p in self.parameters.values()], share)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        own = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.install()
        try:
            yield
        finally:
            _copy(own, self.parameters)

    def install(self) -> None:
        _copy(self.means, self.parameters)

    def load(self, means: Mapping[str, Tensor]) -> None:
        if means.keys() != self.means.keys() or any(means[n].shape != m.shape for n, m in self.means.items()):
            raise CheckpointError(
                f"the checkpoint holds a mean of {len(means)} weights, and the model trains {len(self.means)} others: "
                "build the model as it was"
            )
        _copy(means, self.means)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.data.copy_(source[name])


# Keys of an identity by the first format that has them.
_SINCE = {"data_digest": 2}


def save_model(model: nn.Module, path: Path | str, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write the `state_dict`, tied weights once, with a JSON document."""
    return write_tensors(path, "model", _model_state(model), dict(metadata or {}))


def load_model(model: nn.Module, path: Path | str) -> dict[str, Any]:
    contents = read_tensors(path, "model")
    _check_model(contents.path, contents.tensors, model)
    model.load_state_dict(contents.tensors)
    return contents.data


@dataclass(kw_only=True)
class Parts:
    """The state of a training that a checkpoint holds beside its position."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: WeightAverage | None = None
    best: BestWeights | None = None


def save_checkpoint(
    path: Path | str, parts: Parts, *, identity: Mapping[str, Any], position: Mapping[str, Any]
) -> Path:
    tensors = {f"model.{name}": tensor for name, tensor in _model_state(parts.model).items()}
    for name, state in _optimizer_states(parts.model, parts.optimizer).items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in state.items() if value is not None}
    if parts.average is not None:
        tensors |= {f"average.{name}": mean for name, mean in parts.average.means.items()}
    if parts.best is not None:
        tensors |= {f"best.{name}": tensor for name, tensor in parts.best.state.items()}
    data = {"identity": dict(identity), "position": dict(position), "scaler": parts.scaler.state_dict()}
    return write_tensors(path, "checkpoint", tensors, data)


def read_checkpoint(path: Path | str, identity: Mapping[str, Any]) -> Contents:
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


def restore_checkpoint(contents: Contents, parts: Parts) -> dict[str, Any]:
    weights, optimizer, scaler = _named(contents, "model."), parts.optimizer, parts.scaler
    _check_model(contents.path, weights, parts.model)
    states = _read_optimizer(contents, parts.model, optimizer)
    if parts.average is not None:
        parts.average.load(_named(contents, "average."))
    if parts.best is not None:
        parts.best.load(_named(contents, "best."))
    parts.model.load_state_dict(weights)
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})
    if scaler.is_enabled():
        try:
            scaler.load_state_dict(contents.data["scaler"])
        except (KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{contents.path} holds no state of the gradient scaler that fp16 needs ({error}). Start a new training"
            ) from error
    return contents.data["position"]


def _named(contents: Contents, prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in contents.tensors.items() if n.startswith(prefix)}


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    state: dict[str, Any] = model.state_dict()
    for name, value in state.items():
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
