"""Accuracy of quantized networks with real weights on real pictures, on engines, beside the peers.

Every row is written as it is measured, and the same command goes on after a stop.
"""

import argparse
import os
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from analysis.common.cifar import NETWORKS
from analysis.common.study import Row, append_row, command_line, option, read_rows, software, study_options
from analysis.real_accuracy.methods import METHODS, Made, Method, exported, figures, logits_of
from analysis.real_accuracy.networks import Subject, cifar, imagenet
from analysis.real_accuracy.report import write
from compress.errors import CompressError
from compress.measure.machine import describe_machine


def main() -> None:
    o = study_options(
        __doc__,
        option("--networks", nargs="+", default=["efficientnet_lite0"]),
        option("--pictures", type=Path, help="folder of ImageNet pictures, one of each class"),
        option("--cifar", help="folder of cifar-10-batches-py"),
        option("--weights", nargs="+", type=Path, default=[], help="files of analysis.low_bits, by network"),
        option("--methods", nargs="+", help="parts of the methods' names; default: all"),
        option("--engines", nargs="+", help="default: all that are installed"),
        option("--device", default="cpu", help="where our methods quantize, such as cuda; engines use the CPU"),
        option("--made", type=Path, help="file that the one method of --methods made elsewhere, on a GPU"),
        option("--made-in", type=float, default=0.0, help="seconds that it took there"),
        option("--made-on", default="", help="name of that GPU"),
        option("--made-note", default="", help="remark on that file"),
        option("--limit", type=int, help="number of pictures"),
        option("--threads", type=int, default=1),
        out="results/real_accuracy",
    )
    file = o.out / "rows.jsonl"
    done: set[tuple[str, ...]] = {(row["network"], row["method"], row["engine"]) for row in read_rows(file)}
    for name in o.networks:
        subject = _subject(name, o)
        with tempfile.TemporaryDirectory() as folder:
            _measure(name, subject, Path(folder), file, done, o)
    write(o.out)


def _subject(name: str, o: argparse.Namespace) -> Subject:
    if name in NETWORKS:
        weights = o.weights[sorted(set(o.networks) & set(NETWORKS), key=o.networks.index).index(name)]
        return cifar(name, o.cifar, weights, o.limit)
    return imagenet(o.pictures, o.limit)


def _measure(
    name: str, subject: Subject, folder: Path, file: Path, done: set[tuple[str, ...]], o: argparse.Namespace
) -> None:
    path, expected = exported(subject.model, subject.calibration[:2], folder / "float.onnx"), dict[str, Tensor]()
    moved = Subject(subject.model.to(o.device), subject.calibration.to(o.device), subject.images, subject.targets)
    for title, method in METHODS.items():
        chosen = not o.methods or any(part in title for part in o.methods)
        asked = [engine for engine in method.engines if not o.engines or engine in o.engines]
        missing = [engine for engine in asked if (name, title, engine) not in done]
        if not chosen or not missing:
            continue
        start = time.perf_counter()
        try:
            where = moved if title.startswith("compress") else subject
            made = Made(o.made, o.made_note) if o.made else method.make(where, path, folder)
        except (ImportError, CompressError) as error:
            print(f"{name}, {title}: not measured ({error})", flush=True)
            continue
        seconds = o.made_in if o.made else time.perf_counter() - start
        gpu = o.made_on or ("" if o.device == "cpu" else torch.cuda.get_device_name())
        for engine in missing:
            if engine not in expected:
                expected[engine] = logits_of(path, engine, subject.images, o.threads)
            try:
                row = _row(name, title, method, engine, made.file, expected[engine], subject, o)
            except CompressError as error:
                print(f"{name}, {title}, {engine}: not measured ({error})", flush=True)
                continue
            row |= {"seconds": round(seconds, 1), "gpu": gpu, "note": made.note}
            append_row(file, row)
            print(f"{name}, {title}, {engine}: {row['figures']['points']['value']:+.2f} points", flush=True)


def _row(
    name: str,
    title: str,
    method: Method,
    engine: str,
    made: Path,
    expected: Tensor,
    subject: Subject,
    o: argparse.Namespace,
) -> Row:
    logits = logits_of(made, engine, subject.images, o.threads)
    float_top1 = 100 * (expected.argmax(1) == subject.targets).double().mean().item()
    return {
        "network": name,
        "method": title,
        "engine": engine,
        "bits": method.bits,
        "float_top1": round(float_top1, 2),
        "figures": asdict(figures(expected, logits, subject.targets)),
        "calibration": len(subject.calibration),
        "evaluated": len(subject.images),
        "command": command_line(pictures="DIR", cifar="DIR", weights="FILE", made="FILE"),
        "machine": describe_machine().cpu,
        "load": round(os.getloadavg()[0], 1),
        "software": software("torch", "openvino", "onnxruntime", *([method.version] if method.version else [])),
    }


if __name__ == "__main__":
    main()
