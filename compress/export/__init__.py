"""ONNX files with Q/DQ, and the names in them. Here: the `export` section of a recipe."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field


@dataclass(frozen=True, kw_only=True)
class ExportSpec:
    """Form of an ONNX file.

    Attributes:
        opset: from 19 on, Q/DQ have half-precision scales per channel; from 21 on, weights of 4 bits are INT4.
            Files with activations of 16 bits have 21 at least.
        precision: type of everything that is not quantized; strongly typed engines run exactly that.
        dynamic_batch: leave the batch size open.
        channel_scales: place of the scales of a weight's channels: at the `weight`, or after the layer at its `output`,
            with which TensorRT-RTX moves fewer bytes (see `compress.export.tensorrt`).
        nms: for a detector of torchvision, write `<variant>.nms.onnx` too, which ends with boxes, scores and labels:
            decoding and non-maximum suppression, in float32, are in the file.
        require: fails the run if an engine does not compute so: `int8` (all that is INT8 in the file), `fp16` (no
            product in FP32).

    Examples:
        >>> spec = compress.ExportSpec(precision="fp16")
        >>> compress.load_recipe("quickstart", ["export.precision=fp16"]).export == spec
        True
    """

    opset: Annotated[int, Field(ge=19)] = 19
    precision: Literal["fp32", "fp16"] = "fp32"
    dynamic_batch: bool = True
    channel_scales: Literal["weight", "output"] = "weight"
    nms: bool = False
    require: Literal["int8", "fp16"] | None = None


# The former place of this section, which scripts outside import.
sys.modules[f"{__name__}.spec"] = sys.modules[__name__]
