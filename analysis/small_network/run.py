"""A small network on a GPU: how fast it trains, and its top-1 on the engine `cuda` in float, PTQ, QAT and 2:4 + INT8.

    python -m analysis.small_network.run --data CIFAR --weights resnet20.safetensors
    python -m analysis.small_network.run --shapes --parts accuracies

ResNet-20 on CIFAR-10, or trained here on `shapes`. Writes small_network.json after every row, and prints the rows.
"""

from __future__ import annotations

import copy
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import compress
from analysis.common.cifar import NETWORKS
from analysis.common.study import command_line, gpu_software, study_parser
from compress.data import Batch, BatchPlan, DataSet, DataSpec, load_data
from compress.files import write_json
from compress.quantization.learned import learn_scales
from compress.training import QATSpec, TrainSpec, fit

BATCH = 128
ENGINE_BATCH = 500
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALIBRATION = 1024
Row = dict[str, Any]


class Study:
    """Data, weights and the rows so far."""

    def __init__(self, arguments: Any) -> None:
        name = "shapes" if arguments.shapes else "cifar10" if arguments.data else "digits"
        spec = DataSpec(
            name=name, root=arguments.data, image_size=32, batch_size=BATCH, train_images=arguments.images,
            **({"num_classes": 10, "val_images": arguments.evaluated} if arguments.shapes else {}),
        )  # fmt: skip
        self.data: DataSet = load_data(spec)
        self.weights = load_file(arguments.weights) if arguments.weights else None
        self.out, self.engine_options = arguments.out, dict(arguments.engine)
        self.qat_epochs = arguments.qat_epochs
        self._drawn: dict[str, list[Batch]] = {}
        self.report: Row = {"command": command_line(), "machine": gpu_software("triton"), "rows": []}

    def network(self) -> nn.Module:
        """ResNet-20, trained if weights were given."""
        torch.manual_seed(0)
        model = NETWORKS["resnet20"]()
        if self.weights is not None:
            model.load_state_dict(self.weights)
        return model

    def train(self, epochs: int) -> None:
        """Train the weights that every part begins with."""
        model = self.network()
        spec = TrainSpec(
            epochs=epochs, lr=0.2, weight_decay=5e-4, precision="bf16" if DEVICE == "cuda" else "fp32",
            cuda_graphs=True, evaluate_every=epochs,
        )  # fmt: skip
        start = time.monotonic()
        report = fit(model, self.data, spec, batch_size=BATCH, folder=None, device=DEVICE)
        self.weights = {name: value.cpu() for name, value in model.state_dict().items()}
        self.add({"trained": epochs, "top1": report.history[-1].val_top1, "s": round(time.monotonic() - start, 1)})

    def pictures(self, count: int) -> torch.Tensor:
        """At most `CALIBRATION` training pictures without augmentation, on the CPU."""
        return self._batches("train", BatchPlan(batch_size=CALIBRATION, limit=CALIBRATION))[0][0][:count]

    def evaluated(self) -> list[Batch]:
        """The pictures that files are judged by, on the CPU."""
        return self._batches("val", BatchPlan(batch_size=ENGINE_BATCH))

    def _batches(self, part: str, plan: BatchPlan) -> list[Batch]:
        """Batches of a split; they are made once, by the GPU if there is one."""
        if part not in self._drawn:
            batches = getattr(self.data, part).batches(plan, device=DEVICE)
            self._drawn[part] = [(x.cpu(), targets.cpu()) for x, targets in batches]
        return self._drawn[part]

    def quantized(self, model: nn.Module, **spec: Any) -> nn.Module:
        """The network with calibrated quantizers."""
        x = self.pictures(CALIBRATION)
        return compress.quantize(model.eval(), x[:1], x.split(256), spec=compress.QuantSpec(**spec))

    def add(self, row: Row) -> None:
        """Keep a row and print it."""
        self.report["rows"].append(row)
        write_json(self.out / "small_network.json", self.report)
        print(row, flush=True)


def main() -> None:
    """Speed first, then accuracy."""
    parser = study_parser(__doc__, out="results/small_network")
    parser.add_argument("--data", help="folder of CIFAR-10; the digits of scikit-learn without it")
    parser.add_argument("--weights", type=Path, help="trained float weights of ResNet-20")
    parser.add_argument("--images", type=int, help="training images at most")
    parser.add_argument("--shapes", action="store_true", help="draw `shapes` (10 classes), and train on them first")
    parser.add_argument("--epochs", type=int, default=20, help="of that training")
    parser.add_argument("--qat-epochs", type=int, default=3, help="of each QAT")
    parser.add_argument("--evaluated", type=int, default=10_000, help="pictures of `shapes` that are evaluated")
    parser.add_argument("--parts", nargs="+", default=list(_PARTS), choices=list(_PARTS))
    parser.add_argument("--engine", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="its options")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    study = Study(arguments)
    if arguments.shapes:
        study.train(arguments.epochs)
    for part in arguments.parts:
        try:
            _PARTS[part](study)
        except Exception:
            study.add({"failed": traceback.format_exc()[-1500:]})


def _speeds(study: Study) -> None:
    """Epochs of float training and of QAT, as launches and as CUDA graphs."""
    common: Row = {"epochs": 2, "lr": 0.001, "warmup_epochs": 0, "precision": "bf16", "evaluate_every": 2}
    learned: Row = {**common, "distill": False, "scales": "learned"}
    for graphs in (False, True):
        end = ", CUDA graph" if graphs else ""
        _speed(study, f"float{end}", study.network(), TrainSpec(cuda_graphs=graphs, **common))
        model = study.quantized(study.network())
        spec = QATSpec(cuda_graphs=graphs, distill=False, fused="on", **common)
        _speed(study, f"QAT, BatchNorm folded, fixed ranges{end}", model, spec)
        for fused in ("off", "on"):
            model = study.quantized(study.network(), batchnorm="keep")
            learn_scales(model)
            spec = QATSpec(cuda_graphs=graphs, fused=fused, **learned)
            _speed(study, f"QAT, BatchNorm kept, learned ranges, fused {fused}{end}", model, spec)


def _speed(study: Study, name: str, model: nn.Module, spec: TrainSpec) -> None:
    """The second epoch counts: the first compiles and records."""
    report = fit(model, study.data, spec, batch_size=BATCH, folder=None, device=DEVICE)
    last = report.history[-1]
    study.add({
        "training": name, "images_per_s": round(last.images_per_s), "waited": last.waited, "loss": last.train_loss,
        "top1": last.val_top1,
    })  # fmt: skip


def _accuracies(study: Study) -> None:
    """Top-1 of files on the engine, and of the same files on ONNX Runtime."""
    spec = QATSpec(
        epochs=study.qat_epochs, lr=0.002, precision="bf16" if DEVICE == "cuda" else "fp32", cuda_graphs=True,
    )  # fmt: skip
    teacher = study.network().eval()
    _accuracy(study, "float", study.network().eval())
    qmodel = study.quantized(study.network())
    _accuracy(study, "PTQ", qmodel)
    fit(qmodel, study.data, spec, batch_size=BATCH, folder=None, device=DEVICE, teacher=copy.deepcopy(teacher))
    _accuracy(study, "QAT", qmodel.cpu())
    sparse = study.network()
    compress.sparsify(sparse, compress.SparsitySpec(pattern="2:4"), example_inputs=study.pictures(1))
    qmodel = study.quantized(sparse)
    fit(qmodel, study.data, spec, batch_size=BATCH, folder=None, device=DEVICE, teacher=copy.deepcopy(teacher))
    _accuracy(study, "2:4 + INT8 (QAT)", qmodel.cpu())


def _accuracy(study: Study, name: str, model: nn.Module) -> None:
    path = study.out / "file.onnx"
    model.eval()
    compress.export_onnx(model, study.pictures(2), path, dynamic_batch=True)
    row: Row = {"file": name}
    for engine_name in ("cuda", "onnxruntime"):
        options = {} if engine_name != "cuda" else {"tune": "no", **study.engine_options}
        start = time.monotonic()
        engine = compress.build_engine(path, engine_name, batch_size=ENGINE_BATCH, **options)
        found = compress.measure_accuracy(engine, study.evaluated())
        engine.close()
        row |= {engine_name: found.top1, f"{engine_name}_s": round(time.monotonic() - start, 1)}
    path.unlink()
    study.add(row)


_PARTS = {"speeds": _speeds, "accuracies": _accuracies}


if __name__ == "__main__":
    main()
