"""One random network through quantize, export and ONNX Runtime, and the smallest network that still fails."""

import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import torch
from torch import Tensor, fx

from analysis.random_networks.network import Network, Step
from analysis.random_networks.operations import CHANNELS, SIDE
from compress.engines import build_engine
from compress.errors import CalibrationError, CompressError
from compress.export.onnx import export_onnx
from compress.graph.compare import relative_error
from compress.quantization import ActivationSpec, QuantSpec, Target
from compress.quantization.ptq.quantize import quantize
from compress.quantization.quantizer import quantizers
from compress.quantization.sensitivity import sqnr

TARGETS: tuple[Target, ...] = ("tensorrt", "openvino", "onnxruntime")
# Largest relative error of the network with its quantizers off.
SAME = 1e-3
# Least signal to noise of the quantized network. 8 bits leave 20 to 50 dB, and less where an operation amplifies
# their error; a wrong sign, scale or axis leaves about none.
LOWEST_DB = 5.0
# Least signal to noise of ONNX Runtime against fake quantization: where a sum lies between two integers, float32 may
# round it to either.
RUNTIME_DB = 20.0


def inputs() -> Tensor:
    return torch.randn(4, CHANNELS, SIDE, SIDE, generator=torch.Generator().manual_seed(7))


def failure_of(steps: tuple[Step, ...], target: Target, *, export: bool) -> str:
    """Quantize a network and compare it with the float one, and its file with it.

    Args:
        steps: of the network.
        target: whose placement is followed.
        export: True exports it and runs the file in ONNX Runtime, with and without its optimizations.

    Returns:
        What went wrong; "" if nothing did, also where the network is refused with a reason.
    """
    model, x = Network(steps).eval(), inputs()
    with torch.no_grad():
        expected = model(x)
        if not bool(expected.isfinite().all()):
            return ""
        try:
            spec = QuantSpec(target=target, activations=ActivationSpec(calibrator="max"), bias_correction=None)
            qmodel = cast(fx.GraphModule, quantize(model, x, [x], spec=spec))
        except CalibrationError:
            return ""  # a tensor of zeros, such as relu(-relu(x)), has no range
        except CompressError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"traceback of quantize: {type(error).__name__}: {error}"
        plain = copy.deepcopy(qmodel)
        for _, quantizer in quantizers(plain):
            quantizer.enabled = False
        difference = relative_error(expected, plain(x))
        if difference > SAME:
            return f"with quantizers off it differs by {difference:.2g}"
        result = qmodel(x)
        noise = sqnr(expected, result)
        if noise < LOWEST_DB:
            return f"float to quantized: {noise:.1f} dB"
    return _failure_of_file(qmodel, x, result) if export else ""


def _failure_of_file(qmodel: fx.GraphModule, x: Tensor, expected: Tensor) -> str:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        try:
            export_onnx(qmodel, x, path)
        except CompressError as error:
            return f"export refused: {error}"
        except Exception as error:
            return f"traceback of export: {type(error).__name__}: {error}"
        for fuse in ("no", "yes"):
            try:
                with build_engine(path, "onnxruntime", threads=1, fuse=fuse) as engine:
                    (result,) = engine.run({engine.inputs[0].name: x.numpy()}).values()
            except CompressError as error:
                return f"ONNX Runtime (fuse={fuse}) refuses the file: {error}"
            noise = sqnr(expected, torch.from_numpy(result))
            if noise < RUNTIME_DB:
                return f"fake quantization to ONNX Runtime (fuse={fuse}): {noise:.1f} dB"
    return ""


def shrunk(steps: tuple[Step, ...], target: Target, *, export: bool) -> tuple[Step, ...]:
    i = 0
    while i < len(steps):
        fewer = steps[:i] + steps[i + 1 :]
        if failure_of(fewer, target, export=export):
            steps, i = fewer, 0
        else:
            i += 1
    return steps
