"""The training loop, its checkpoints and processes."""

from compress.training.checkpoint import load_checkpoint, load_model, save_checkpoint, save_model
from compress.training.distributed import SINGLE, Processes, init_processes
from compress.training.evaluate import Evaluation, evaluate
from compress.training.fitting import fit
from compress.training.freezing import recalibrate_batchnorm
from compress.training.log import EpochRow, TrainReport
from compress.training.spec import FinetuneSpec, QATSpec, TrainSpec, check_train_spec

__all__ = [
    "SINGLE",
    "EpochRow",
    "Evaluation",
    "FinetuneSpec",
    "Processes",
    "QATSpec",
    "TrainReport",
    "TrainSpec",
    "check_train_spec",
    "evaluate",
    "fit",
    "init_processes",
    "load_checkpoint",
    "load_model",
    "recalibrate_batchnorm",
    "save_checkpoint",
    "save_model",
]
