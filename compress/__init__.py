"""compress: PyTorch vision models made small and fast, and measured on the engine.

    qmodel = compress.quantize(model, example_inputs, batches, spec=compress.QuantSpec(target="tensorrt"))
    compress.export_onnx(qmodel, example_inputs, "model.onnx")
    engine = compress.build_engine("model.onnx", "openvino")

The README shows each use; every name below has its own docstring. A name is imported when it is first used, so that
`import compress` takes no time and `compress.QuantSpec` does not wait for matplotlib or an engine.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from compress.version import __version__ as __version__

if TYPE_CHECKING:  # the same names for type checkers and editors; tests/test_package.py compares the two lists
    from compress.audit.engine import EngineAudit as EngineAudit
    from compress.audit.engine_file import audit_engine as audit_engine
    from compress.audit.onnx import OnnxAudit as OnnxAudit
    from compress.audit.onnx import audit_onnx as audit_onnx
    from compress.data.load import load_data as load_data
    from compress.data.spec import DataSpec as DataSpec
    from compress.engines.base import Engine as Engine
    from compress.engines.registry import build_engine as build_engine
    from compress.engines.registry import engine_availability as engine_availability
    from compress.engines.tensorrt.build import build_tensorrt as build_tensorrt
    from compress.engines.torch import TorchEngine as TorchEngine
    from compress.errors import CompressError as CompressError
    from compress.errors import CompressWarning as CompressWarning
    from compress.export.onnx import export_onnx as export_onnx
    from compress.export.spec import ExportSpec as ExportSpec
    from compress.graph.trace import trace as trace
    from compress.interop.pytorch_quantization import from_pytorch_quantization as from_pytorch_quantization
    from compress.measure import BenchSpec as BenchSpec
    from compress.measure import measure_accuracy as measure_accuracy
    from compress.measure import measure_latency as measure_latency
    from compress.measure import measure_metric as measure_metric
    from compress.measure.file_check import check_onnx as check_onnx
    from compress.models.by_name import ModelSpec as ModelSpec
    from compress.models.by_name import build_model as build_model
    from compress.onnx_ptq.mend import mend_onnx as mend_onnx
    from compress.onnx_ptq.quantize import quantize_onnx as quantize_onnx
    from compress.onnx_ptq.to_torch.network import from_onnx as from_onnx
    from compress.pipeline import run as run
    from compress.pipeline.saved import load as load
    from compress.pipeline.saved import save as save
    from compress.qat_fusion.fuse import fuse_for_training as fuse_for_training
    from compress.quantization.calibration.calibrate import calibrate as calibrate
    from compress.quantization.learned import learn_scales as learn_scales
    from compress.quantization.offsets import learn_offsets as learn_offsets
    from compress.quantization.placement.decisions import Placement as Placement
    from compress.quantization.placement.insert import insert_quantizers as insert_quantizers
    from compress.quantization.ptq.quantize import quantize as quantize
    from compress.quantization.ptq.quantize import quantize_targets as quantize_targets
    from compress.quantization.quantizer import Quantizer as Quantizer
    from compress.quantization.report import CalibrationReport as CalibrationReport
    from compress.quantization.sensitivity.diagnose import diagnose as diagnose
    from compress.quantization.sensitivity.mend import mend as mend
    from compress.quantization.sensitivity.sensitivity import Sensitivity as Sensitivity
    from compress.quantization.sensitivity.sensitivity import sensitivity as sensitivity
    from compress.quantization.spec import ActivationSpec as ActivationSpec
    from compress.quantization.spec import AdaRoundSpec as AdaRoundSpec
    from compress.quantization.spec import QuantSpec as QuantSpec
    from compress.quantization.spec import ReconstructSpec as ReconstructSpec
    from compress.quantization.spec import Rule as Rule
    from compress.quantization.spec import WeightSpec as WeightSpec
    from compress.receptive_field import effective_receptive_field as effective_receptive_field
    from compress.receptive_field import receptive_field as receptive_field
    from compress.recipe.tree import Recipe as Recipe
    from compress.recipe.tree import load_recipe as load_recipe
    from compress.roofline.model import roofline as roofline
    from compress.search.front import Front as Front
    from compress.search.search import search as search
    from compress.search.spec import SearchSpec as SearchSpec
    from compress.sparsity.channel_pruning import prune_channels as prune_channels
    from compress.sparsity.parametrization import squash_masks as squash_masks
    from compress.sparsity.schedule import MaskSchedule as MaskSchedule
    from compress.sparsity.sparsifier import sparsify as sparsify
    from compress.sparsity.spec import SparsitySpec as SparsitySpec
    from compress.training import QATSpec as QATSpec
    from compress.training import TrainSpec as TrainSpec
    from compress.training import evaluate as evaluate
    from compress.training import fit as fit
    from compress.training import recalibrate_batchnorm as recalibrate_batchnorm
    from compress.training.callbacks import Callback as Callback
    from compress.training.loops.cycle import QuantizationCycle as QuantizationCycle
    from compress.training.passes import record_step as record_step

_HOMES = {
    "ActivationSpec": "compress.quantization.spec",
    "AdaRoundSpec": "compress.quantization.spec",
    "BenchSpec": "compress.measure",
    "CalibrationReport": "compress.quantization.report",
    "Callback": "compress.training.callbacks",
    "CompressError": "compress.errors",
    "CompressWarning": "compress.errors",
    "DataSpec": "compress.data.spec",
    "Engine": "compress.engines.base",
    "EngineAudit": "compress.audit.engine",
    "ExportSpec": "compress.export.spec",
    "Front": "compress.search.front",
    "MaskSchedule": "compress.sparsity.schedule",
    "ModelSpec": "compress.models.by_name",
    "OnnxAudit": "compress.audit.onnx",
    "Placement": "compress.quantization.placement.decisions",
    "QATSpec": "compress.training",
    "QuantSpec": "compress.quantization.spec",
    "QuantizationCycle": "compress.training.loops.cycle",
    "Quantizer": "compress.quantization.quantizer",
    "Recipe": "compress.recipe.tree",
    "ReconstructSpec": "compress.quantization.spec",
    "Rule": "compress.quantization.spec",
    "SearchSpec": "compress.search.spec",
    "Sensitivity": "compress.quantization.sensitivity.sensitivity",
    "SparsitySpec": "compress.sparsity.spec",
    "TorchEngine": "compress.engines.torch",
    "TrainSpec": "compress.training",
    "WeightSpec": "compress.quantization.spec",
    "audit_engine": "compress.audit.engine_file",
    "audit_onnx": "compress.audit.onnx",
    "build_engine": "compress.engines.registry",
    "build_model": "compress.models.by_name",
    "build_tensorrt": "compress.engines.tensorrt.build",
    "calibrate": "compress.quantization.calibration.calibrate",
    "check_onnx": "compress.measure.file_check",
    "diagnose": "compress.quantization.sensitivity.diagnose",
    "effective_receptive_field": "compress.receptive_field",
    "engine_availability": "compress.engines.registry",
    "evaluate": "compress.training",
    "export_onnx": "compress.export.onnx",
    "fit": "compress.training",
    "from_onnx": "compress.onnx_ptq.to_torch.network",
    "from_pytorch_quantization": "compress.interop.pytorch_quantization",
    "fuse_for_training": "compress.qat_fusion.fuse",
    "insert_quantizers": "compress.quantization.placement.insert",
    "learn_offsets": "compress.quantization.offsets",
    "learn_scales": "compress.quantization.learned",
    "load": "compress.pipeline.saved",
    "load_data": "compress.data.load",
    "load_recipe": "compress.recipe.tree",
    "measure_accuracy": "compress.measure",
    "measure_latency": "compress.measure",
    "measure_metric": "compress.measure",
    "mend": "compress.quantization.sensitivity.mend",
    "mend_onnx": "compress.onnx_ptq.mend",
    "prune_channels": "compress.sparsity.channel_pruning",
    "quantize": "compress.quantization.ptq.quantize",
    "quantize_onnx": "compress.onnx_ptq.quantize",
    "quantize_targets": "compress.quantization.ptq.quantize",
    "recalibrate_batchnorm": "compress.training",
    "receptive_field": "compress.receptive_field",
    "record_step": "compress.training.passes",
    "roofline": "compress.roofline.model",
    "run": "compress.pipeline",
    "save": "compress.pipeline.saved",
    "search": "compress.search.search",
    "sensitivity": "compress.quantization.sensitivity.sensitivity",
    "sparsify": "compress.sparsity.sparsifier",
    "squash_masks": "compress.sparsity.parametrization",
    "trace": "compress.graph.trace",
}
"""Public name -> the module that defines it."""

__all__ = sorted([*_HOMES, "__version__"])


class _Package(ModuleType):
    """This package as a module that imports a public name when it is first used."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, except where the import system would put a sub-package in the place of a public name.

        `compress.roofline` and `compress.receptive_field` are functions; the packages of the same names are reached
        with `from compress.roofline import ...`.
        """
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
