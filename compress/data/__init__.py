"""Data sets whose batches depend on (seed, epoch, step) alone, and the preprocessing that travels with a model."""

from compress.data.base import Batch, BatchPlan, DataSet, Split, hash_seed
from compress.data.load import check_data_spec, load_data
from compress.data.preprocessing import LABELS_KEY, METADATA_KEY, Preprocessing
from compress.data.spec import DATASETS, DataSpec

__all__ = [
    "DATASETS",
    "LABELS_KEY",
    "METADATA_KEY",
    "Batch",
    "BatchPlan",
    "DataSet",
    "DataSpec",
    "Preprocessing",
    "Split",
    "check_data_spec",
    "hash_seed",
    "load_data",
]
