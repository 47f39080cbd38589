"""Latency, also end to end, accuracy, parity and sizes, measured on engines, and the machine they were measured on."""

from compress.measure.accuracy import EngineAccuracy, measure_accuracy
from compress.measure.end_to_end import EndToEnd, measure_end_to_end
from compress.measure.first_difference import LayerDifference, first_difference
from compress.measure.latency import Latency, latency_ratio, measure_latency
from compress.measure.machine import Gpu, Machine, describe_machine
from compress.measure.metric import METRIC_NAMES, Metric
from compress.measure.parity import Parity, agreement, compare_logits, sqnr_db
from compress.measure.sizes import Sizes, model_sizes
from compress.measure.spec import BenchSpec, check_bench_spec

__all__ = [
    "METRIC_NAMES",
    "BenchSpec",
    "EndToEnd",
    "EngineAccuracy",
    "Gpu",
    "Latency",
    "LayerDifference",
    "Machine",
    "Metric",
    "Parity",
    "Sizes",
    "agreement",
    "check_bench_spec",
    "compare_logits",
    "describe_machine",
    "first_difference",
    "latency_ratio",
    "measure_accuracy",
    "measure_end_to_end",
    "measure_latency",
    "model_sizes",
    "sqnr_db",
]
