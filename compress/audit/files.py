"""Audits an engine by its file: finds and reads its layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from compress.audit.cuda_plan import read_cuda_layers
from compress.audit.engine import EngineAudit, audit_listing
from compress.audit.layers import EngineListing
from compress.audit.litert import read_litert_layers
from compress.audit.nvidia import parse_build_log, parse_inspector
from compress.audit.onnx import sparse_nodes
from compress.engines.tensorrt.metadata import (
    check_fresh,
    check_whole,
    layers_path,
    log_path,
    metadata_path,
    read_metadata,
)
from compress.errors import AuditError, EngineError
from compress.support.limits import JSON_BYTES


def audit_engine(path: Path | str, *, onnx: Path | str | None = None, sides: Sequence[int] = ()) -> EngineAudit:
    """Audit an engine: the type of every layer, the bytes that it moves, and what is wrong with either.

    Args:
        path: a built engine with its log or the inspector's JSON beside it, or one of these files; a .tflite file; an
            ONNX file stands for the plan that the engine `cuda` makes of it.
        onnx: the file that the engine was built from; None = the file beside the engine, if it is there and unchanged.
        sides: of an ONNX file: sizes that its inputs leave open after the batch, such as height and width.

    Raises:
        AuditError: there is no such file, nothing lists the engine's layers, or a built engine is given sides.
        EngineError: the engine is truncated, or another than was built.

    Examples:
        >>> compress.audit_engine("int8.onnx").share("int8", "uint8")  # of an ONNX file: the plan of the engine `cuda`
        1.0
    """
    path = Path(path)
    planned = path.suffix == ".onnx" and path.is_file()  # the engine cuda runs the file itself
    if sides and not planned:
        raise AuditError(
            f"{path}: sides are for ONNX files with open ones, and a built engine has its own; leave them out"
        )
    if path.suffix == ".tflite":
        return audit_listing(read_litert_layers(path))
    listing = read_cuda_layers(path, sides=sides) if planned else read_engine_layers(path)
    source = onnx or (path if planned else onnx_beside(path))
    return audit_listing(listing, onnx=source, sparse_nodes=() if source is None else sparse_nodes(source))


def read_engine_layers(path: Path | str) -> EngineListing:
    """The layers of an engine with `<engine>.layers.json` (preferred) or `.log` beside it, or of such a file."""
    path = Path(path)
    if not path.is_file():
        raise AuditError(f"{path} does not exist; give an engine, its build log or the inspector's JSON")
    if path.suffix == ".onnx":
        raise AuditError(f"{path} is a model, not an engine of it: --onnx shows what is in it, build makes an engine")
    if path.suffix == ".json":
        return _parsed(parse_inspector, path)
    if path.suffix in {".log", ".txt"}:
        return _parsed(parse_build_log, path)
    if metadata_path(path).is_file():
        check_whole(path, read_metadata(path))
    layers, log = layers_path(path), log_path(path)
    for beside in (layers, path.with_suffix(".layers.json"), log, path.with_suffix(".log")):
        if beside.is_file():
            return read_engine_layers(beside)
    raise AuditError(
        f"no file beside {path} lists its layers (looked for {layers.name} and {log.name}). Build it with "
        f"`python -m compress build onnx`, which keeps the log; or write {layers.name} with "
        f"trtexec --loadEngine={path} --profilingVerbosity=detailed --exportLayerInfo={layers.name}"
    )


def onnx_beside(path: Path | str) -> Path | None:
    """The ONNX file that an engine was built from, if it is beside the engine and unchanged."""
    path = Path(path)
    for engine in (path, path.with_suffix("")):  # the second if `path` is the engine's log
        try:
            metadata = read_metadata(engine)
            onnx = engine.with_name(metadata.onnx)
            check_fresh(engine, metadata, onnx)
        except (EngineError, OSError):
            continue
        return onnx
    return None


def _parsed(parse: Callable[[str], EngineListing], path: Path) -> EngineListing:
    try:
        return parse(_text(path))
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise AuditError(
            f"{path} lists its layers in a form that is not known ({type(error).__name__}: {error}); write it again "
            "with trtexec, or build the engine again"
        ) from error


def _text(path: Path) -> str:
    try:
        if (size := path.stat().st_size) > JSON_BYTES:
            raise AuditError(f"{path} has {size:,} bytes, and at most {JSON_BYTES:,} are read")
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise AuditError(f"{path} cannot be read: {error}") from None
