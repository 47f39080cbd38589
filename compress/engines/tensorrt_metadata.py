"""What stands beside a built engine: where it came from, where it may run, and the refusal of one that may not.

An engine file is opaque. Loaded on another GPU, with another version, or after its ONNX file has changed, it fails late
or, worse, runs another network than the one that is asked. So each is written with a `.json`, and checked against it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from compress.engines.base import TensorInfo
from compress.engines.onnx_file import read_onnx
from compress.engines.tensorrt_library import FLAVOURS
from compress.engines.tensorrt_options import Profile
from compress.errors import EngineError

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class EngineMetadata:
    """An engine file.

    Attributes:
        engine: `tensorrt` or `tensorrt-rtx`.
        version: of the library that built it; `parser_version` of its ONNX parser.
        gpu: name of the GPU that it was built on; "" for one built without.
        sms: compute capabilities that it was built for.
        recipe, variant: digest of the recipe and name of the network, as the ONNX file tells; "" where it does not.
        onnx, onnx_sha256: name and hash (`model_sha256`) of the file that it was built from.
        engine_bytes, engine_sha256: size and hash of the engine file.
        options: as in `TensorRTOptions`.
        profiles: shapes that it admits, by input.
        inputs, outputs: those of the ONNX file; -1 where the profile has a range.
        float_types: types of what is not quantized, as the ONNX file holds them.
        onnx_metadata: `metadata_props` of the ONNX file: preprocessing, labels.
        build_seconds: how long the build took.
        notes: what happened on the way that the user might not expect.
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
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        told: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {"format": _FORMAT, **told}

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> EngineMetadata:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        if told["format"] != _FORMAT:
            raise ValueError(f"format {told['format']}; this version of compress reads {_FORMAT}")
        values = {item.name: told[item.name] for item in fields(cls)}
        for name in ("inputs", "outputs"):
            values[name] = tuple(TensorInfo(**{**row, "shape": tuple(row["shape"])}) for row in told[name])
        values["profiles"] = {
            name: Profile(**{bound: tuple(shape) for bound, shape in row.items()})
            for name, row in told["profiles"].items()
        }
        for name in ("sms", "float_types", "notes"):
            values[name] = tuple(told[name])
        return cls(**values)

    @property
    def float_precision(self) -> str:
        """Type of what is not quantized. Strongly typed engines run exactly what the file says.

        A file of half types has float inputs and outputs, which are cast at its edges; its products are in half.
        Those of float32 are in TF32 where the GPU has it (Ampere and later) and the build allowed it.
        """
        kinds = set(self.float_types)
        narrow = kinds - {"f32"} or kinds
        kind = narrow.pop() if len(narrow) == 1 else "unknown"
        return "tf32" if kind == "f32" and self.options.get("tf32", True) and max(self.sms, default=0) >= 80 else kind


def sha256(path: Path) -> str:
    """Hash of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_sha256(onnx: Path) -> str:
    """Hash of an ONNX model, in hex: of its file, and of the files of its weights where these stand apart.

    Raises:
        EngineError: no ONNX model, or a file of its weights is missing.
    """
    apart = read_onnx(onnx).weight_files
    for path in apart:
        if not path.is_file():
            raise EngineError(f"{onnx}: {path.name}, which holds its weights, is missing beside it; copy that file too")
    hashes = [sha256(path) for path in (onnx, *apart)]
    return hashlib.sha256("".join(hashes).encode()).hexdigest() if apart else hashes[0]


def metadata_path(engine: Path) -> Path:
    """`<engine>.json`."""
    return engine.with_name(engine.name + ".json")


def log_path(engine: Path) -> Path:
    """`<engine>.log`: what the builder said, in full."""
    return engine.with_name(engine.name + ".log")


def layers_path(engine: Path) -> Path:
    """`<engine>.layers.json`: the layers as the inspector tells them; TensorRT alone, on the GPU."""
    return engine.with_name(engine.name + ".layers.json")


def read_metadata(engine: Path) -> EngineMetadata:
    """The metadata of an engine file.

    Raises:
        EngineError: there is none, or it cannot be read: the engine was not built by compress, or lost its `.json`.
    """
    path = metadata_path(engine)
    if not path.is_file():
        raise EngineError(
            f"{engine}: {path.name} is missing beside it, so nobody knows from which model, for which GPU and with "
            "which version it was built; copy that file too, or build the engine again with python -m compress build"
        )
    try:
        return EngineMetadata.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{path} cannot be read ({type(error).__name__}: {error}); build the engine again") from None


def check_whole(engine: Path, told: EngineMetadata) -> None:
    """Refuse an engine file that is not the one that was written.

    Raises:
        EngineError: it is truncated, or its bytes have changed.
    """
    size = engine.stat().st_size
    if size != told.engine_bytes:
        state = "truncated" if size < told.engine_bytes else "another file than was built"
        raise EngineError(f"{engine} is {state}: {size:,} bytes of {told.engine_bytes:,}; copy or build it again")
    if sha256(engine) != told.engine_sha256:
        raise EngineError(f"{engine}: its bytes are not those that were built (sha256 differs); copy or build it again")


def check_fresh(engine: Path, told: EngineMetadata, onnx: Path) -> None:
    """Refuse an engine whose ONNX file, or a file of its weights, has changed since.

    Raises:
        EngineError: `onnx` is another model than it was built from.
    """
    try:
        same = model_sha256(onnx) == told.onnx_sha256
    except EngineError as error:
        raise EngineError(f"{engine}: nobody can say whether it is stale: {error}") from None
    if not same:
        raise EngineError(f"{engine} is stale: {onnx} or its weights have changed since it was built; build it again")


def check_runnable(engine: Path, told: EngineMetadata, *, version: str, gpu: str, sm: int) -> None:
    """Refuse an engine that this library and GPU cannot run.

    Args:
        engine: the file, for messages.
        told: its metadata.
        version: of the library here.
        gpu: name of the GPU here.
        sm: its compute capability, 89 for 8.9.

    Raises:
        EngineError: says what it was built for, what is here, and what to do.
    """
    title = FLAVOURS[told.engine].title
    later = told.options.get("version_compatible") and _major(version) >= _major(told.version)
    if version != told.version and not later:
        advice = "" if FLAVOURS[told.engine].portable else ", or build with version_compatible"
        raise EngineError(
            f"{engine} was built with {title} {told.version} and here is {version}: engines run with the version that "
            f"built them; build it again here{advice}"
        )
    hardware = told.options.get("hardware", "none")
    problem = ""
    if FLAVOURS[told.engine].portable:
        if sm not in told.sms:
            problem = f"it was built for SM {', '.join(map(str, told.sms))}"
    elif hardware == "ampere-plus":
        problem = "" if sm >= 80 else "it was built for Ampere and later (SM 80)"
    elif sm not in told.sms:
        problem = f"it was built for SM {', '.join(map(str, told.sms))}"
    elif hardware == "none" and gpu != told.gpu:
        problem = f"it was built on {told.gpu}, for that GPU alone"
    if problem:
        named = f"with --sm {sm}" if FLAVOURS[told.engine].portable else "on this machine, or with another `hardware`"
        raise EngineError(f"{engine} does not run on {gpu} (SM {sm}): {problem}; build it again {named}")


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else -1
