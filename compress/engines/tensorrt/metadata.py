"""Metadata of a built engine: its model, where it may run, and checks that refuse an engine that may not."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from compress.engines.base import TensorInfo, read_onnx
from compress.engines.tensorrt.library import BUILDERS, FLAVOURS
from compress.engines.tensorrt.options import Profile
from compress.errors import EngineError
from compress.files import read_json
from compress.support.validation import parse

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class EngineMetadata:
    """Description of an engine file.

    Attributes:
        version, parser_version: of the library that built it, and of its ONNX parser.
        gpu: that it was built on; "" if it was built without one.
        sms: compute capabilities that it was built for.
        recipe, variant: digest of the recipe, and variant, from the ONNX file; "" if it has none.
        onnx, onnx_sha256: name and hash (`model_sha256`) of the ONNX file.
        profiles: shapes that it admits, by input.
        inputs, outputs: those of the ONNX file; -1 where the profile has a range.
        float_types: types of everything that is not quantized.
    """

    engine: str
    version: str
    parser_version: str
    gpu: str
    sms: tuple[int, ...]
    recipe: str
    variant: str
    onnx: str
    onnx_sha256: str
    engine_bytes: int
    engine_sha256: str
    options: Mapping[str, Any]
    profiles: Mapping[str, Profile]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    float_types: tuple[str, ...]
    onnx_metadata: Mapping[str, str]
    build_seconds: float
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"format": _FORMAT, **TypeAdapter(EngineMetadata).dump_python(self, mode="json")}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> EngineMetadata:
        if row["format"] != _FORMAT:
            raise ValueError(f"format is {row['format']!r}; this version of compress reads {_FORMAT}")
        names = {field.name for field in fields(cls)}
        metadata, lines = parse(cls, {key: value for key, value in row.items() if key in names})
        if metadata is None:
            raise ValueError("; ".join(lines))
        if metadata.engine not in BUILDERS:
            raise ValueError(f"engine is {metadata.engine!r}; one of: {', '.join(BUILDERS)}")
        if metadata.onnx in ("", ".", "..") or any(mark in metadata.onnx for mark in "/\\\0"):
            raise ValueError(f"onnx is {metadata.onnx!r}; it must be the name of a file beside the engine")
        return metadata

    @property
    def float_precision(self) -> str:
        """Strongly typed engines compute in the types of the file."""
        kinds = set(self.float_types)
        narrow = kinds - {"f32"} or kinds
        kind = narrow.pop() if len(narrow) == 1 else "unknown"
        return "tf32" if kind == "f32" and self.options.get("tf32", True) and max(self.sms, default=0) >= 80 else kind


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_sha256(onnx: Path) -> str:
    """Of its file, and of the files of its weights if it has any."""
    weights = read_onnx(onnx).weight_files
    for path in weights:
        if not path.is_file():
            raise EngineError(f"{onnx}: {path.name}, which holds its weights, is missing beside it; copy that file too")
    hashes = [sha256(path) for path in (onnx, *weights)]
    return hashlib.sha256("".join(hashes).encode()).hexdigest() if weights else hashes[0]


def metadata_path(engine: Path) -> Path:
    return engine.parent / f"{engine.name}.json"


def log_path(engine: Path) -> Path:
    return engine.parent / f"{engine.name}.log"


def layers_path(engine: Path) -> Path:
    """The file with the inspector's layers; written for TensorRT alone, on the GPU."""
    return engine.parent / f"{engine.name}.layers.json"


def read_metadata(engine: Path) -> EngineMetadata:
    path = metadata_path(engine)
    if not path.is_file():
        raise EngineError(
            f"{engine}: {path.name} is missing beside it, so its model, GPU and library version are unknown; copy that "
            "file too, or build the engine again with python -m compress build onnx"
        )
    try:
        return EngineMetadata.from_dict(read_json(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise EngineError(f"{path} cannot be read: {told}. Build the engine again") from None


def check_whole(engine: Path, metadata: EngineMetadata) -> None:
    size = engine.stat().st_size
    if size != metadata.engine_bytes:
        state = "truncated" if size < metadata.engine_bytes else "another file than was built"
        raise EngineError(f"{engine} is {state}: {size:,} bytes of {metadata.engine_bytes:,}; copy or build it again")
    if sha256(engine) != metadata.engine_sha256:
        raise EngineError(f"{engine}: its bytes are not those that were built (sha256 differs); copy or build it again")


def check_fresh(engine: Path, metadata: EngineMetadata, onnx: Path) -> None:
    try:
        same = model_sha256(onnx) == metadata.onnx_sha256
    except EngineError as error:
        raise EngineError(f"{engine}: it is unknown whether it is stale: {error}") from None
    if not same:
        raise EngineError(f"{engine} is stale: {onnx} or its weights have changed since it was built; build it again")


def check_runnable(engine: Path, metadata: EngineMetadata, *, version: str, gpu: str, sm: int) -> None:
    flavour = FLAVOURS[metadata.engine]
    later = metadata.options.get("version_compatible") and _numbers(version) >= _numbers(metadata.version)
    if version != metadata.version and not later:
        advice = "" if flavour.portable else ", or build with version_compatible"
        raise EngineError(
            f"{engine} was built with {flavour.title} {metadata.version} and here is {version}: engines run with the "
            f"version that built them, and version-compatible ones with later ones too; build it again here{advice}"
        )
    hardware = metadata.options.get("hardware", "none")
    problem = ""
    if flavour.portable:
        if sm not in metadata.sms:
            problem = f"it was built for SM {', '.join(map(str, metadata.sms))}"
    elif hardware == "ampere-plus":
        problem = "" if sm >= 80 else "it was built for Ampere and later (SM 80)"
    elif sm not in metadata.sms:
        problem = f"it was built for SM {', '.join(map(str, metadata.sms))}"
    elif hardware == "none" and gpu != metadata.gpu:
        problem = f"it was built on {metadata.gpu}, for that GPU alone"
    if problem:
        advice = f"with --sm {sm}" if flavour.portable else "on this machine, or with another `hardware`"
        raise EngineError(f"{engine} does not run on {gpu} (SM {sm}): {problem}; build it again {advice}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
