"""safetensors with a JSON header, version and checksum."""

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
from torch import Tensor

from compress.errors import CheckpointError
from compress.files import parse_json, replacing
from compress.support.validation import parse

VERSION = 2
HEADER, CHECKSUM = "compress", "sha256"
"""Keys of our JSON in the metadata, and of the checksum in it."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The JSON document of a file.

    Attributes:
        kind: `model` or `checkpoint`.
        torch: that wrote it.
        shared: alias -> name, stored once.
        data: the caller's document.
    """

    kind: str
    version: int
    torch: str
    shared: dict[str, str]
    data: dict[str, Any]


_UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {
    1: lambda header: {"torch": "unknown", "shared": {}, **header, "version": 2}
}
"""For each earlier format, what makes the next one's header."""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Contents of a file.

    Attributes:
        version: of the file.
        tensors: on the CPU; shared names hold one tensor.
        data: the caller's document.
    """

    path: str
    version: int
    tensors: dict[str, Tensor]
    data: dict[str, Any]


@contextmanager
def writing(path: Path | str) -> Iterator[Path]:
    """As `compress.files.replacing`; failures become a CheckpointError."""
    try:
        with replacing(path) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write {path}: {error}. An older file there is unchanged; free space, or choose another folder"
        ) from error


def write_tensors(path: Path | str, kind: str, tensors: Mapping[str, Tensor], data: dict[str, Any]) -> Path:
    """Write tensors and a JSON document, whole or not at all.

    Raises:
        CheckpointError: the file cannot be written.
    """
    alone, shared = _without_shared_memory(tensors)
    header = {"kind": kind, "version": VERSION, "torch": torch.__version__, "shared": shared, "data": data}
    text = json.dumps({**header, CHECKSUM: _checksum(header, alone)})
    with writing(path) as temporary:
        save_file(alone, temporary, metadata={HEADER: text})  # one key alone: the order of several is random
    return Path(path)


def read_tensors(path: Path | str, kind: str) -> Contents:
    """Contents of a kind, checksum compared.

    Raises:
        CheckpointError: missing, truncated, damaged, foreign, of another kind or later version.
    """
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
    """Return the header in today's form, and its version."""
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
    """SHA-256 of header and tensors."""
    digest = hashlib.sha256(json.dumps(header).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        if tensor.numel():
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _without_shared_memory(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return CPU copies that own their memory, and alias -> name for tied tensors."""
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
