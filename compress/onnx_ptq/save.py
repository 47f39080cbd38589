"""Writes an ONNX model whole or not at all; large ones with their weights in a file beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import onnx
from onnx import TensorProto, external_data_helper

from compress.engines.base import import_library, library_errors
from compress.engines.onnx_file import read_onnx
from compress.errors import AuditError, EngineError
from compress.files import replacing
from compress.onnx_ptq.load import SourceFile, tensors_of
from compress.onnx_ptq.run import unknown_to_runtime

_LARGEST = (1 << 31) - (1 << 20)
"""Bytes of a file of one piece, less than protobuf's limit of 2 GiB."""
_INSIDE = 1024
"""Bytes of tensors that always stay in the model itself: shapes, axes, scales."""
_ALIGNED = 4096


def save_model(source: SourceFile, path: Path, target: str = "") -> Path:
    """Write a model; it has external data if it is too large without, or if the file that it comes from had them.

    Args:
        source: the model, and the folder of its external data. Tensors that go to another file are taken out of it, so
            that large models are not in memory twice.
        path: external data go to the first of `<path>.data`, `<path>.2.data`, ... that is not there, so that no model
            loses its weights; those of a model that was at `path` are removed afterwards.
        target: that the model is for; ONNX Runtime loads its files once.

    Raises:
        AuditError: the model is not valid; nothing is written.
        QuantizationError: external data cannot be read.
        OSError: writing fails.
    """
    whole = b"" if source.external else source.proto.SerializeToString()
    if 0 < len(whole) < _LARGEST:
        _check(whole, path, target, source)
        with replacing(path) as temporary:
            temporary.write_bytes(whole)
        return path
    del whole
    older, data = _weight_files(path), _free_data(path)
    with replacing(path) as temporary, _external(source, data) as proto:
        temporary.write_bytes(proto.SerializeToString())
    for place in {place for place in older if _is_data_of(place, path)} - _weights_of_others(path):
        place.unlink(missing_ok=True)
    return path


def _free_data(path: Path) -> Path:
    """Return the first of `<path>.data`, `<path>.2.data`, ... that is not there: any that is may be another model's."""
    names = (path.with_name(f"{path.name}{f'.{i}' if i > 1 else ''}.data") for i in itertools.count(1))
    return next(place for place in names if not place.exists() and not place.is_symlink())


def _is_data_of(place: Path, path: Path) -> bool:
    return place.parent == path.parent and place.name.startswith(f"{path.name}.") and place.name.endswith(".data")


def _weights_of_others(path: Path) -> set[Path]:
    found: set[Path] = set()
    for other in path.parent.glob("*.onnx"):
        if other != path:
            found |= _weight_files(other)
    return found


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
    if not external_data_helper.uses_external_data(tensor):
        return tensor.raw_data
    source.array(tensor)  # refuses data that are missing
    whole = onnx.TensorProto()
    whole.CopyFrom(tensor)
    external_data_helper.load_external_data_for_tensor(whole, str(source.folder))
    return whole.raw_data


def _check(model: bytes, path: Path, target: str, source: SourceFile) -> None:
    """Refuse a model that onnx's checker or its shape inference refuses, and one that its own engine does not load."""
    with library_errors(AuditError, f"the new form of {path.name} is not valid (", "); report it, please"):
        onnx.checker.check_model(model, full_check=True)
        if target == "onnxruntime" and not unknown_to_runtime(source):
            onnxruntime = import_library("onnxruntime", "pip install onnxruntime")
            options = onnxruntime.SessionOptions()
            options.log_severity_level = 4
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            for library in source.ops:
                options.register_custom_ops_library(str(library.absolute()))
            onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
