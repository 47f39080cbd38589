"""Latency, accuracy, parity and sizes, measured on engines."""

from compress.measure.accuracy import EngineAccuracy, measure_accuracy
from compress.measure.figures import EngineFigures, compare_figures, measure_metric
from compress.measure.latency import Latency, first_quiet, latency_ratio, measure_latency, time_files
from compress.measure.machine import Gpu, Machine, describe_machine
from compress.measure.metric import METRIC_NAMES, Metric
from compress.measure.parity import Parity, agreement, compare_logits, sqnr_db
from compress.measure.sizes import Sizes, model_sizes
from compress.measure.spec import BenchSpec, check_bench_spec

__all__ = [
    "METRIC_NAMES",
    "BenchSpec",
    "EngineAccuracy",
    "EngineFigures",
    "Gpu",
    "Latency",
    "Machine",
    "Metric",
    "Parity",
    "Sizes",
    "agreement",
    "check_bench_spec",
    "compare_figures",
    "compare_logits",
    "describe_machine",
    "first_quiet",
    "latency_ratio",
    "measure_accuracy",
    "measure_latency",
    "measure_metric",
    "model_sizes",
    "sqnr_db",
    "time_files",
]
