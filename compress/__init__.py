"""compress: PyTorch vision models made small and fast, and measured on the engine.

    qmodel = compress.quantize(model, example_inputs, batches, spec=compress.QuantSpec(target="tensorrt"))
    compress.export_onnx(qmodel, example_inputs, "model.onnx")
    engine = compress.build_engine("model.onnx", "openvino")

The README shows each use; every name below has its own docstring.
"""

import signal
import sys

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # `python -m compress` comes by here first, and importing torch takes seconds: Ctrl-C ends it without a trace
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from compress.data import DataSpec, load_data
from compress.engines import Engine, TorchEngine, build_engine, engine_availability
from compress.errors import CompressError
from compress.export.audit import OnnxAudit, audit_onnx
from compress.export.onnx import export_onnx
from compress.export.spec import ExportSpec
from compress.graph.trace import trace
from compress.measure import BenchSpec, measure_accuracy, measure_latency
from compress.models import ModelSpec, build_model
from compress.pipeline import run
from compress.quantization.calibrate import CalibrationReport, calibrate, quantize
from compress.quantization.decisions import Placement
from compress.quantization.fused import fuse_for_training
from compress.quantization.insert import insert_quantizers
from compress.quantization.learned import learn_scales
from compress.quantization.migrate import from_pytorch_quantization
from compress.quantization.quantizer import Quantizer
from compress.quantization.sensitivity import Sensitivity, sensitivity
from compress.quantization.spec import ActivationSpec, AdaRoundSpec, QuantSpec, Rule, WeightSpec
from compress.receptive_field import effective_receptive_field, receptive_field
from compress.recipe import Recipe, load_recipe
from compress.roofline.model import roofline
from compress.sparsity.parametrization import squash_masks
from compress.sparsity.schedule import MaskSchedule
from compress.sparsity.sparsifier import sparsify
from compress.sparsity.spec import SparsitySpec
from compress.training import QATSpec, TrainSpec, evaluate, fit, recalibrate_batchnorm
from compress.version import __version__

if sys.argv[:1] == ["-m"] and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
    signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = [
    "ActivationSpec",
    "AdaRoundSpec",
    "BenchSpec",
    "CalibrationReport",
    "CompressError",
    "DataSpec",
    "Engine",
    "ExportSpec",
    "MaskSchedule",
    "ModelSpec",
    "OnnxAudit",
    "Placement",
    "QATSpec",
    "QuantSpec",
    "Quantizer",
    "Recipe",
    "Rule",
    "Sensitivity",
    "SparsitySpec",
    "TorchEngine",
    "TrainSpec",
    "WeightSpec",
    "__version__",
    "audit_onnx",
    "build_engine",
    "build_model",
    "calibrate",
    "effective_receptive_field",
    "engine_availability",
    "evaluate",
    "export_onnx",
    "fit",
    "from_pytorch_quantization",
    "fuse_for_training",
    "insert_quantizers",
    "learn_scales",
    "load_data",
    "load_recipe",
    "measure_accuracy",
    "measure_latency",
    "quantize",
    "recalibrate_batchnorm",
    "receptive_field",
    "roofline",
    "run",
    "sensitivity",
    "sparsify",
    "squash_masks",
    "trace",
]
