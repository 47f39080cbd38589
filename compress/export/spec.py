"""What ONNX file a recipe asks for: its `export` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class ExportSpec:
    """An ONNX file.

    Attributes:
        opset: 19 or later (per-channel Q/DQ with half-precision scales); from 21 on, weights of 4 bits are INT4.
        precision: type of everything that is not quantized; strongly typed engines run exactly that.
        dynamic_batch: leave the batch size open.
        channel_scales: where the scales of a weight's channels stand: at the `weight`, or behind the layer's `output`,
            which TensorRT-RTX moves fewer bytes with (see `compress.export.channel_scales`).
        require: the run fails when an engine is not that: `int8` (all that is INT8 in the file), `fp16` (no product in
            FP32).
    """

    opset: int = 19
    precision: Literal["fp32", "fp16"] = "fp32"
    dynamic_batch: bool = True
    channel_scales: Literal["weight", "output"] = "weight"
    require: Literal["int8", "fp16"] | None = None
