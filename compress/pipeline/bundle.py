"""A run's file as a model repository of Triton Inference Server or of OpenVINO Model Server."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from compress.engines.base import TensorInfo
from compress.engines.onnx_file import read_onnx
from compress.errors import RunError, near_misses
from compress.files import replacing, write_text
from compress.pipeline.again import chosen_variant, networks_of

SERVERS = {"triton": "onnxruntime", "openvino": "openvino"}
"""Server -> the engine whose file it is given."""
_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "int64": "TYPE_INT64", "int32": "TYPE_INT32"}


def write_bundle(
    folder: Path, server: str, out: Path, *, variant: str = "", name: str = "", max_batch_size: int = 32
) -> list[Path]:
    """Write `<out>/<name>/1/model.onnx`, and for Triton `<out>/<name>/config.pbtxt`.

    Args:
        folder: of a finished run.
        server: `triton` or `openvino`.
        out: the model repository; models of other names in it are left alone.
        variant: which network; "" = the last that was made.
        name: of the model in the repository; "" = that of the run folder.
        max_batch_size: largest batch that Triton puts together; files of a fixed batch size are served as they are.

    Raises:
        RunError: there is no such server or network, or the repository holds a model of that name.
    """
    if server not in SERVERS:
        raise RunError(f"there is no server {server!r}{near_misses(server, SERVERS)} (one of: {', '.join(SERVERS)})")
    file = networks_of([folder])[chosen_variant(folder, variant)].of(SERVERS[server])
    model = out / (name or folder.resolve().name)
    if model.exists():
        raise RunError(f"{model} is there already; name another model with --name, or remove it")
    with replacing(model / "1" / "model.onnx") as path:
        shutil.copyfile(file, path)
    written = [model / "1" / "model.onnx"]
    if server == "triton":
        interface = read_onnx(file)
        text = config_text(interface.inputs, interface.outputs, max_batch_size=max_batch_size)
        written.append(write_text(model / "config.pbtxt", text))
    return written


def config_text(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], *, max_batch_size: int) -> str:
    """Return Triton's configuration of an ONNX file; batches are put together where the file leaves the size open."""
    batched = all(tensor.shape and tensor.shape[0] == -1 for tensor in (*inputs, *outputs))

    def rows(kind: str, tensors: Sequence[TensorInfo]) -> str:
        parts = []
        for tensor in tensors:
            dims = ", ".join(map(str, tensor.shape[1:] if batched else tensor.shape))
            kind_of = _TYPES.get(tensor.dtype, f"TYPE_{tensor.dtype.upper()}")
            parts.append(f'  {{ name: "{tensor.name}", data_type: {kind_of}, dims: [{dims}] }}')
        return f"{kind} [\n" + ",\n".join(parts) + "\n]\n"

    head = f'backend: "onnxruntime"\nmax_batch_size: {max_batch_size if batched else 0}\n'
    return head + rows("input", inputs) + rows("output", outputs) + ("dynamic_batching { }\n" if batched else "")
