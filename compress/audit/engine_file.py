"""Audits an engine by its file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compress.audit.cuda_plan import read_cuda_layers
from compress.audit.engine import EngineAudit, audit_listing
from compress.audit.files import onnx_beside, read_engine_layers
from compress.audit.onnx import sparse_nodes
from compress.errors import AuditError


def audit_engine(path: Path | str, *, onnx: Path | str | None = None, sides: Sequence[int] = ()) -> EngineAudit:
    """Audit an engine: the type of every layer, the bytes that it moves, and what is wrong with either.

    Args:
        path: a built engine with its log or the inspector's JSON beside it, or one of these files; an ONNX file stands
            for the plan that the engine `cuda` makes of it.
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
    listing = read_cuda_layers(path, sides=sides) if planned else read_engine_layers(path)
    source = onnx or (path if planned else onnx_beside(path))
    return audit_listing(listing, onnx=source, sparse_nodes=() if source is None else sparse_nodes(source))
