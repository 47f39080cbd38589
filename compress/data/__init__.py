"""Data sets whose batches depend on (seed, epoch, step) alone, and the preprocessing that is stored with a model."""

from compress.data.base import Batch, BatchPlan, DataSet, Split, hash_seed
from compress.data.load import load_data
from compress.data.preprocessing import Preprocessing
from compress.data.spec import DATASETS, DataSpec, check_data_spec

__all__ = [
    "DATASETS",
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
