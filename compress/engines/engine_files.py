"""From a file of the user to the layers of an engine: what stands beside an engine, a build log, or inspector JSON."""

from __future__ import annotations

from pathlib import Path

from compress.engines.engine_layers import EngineListing
from compress.engines.nvidia_inspector import parse_inspector
from compress.engines.nvidia_log import parse_build_log
from compress.engines.tensorrt_metadata import check_fresh, check_whole, metadata_path, read_metadata
from compress.errors import AuditError, EngineError

LOG, LAYERS = ".log", ".layers.json"
"""Endings of the verbose build log and of the inspector's JSON that stand beside `<engine>`."""


def read_engine_layers(path: Path | str) -> EngineListing:
    """Read the layers of an engine.

    Args:
        path: an engine, beside which `<engine>.layers.json` (the inspector's, preferred) or `<engine>.log` stands; or
            one of these files itself.

    Raises:
        AuditError: no such file, nothing beside the engine, or a file that tells of no layer.
        EngineError: the engine is truncated, or another than was built.
    """
    path = Path(path)
    if not path.is_file():
        raise AuditError(f"{path} does not exist; give an engine, its build log or the inspector's JSON")
    if path.suffix == ".onnx":
        raise AuditError(f"{path} is a model, not an engine of it: --onnx shows what is in it, build makes an engine")
    if path.suffix == ".json":
        return parse_inspector(_text(path))
    if path.suffix in {".log", ".txt"}:
        return parse_build_log(_text(path))
    if metadata_path(path).is_file():
        check_whole(path, read_metadata(path))
    tried = [beside for end in (LAYERS, LOG) for beside in (Path(f"{path}{end}"), path.with_suffix(end))]
    for beside in tried:
        if beside.is_file():
            return read_engine_layers(beside)
    raise AuditError(
        f"nothing beside {path} tells of its layers (looked for {tried[0].name} and {tried[2].name}). Build it with "
        f"`python -m compress build`, which keeps the log; or write {tried[0].name} with trtexec --loadEngine={path} "
        f"--profilingVerbosity=detailed --exportLayerInfo={tried[0].name}"
    )


def onnx_beside(path: Path | str) -> Path | None:
    """The ONNX file that an engine was built from, if its metadata names one that stands beside it unchanged."""
    path = Path(path)
    for engine in (path, path.with_suffix("")):  # the second where `path` is the engine's log
        try:
            told = read_metadata(engine)
            onnx = engine.with_name(told.onnx)
            check_fresh(engine, told, onnx)
        except (EngineError, OSError):
            continue
        return onnx
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise AuditError(f"{path} cannot be read: {error}") from None
