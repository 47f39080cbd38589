"""Layers that stay float by their time on an engine (`compress.tune`), for forty ONNX files.

A process for each file, on cores of its own, with a cache of its own. After tuning, the three files are built anew,
timed in turn once more, and compared with float on photographs that neither calibration nor tuning has seen.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, Queue

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import nn

import compress
from analysis.common.networks import random_network, with_statistics
from analysis.common.study import (
    Row,
    append_row,
    command_line,
    listed,
    option,
    read_rows,
    software,
    study_options,
    table,
)
from analysis.onnx_in.forms import write_dynamo, write_older
from compress.engines.base import read_onnx
from compress.files import write_text
from compress.measure.latency import latency_ratio, time_files
from compress.measure.machine import describe_machine
from compress.measure.parity import sqnr_db
from compress.pipeline.studies.tune import LEAST_GAIN
from compress.quantization import Target
from compress.support.process import core_count

# Networks with most groups of layers first: they take longest.
TORCHVISION = (
    *("efficientnet_v2_s", "inception_v3", "googlenet", "densenet121", "efficientnet_b0", "maxvit_t", "swin_t"),
    *("mobilenet_v3_large", "regnet_y_400mf", "mobilenet_v2", "mnasnet1_0", "shufflenet_v2_x1_0", "regnet_x_800mf"),
    *("resnext50_32x4d", "resnet50", "convnext_tiny", "mobilenet_v3_small", "shufflenet_v2_x0_5", "vit_b_32"),
    *("squeezenet1_1", "resnet18", "alexnet"),
)
# The newer exporter takes minutes for the others.
DYNAMO = ("mobilenet_v3_small", "resnet18", "resnet50", "mobilenet_v2", "squeezenet1_1", "alexnet", "regnet_y_400mf")
SEGMENTATION = ("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "fcn_resnet50")
BACKBONES = ("ssdlite320_mobilenet_v3_large", "fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet_resnet50_fpn")
TIMM = (
    *("mobilevit_xs", "efficientformer_l1", "mobilenetv4_conv_small", "vit_tiny_patch16_224"),
    *("deit_tiny_patch16_224", "repvgg_a0"),
)
# Height, width, mean and deviation by a part of the file's name; files of PP-OCR see lines of text on photographs.
INPUTS = {
    "lite0": (224, 224, 127 / 255, 128 / 255),
    "onet": (48, 48, 127.5 / 255, 128 / 255),
    "rnet": (24, 24, 127.5 / 255, 128 / 255),
    "det": (320, 320, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "rec": (48, 320, 0.5, 0.5),
    "cls": (48, 192, 0.5, 0.5),
}
USUAL = (224, 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
TEXT = "Invoice 4711 of May 2026: total 1,208.50 EUR, thank you"
# Least dB to float: noise grows through random weights, so that rules' files have little more there.
FLOORS = {"random": 10.0, "real": 15.0}
CALIBRATED, TUNED = 40, 32  # photographs for calibration and for tune's floor; the rest are for the second one
TARGETS: dict[str, Target] = {"onnxruntime": "onnxruntime", "openvino": "openvino", "cuda": "tensorrt"}
CUDA = (
    *("resnet18", "resnet50", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0", "regnet_y_400mf", "vit_b_32"),
    *("densenet121", "convnext_tiny", "swin_t", "efficientnet_lite0", "ch_PP-OCRv4_det_infer"),
)


def names(files: Path | None) -> list[str]:
    real = sorted(path.stem for path in files.glob("*.onnx")) if files else []
    return [*real, *TIMM, *BACKBONES, *SEGMENTATION, *TORCHVISION]


def float_file(name: str, photographs: NDArray[np.float32], files: Path | None, folder: Path) -> Path:
    if files and (files / f"{name}.onnx").is_file():
        return files / f"{name}.onnx"
    model = with_statistics(_network(name), torch.from_numpy(photographs[:8]))
    write = write_dynamo if name in DYNAMO else write_older
    return write(model, torch.from_numpy(photographs[:2]), folder / f"{name}.onnx")


def _network(name: str) -> nn.Module:
    options: Row = {"aux_logits": False, "init_weights": True} if name in ("inception_v3", "googlenet") else {}
    if name in (*BACKBONES, *SEGMENTATION):
        options = {"weights_backbone": None}
    found = random_network(name, **options)
    return found.get_submodule("backbone") if name in BACKBONES else found


def photographs_of(name: str, folder: Path) -> NDArray[np.float32]:
    height, width, mean, deviation = next((own for part, own in INPUTS.items() if part in name), USUAL)
    images = [_image(path, height, width, text="ocr" in name.lower()) for path in sorted(folder.glob("*.jpg"))]
    pixels = (np.stack(images) / 255 - np.asarray(mean)) / np.asarray(deviation)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2), np.float32)


def _image(path: Path, height: int, width: int, *, text: bool) -> NDArray[np.uint8]:
    image = Image.open(path).convert("RGB")
    scale = max(height / image.height, width / image.width) * (1 if text else 8 / 7)
    image = image.resize((max(width, round(image.width * scale)), max(height, round(image.height * scale))))
    left, top = (image.width - width) // 2, (image.height - height) // 2
    image = image.crop((left, top, left + width, top + height))
    if text:
        size, shift = min(28, height * 3 // 4), sum(path.name.encode())
        for row in range(0, height - size + 1, 2 * size):
            line = TEXT[(shift + row) % 24 :]
            ImageDraw.Draw(image).text((4, row + 4), line, font=ImageFont.load_default(size))
    return np.asarray(image)


def study(name: str, engine: str, minutes: float, images: Path, files: Path | None) -> Row:
    """The row of a file; in a process of its own."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        data = photographs_of(name, images)
        path = float_file(name, data, files, Path(folder))
        weights = "real" if files and path.parent == files else "random"
        batches = list(torch.from_numpy(data[: CALIBRATED + TUNED]).split(8))
        begun, count = time.monotonic(), CALIBRATED // 8
        spec = compress.QuantSpec(target=TARGETS[engine])
        floor = FLOORS[weights]
        found = compress.tune(path, batches[:count], out=Path(folder) / "q.onnx", images=batches[count:], spec=spec,
                              engine=engine, minutes=minutes, sqnr_db=floor)  # fmt: skip
        spent = (time.monotonic() - begun) / 60
        paths = {form.label: form.path for form in found.forms}
        audits = {label: compress.audit_onnx(path).rows for label, path in paths.items()}
        row: Row = {"network": name, "weights": weights, "engine": engine, "floor_db": floor, "choice": found.choice}
        row |= {"why": found.why, "minutes": round(spent, 2), "groups": len(found.groups), "status": "tuned"}
        row |= {"tried": sum(group.gain_ms is not None for group in found.groups), "layers": len(audits["float"])}
        row |= {"int8_layers": {label: sum(each.int8 for each in rows) for label, rows in audits.items()}}
        row |= {"held_db": {form.label: form.effect.sqnr_db for form in found.forms[1:]}}
        return row | _checked(paths, engine, data[CALIBRATED + TUNED :])


def _checked(paths: dict[str, Path], engine: str, fresh: NDArray[np.float32]) -> Row:
    """Times of files that are built anew, and their dB to float on photographs that nothing else saw."""
    name = read_onnx(paths["float"]).inputs[0].name
    timed = time_files(paths, engine, batch_size=1, inputs={name: fresh[:1]}, runs=200, seconds=2.0)
    results = {}
    for label, path in paths.items():
        with compress.build_engine(path, engine) as built:
            runs = [list(built.run({name: fresh[i : i + 8]}).values()) for i in range(0, len(fresh), 8)]
        results[label] = np.concatenate([np.asarray(x, np.float64).ravel() for run in runs for x in run])
    reference = results.pop("float")
    return {
        "float_ms": round(timed["float"].p50_ms, 3),
        "ratio": {label: round(latency_ratio(row, timed["float"]), 4) for label, row in timed.items()},
        "fresh_db": {label: sqnr_db(reference, found) for label, found in results.items()},
        "fresh": len(fresh),
        "unquiet": next((row.unquiet for row in timed.values() if row.unquiet), ""),
    }


def run_all(arguments: argparse.Namespace) -> None:
    """Studies files beside one another, each on its own cores, until the time is over."""
    waiting: Queue[str] = Queue()
    for name in names(arguments.files):
        if (arguments.engine != "cuda" or name in CUDA) and (not arguments.only or name in arguments.only):
            waiting.put(name)
    end, cores = time.monotonic() + arguments.seconds, sorted(os.sched_getaffinity(0))

    def lane(number: int) -> None:
        own = cores[number * arguments.cores : (number + 1) * arguments.cores]
        os.sched_setaffinity(0, own)  # of this thread, and of the processes that it starts
        while (left := end - time.monotonic()) > 0:
            try:
                name = waiting.get_nowait()
            except Empty:
                return
            with tempfile.TemporaryDirectory() as cache:
                environment = os.environ | {"XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": str(len(own))}
                if arguments.engine == "cuda":
                    environment["CUDA_VISIBLE_DEVICES"] = str(number)
                words = [sys.executable, "-m", "analysis.onnx_in.tuned", *sys.argv[1:], "--one", name]
                try:
                    ended = subprocess.run(words, env=environment, timeout=left, capture_output=True, text=True)
                    why = "" if ended.returncode == 0 else " ".join(ended.stderr.split()[-60:])
                except subprocess.TimeoutExpired:
                    why = "stopped: the time of the study was over"
            if why:
                row = {"network": name, "engine": arguments.engine, "status": "failed", "why": why}
                append_row(arguments.out / "rows.jsonl", row)
            print(name, why, flush=True)

    with ThreadPoolExecutor(arguments.pairs) as pool:
        list(pool.map(lane, range(arguments.pairs)))


def markdown(rows: list[Row]) -> str:
    done = [row for row in rows if row["status"] == "tuned"]
    lines = ["# Layers that stay float by their time", ""]
    for engine in sorted({row["engine"] for row in done}):
        lines += _page_of([row for row in done if row["engine"] == engine], engine)
    failed = [row for row in rows if row["status"] != "tuned"]
    lines += [f"- {row['network']} on {row['engine']}: {row['why']}" for row in failed]
    return "\n".join(lines) + "\n"


HEAD = (
    *("network", "weights", "INT8 of products: rules, tuned", "float ms", "rules", "tuned", "recommended / rules"),
    *("choice", "floor", "dB on held-back images", "dB on fresh images", "floor kept", "groups", "min"),
)


def _page_of(rows: list[Row], engine: str) -> Iterator[str]:
    first, limit = rows[0], 1 - LEAST_GAIN
    yield from (f"## {engine}", "", f"`{first['command']}` on {first['machine']}, {first['cores']} cores a file;")
    yield from (f"{listed(first['software'])}.", "")
    yield from table(HEAD, map(_cells, sorted(rows, key=lambda row: (row["weights"], row["network"]))))
    against = f"{np.mean([_against(row) for row in rows]):.3f} in the mean of {len(rows)} files"
    yield from ("", f"- Recommended file over the rules' file: {against}.")
    both = [row["ratio"]["tuned"] / row["ratio"]["rules"] for row in rows if "tuned" in row["ratio"]]
    yield f"- Tuned file over the rules' file: {np.mean(both or [1.0]):.3f} in the mean of {len(both)} that have one."
    yield f"- Float is recommended for {sum(row['choice'] == 'float' for row in rows)} of {len(rows)}."
    slow = [row for row in rows if row["choice"] != "float" and row["ratio"][row["choice"]] > limit]
    text = ", ".join(f"{row['network']} ({row['ratio'][row['choice']]:.3f})" for row in slow)
    yield f"- Recommended, quantized, and above {limit} of float's time when built anew: {text or 'none'}."
    missed = ", ".join(row["network"] for row in rows if not _kept(row))
    yield f"- The floor was missed on fresh images by {missed or 'none'}."
    yield f"- The machine was busy for {', '.join(row['network'] for row in rows if row['unquiet']) or 'none'}."
    yield ""


def _kept(row: Row) -> bool:
    return bool(row["choice"] == "float" or row["fresh_db"][row["choice"]] >= row["floor_db"])


def _against(row: Row) -> float:
    return float(row["ratio"][row["choice"]] / row["ratio"]["rules"])


def _cells(row: Row) -> list[object]:
    shares = f"{_each(row, 'int8_layers', '{:.0f}')} of {row['layers']}"
    times = [_faster(row["ratio"].get(label)) for label in ("rules", "tuned")]
    noises = [_each(row, key, "{:.1f}") for key in ("held_db", "fresh_db")]
    tried = f"{row['tried']} of {row['groups']}"
    words = [row["choice"], f"{row['floor_db']:g} dB", *noises, "yes" if _kept(row) else "NO", tried, row["minutes"]]
    return [row["network"], row["weights"], shares, row["float_ms"], *times, f"{_against(row):.3f}", *words]


def _faster(ratio: float | None) -> str:
    return "-" if ratio is None else f"{1 / ratio:.2f}x faster" if ratio <= 1 else f"{ratio:.2f}x slower"


def _each(row: Row, key: str, form: str) -> str:
    return ", ".join(form.format(row[key][label]) for label in ("rules", "tuned") if label in row[key])


def main() -> None:
    arguments = study_options(
        __doc__,
        option("--engine", default="onnxruntime", choices=("onnxruntime", "openvino", "cuda")),
        option("--images", default=None, type=Path, help="folder of JPEG files, 120 or so"),
        option("--files", default=None, type=Path, help="folder of ONNX files with real weights"),
        option("--only", default=(), nargs="+", help="networks"),
        option("--pairs", default=8, type=int, help="processes beside one another"),
        option("--cores", default=2, type=int, help="of each process"),
        option("--minutes", default=5.0, type=float, help="of tune, for each file"),
        option("--seconds", default=540.0, type=float, help="of the whole"),
        option("--one", default=None, help="study one file, on the cores that this process has"),
        option("--report", default=None, type=Path, nargs="+", help="write the page of rows.jsonl files instead"),
        out="results/tuned",
    )
    if arguments.report:
        write_text(arguments.out / "tuned.md", markdown([row for file in arguments.report for row in read_rows(file)]))
    elif arguments.one:
        row = study(arguments.one, arguments.engine, arguments.minutes, arguments.images, arguments.files)
        packages = software("torch", "onnxruntime", "openvino")
        command = command_line(images="DIR", files="DIR", one="NETWORK")
        row |= {"machine": describe_machine().cpu, "cores": core_count(), "software": packages, "command": command}
        append_row(arguments.out / "rows.jsonl", row)
    else:
        run_all(arguments)


if __name__ == "__main__":
    main()
