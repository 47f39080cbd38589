"""A network as a torch module and as its ONNX file: both readers give the same quantizers, results and INT8 layers."""

import contextlib
import io
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import compress
from analysis.common.study import command_line, gpu_software, listed, option, study_options
from analysis.engine_check.run import lost_layers
from analysis.random_networks.check import RUNTIME_DB, TARGETS, inputs
from analysis.random_networks.graphs import SHAPE, Graph
from analysis.random_networks.network import Network, Step, steps_of
from compress.engines import build_engine
from compress.errors import CompressError
from compress.files import write_text
from compress.onnx_ptq.quantize import quantize_onnx_file
from compress.quantization import ActivationSpec, QuantSpec, Target
from compress.quantization.numerics import scale_from_amax
from compress.quantization.sensitivity import sqnr

Depth = Literal["quantizers", "results", "engine"]
# Operations that an older exporter's file spells with others, and a hook, which a file does not hold.
OTHERWISE_WRITTEN = {
    "hook after": "a layer with hooks stays float and says so",
    "hook before": "the same",
    "shared bn": "a BatchNorm that is called twice stays, and a file holds two",
    "in place": "SiLU in place is not looked for",
    "list of branches": "of two branches of one length, the other is the identity",
    "conv of circles": "the exporter writes slices, which share the scale of the image that they are of",
    "chunk": "the exporter writes slices",
    "flip": "the exporter writes a slice that goes back",
    "linear interpolation": "the exporter writes the sum of two products",
    "variance": "the exporter writes the mean of a product",
    "addition of a product": "the exporter writes a product and a sum",
    "addcmul": "the same",
    "add method": "the same, for its alpha",
}
OPERATIONS_OF_A_GRAPH, OPSET = 25, 19
# Largest relative difference of two scales: the two readers sum in another order.
SCALES = 1e-3


def of_network(steps: tuple[Step, ...], target: Target, folder: Path, *, depth: Depth) -> str:
    steps = tuple(step for step in steps if step.name not in OTHERWISE_WRITTEN)
    model, x, file = Network(steps).eval(), inputs(), folder / "float.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # the exporter prints the graph of what it cannot write
                torch.onnx.export(model, (x,), str(file), dynamo=False, opset_version=17)
            _run(file, x)
        except Exception:  # the exporter does not write it, loses a size, or writes what no engine loads
            return ""
    return difference(model, file, x, target, depth=depth)


def of_graph(seed: int, target: Target, folder: Path, *, depth: Depth) -> str:
    graph, file = Graph(seed, OPSET), folder / "float.onnx"
    graph.weighted()
    file.write_bytes(graph.model(OPERATIONS_OF_A_GRAPH).SerializeToString())
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    try:
        model = compress.from_onnx(file, x)
    except CompressError as error:
        return "" if "no counterpart" in str(error) else f"from_onnx: {error}"
    return difference(model, file, x, target, depth=depth)


def difference(model: nn.Module, file: Path, x: Tensor, target: Target, *, depth: Depth) -> str:
    """Quantize a network and its file, export the network, and compare.

    Args:
        model: of torch.
        file: the same network as ONNX; the quantized files are written beside it.
        x: what both are calibrated with and compared on.
        target: whose placement is followed.
        depth: `quantizers` compares those; `results` also what the two quantized files compute; `engine` also asks the
            target's engine which layers it computes in 8 bits.

    Returns:
        In what they differ; "" if in nothing, also where both are refused.
    """
    spec = QuantSpec(target=target, activations=ActivationSpec(calibrator="max"), smooth=None)
    made: dict[str, Any] = {}
    refused = {}
    for name in ("torch", "file"):
        out = file.with_name(f"{name}.onnx")
        try:
            if name == "file":
                done = quantize_onnx_file(file, [x], spec=spec, out=out)
                made[name] = (done.placement, done.calibration)
            else:
                qmodel = compress.quantize(model, x, [x], spec=spec)
                if depth != "quantizers":
                    compress.export_onnx(qmodel, x, out)
                made[name] = (qmodel.placement, qmodel.report.calibration)
        except CompressError as error:
            refused[name] = str(error)
    if refused:
        return "" if len(refused) == 2 else f"refused of one alone: {refused}"
    pairs, weights = zip(*(ranges(*one) for one in made.values()), strict=True)
    if text := _unlike(pairs, "activations") or _unlike(weights, "weights"):
        return text
    differ = "" if depth == "quantizers" else _results(file, x)
    return differ or (_engines(file, target, len(x)) if depth == "engine" else "")


def ranges(placement: Any, calibration: Any) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    parts = (
        [(site.name, site.format) for site in placement.activations],
        [(f"{site.path}.weight_quantizer", site.format) for site in placement.weights],
    )
    activations, weights = (
        [
            (str(form), float(torch.as_tensor(scale_from_amax(calibration.amax[name], form)).max()))
            for name, form in part
        ]
        for part in parts
    )
    return sorted(activations), sorted(set(weights))  # a shared weight has a row for each layer of a file


def _unlike(both: tuple[list[tuple[str, float]], list[tuple[str, float]]], what: str) -> str:
    ours, theirs = both
    alike = len(ours) == len(theirs) and all(
        name == other and abs(a - b) <= SCALES * max(a, b) for (name, a), (other, b) in zip(ours, theirs, strict=True)
    )
    return "" if alike else f"{what}: {_short(ours, theirs)} of torch, {_short(theirs, ours)} of the file"


def _short(part: list[tuple[str, float]], other: list[tuple[str, float]]) -> list[str]:
    left = [(name, a) for name, a in part if not any(n == name and abs(a - b) <= SCALES * b for n, b in other)]
    return [f"{name.replace('QuantFormat', '')} {scale:.3g}" for name, scale in left] or [f"{len(part)} in all"]


def _results(file: Path, x: Tensor) -> str:
    exact, ours, theirs = (_run(file.with_name(f"{name}.onnx"), x) for name in (file.stem, "torch", "file"))
    for one, a, b in zip(exact, ours, theirs, strict=True):
        near, same = min(sqnr(one, a), sqnr(one, b)), sqnr(a, b)
        if same < min(RUNTIME_DB, near):
            return (
                f"files: {same:.1f} dB between them; to float {sqnr(one, a):.1f} of torch, {sqnr(one, b):.1f} of file"
            )
    return ""


def _run(file: Path, x: Tensor) -> list[Tensor]:
    with build_engine(file, "onnxruntime", threads=1, fuse="no") as engine:
        results = engine.run({engine.inputs[0].name: x.numpy()})
        return [torch.from_numpy(results[value.name]) for value in engine.outputs]


def _engines(file: Path, target: Target, batch_size: int) -> str:
    for name in ("torch", "file"):
        made = file.with_name(f"{name}.onnx")
        int8 = tuple(row.name for row in compress.audit_onnx(made).rows if row.int8)
        if lost := lost_layers(made, target, int8, batch_size):
            return f"{target} computes in float, of the file by {name}: {', '.join(lost)}"
    return ""


def main() -> None:
    o = study_options(
        __doc__,
        option("--count", type=int, default=300, help="of networks, and of graphs"),
        option("--seed", type=int, default=0, help="of the first"),
        option("--engine-every", type=int, default=10, help="ask the engine for each n-th"),
        out="results/reliability",
    )
    torch.set_num_threads(1)
    found: list[str] = []
    kinds: dict[str, Callable[..., str]] = {"network": lambda seed, *a, **k: of_network(steps_of(seed), *a, **k)}
    for kind, compare in (kinds | {"graph": of_graph}).items():
        for seed in range(o.seed, o.seed + o.count):
            target = TARGETS[seed % len(TARGETS)]
            depth: Depth = "results" if (seed // len(TARGETS)) % o.engine_every else "engine"
            with tempfile.TemporaryDirectory() as folder:
                try:
                    text = compare(seed, target, Path(folder), depth=depth)
                except Exception as error:  # a row of the table
                    text = f"{type(error).__name__}: {error}"
            if text:
                found.append(f"| {kind} {seed} | {target} | {' '.join(text.replace(folder, '').split())[:300]} |")
                print(found[-1], flush=True)
    write_text(o.out / "readers.md", _page(found, o.count, o.engine_every))


def _page(found: list[str], count: int, every: int) -> str:
    versions = listed(gpu_software("onnx", "onnxruntime", "openvino", "tensorrt_rtx"))
    lines = [
        "# A torch module and its ONNX file through both readers",
        "",
        f"`{command_line()}`; {versions}; a CPU with {os.cpu_count()} cores.",
        "",
        f"{count} random networks and {count} random graphs, the targets in turn: formats and scales of all "
        f"quantizers, signal to noise between both quantized files, and for each {every}th the layers that the engine "
        f"computes in 8 bits (TensorRT-RTX builds for SM 89). They differ in {len(found)}. Left out are operations "
        f"that torch's older exporter writes with others: {', '.join(OTHERWISE_WRITTEN)}.",
    ]
    return "\n".join([*lines, "", "| case | target | difference |", "|---|---|---|", *found, ""])


if __name__ == "__main__":
    main()
