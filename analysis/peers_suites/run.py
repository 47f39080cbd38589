"""Quantizes the models of other tools' test suites for every target and compares what the engines compute."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx.backend.test.loader import load_model_tests
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import compress
from analysis.common.study import command_line, gpu_software, listed, study_parser
from compress.files import write_text
from compress.quantization.spec import Target

TARGETS: tuple[Target, ...] = ("openvino", "onnxruntime", "tensorrt")
SHAPES = (
    (2, 3, 32, 32),
    (2, 1, 28, 28),
    (2, 3, 224, 224),
    (2, 1, 32, 32),
    (2, 3, 299, 299),
    (2, 10),
    (2, 16),
    (2, 8, 16),
    (2, 4, 8, 8),
)
_WEIGHTED = {
    "Conv",
    "ConvTranspose",
    "Gemm",
    "MatMul",
    "Einsum",
    "LSTM",
    "GRU",
    "RNN",
    "Attention",
    "LayerNormalization",
}
NEAR_DB, SAME_DB = 15.0, 25.0
"""Signal to noise of the quantized network to float, and of the engine to the quantized network."""


READ = {
    "ModelWithFunctionalOps": "right: draws a weight at random in each call",
    "CustomFunctionalConv": "right: its only product is a fixed filter",
    "MultiBranchesConnectedModelWithConcat": "right: joins a constant of one image, so its batch is fixed",
    "MultiBranchesModel": "right reason, no help: the layer that forward makes belongs in `__init__`",
}
"""What a person who read the model says of the reason for its refusal."""


SAID = {
    "opsets 6 to 25 are read": "right: a later opset",
    "ONNX Runtime cannot load": "right: ONNX Runtime does not load it",
    "is bfloat16": "right: ONNX Runtime takes no such input",
    "NaN or Inf was collected": "wrong: a mask of -inf is no broken weight",
}
"""The same of reasons that many files have in common."""
_PRODUCTS = {"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum"}


@dataclass(frozen=True)
class Row:
    """What became of a model for a target; `reason` judges that of a refusal."""

    suite: str
    model: str
    target: str
    verdict: str
    said: str = ""
    reason: str = ""


def sqnr(expected: np.ndarray, found: np.ndarray) -> float:
    """Signal to noise in dB; 100 where they are equal."""
    noise = float(((expected - found) ** 2).sum())
    return 10 * float(np.log10(max(float((expected**2).sum()), 1e-30) / noise)) if noise else 100.0


def modules_of(file: Path) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Yield networks that are made without arguments, with an input that they take."""
    parents = [str(parent) for parent in file.resolve().parents[:4]]
    sys.path[:0] = [parent for parent in parents if parent not in sys.path]  # so that the suite's own imports work
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, kind in inspect.getmembers(module, inspect.isclass):
        if issubclass(kind, nn.Module) and kind.__module__ == file.stem:
            found = _made(kind)
            if found is not None:
                yield name, *found


def _made(kind: type[nn.Module]) -> tuple[nn.Module, Tensor] | None:
    torch.manual_seed(0)
    own = [tuple(value) for key, value in vars(kind).items() if key.startswith("INPUT_S") and value]
    try:
        network = kind().eval()
    except Exception:  # it needs arguments, or other packages: not a network of this study
        return None
    for shape in [*own, *SHAPES]:
        x = torch.randn(shape)
        try:
            with torch.no_grad():
                if copy.deepcopy(network)(x) is not None:
                    return network, x
        except Exception:  # the shape does not fit: the next
            continue
    return None


def first_tensor(output: object) -> Tensor | None:
    """The first floating tensor of an output."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    inner = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return next((t for value in inner if (t := first_tensor(value)) is not None), None)


def judge_network(network: nn.Module, x: Tensor, target: Target, folder: Path) -> tuple[str, str]:
    """Return verdict and text of a torch network."""
    with torch.no_grad():
        expected = first_tensor(copy.deepcopy(network)(x))
    qmodel = compress.quantize(network, x, [x], spec=compress.QuantSpec(target=target))
    with torch.no_grad():
        fake = first_tensor(qmodel(x))
    if expected is None or fake is None:
        return "passed", "no floating output"
    file = compress.export_onnx(qmodel, x, folder / f"{target}.onnx")
    engine = "openvino" if target == "openvino" else "onnxruntime"
    f32 = "f32" if engine == "openvino" else None
    with compress.build_engine(file, engine, batch_size=len(x), precision=f32) as built:
        found = built.run({built.inputs[0].name: x.numpy()})[built.outputs[0].name]
    near, same = sqnr(expected.numpy(), fake.numpy()), sqnr(fake.numpy(), found)
    return _verdict(near, same)


def _verdict(near: float, same: float) -> tuple[str, str]:
    said = f"{near:.0f} dB to float, engine {same:.0f} dB to the quantized network"
    return ("wrong" if same < min(SAME_DB, near) else "coarse" if near < NEAR_DB else "passed"), said


def reason_of(name: str, said: str, network: object, x: object) -> str:
    """Judge the reason of a refusal: that there is nothing to quantize by torch's own count of products."""
    if "has no layer that can be quantized" in said and isinstance(network, nn.Module):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            copy.deepcopy(network)(x)
        if not counter.get_total_flops():
            return "right: torch counts no product"
    if isinstance(network, Path) and "has no layer that can be quantized" in said:
        made = {node.op_type for node in onnx.load(network).graph.node}
        return "not read" if made & _PRODUCTS else "right: the file has no convolution or product of its own"
    return next((reason for part, reason in (READ | SAID).items() if part == name or part in said), "not read")


def onnx_cases() -> Iterator[tuple[str, Path, list[np.ndarray]]]:
    """Yield onnx's backend tests with a product or a convolution, each with its inputs."""
    for case in load_model_tests(kind="node"):
        if case.model is None or not case.data_sets:
            continue
        if {node.op_type for node in case.model.graph.node} & _WEIGHTED:
            folder = Path(tempfile.mkdtemp())
            onnx.save(case.model, folder / "model.onnx")
            yield case.name, folder / "model.onnx", [np.asarray(array) for array in case.data_sets[0][0]]


def judge_file(file: Path, inputs: list[np.ndarray], target: Target, folder: Path) -> tuple[str, str]:
    """Return verdict and text of an ONNX file whose inputs past the first become initializers, as weights are."""
    model = onnx.load(file)
    for value, array in zip(list(model.graph.input)[1:], inputs[1:], strict=False):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
        model.graph.input.remove(value)
    onnx.save(model, folder / "float.onnx")
    made = compress.quantize_onnx(
        folder / "float.onnx", [inputs[0]], spec=compress.QuantSpec(target=target), out=folder / "q.onnx"
    )
    expected, found = (_run(path, inputs[0]) for path in (folder / "float.onnx", made))
    near = sqnr(expected.astype("f8"), found.astype("f8"))
    return ("coarse" if near < NEAR_DB else "passed"), f"{near:.0f} dB to float"


def _run(file: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(file))
    return np.asarray(session.run(None, {session.get_inputs()[0].name: x})[0])


def main() -> None:
    """Run the study from the command line."""
    parser = study_parser(__doc__, out="results")
    parser.add_argument("--modules", nargs="+", type=Path, default=[], help="Python files of suites")
    parser.add_argument("--onnx-tests", action="store_true")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    o = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for suite, name, judge, given in _work(o.modules, o.onnx_tests):
        for target in o.targets:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    verdict, said = judge(*given, target, Path(folder))
                except compress.CompressError as error:
                    verdict, said = "refused", str(error)
                except Exception as error:  # a row of the table
                    verdict, said = "failed", f"{type(error).__name__}: {error}"
            reason = reason_of(name, said, *given) if verdict == "refused" else ""
            said = " ".join(_without(said, [*o.modules, Path(folder) / "x"]).split())[:200]
            rows.append(Row(suite, name, target, verdict, said, reason))
            print(*vars(rows[-1]).values(), sep=" | ", flush=True)
    command = command_line([Path(word).name if "/" in word else word for word in sys.argv[1:]])
    write_text(o.out / "peers_suites.md", page(rows, command))


def _without(text: str, files: list[Path]) -> str:
    """Take the folders of files out of a text: they are of one machine."""
    for file in files:
        text = text.replace(f"{file.parent}/", "")
    return text


def _work(
    files: list[Path], onnx_tests: bool
) -> Iterator[tuple[str, str, Callable[..., tuple[str, str]], tuple[Any, ...]]]:
    """Yield suite, model, what judges it, and what that is given."""
    for file in files:
        try:
            for name, network, x in modules_of(file):
                yield file.stem, name, judge_network, (network, x)
        except Exception as error:  # a suite that needs its own tool
            print(f"{file.name} is left out: {error}", flush=True)
    for name, model, inputs in onnx_cases() if onnx_tests else ():
        yield "onnx", name, judge_file, (model, inputs)


def page(rows: list[Row], command: str) -> str:
    """The table of counts, and a row for each model that did not pass on all targets."""
    lines = [
        "# Models of other tools' test suites",
        "",
        f"`{command}`; {listed(gpu_software('onnx', 'onnxruntime', 'openvino'))}; a CPU with {os.cpu_count()} cores.",
        "",
    ]
    verdicts = ("passed", "coarse", "refused", "wrong", "failed")
    lines += ["| suite | target | " + " | ".join(verdicts) + " |", "|---|---|" + "---:|" * len(verdicts)]
    for suite, target in dict.fromkeys((row.suite, row.target) for row in rows):
        count = Counter(row.verdict for row in rows if (row.suite, row.target) == (suite, target))
        lines.append(f"| {suite} | {target} | " + " | ".join(str(count[v]) for v in verdicts) + " |")
    lines += ["", "| suite | model | targets | verdict | reason | said |", "|---|---|---|---|---|---|"]
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row.verdict != "passed":
            alike.setdefault((row.suite, row.model, row.verdict, row.reason, row.said), []).append(row.target)
    lines += [
        f"| {suite} | {model} | {', '.join(targets)} | {verdict} | {reason} | {said.replace('|', '/')} |"
        for (suite, model, verdict, reason, said), targets in alike.items()
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
