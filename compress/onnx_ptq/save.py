"""Writes an ONNX model whole or not at all; large ones with their weights in a file beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
from onnx import TensorProto, external_data_helper

from compress.engines.onnx_file import read_onnx
from compress.errors import AuditError, EngineError
from compress.files import replacing
from compress.onnx_ptq.load import SourceFile, one_line, tensors_of

_LARGEST = (1 << 31) - (1 << 20)
"""Bytes of a file of one piece, less than protobuf's limit of 2 GiB."""
_INSIDE = 1024
"""Bytes of tensors that always stay in the model itself: shapes, axes, scales."""
_ALIGNED = 4096


def save_model(source: SourceFile, path: Path) -> Path:
    """Write a model; it has external data if it is too large without, or if the file that it comes from had them.

    Args:
        source: the model, and the folder that its external data are in. Tensors that are written to another file are
            taken out of it, so that large models are not in memory twice.
        path: file to write; external data go to `<path>.data`; to `<path>.2.data` if an older model
            there reads that, so that each model has its own weights beside it at any moment.

    Raises:
        AuditError: the model is not valid; nothing is written.
        QuantizationError: external data cannot be read.
        OSError: writing fails.
    """
    whole = b"" if source.external else source.proto.SerializeToString()
    if 0 < len(whole) < _LARGEST:
        _check(whole, path)
        with replacing(path) as temporary:
            temporary.write_bytes(whole)
        return path
    del whole
    places = tuple(path.with_name(f"{path.name}{end}") for end in (".data", ".2.data"))
    older = _weight_files(path)
    data = places[1] if places[0] in older else places[0]
    with replacing(path) as temporary, _external(source, data) as proto:
        temporary.write_bytes(proto.SerializeToString())
    for place in older.intersection(places) - {data}:
        place.unlink(missing_ok=True)
    return path


def _weight_files(path: Path) -> set[Path]:
    """Return the files that a model reads its weights from; none if there is no model."""
    try:
        return set(read_onnx(path).weight_files)
    except EngineError:
        return set()


@contextmanager
def _external(source: SourceFile, data: Path) -> Iterator[onnx.ModelProto]:
    """Move the tensors of a model to a file, one at a time, and yield the model, which refers to it."""
    proto = source.proto
    with replacing(data) as temporary:
        with temporary.open("wb") as file:
            for tensor in tensors_of(proto.graph):
                if tensor.data_type == TensorProto.STRING:
                    continue
                outside = external_data_helper.uses_external_data(tensor)
                if not outside and len(tensor.raw_data) <= _INSIDE:
                    continue
                raw = _raw(source, tensor)
                file.seek(-(-file.tell() // _ALIGNED) * _ALIGNED)
                offset = file.tell()
                file.write(raw)
                tensor.raw_data = b"\0"
                external_data_helper.set_external_data(tensor, data.name, offset=offset, length=len(raw))
                tensor.ClearField("raw_data")
        yield proto


def _raw(source: SourceFile, tensor: onnx.TensorProto) -> bytes:
    """The bytes of a tensor, also of one whose data are in another file."""
    if not external_data_helper.uses_external_data(tensor):
        return tensor.raw_data
    source.array(tensor)  # refuses data that are missing
    whole = onnx.TensorProto()
    whole.CopyFrom(tensor)
    external_data_helper.load_external_data_for_tensor(whole, str(source.folder))
    return whole.raw_data


def _check(model: bytes, path: Path) -> None:
    try:
        onnx.checker.check_model(model)
    except Exception as error:
        raise AuditError(f"the quantized form of {path.name} does not pass onnx.checker: {one_line(error)}") from error
