"""A program that uses the installed package, for its types alone: `make package` checks it against the wheel."""

from pathlib import Path
from typing import assert_type

import torch

import compress


def program() -> None:
    """What the types are about; never called."""
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
    images = torch.randn(4, 3, 16, 16)
    spec = compress.QuantSpec(target="openvino", activations=compress.ActivationSpec(calibrator="mse"))
    qmodel = compress.insert_quantizers(model, images, spec)
    assert_type(qmodel.placement, compress.Placement)
    assert_type(compress.quantize(model, images, [images]), compress.QuantizedModule)
    assert_type(compress.calibrate(qmodel, [images]), compress.CalibrationReport)
    path = compress.export_onnx(qmodel, images, "model.onnx")
    assert_type(path, Path)
    with compress.build_engine(path, "openvino") as engine:
        assert_type(compress.measure_latency([engine])[0].p50_ms, float)
    assert_type(compress.audit_onnx(path).int8_share, float)
    compress.QuantSpec(traget="openvino")  # type: ignore[call-arg]  # a misspelt key is an error; without types it is none
