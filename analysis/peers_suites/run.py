"""Quantizes the models of other tools' test suites for every target and compares what the engines compute."""

import ast
import contextlib
import copy
import importlib
import inspect
import io
import linecache
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx.backend.test.loader import load_model_tests
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import compress
from analysis.common.study import (
    BudgetSpentError,
    append_row,
    command_line,
    gpu_software,
    listed,
    option,
    read_rows,
    sqnr,
    study_options,
    table,
    time_limit,
)
from analysis.peers_suites.packages import PACKAGES
from compress.files import write_text
from compress.quantization import Target

Inputs = tuple[Tensor, ...]
SUITES = (
    "nncf/tests",
    "aimet/TrainingExtensions/torch",
    "TensorRT-Model-Optimizer/tests",
    "ao/test",
    "brevitas/tests",
    "ppq/tests",
    "micronet/micronet/models",
    "model_optimization/tests",
    "model_optimization/tests_pytest",
    "Torch-Pruning/tests",
    "Torch-Pruning/reproduce/engine/models",
)
_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.Assign, ast.ClassDef, ast.FunctionDef, ast.Try)
_GIVES = ("get_args", "get_example_inputs", "get_input", "example_input", "example_inputs")
_ENDS = (Exception, SystemExit, pytest.skip.Exception)
TARGETS: tuple[Target, ...] = ("openvino", "onnxruntime", "tensorrt")
SHAPES = (
    (2, 3, 32, 32),
    (2, 1, 28, 28),
    (2, 3, 224, 224),
    (2, 1, 32, 32),
    (2, 3, 299, 299),
    (2, 10),
    (2, 16),
    (2, 4, 8, 8),
)
ROWS = (2, 8, 16)
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
# Signal to noise of the quantized network to float, and of the engine to the quantized network.
NEAR_DB, SAME_DB = 15.0, 25.0
# An engine may be so much farther from the quantized network than that is from itself with inputs moved by 1e-5.
ROUNDING_DB = 3.0


NOTHING, NO_PRODUCT = "nothing to quantize", "right: no product"
# The verdict on a refusal's reason, by a person who read the model.
READ = {
    "CustomFunctionalConv": "right: its only product is a fixed filter",
    "MultiBranchesConnectedModelWithConcat": "right: joins a constant of one image, so its batch is fixed",
    "MultiBranchesModel": "right reason, no help: the layer that forward makes belongs in `__init__`",
    "ConvolutionWithAllConstantInputsModel": "right: it convolves constants alone",
    "ConvJitNormModel": "right: torch.fx does not trace a function of torch.jit.script, and a submodule helps",
    "DynamicConv2d": "right: its weight is computed from the input",
    "DynamicLinear": "right: its weight is computed from the input",
    "ModelWithNonTorchFunction": "right: divides by the size of its batch",
    "MhaModel": "right: an attention without a batch dimension stays whole",
    "MatMulRight": "right, without its reason: its product sums over the batch",
    "NonZeroLinearModel": "right: the sizes after nonzero depend on values",
    "test_quantize_pt2e.M 5": "right: adds a parameter of two rows",
}


SAID = {
    "draws random numbers in evaluation": "right: it does, in each call",
    "the model is quantized already": "right: the suite quantized it",
    "a factor is a parameter or constant": "right: a vector, or a matrix for each image",
    "cannot be used as inputs to control flow": "right: branches on values",
    "opsets 6 to 25 are read": "right: a later opset",
    "ONNX Runtime cannot load": "right: ONNX Runtime does not load it",
    "transposed convolutions": "right: the engine computes them in float",
    "takes 1 positional argument": f"{NO_PRODUCT}: an autograd function's static forward",
    "is bfloat16": "right: ONNX Runtime takes no such input",
    "NaN or Inf was collected": "wrong: a mask of -inf is no broken weight",
}
_PRODUCTS = {"Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum"}


MOST_PARAMETERS = 100_000_000
LIMIT_S = 300


@dataclass(frozen=True)
class Row:
    """What became of a model for a target; `reason` judges that of a refusal."""

    suite: str
    model: str
    target: str
    verdict: str
    said: str = ""
    reason: str = ""

    @property
    def column(self) -> str:
        return NOTHING if self.reason.startswith(NO_PRODUCT) else self.verdict


def modules_of(peers: Path, suite: str) -> Iterator[tuple[str, nn.Module, Inputs]]:
    """Yield the networks of a suite that are made without arguments, each text once, with inputs that they take.

    Args:
        peers: folder of the checkouts.
        suite: file or folder in it; the first part of its path is the checkout.
    """
    root, seen, names_seen = peers / Path(suite).parts[0], set[str](), Counter[str]()
    files = [peers / suite] if suite.endswith(".py") else sorted((peers / suite).rglob("*.py"))
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        if "Module)" not in text:
            continue
        names = namespace_of(file, root, ast.parse(text))
        for made in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
            made.decorator_list = []
            if (key := ast.dump(made)) in seen or not made.bases:
                continue
            seen.add(key)
            kind = _class_of(made, names)
            found = None if kind is None else _made(kind)
            if found is not None:
                name = f"{file.stem}.{made.name}"
                names_seen[name] += 1
                yield f"{name} {names_seen[name]}" if names_seen[name] > 1 else name, *found


def modules_of_packages() -> Iterator[tuple[str, nn.Module, Inputs]]:
    """Yield the networks of packages that are installed, with inputs of two images."""
    for name, (module, call, shapes) in PACKAGES.items():
        torch.manual_seed(0)
        network: nn.Module | None = None
        with contextlib.suppress(ImportError), contextlib.redirect_stdout(io.StringIO()):
            network = eval(f"package.{call}", {"package": importlib.import_module(module)})
        if network is not None:
            yield name, network.eval(), tuple(torch.randn(2, *shape) for shape in shapes)


def namespace_of(file: Path, root: Path, tree: ast.Module) -> dict[str, Any]:
    """Run the definitions of a file one by one; one that needs the suite's own tool is left out, the others stay."""
    sys.path[:0] = [str(part) for part in (root, root / "src", file.parent) if str(part) not in sys.path]
    package = ".".join(file.relative_to(root).parent.parts)
    module = ModuleType(f"{package}.{file.stem}".lstrip("."))
    names = vars(module) | {"__package__": package, "__file__": str(file)}
    sys.modules.setdefault(module.__name__, module)
    for statement in tree.body:
        if isinstance(statement, _DEFINITIONS):
            with contextlib.suppress(*_ENDS), contextlib.redirect_stdout(io.StringIO()):
                linecache.lazycache(str(file), names)
                exec(compile(ast.Module([statement], []), str(file), "exec"), names)
    return names


def _class_of(definition: ast.ClassDef, names: dict[str, Any]) -> type[nn.Module] | None:
    own = dict(names)
    with contextlib.suppress(Exception):
        exec(compile(ast.Module([definition], []), names["__file__"], "exec"), own)
        if issubclass(own[definition.name], nn.Module):
            names.setdefault(definition.name, own[definition.name])
            return cast(type[nn.Module], own[definition.name])
    return None


def _made(kind: type[nn.Module]) -> tuple[nn.Module, Inputs] | None:
    torch.manual_seed(0)
    try:
        network = kind().eval()
        count = sum(
            one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
            for one in inspect.signature(network.forward).parameters.values()
        )
    except Exception:  # it needs arguments, or other packages: not a network of this study
        return None
    if sum(one.numel() for one in network.parameters()) > MOST_PARAMETERS:
        return None
    for x in _inputs(network, max(count, 1)):
        with contextlib.suppress(Exception), torch.no_grad():  # the shape does not fit: the next
            if first_tensor(copy.deepcopy(network)(*x)) is not None:
                return network, x
    return None


def _inputs(network: nn.Module, count: int) -> Iterator[Inputs]:
    for name in _GIVES:
        with contextlib.suppress(Exception):
            given = getattr(network, name)()
            given = given if isinstance(given, tuple) else (given,)
            if all(isinstance(one, Tensor) for one in given):
                yield given
    own = [tuple(value) for key, value in vars(type(network)).items() if key.startswith("INPUT_S") and value]
    for shape in [*own, *SHAPES, *_guessed(network), ROWS]:
        yield tuple(torch.randn(shape) for _ in range(count))


def _guessed(network: nn.Module) -> list[tuple[int, ...]]:
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            return [(2, layer.in_features), (2, 5, layer.in_features)]
        if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            count = len(layer.kernel_size)
            return [(2, layer.in_channels, *(side,) * count) for side in (8, 16, 32, 64) if side < 64 or count < 3]
    return []


def first_tensor(output: object) -> Tensor | None:
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    inner = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return next((t for value in inner if (t := first_tensor(value)) is not None), None)


def judge_network(network: nn.Module, x: Inputs, target: Target, folder: Path) -> tuple[str, str]:
    with torch.no_grad():
        expected = first_tensor(copy.deepcopy(network)(*x))
    qmodel = compress.quantize(network, x, [x], spec=compress.QuantSpec(target=target))
    with torch.no_grad():
        fake, beside = (
            first_tensor(qmodel(*given)) for given in (x, [one + 1e-5 * torch.randn_like(one) for one in x])
        )
    if expected is None or fake is None or beside is None:
        return "passed", "no floating output"
    file = compress.export_onnx(qmodel, x, folder / f"{target}.onnx")
    engine = "openvino" if target == "openvino" else "onnxruntime"
    f32 = "f32" if engine == "openvino" else None
    with compress.build_engine(file, engine, batch_size=len(x[0]), precision=f32) as built:
        named = {value.name: one.numpy() for value, one in zip(built.inputs, x, strict=True)}
        found = built.run(named)[built.outputs[0].name]
    near, same = sqnr([expected], [fake]), sqnr([fake], [found])
    least = min(SAME_DB, near, sqnr([fake], [beside]) - ROUNDING_DB)
    said = f"{near:.0f} dB to float, engine {same:.0f} dB to the quantized network"
    return ("wrong" if same < least else "coarse" if near < NEAR_DB else "passed"), said


def reason_of(name: str, said: str, network: object, x: Any) -> str:
    """Judge the reason of a refusal: that there is nothing to quantize by torch's own count of products."""
    if isinstance(network, nn.Module):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            copy.deepcopy(network)(*x)
        if not counter.get_total_flops():
            return f"{NO_PRODUCT}: torch counts none"
    if (
        isinstance(network, Path)
        and "has no layer that can be quantized" in said
        and not {node.op_type for node in onnx.load(network).graph.node} & _PRODUCTS
    ):
        return f"{NO_PRODUCT}: none of its own in the file"
    own = name.rpartition(".")[2].partition(" ")[0]
    return next((reason for part, reason in (READ | SAID).items() if part in (own, name) or part in said), "not read")


def onnx_cases() -> Iterator[tuple[str, Path, list[np.ndarray]]]:
    for case in load_model_tests(kind="node"):
        if case.model is None or not case.data_sets:
            continue
        if {node.op_type for node in case.model.graph.node} & _WEIGHTED:
            folder = Path(tempfile.mkdtemp())
            onnx.save(case.model, folder / "model.onnx")
            yield case.name, folder / "model.onnx", [np.asarray(array) for array in case.data_sets[0][0]]


def judge_file(file: Path, inputs: list[np.ndarray], target: Target, folder: Path) -> tuple[str, str]:
    model = onnx.load(file)
    for value, array in zip(list(model.graph.input)[1:], inputs[1:], strict=False):
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
        model.graph.input.remove(value)
    onnx.save(model, folder / "float.onnx")
    made = compress.quantize_onnx(
        folder / "float.onnx", [inputs[0]], spec=compress.QuantSpec(target=target), out=folder / "q.onnx"
    )
    expected, found = (_run(path, inputs[0]) for path in (folder / "float.onnx", made))
    near = sqnr([expected], [found])
    return ("coarse" if near < NEAR_DB else "passed"), f"{near:.0f} dB to float"


def _run(file: Path, x: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(file))
    return np.asarray(session.run(None, {session.get_inputs()[0].name: x})[0])


def main() -> None:
    o = study_options(
        __doc__,
        option("--peers", type=Path, help="folder of the checkouts; without it only --onnx-tests"),
        option("--suites", nargs="+", default=list(SUITES), help="files or folders below --peers"),
        option("--onnx-tests", action="store_true"),
        option("--packages", action="store_true", help="networks of packages that are installed"),
        option("--targets", nargs="+", choices=TARGETS, default=list(TARGETS)),
        option("--rows", type=Path, default=Path("runs/peers_suites.jsonl"), help="goes on from these rows"),
        out="results",
    )
    warnings.simplefilter("ignore")
    rows = [Row(**row) for row in read_rows(o.rows)]
    done = {(row.suite, row.model, row.target) for row in rows}
    for suite, name, judge, given in _work(o.peers or Path(), o.suites if o.peers else [], o.onnx_tests, o.packages):
        for target in o.targets:
            if (suite, name, target) not in done:
                rows.append(_row((suite, name, target), judge, given, o.peers))
                append_row(o.rows, asdict(rows[-1]))
                print(*vars(rows[-1]).values(), sep=" | ", flush=True)
    write_text(o.out / "peers_suites.md", page(rows, command_line()))


def _row(
    key: tuple[str, str, Target], judge: Callable[..., tuple[str, str]], given: tuple[Any, ...], peers: Path | None
) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with time_limit(LIMIT_S):
                verdict, said = judge(*given, key[2], Path(folder))
        except BudgetSpentError:
            verdict, said = "failed", f"not done in {LIMIT_S} s"
        except compress.CompressError as error:
            verdict, said = "refused", str(error)
        except Exception as error:  # a row of the table
            verdict, said = "failed", f"{type(error).__name__}: {error}"
        for place in filter(None, (folder, peers)):  # they are of one machine
            said = said.replace(f"{place}/", "")
    reason = reason_of(key[1], said, *given) if verdict == "refused" else ""
    return Row(*key, verdict, " ".join(said.split())[:200], reason)


def _work(
    peers: Path, suites: list[str], onnx_tests: bool, packages: bool
) -> Iterator[tuple[str, str, Callable[..., tuple[str, str]], tuple[Any, ...]]]:
    for suite in suites:
        for name, network, x in modules_of(peers, suite):
            yield Path(suite).parts[0], name, judge_network, (network, x)
    for name, network, x in modules_of_packages() if packages else ():
        yield name.split()[0], name, judge_network, (network, x)
    for name, model, inputs in onnx_cases() if onnx_tests else ():
        yield "onnx", name, judge_file, (model, inputs)


def page(rows: list[Row], command: str) -> str:
    lines = [
        "# Models of other tools' test suites",
        "",
        f"`{command}`; {listed(gpu_software('onnx', 'onnxruntime', 'openvino'))}; a CPU with {os.cpu_count()} cores.",
        "",
    ]
    verdicts = ("passed", "coarse", NOTHING, "refused", "wrong", "failed")
    count = Counter((row.suite, row.target, row.column) for row in rows)
    pairs = dict.fromkeys((row.suite, row.target) for row in rows)
    lines += table(("suite", "target", *verdicts), [(*pair, *(count[*pair, v] for v in verdicts)) for pair in pairs])
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if row.column not in ("passed", NOTHING):
            alike.setdefault((row.suite, row.verdict, row.reason, row.said.replace("|", "/")), []).append(row)
    cells = [
        (
            suite,
            *(", ".join(dict.fromkeys(names)) for names in zip(*[(r.model, r.target) for r in same], strict=True)),
            *judged,
        )
        for (suite, *judged), same in alike.items()
    ]
    return "\n".join([*lines, "", *table(("suite", "models", "targets", "verdict", "reason", "said"), cells), ""])


if __name__ == "__main__":
    main()
