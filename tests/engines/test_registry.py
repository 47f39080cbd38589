# The table of engines: what is listed, what is refused, and libraries that are missing or placeholders.

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from compress import BenchSpec, TorchEngine, build_engine, engine_availability
from compress.engines import ENGINES, Availability
from compress.engines.registry import EngineEntry
from compress.errors import EngineError, EngineUnavailableError
from compress.measure import ENGINE_NAMES, check_bench_spec
from compress.pipeline.run import NetworkFiles
from compress.pipeline.steps.evaluate import bench
from compress.support.progress import NoProgress
from tests.engines.models import classifier
from tests.measure.fakes import GivenEngine
from tests.networks import Net


def test_every_engine_is_listed_and_says_why_not():
    rows = {row.name: row for row in engine_availability()}
    assert (
        list(rows)
        == list(ENGINES)
        == [
            "openvino",
            "onnxruntime",
            "litert",
            "executorch",
            "coreml",
            "cuda",
            "torch",
            "tensorrt",
            "tensorrt-rtx",
            "tensorrt-lean",
        ]
    )
    for name in ("openvino", "onnxruntime", "torch"):
        assert rows[name].available
        assert rows[name].version
        assert rows[name].devices
    for row in rows.values():
        assert row.available == (not row.reason)


@pytest.mark.parametrize(("engine", "module"), [("tensorrt", "tensorrt"), ("tensorrt-rtx", "tensorrt_rtx")])
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("", "holds no Builder"),
        ("raise RuntimeError('install me from elsewhere')", "RuntimeError: install me from elsewhere"),
        ("import sys; sys.exit('placeholder')", "SystemExit"),
        ("raise OSError('libnvinfer.so.10: cannot open')", "libnvinfer"),
    ],
)
def test_placeholder_packages_count_as_missing(tmp_path, monkeypatch, engine, module, source, reason):
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, module, raising=False)
    importlib.invalidate_caches()
    row = next(row for row in engine_availability() if row.name == engine)
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert not row.available
    assert reason in row.reason
    assert "pip install" in row.install
    assert ("CUDA" in row.reason) == (not torch.cuda.is_available())


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_a_library_that_cannot_be_imported_is_unavailable(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    row = next(row for row in engine_availability() if row.name == name)
    assert not row.available
    assert row.install == f"pip install {name}"
    with pytest.raises(EngineUnavailableError, match=f"pip install {name}"):
        build_engine(classifier(tmp_path / "m.onnx"), name)


TELLS = """
import sys
from pathlib import Path

def __getattr__(name):
    Path(__file__).with_name("told").touch()
    raise ImportError(name)
"""


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import openvino", True),
        ("from compress.support.libraries import import_library; import_library('openvino', '')", False),
    ],
)
def test_openvino_does_not_report_its_import(tmp_path, code, told):
    (tmp_path / "openvino_telemetry.py").write_text(TELLS)
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    check = "import os, openvino_telemetry; print(os.environ.get('ORT_DISABLE_TELEMETRY'))"  # the package stays usable
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; {check}"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "told").exists() == told
    assert told or done.stdout.split() == ["1"]


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        ("opnvino", {}, r"'opnvino', did you mean 'openvino'\? \(one of: openvino, onnxruntime"),
        ("openvino", {"devise": "CPU"}, "unknown option 'devise', did you mean 'device'"),
        ("onnxruntime", {"device": "CPU"}, "unknown option 'device'"),
        ("torch", {}, "TorchEngine"),
    ],
)
def test_unknown_engines_and_options_name_the_near_miss(engine, options, message, tmp_path):
    with pytest.raises(EngineError, match=message):
        build_engine(classifier(tmp_path / "m.onnx"), engine, **options)


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_numbers_out_of_range_are_refused(tmp_path, number):
    path = classifier(tmp_path / "m.onnx")
    for name in ("batch_size", "threads"):
        with pytest.raises(EngineError, match=f"{name} is {number}"):
            build_engine(path, **{name: number})


def test_recipes_know_the_engines_of_the_table():
    assert tuple(ENGINES) == ENGINE_NAMES


def test_a_row_and_its_name_are_all_that_a_new_engine_needs(tmp_path, monkeypatch):
    entry = EngineEntry(
        availability=lambda: Availability(name="mine", available=True, version="1", devices=("CPU",)),
        load=lambda path, build: GivenEngine(lambda x: x.mean(axis=(2, 3)), shape=(build.batch_size, 3, 8, 8)),
        options={"speed": "how fast"},
    )
    monkeypatch.setitem(ENGINES, "mine", entry)
    monkeypatch.setattr("compress.measure.ENGINE_NAMES", (*ENGINE_NAMES, "mine"))
    assert "mine" in {row.name for row in engine_availability() if row.available}
    spec = BenchSpec(engines=("mine",), batch_sizes=(2,), runs=1, warmup=0)
    check_bench_spec(spec)
    metrics = bench({"float": NetworkFiles(file=tmp_path / "m.onnx")}, spec, progress=NoProgress())
    assert {m.engine for m in metrics} == {"given"} and all(m.value for m in metrics)
    assert build_engine(tmp_path / "m.onnx", "mine", batch_size=1, speed="high").inputs[0].shape == (1, 3, 8, 8)
    with pytest.raises(EngineError, match="unknown option 'sped', did you mean 'speed'"):
        build_engine(tmp_path / "m.onnx", "mine", sped="high")


# Modules as engines: the module's own results, and the module untouched.


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(144, 5))


IMAGES = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


def test_results_are_those_of_evaluation_mode():
    model = network()
    engine = TorchEngine(model, (3, 8, 8))
    with torch.no_grad():
        expected = model.eval()(torch.from_numpy(IMAGES)).numpy()
    np.testing.assert_array_equal(engine.run({"input": IMAGES})["logits"], expected)
    assert engine.info.label == "torch (cpu)"
    assert engine.info.float_precision == "f32"
    assert engine.metadata == {}
    assert [(t.name, t.dtype, t.shape) for t in engine.inputs] == [("input", "float32", (-1, 3, 8, 8))]
    assert [(t.name, t.dtype, t.shape) for t in engine.outputs] == [("logits", "float32", (-1, 5))]


def test_the_callers_module_is_untouched():
    model = network().train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    engine = TorchEngine(model, (3, 8, 8), precision="bf16", label="mine")
    first = engine.run({"input": IMAGES})["logits"]
    assert [module.training for module in model] == [True, False, True, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    nn.init.zeros_(model[0].weight)
    np.testing.assert_array_equal(engine.run({"input": IMAGES})["logits"], first)
    assert engine.info.label == "mine"


def test_precision_is_what_ran():
    seen = []

    def dtype_net():
        def run(net, x):
            y = net.linear(x)
            seen.append(y.dtype)
            return y

        return Net(run, linear=nn.Linear(3, 2))

    for precision, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32), (None, torch.float32)):
        engine = TorchEngine(dtype_net(), (3,), precision=precision)
        assert seen.pop() == dtype
        assert engine.info.float_precision == (precision or "f32")
        assert engine.run({"input": np.zeros((1, 3), np.float32)})["logits"].dtype == np.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        TorchEngine(dtype_net(), (3,), precision="f32")
    assert seen[-1] == torch.float32


def test_other_outputs_have_names():
    heads = TorchEngine(Net(lambda net, x: {"logits": x, "double": 2 * x}), (4,))
    found = heads.run({"input": np.ones((2, 4), np.float32)})
    assert {name: value[0, 0] for name, value in found.items()} == {"logits": 1, "double": 2}
    assert [t.name for t in TorchEngine(Net(lambda net, x: (x, 2 * x)), (4,)).outputs] == ["output_0", "output_1"]
    with pytest.raises(EngineError, match="returned int"):
        TorchEngine(Net(lambda net, x: 3), (4,))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or (os.cpu_count() or 1) < 2, reason="one core, or no Linux")
def test_a_process_of_one_core_gets_no_threads_for_the_others(tmp_path):
    allowed, tasks, path = os.sched_getaffinity(0), Path("/proc/self/task"), classifier(tmp_path / "m.onnx")
    os.sched_setaffinity(0, {min(allowed)})
    try:
        before = len(list(tasks.iterdir()))
        with build_engine(path, "onnxruntime"):
            assert len(list(tasks.iterdir())) == before
    finally:
        os.sched_setaffinity(0, allowed)


def test_threads_are_given_back():
    before = torch.get_num_threads()
    model = Net(lambda net, x: x.new_full((1, 1), torch.get_num_threads()))
    engine = TorchEngine(model, (1,), threads=before + 1)
    assert engine.run({"input": np.zeros((1, 1), np.float32)})["logits"].item() == before + 1
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((4, 8, 8), {}, "failed to run the module"),
        ((3, 8, 8), {"device": "gpu"}, "not a device"),
        ((3, 8, 8), {"device": "cuda:99"}, "no device 'cuda:99'"),
        ((3, 8, 8), {"precision": "fp16"}, "did you mean 'f16'"),
    ],
)
def test_refusals(shape, options, message):
    with pytest.raises(EngineError, match=message):
        TorchEngine(network(), shape, **options)


def test_an_engine_takes_float32_until_it_is_closed():
    with TorchEngine(network(), (3, 8, 8)) as engine, pytest.raises(EngineError, match="is float64"):
        engine.run({"input": IMAGES.astype(np.float64)})
    with pytest.raises(EngineError, match="closed"):
        engine.run({"input": IMAGES})
