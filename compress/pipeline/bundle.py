"""A run's file as a model repository of Triton or OpenVINO Model Server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from compress.engines.base import TensorInfo
from compress.engines.onnx_file import read_onnx
from compress.engines.registry import suits
from compress.errors import RunError, near_misses
from compress.files import replacing, write_text
from compress.pipeline.folder import recipe_of
from compress.pipeline.saved import chosen_variant, networks_of
from compress.variants import Variant

SERVERS = {"triton": ("onnxruntime", "openvino", "tensorrt"), "openvino": ("openvino",)}
# Lets ONNX Runtime's backend give a file to TensorRT.
_TENSORRT = 'optimization { execution_accelerators { gpu_execution_accelerator: [ { name: "tensorrt" } ] } }\n'
_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "int64": "TYPE_INT64", "int32": "TYPE_INT32"}


def write_bundle(
    folder: Path, server: str, out: Path, *, variant: str = "", name: str = "", max_batch_size: int = 32
) -> list[Path]:
    """Write `<out>/<name>/1/model.onnx`, and for Triton `<out>/<name>/config.pbtxt`.

    `server` is `triton` or `openvino`; `variant` "" = the best; `name` "" = the run folder's; Triton joins batches up
    to `max_batch_size`.
    """
    if server not in SERVERS:
        raise RunError(f"there is no server {server!r}{near_misses(server, SERVERS)} (one of: {', '.join(SERVERS)})")
    chosen = chosen_variant(folder, variant)
    engine = _engine_of(folder, chosen, server)
    file = networks_of([folder])[str(chosen)].of(engine)
    model = out / (name or folder.resolve().name)
    if model.exists():
        raise RunError(f"{model} is there already; name another model with --name, or remove it")
    with replacing(model / "1" / "model.onnx") as path:
        shutil.copyfile(file, path)
    written = [model / "1" / "model.onnx"]
    if server == "triton":
        interface = read_onnx(file)
        text = config_text(interface.inputs, interface.outputs, engine, max_batch_size=max_batch_size)
        written.append(write_text(model / "config.pbtxt", text))
    return written


def _engine_of(folder: Path, variant: Variant, server: str) -> str:
    engines, quantization = SERVERS[server], recipe_of(folder).quantization
    if not variant.is_quantized or quantization is None:
        return engines[0]
    found = [engine for target in quantization.targets for engine in engines if suits(engine, [target])]
    if not found:
        raise RunError(
            f"the INT8 files of {folder} are for {', '.join(quantization.targets)}, and {server} runs files in "
            f"{' or '.join(engines)}: add one to quantization.target and run `export` again, or give --variant float"
        )
    return found[0]


def config_text(
    inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo], engine: str = "onnxruntime", *, max_batch_size: int
) -> str:
    """Triton's configuration; batches are joined where the file leaves the size open."""
    batched = all(tensor.shape and tensor.shape[0] == -1 for tensor in (*inputs, *outputs))

    def rows(kind: str, tensors: Sequence[TensorInfo]) -> str:
        parts = []
        for tensor in tensors:
            dims = ", ".join(map(str, tensor.shape[1:] if batched else tensor.shape))
            kind_of = _TYPES.get(tensor.dtype, f"TYPE_{tensor.dtype.upper()}")
            parts.append(
                f"  {{ name: {json.dumps(tensor.name, ensure_ascii=False)}, data_type: {kind_of}, dims: [{dims}] }}"
            )
        return f"{kind} [\n" + ",\n".join(parts) + "\n]\n"

    backend = "openvino" if engine == "openvino" else "onnxruntime"
    head = f'backend: "{backend}"\nmax_batch_size: {max_batch_size if batched else 0}\n'
    head += _TENSORRT if engine == "tensorrt" else ""
    return head + rows("input", inputs) + rows("output", outputs) + ("dynamic_batching { }\n" if batched else "")
