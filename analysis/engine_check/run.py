"""Asks each target's engine which layers it computes in 8 bits, and compares that with the audit of the file."""

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import compress
from analysis.common.study import command_line, gpu_software, listed, option, study_options
from analysis.engine_check.networks import NETWORKS
from compress.audit.engine import folded_names, lost_in_audit, lost_in_runtime
from compress.engines.tensorrt.build import build_tensorrt
from compress.engines.tensorrt.options import TensorRTOptions
from compress.files import write_text
from compress.quantization import Target

TARGETS: tuple[Target, ...] = ("openvino", "onnxruntime", "tensorrt")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an engine says of a file.

    Attributes:
        weighted: convolutions and products of the file.
        int8: names of those that the audit calls INT8.
        lost: those of `int8` that the engine does not compute in 8 bits.
    """

    weighted: int
    int8: tuple[str, ...]
    lost: tuple[str, ...]


def ask(network: nn.Module, x: Tensor, target: Target, folder: Path) -> Answer:
    """Quantize and export a network for a target, and ask the target's engine; for `tensorrt` the log of TensorRT-RTX.

    Raises:
        CompressError: the network is refused, or the engine is not here.
    """
    qmodel = compress.quantize(network, x, [x], spec=compress.QuantSpec(target=target))
    file = compress.export_onnx(qmodel, x, folder / f"{target}.onnx")
    rows = compress.audit_onnx(file).rows
    int8 = tuple(row.name for row in rows if row.int8)
    return Answer(weighted=len(rows), int8=int8, lost=lost_layers(file, target, int8, len(x)))


def lost_layers(file: Path, target: Target, int8: tuple[str, ...], batch_size: int) -> tuple[str, ...]:
    if target == "tensorrt":
        built = build_tensorrt(file, "tensorrt-rtx", options=TensorRTOptions(sms=(89,)))
        return lost_in_audit(compress.audit_engine(built.path, onnx=file), int8)
    more: dict[str, Any] = {"profile": "yes"} if target == "onnxruntime" else {}
    precision = "f32" if target == "openvino" else None  # a float layer in bf16 is float all the same
    with compress.build_engine(file, target, batch_size=batch_size, precision=precision, **more) as engine:
        return lost_in_runtime(engine.runtime_layers(), int8, folded_names(file))


def main() -> None:
    o = study_options(
        __doc__,
        option("--targets", nargs="+", choices=TARGETS, default=list(TARGETS)),
        option("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS)),
        out="results",
    )
    warnings.simplefilter("ignore")
    cells: dict[str, dict[str, Answer | str]] = {}
    for name in o.networks:
        cells[name] = {target: _cell(NETWORKS[name], target) for target in o.targets}
        print(name, *(f"{target}: {cell_text(cell)}" for target, cell in cells[name].items()), sep=" | ", flush=True)
        write_text(o.out / "engine_check.md", page(cells, o.targets))


def _cell(make: Callable[[], tuple[nn.Module, Tensor]], target: Target) -> Answer | str:
    torch.manual_seed(0)
    network, x = make()
    with tempfile.TemporaryDirectory() as folder:
        try:
            return ask(network.eval(), x, target, Path(folder))
        except compress.CompressError as error:
            return f"refused: {' '.join(str(error).split())[:160]}"


def cell_text(cell: Answer | str) -> str:
    if isinstance(cell, str):
        return cell
    return f"{len(cell.int8) - len(cell.lost)} / {len(cell.int8)} / {cell.weighted}"


def page(cells: Mapping[str, Mapping[str, Answer | str]], targets: list[Target]) -> str:
    answers = [cell for row in cells.values() for cell in row.values() if isinstance(cell, Answer)]
    lost, int8 = (sum(len(names) for names in part) for part in ([a.lost for a in answers], [a.int8 for a in answers]))
    versions = gpu_software("onnx", "onnxruntime", "openvino", "tensorrt_rtx", "timm", "torchvision")
    lines = [
        "# What the audit calls INT8, asked of the engine",
        "",
        f"`{command_line()}`; {listed(versions)}; a CPU with {os.cpu_count()} cores; random weights.",
        "",
        f"{int8 - lost} of {int8} layers that the audit calls INT8 are INT8 in the engine ({len(answers)} files of "
        f"{len(cells)} networks). A cell is: INT8 in the engine / INT8 in the audit / convolutions and products. "
        "Engines: OpenVINO's runtime model, the profile of ONNX Runtime's optimized graph, and the build log of "
        "TensorRT-RTX for SM 89 (built, not run).",
        "",
        "| network | " + " | ".join(targets) + " |",
        "|---|" + "---|" * len(targets),
    ]
    for name, row in cells.items():
        lines.append(f"| {name} | " + " | ".join(cell_text(row[target]).replace("|", "/") for target in targets) + " |")
    differ = [(n, t, c.lost) for n, row in cells.items() for t, c in row.items() if isinstance(c, Answer) and c.lost]
    if differ:
        lines += ["", "| network | target | INT8 in the audit, float in the engine |", "|---|---|---|"]
        lines += [f"| {name} | {target} | {', '.join(names)} |" for name, target, names in differ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
