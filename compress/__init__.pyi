# The public API, a name a line: for type checkers, editors and the interpreter (__init__.py reads it).
# Names marked experimental may change in any version.
from compress.audit.engine import EngineAudit as EngineAudit
from compress.audit.files import audit_engine as audit_engine
from compress.audit.onnx import OnnxAudit as OnnxAudit
from compress.audit.onnx import audit_onnx as audit_onnx
from compress.data import DataSpec as DataSpec
from compress.data.load import load_data as load_data
from compress.engines.base import Engine as Engine
from compress.engines.registry import build_engine as build_engine
from compress.engines.registry import engine_availability as engine_availability
from compress.engines.tensorrt.build import build_tensorrt as build_tensorrt
from compress.engines.torch import TorchEngine as TorchEngine
from compress.errors import CompressError as CompressError
from compress.errors import CompressWarning as CompressWarning
from compress.export import ExportSpec as ExportSpec
from compress.export.litert import export_litert as export_litert
from compress.export.onnx import export_onnx as export_onnx
from compress.graph.trace import trace as trace
from compress.measure import BenchSpec as BenchSpec
from compress.measure.accuracy import measure_accuracy as measure_accuracy
from compress.measure.accuracy import measure_metric as measure_metric
from compress.measure.latency import measure_latency as measure_latency
from compress.measure.parity import check_onnx as check_onnx
from compress.models import ModelSpec as ModelSpec
from compress.models.by_name import build_model as build_model
from compress.onnx_ptq.cast import cast_onnx as cast_onnx  # experimental
from compress.onnx_ptq.dequantize import dequantize_onnx as dequantize_onnx  # experimental
from compress.onnx_ptq.pt2e import export_coreml as export_coreml  # experimental
from compress.onnx_ptq.pt2e import export_executorch as export_executorch  # experimental
from compress.onnx_ptq.pt2e import from_pt2e as from_pt2e  # experimental
from compress.onnx_ptq.pt2e import to_pt2e as to_pt2e  # experimental
from compress.onnx_ptq.quantize import mend_onnx as mend_onnx
from compress.onnx_ptq.quantize import quantize_onnx as quantize_onnx
from compress.onnx_ptq.to_torch import from_onnx as from_onnx
from compress.pipeline import run as run
from compress.pipeline.saved import load as load
from compress.pipeline.saved import save as save
from compress.pipeline.studies.tune import tune as tune  # experimental
from compress.qat_fusion.fuse import fuse_for_training as fuse_for_training
from compress.quantization import ActivationSpec as ActivationSpec
from compress.quantization import AdaRoundSpec as AdaRoundSpec
from compress.quantization import QuantSpec as QuantSpec
from compress.quantization import ReconstructSpec as ReconstructSpec
from compress.quantization import Rule as Rule
from compress.quantization import WeightSpec as WeightSpec
from compress.quantization.calibration.calibrate import calibrate as calibrate
from compress.quantization.learned import learn_offsets as learn_offsets
from compress.quantization.learned import learn_scales as learn_scales
from compress.quantization.placement.decisions import Placement as Placement
from compress.quantization.placement.insert import insert_quantizers as insert_quantizers
from compress.quantization.ptq.quantize import quantize as quantize
from compress.quantization.ptq.quantize import quantize_targets as quantize_targets
from compress.quantization.pytorch_quantization import from_pytorch_quantization as from_pytorch_quantization
from compress.quantization.quantizer import Quantizer as Quantizer
from compress.quantization.report import CalibrationReport as CalibrationReport
from compress.quantization.report import QuantizedModule as QuantizedModule
from compress.quantization.sensitivity import Sensitivity as Sensitivity
from compress.quantization.sensitivity import diagnose as diagnose
from compress.quantization.sensitivity import mend as mend
from compress.quantization.sensitivity import sensitivity as sensitivity
from compress.receptive import effective_receptive_field as effective_receptive_field
from compress.receptive import receptive_field as receptive_field
from compress.recipe.tree import Recipe as Recipe
from compress.recipe.tree import load_recipe as load_recipe
from compress.roofline_model.model import roofline as roofline
from compress.search import SearchSpec as SearchSpec  # experimental
from compress.search.search import Front as Front  # experimental
from compress.search.search import search as search  # experimental
from compress.sparsity import SparsitySpec as SparsitySpec
from compress.sparsity.channels import prune_channels as prune_channels
from compress.sparsity.parametrization import MaskSchedule as MaskSchedule
from compress.sparsity.parametrization import squash_masks as squash_masks
from compress.sparsity.sparsifier import sparsify as sparsify
from compress.training import QATSpec as QATSpec
from compress.training import TrainSpec as TrainSpec
from compress.training.log import Callback as Callback
from compress.training.loop import fit as fit
from compress.training.loops.cycle import QuantizationCycle as QuantizationCycle
from compress.training.optim import recalibrate_batchnorm as recalibrate_batchnorm
from compress.training.passes import evaluate as evaluate
from compress.training.passes import record_step as record_step
from compress.version import __version__ as __version__
