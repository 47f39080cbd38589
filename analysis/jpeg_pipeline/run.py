"""JPEG files from the page cache to a training step: the pipeline alone, and a network that trains on it.

    python -m analysis.jpeg_pipeline.run

Writes jpeg_pipeline.json after every row, and prints the rows.
"""

from __future__ import annotations

import functools
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

import compress
from analysis.common.qat_variants import DEVICE, NETWORKS, fast_arithmetic, finish, machine, pretrained
from analysis.common.study import Row, command_line, study_parser
from compress.data import BatchPlan, DataSet, DataSpec, load_data
from compress.data.base import Batch, Split
from compress.data.decode import Decoder
from compress.data.jpeg import Reader, decode_jpegs, pack
from compress.data.memory import in_memory
from compress.data.workers import Workers
from compress.files import write_json
from compress.kernels.resample import Window, resample
from compress.training import QATSpec, fit
from compress.training.callbacks import Callback
from compress.training.log import EpochRow

SIZES = {"ImageNet's size": (500, 375), "short side 256": (341, 256)}
"""Width and height of the files, in pixels."""
DIFFERENT = 64
BATCH = 128


def picture(rng: np.random.Generator, width: int, height: int) -> bytes:
    """Return a JPEG file of quality 90 with structure at every scale, about as large as a photograph's."""
    total = np.zeros((height, width, 3), dtype=np.float32)
    for scale in (1, 2, 4, 8, 16, 32, 64):
        grid = rng.normal(size=(height // scale + 2, width // scale + 2, 3)).astype(np.float32)
        grey = Image.fromarray(np.uint8(np.clip(128 + 40 * grid, 0, 255)))
        total += (np.asarray(grey.resize((width, height), Image.Resampling.BICUBIC)) - 128.0) * scale**0.5 / 5
    file = io.BytesIO()
    Image.fromarray(np.uint8(np.clip(128 + total, 0, 255))).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_folder(root: Path, size: tuple[int, int], count: int) -> float:
    """Write `count` files of ten classes, `DIFFERENT` of them different; return their mean size in bytes."""
    rng = np.random.default_rng(0)
    files = [picture(rng, *size) for _ in range(min(count, DIFFERENT))]
    for part, images in (("train", count), ("val", 2 * BATCH if count > 2 * BATCH else 20)):
        for i in range(images):
            path = root / part / f"{i % 10}" / f"{i:06}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            if i < len(files):
                path.write_bytes(files[i])
            else:
                path.hardlink_to(root / part / f"{i % len(files) % 10}" / f"{i % len(files):06}.jpg")
    return sum(map(len, files)) / len(files)


class Turns(Split):
    """Several splits of the same images, one after the other from epoch to epoch."""

    def __init__(self, splits: list[Split]) -> None:
        first = splits[0]
        super().__init__(labels=first.labels, preprocessing=first.preprocessing, seed=first.seed)
        self.splits = splits

    def __len__(self) -> int:
        """Number of images."""
        return len(self.splits[0])

    def load(self, indices: list[int], *, epoch: int | None, device: torch.device) -> Batch:
        """See `Split.load`."""
        return self.splits[0].load(indices, epoch=epoch, device=device)

    def batches(self, plan: BatchPlan, *, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """Yield those of the epoch's split."""
        return self.splits[(plan.epoch or 0) % len(self.splits)].batches(plan, device=device)


class EpochRows(Callback):
    """Adds the row of each epoch as it ends."""

    def __init__(self, add: Callable[[Row], None], names: Sequence[str]) -> None:
        self._add, self._names = add, names

    def epoch(self, name: str, row: EpochRow) -> None:
        """See `Callback.epoch`."""
        self._add({
            "pictures": self._names[row.epoch - 1], "images_per_s": round(row.images_per_s), "waited": row.waited,
            "seconds": round(row.seconds, 2), "loss": row.train_loss,
        })  # fmt: skip


class Study:
    """The rows so far."""

    def __init__(self, arguments: Any) -> None:
        self.arguments = arguments
        self.report: Row = {
            "command": command_line(), "machine": machine(), "cores": len(os.sched_getaffinity(0)), "rows": [],
        }  # fmt: skip

    def add(self, **row: Any) -> None:
        """Keep a row and print it."""
        self.report["rows"].append(row)
        write_json(self.arguments.out / "jpeg_pipeline.json", self.report)
        print(row, flush=True)

    def data(self, root: Path, decode: Any, workers: int) -> DataSet:
        """Return the folder's splits."""
        spec: Any = {"name": "folder", "root": str(root), "image_size": self.arguments.pixels, "batch_size": BATCH}
        return load_data(DataSpec(**spec, workers=workers, decode=decode))

    def alone(self, root: Path, files: str, bytes_each: float) -> None:
        """Measure the pipeline without a network: one pass of training batches."""
        for decode, workers in (
            ("cpu", self.arguments.workers),
            ("gpu", 4),
            ("gpu", 8),
            ("gpu", self.arguments.workers),
        ):
            split = self.data(root, decode, workers).train
            passes = split.batches(BatchPlan(batch_size=BATCH, epoch=1, drop_last=True), device=DEVICE)
            for _ in range(3):  # workers begin, kernels are compiled
                next(passes)
            finish()
            start, images = time.perf_counter(), 0
            for batch, _ in passes:
                images += len(batch)
            finish()
            speed = images / (time.perf_counter() - start)
            self.add(
                files=files, kilobytes=round(bytes_each / 1e3, 1), decode=decode, workers=workers,
                images_per_s=round(speed), notes=split.notes(),
            )  # fmt: skip

    def parts(self, root: Path, files: str) -> None:
        """Measure the parts of a batch's way, each alone: read by the workers, decoded, resized, normalized."""
        split = self.data(root, "gpu", self.arguments.workers).train
        names = np.array([os.fsencode(file.relative_to(root / "train")) for file in split.files])  # type: ignore[attr-defined]
        decoder = Decoder(root / "train", names, preprocessing=split.preprocessing)
        shares = split.batch_indices(BatchPlan(batch_size=BATCH, epoch=1, limit=min(len(split), 64 * BATCH)))
        pin = DEVICE.type == "cuda"
        passes = Workers(self.arguments.workers).read(Reader(decoder), pack, shares, 0, pin=pin)
        kept, ms = [next(passes)], dict.fromkeys(("read", "decode", "resize", "normalize"), 0.0)
        start = time.perf_counter()
        for packed in passes:
            kept = [*kept[-7:], packed]
        ms["read"] = (time.perf_counter() - start) / max(1, len(shares) - 1)
        for i, packed in enumerate([*kept, *kept]):
            images: Any = list(packed.files.split(packed.lengths))
            for part, make in (
                ("decode", lambda x: decode_jpegs(x, DEVICE)),
                ("resize", functools.partial(_resized, packed.windows, split.preprocessing.height_width)),
                ("normalize", lambda x: split.preprocessing.normalize(x.float().div_(255))),
            ):
                start = time.perf_counter()
                images = make(images)
                finish()
                ms[part] += (time.perf_counter() - start) / len(kept) if i >= len(kept) else 0.0
        self.add(files=files, workers=self.arguments.workers, ms_a_batch={k: round(v * 1e3, 2) for k, v in ms.items()})

    def train(self, root: Path, files: str) -> None:
        """Train on images in the GPU's memory, on files decoded by the GPU, and by the CPU, in turn by epoch."""
        by_gpu, by_cpu = (self.data(root, decode, self.arguments.workers) for decode in ("gpu", "cpu"))
        stored = in_memory(by_gpu.train, DEVICE)
        names = ["first (compiles)", *self.arguments.pictures]
        order = Turns(
            [stored if name in ("memory", names[0]) else (by_gpu if name == "gpu" else by_cpu).train for name in names]
        )
        network = NETWORKS[self.arguments.network]
        if self.arguments.network != "tiny":
            make: Any = network.make
            network = replace(network, make=functools.partial(make, num_classes=10))
        model = pretrained(network).eval()
        x = next(order.batches(BatchPlan(batch_size=32), device=DEVICE))[0]
        spec = compress.QuantSpec(activations=compress.ActivationSpec(calibrator="max"))
        qmodel = compress.quantize(model, x[:2], [x], spec=spec)
        qat = QATSpec(
            epochs=len(names), lr=1e-4, distill=False, evaluate_every=len(names), compile=self.arguments.compile,
            precision="bf16", fused="on", cuda_graphs=self.arguments.cuda_graphs,
        )  # fmt: skip
        rows = EpochRows(lambda row: self.add(files=files, training=self.arguments.network, **row), names)
        data = DataSet(order, by_gpu.val)
        fit(qmodel, data, qat, batch_size=BATCH, folder=None, device=DEVICE, callbacks=[rows])

    def same(self, root: Path, files: str) -> None:
        """Compare pixels of the two decoders, and of two passes of one."""
        one = self.data(root, "gpu", self.arguments.workers).train
        plan = BatchPlan(batch_size=BATCH, limit=BATCH)
        first, again = (self.pixels(one, plan, DEVICE) for _ in range(2))
        usual = self.pixels(one, plan, torch.device("cpu"))
        apart = (first - usual).abs().float()
        self.add(
            files=files, same_twice=bool(torch.equal(first, again)), largest_difference=int(apart.max()),
            mean_difference=round(float(apart.mean()), 3),
        )  # fmt: skip

    def pixels(self, split: Split, plan: BatchPlan, device: torch.device) -> Tensor:
        """Return grey levels of a batch without augmentation, on the CPU."""
        return split.preprocessing.pixels(next(split.batches(plan, device=device))[0]).cpu().int()


def _resized(windows: Sequence[Window], size: tuple[int, int], images: Sequence[Tensor]) -> Tensor:
    return resample(images, windows, size)


def main() -> None:
    """Measure all rows."""
    parser = study_parser(__doc__, out="results/h100")
    parser.add_argument("--images", type=int, default=8192, help="files of each size")
    parser.add_argument(
        "--pictures", nargs="+", default=["memory", "gpu", "memory", "gpu", "cpu"], help="of each epoch"
    )
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--workers", type=int, default=15, help="of the rows that are not for fewer")
    parser.add_argument("--network", default="resnet50", choices=NETWORKS)
    parser.add_argument("--compile", default="regions", type=lambda word: {"no": False, "whole": True}.get(word, word))
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--cuda-graphs", action="store_true", help="record the passes of a step")
    parser.add_argument("--only-training", action="store_true", help="leave out the pipeline alone")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    fast_arithmetic()
    study = Study(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for i, files in enumerate(arguments.sizes):
            root = Path(folder) / str(i)
            bytes_each = write_folder(root, SIZES[files], arguments.images)
            if not arguments.only_training:
                study.same(root, files)
                study.alone(root, files, bytes_each)
            study.parts(root, files)
        for i, files in enumerate(arguments.sizes):
            study.train(Path(folder) / str(i), files)


if __name__ == "__main__":
    main()
