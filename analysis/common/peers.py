"""Quantizers of other tools, each from a float ONNX file whose input is `INPUT` to a file of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

INPUT = "input"


class Feeds:
    """Batches as ONNX Runtime's quantizer reads them (its CalibrationDataReader)."""

    def __init__(self, name: str, batches: Sequence[Any]) -> None:
        self._feeds = iter([{name: np.asarray(batch)} for batch in batches])

    def get_next(self) -> dict[str, Any] | None:
        return next(self._feeds, None)


def onnxruntime_file(path: Path, batches: Sequence[Tensor], folder: Path, **options: Any) -> Path:
    """ONNX Runtime's quantizer in the form that its documentation recommends for x86."""
    from onnxruntime import quantization  # optional: a peer's part of the engine

    ready, out = folder / "ready.onnx", folder / "ort.onnx"
    quantization.quant_pre_process(str(path), str(ready), skip_symbolic_shape=True)
    quantization.quantize_static(
        str(ready),
        str(out),
        Feeds(INPUT, batches),
        quant_format=quantization.QuantFormat.QDQ,
        per_channel=True,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        reduce_range=False,
        **options,
    )
    return out


def nncf_file(path: Path, batches: Sequence[Tensor], folder: Path, **options: Any) -> Path:
    import nncf  # optional: a peer
    import openvino

    dataset, out = nncf.Dataset(list(batches), lambda batch: {INPUT: batch.numpy()}), folder / "nncf.xml"
    model = nncf.quantize(openvino.Core().read_model(path), dataset, subset_size=len(batches), **options)
    openvino.save_model(model, out, compress_to_fp16=False)
    return out
