# `bench` on a run folder and on files, some of which are damaged. No time is judged.

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from PIL import Image
from torch import nn
from torchvision import transforms
from typer.testing import CliRunner

import compress
from compress.cli.app import app
from compress.cli.options import FormOptions
from compress.data.base import Preprocessing
from compress.data.files import ImageFolder, read_input, unlabelled
from compress.errors import CompressWarning, DataError, EngineUnavailableError, RunError
from compress.measure.latency import STAGES, EndToEnd
from compress.pipeline.run import open_run
from compress.pipeline.saved import _evaluation_images
from compress.plots.results import draw_end_to_end
from compress.plots.style import NARROW, WIDE, styled, to_png
from compress.recipe.tree import parse_recipe
from tests.engines.models import classifier
from tests.exact import open_session
from tests.onnx_ptq.files import model_of, weights

FOLDER = Path(__file__).parents[1] / "pipeline" / "formats" / "run-1"
QUICK = ("--engine", "onnxruntime", "--batch-size", "2", "--seconds", "0.01")


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(FOLDER, tmp_path / "run"))


def times(folder):
    rows = json.loads((folder / "metrics.json").read_text())
    timed = [row for row in rows if row["name"] in ("p50_ms", "p99_ms") and row["batch_size"] == 2]
    return {(row["name"], row["variant"]): row["value"] for row in timed if row["engine"].startswith("onnxruntime")}


def test_a_damaged_file_of_a_run_is_told_and_its_older_times_are_gone(compress, folder):
    assert compress("bench", folder, *QUICK).shown
    timed, file = (folder / "metrics.json").read_bytes(), folder / "ptq.onnx"
    assert {key for key, value in times(folder).items() if value} >= {("p50_ms", "float"), ("p99_ms", "ptq")}
    for content in (file.read_bytes()[:2000], b""):
        (folder / "metrics.json").write_bytes(timed)
        file.write_bytes(content)
        done = compress("bench", folder, *QUICK)
        assert "ptq was not measured" in done.refused and "ptq.onnx" in done.stdout.replace("\n", "")
        found = times(folder)
        assert found["p50_ms", "float"] > 0 and found["p99_ms", "float"] > 0
        assert not any(value for (_, variant), value in found.items() if variant == "ptq")


def test_an_engine_that_is_not_here_is_no_failure_where_another_measures_the_file(compress, folder):
    assert "unavailable" in compress("bench", folder / "ptq.onnx", *QUICK, "--engine", "tensorrt").shown


def test_a_file_with_open_sides_is_timed_at_a_size(compress, tmp_path):
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    onnx.save(model_of([node], {"w": weights(4, 3, 3, 3)}, shape=("n", 3, "h", "w")), tmp_path / "open.onnx")
    words = ("bench", tmp_path / "open.onnx", *QUICK)
    assert "bench --size 320" in compress(*words).refused
    assert all(row["value"] > 0 for row in compress(*words, "--size", "8x12", "--json").document)


def test_the_engine_torch_times_the_modules_of_a_run(compress, folder):
    done = compress("bench", folder, *QUICK[2:], "--engine", "torch")
    assert "loads no file" not in done.shown + done.stderr
    rows = [row for row in json.loads((folder / "metrics.json").read_text()) if row["name"] == "p50_ms"]
    assert {row["variant"] for row in rows if row["engine"].startswith("torch") and row["value"] > 0} >= {
        "float",
        "ptq",
    }


# `bench --end-to-end` as a user calls it, on a small network with files of its own. No time is judged.


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("end_to_end")
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 7)).eval()
    said = Preprocessing(image_size=16)
    path = compress.export_onnx(model, torch.randn(2, 3, 16, 16), folder / "net.onnx", preprocessing=said)
    (folder / "pictures" / "deep").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (24, 30, 3), dtype=np.uint8)
    for name in ("a.jpg", "deep/b.PNG"):
        Image.fromarray(pixels).save(folder / "pictures" / name)
    return path, folder / "pictures"


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments), "--seconds", "0.01"])


@pytest.fixture(scope="module")
def end_to_end(made):
    return ("bench", made[0], "--end-to-end", "--seconds", "0.01", "--images", made[1], "--engine", "onnxruntime")


def test_json_and_figure(compress, end_to_end, tmp_path):
    figure = tmp_path / "bars.png"
    batches = ("--batch-size", 1, "--batch-size", 3)
    document = compress(*end_to_end, *batches, "--figure", figure, "--json").document
    assert [row["batch_size"] for row in document["results"]] == [1, 3] and document["figure"] == str(figure)
    for row in document["results"]:
        assert tuple(row["stage_ms"]) == STAGES and row["label"].startswith("net: onnxruntime")
        assert sum(row["stage_ms"].values()) == pytest.approx(row["total_ms"])
        assert "JPEG or PNG" in row["method"] and "CPU" in row["method"]
    with Image.open(figure) as image:
        assert image.width > 1000


def test_table_and_what_is_not_here(compress, end_to_end):
    shown = compress(*end_to_end, "--engine", "tensorrt").shown
    assert "unavailable tensorrt" in shown and "engine's share" in shown


@pytest.mark.parametrize(
    ("error", "message", "more"),
    [
        (DataError, "holds no images", ["--end-to-end"]),
        (DataError, "no folder", ["--end-to-end", "--images", "nowhere"]),
        (RunError, "go with --end-to-end", ["--images", "."]),
        (RunError, "go with --end-to-end", ["--device", "cuda"]),
    ],
)
def test_refusals(made, error, message, more):
    assert_refused(bench(made[0], *more), error, message)


def assert_refused(result, error, message):
    assert isinstance(result.exception, error) and message in str(result.exception)


def test_a_folder_without_pictures_and_a_file_without_preprocessing(made, tmp_path):
    path, pictures = made
    assert_refused(bench(path, "--end-to-end", "--images", tmp_path), DataError, "holds no JPEG or PNG")
    (tmp_path / "bad.png").write_bytes(b"no picture")
    assert_refused(bench(path, "--end-to-end", "--images", tmp_path), DataError, "bad.png is not a readable image")
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "silent.onnx")
    silent = bench(tmp_path / "silent.onnx", "--end-to-end", "--images", pictures, "--engine", "onnxruntime")
    assert "does not say how its input is made" in str(silent.exception)


@pytest.mark.parametrize("name", ["digits", "shapes"])
def test_pixels_of_built_in_data_are_what_evaluation_reads(name):
    split = compress.load_data(compress.DataSpec(name=name, image_size=32, val_images=8)).val
    pictures = _evaluation_images(split, 3)
    assert [(p.dtype.name, p.shape[2]) for p in pictures] == [("uint8", 3)] * 3
    images, _ = split.load([0, 1, 2], epoch=None, device=torch.device("cpu"))
    if pictures[0].shape[0] == 32:
        again = torch.stack([torch.from_numpy(p.copy()).permute(2, 0, 1) for p in pictures]).float().div(255)
        torch.testing.assert_close(split.preprocessing.normalize(again), images, atol=0.01, rtol=0)


def test_bars_are_as_long_as_the_stages():
    stages = [{"decode": 3.0, "preprocess": 2.0, "engine": 4.0, "postprocess": 0.5}, {"preprocess": 1.0, "engine": 9.0}]
    results = [
        EndToEnd(label=f"ptq: given {i}", batch_size=1 + i, device="cpu", stage_ms=ms, p50_ms=9.0, runs=1, method="")
        for i, ms in enumerate(stages)
    ]
    with styled():
        for form in (WIDE, NARROW):
            axes = draw_end_to_end(results, form).axes[0]
            assert [patch.get_width() for patch in axes.patches] == [3.0, 2.0, 4.0, 0.5, 0.5, 4.5]  # a picture
            assert [patch.get_x() for patch in axes.patches] == [0.0, 3.0, 5.0, 9.0, 0.0, 0.5]
        assert to_png(draw_end_to_end(results, WIDE)).startswith(b"\x89PNG")


# `python -m compress build`, and a run that ends with engines for GPUs that are not here.

TREE = {
    "model": {"name": "tests.networks:tiny"},
    "data": {"image_size": 16, "batch_size": 64, "val_images": 100},
    "train": {"epochs": 1, "lr": 0.05},
    "quantization": {"target": "tensorrt", "calibration_images": 64},
    "qat": None,
    "export": {"precision": "fp16"},
    "bench": {"engines": ["tensorrt", "tensorrt-rtx"], "batch_sizes": [2], "runs": 2, "seconds": 0.1, "sm": [89, 120]},
}


def build_compress(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_an_onnx_file_becomes_an_engine_and_commands(compress, tmp_path):
    path = classifier(tmp_path / "m.onnx", metadata={"compress.recipe.tree": "0123"})
    printed = compress("build", "onnx", path, "--engine", "tensorrt-rtx", "--sm", "89,120", "--json").document
    assert Path(printed["file"]) == tmp_path / "m.tensorrt-rtx.sm89-120.engine"
    assert Path(printed["file"]).stat().st_size == printed["engine_bytes"]
    assert (printed["sms"], printed["recipe"]) == ([89, 120], "0123")
    assert {row["target"] for row in printed["commands"]} == {"TensorRT 10", "TensorRT 11", "TensorRT-RTX"}


def test_commands_are_printed_without_a_build(compress, tmp_path):
    path = classifier(tmp_path / "m.onnx")
    shown = compress("build", "onnx", path, "--commands", "--batch", "1,2,4").shown
    assert "--maxShapes=input:4x3x8x8" in shown
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]


def test_a_run_that_was_stopped_is_gone_on_with(tmp_path, monkeypatch):
    # `build recipe` runs the recipe first; of a run that it had begun, it takes the rest.
    recipe, asked = parse_recipe(TREE), []

    def stopped(recipe, command, folder, *, resume, progress):
        asked.append((str(folder), resume))
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("compress.cli.build.run", stopped)
    Path("tiny.yaml").write_text(recipe.to_yaml())
    build_compress("build", "recipe", "tiny.yaml")
    open_run(Path("runs/tiny-ptq"), recipe, "ptq", resume=False).release()
    build_compress("build", "recipe", "tiny.yaml")
    build_compress("build", "recipe", "tiny.yaml", "--set", "train.epochs=2")
    assert asked == [("runs/tiny-ptq", False), ("runs/tiny-ptq", True), ("runs/tiny-ptq-2", False)]


def test_each_recipe_finds_its_own_run_among_those_of_one_name(tmp_path, monkeypatch):
    # `build recipe --set` begins a folder beside the user's run; the user's `--resume` must not end in that one.
    asked = []
    monkeypatch.chdir(tmp_path)
    for place in ("compress.cli.build.run", "compress.pipeline.run"):
        monkeypatch.setattr(place, lambda recipe, command, folder, **_: asked.append(folder.name) or sys.exit())
    Path("tiny.yaml").write_text(parse_recipe(TREE).to_yaml())
    other = compress.load_recipe("tiny.yaml", ["train.epochs=2"])
    open_run(Path("runs/tiny-ptq"), compress.load_recipe("tiny.yaml"), "ptq", resume=False).release()
    open_run(Path("runs/tiny-ptq-2"), other, "ptq", resume=False).release()
    for words in (["ptq", "--resume", "--recipe"], ["build", "recipe"]):
        build_compress(*words, "tiny.yaml")
        build_compress(*words, "tiny.yaml", "--set", "train.epochs=2")
    assert asked == ["tiny-ptq", "tiny-ptq-2"] * 2
    build_compress("ptq", "--resume", "--recipe", "tiny.yaml", "--set", "train.epochs=3")
    assert asked[-1] == "tiny-ptq-2"  # which then says what differs


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU cannot do")
def test_a_run_ends_with_engines_for_gpus_that_are_not_here(tmp_path):
    folder = compress.run(parse_recipe(TREE), "ptq", tmp_path / "run", device="cpu")
    rows = json.loads((folder / "engines.json").read_text())
    assert [(row["variant"], row["engine"], row["status"]) for row in rows] == [
        ("float", "tensorrt", "unavailable"),
        ("ptq", "tensorrt", "unavailable"),
        ("float", "tensorrt-rtx", "built"),
        ("ptq", "tensorrt-rtx", "built"),
    ]
    assert all(((folder / row["file"]).stat().st_size, [89, 120]) == (row["bytes"], row["sms"]) for row in rows[2:])
    unavailable = {(m.variant, m.engine, m.name): m.reason for m in folder.metrics() if m.status == "unavailable"}
    assert re.search(
        r"built ptq\S+ for SM 89, 120, but it cannot be run here", unavailable["ptq", "tensorrt-rtx", "p50_ms"]
    )
    assert "ptq.onnx, TensorRT 11" in (folder / "build.md").read_text()
    assert "cannot be run here" in (folder / "report.md").read_text()


def test_a_run_for_a_gpu_that_rtx_lacks_says_so_and_goes_on(tmp_path):
    tree = {**TREE, "train": {"epochs": 0}, "bench": {**TREE["bench"], "engines": ["tensorrt-rtx"], "sm": [90]}}
    folder = compress.run(parse_recipe(tree), "train", tmp_path / "run", device="cpu")
    assert "SM 90 needs TensorRT itself" in (folder / "notes.json").read_text()
    assert "TensorRT 11" in (folder / "build.md").read_text()


@pytest.mark.parametrize("command", ["recipe", "explore"])
def test_a_missing_builder_is_told_before_the_run_that_it_would_build(tmp_path, monkeypatch, command):
    # A library that is not installed is one that Python cannot import.
    ran = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    monkeypatch.setattr("compress.cli.build.run", lambda *_, **__: ran.append("run") or sys.exit())
    Path("tiny.yaml").write_text(parse_recipe(TREE).to_yaml())
    done = build_compress("build", command, "tiny.yaml")
    assert isinstance(done.exception, EngineUnavailableError) and "pip install" in str(done.exception)
    assert ran == [] and [file.name for file in tmp_path.iterdir()] == ["tiny.yaml"]
    if command == "recipe":
        build_compress("build", command, "tiny.yaml", "--commands")  # these need no library
        assert ran == ["run"]


@pytest.fixture
def floats(tmp_path):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="first", pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["r"], name="relu"),
        helper.make_node("Softmax", ["r"], ["y"], name="softmax", axis=1),
    ]
    onnx.save(model_of(nodes, {"w": weights(4, 3, 3, 3)}, shape=("n", 3, 8, 8)), tmp_path / "net.onnx")
    (tmp_path / "pictures" / "any").mkdir(parents=True)
    for i, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (3, 12, 10, 3), np.uint8)):
        Image.fromarray(pixels).save(tmp_path / "pictures" / "any" / f"{i}.png")
    np.savez(tmp_path / "inputs.npz", x=np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32))
    (tmp_path / "mine.py").write_text("import numpy\n\ndef data():\n    return [numpy.ones((2, 3, 8, 8), 'float32')]\n")
    return tmp_path


@pytest.mark.parametrize(
    ("data", "options", "images"),
    [
        ("pictures", ("--size", "8"), 3),
        ("pictures", (), 3),
        ("inputs.npz", ("--target", "openvino"), 4),
        ("mine:data", (), 2),
    ],
)
def test_a_file_is_quantized(compress, floats, monkeypatch, data, options, images):
    monkeypatch.syspath_prepend(str(floats))
    told = compress("ptq", "--onnx", "net.onnx", "--data", data, "--out", "run", "--json", *options, cwd=floats)
    assert told.document["images"] == images
    names = ["net.int8.onnx", "placement.csv", "quantization.json"]
    assert sorted(path.name for path in (floats / "run").iterdir()) == names
    open_session(floats / "run" / names[0])
    assert "softmax" in (floats / "run" / names[1]).read_text()


def test_what_stays_float_is_shown(compress, floats):
    shown = compress(*NET, "--out", "run", cwd=floats).shown
    assert "softmax" in shown and "1 of 1 weighted operations are INT8" in shown and "warning" not in shown
    assert "the file as it says against float, 4 images: " in shown and " dB, good: " in shown
    for command in ("bench", "report"):
        refused = compress(command, "run", cwd=floats).refused
        assert "is no run: `bench FLOAT.onnx run/net.int8.onnx` times it" in refused


def test_notes_are_shown(compress, floats):
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="first")
    onnx.save(model_of([node], {"w": weights(4, 3, 3, 3)}, shape=("n", 3, 8, 8), opset=12), floats / "old.onnx")
    told = compress("ptq", "--onnx", "old.onnx", "--data", "inputs.npz", "--out", "run", cwd=floats)
    assert "note the opset is raised from 12 to 13" in told.stdout


NET = ("ptq", "--onnx", "net.onnx", "--data", "inputs.npz")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("ptq",), "give --recipe, or --onnx FILE and --data"),
        (("ptq", "--onnx", "net.onnx"), "--onnx needs --data"),
        (("ptq", "--onnx", "net.onnx", "--data", "none"), "none does not exist; give a folder of images"),
        (("ptq", "--onnx", "none.onnx", "--data", "inputs.npz"), "none.onnx does not exist"),
        (
            ("ptq", "--onnx", "net.onnx", "--data", "inputs.npz", "--target", "cpu"),
            "--target is 'cpu' (one of: tensorrt",
        ),
        (("ptq", "--onnx", "net.onnx", "--data", "pictures", "--size", "8", "--std", "0"), "--std is '0'"),
        (("ptq", "--onnx", "net.onnx", "--data", "pictures", "--size", "0"), "--size is '0'"),
        (("ptq", "--onnx", "net.onnx", "--data", "pictures", "--size", "9"), "takes (any, 3, 8, 8)"),
        (("ptq", "--onnx", "net.onnx", "--data", "os:nothing"), "--data os:nothing: os has no 'nothing'"),
        (("ptq", "--onnx", "net.onnx", "--data", "net.npz"), "cannot be read as an .npz file"),
        (("ptq", "--recipe", "resnet50.yaml", "--data", "pictures"), "belong to --onnx"),
        ((*NET, "--tune", "5", "--max-drop", "1"), "a time with its unit, such as 5min"),
        ((*NET, "--tune", "5min"), "--tune needs one floor of accuracy"),
        ((*NET, "--tune", "5min", "--max-drop", "-1"), "--tune needs one floor of accuracy"),
        ((*NET, "--tune", "5min", "--max-drop", "1"), "needs two batches of images or more"),
        ((*NET, "--max-drop", "1"), "add --tune 5min"),
        (("ptq", "--onnx", "net.onnx", "--data", "inputs.npz", "--out", "new.ONNX"), "--out names a folder"),
    ],
)
def test_refusals_of_ptq(compress, floats, words, text):
    assert text in compress(*words, cwd=floats).refused
    assert not [*floats.glob("run*")]


def test_pictures_become_inputs_as_asked(floats):
    # Against numpy; a picture that has the size already is not resized.
    form = Preprocessing(
        image_size=(12, 10), mean=(0.5,) * 3, std=(0.25,) * 3, layout="NHWC", channels="BGR", resize="squash"
    )
    (batch,) = unlabelled(str(floats / "pictures"), form, limit=2, batch_size=8)
    pixels = np.asarray(Image.open(floats / "pictures" / "any" / "0.png"), np.float32)
    np.testing.assert_allclose(batch[0].numpy(), (pixels[:, :, ::-1] / 255 - 0.5) / 0.25, atol=1e-6)
    assert batch.shape == (2, 12, 10, 3)


def test_a_file_says_itself_how_pictures_become_its_inputs(tmp_path):
    # Against torchvision's transforms; a file that says nothing has ImageNet's numbers and its own size.
    said = Preprocessing(
        image_size=20, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), interpolation="bicubic", crop_ratio=0.8
    )
    net, x = nn.Sequential(nn.Conv2d(3, 2, 3)), torch.randn(1, 3, 20, 20)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8))
    image.save(tmp_path / "a.png")
    file = compress.export_onnx(net, x, tmp_path / "net.onnx", preprocessing=said)
    steps = [
        transforms.Resize(25, transforms.InterpolationMode.BICUBIC),
        transforms.CenterCrop(20),
        transforms.ToTensor(),
    ]
    expected = transforms.Compose([*steps, transforms.Normalize(said.mean, said.std)])(image)
    torch.testing.assert_close(read_input(tmp_path / "a.png", FormOptions().of(file)), expected, rtol=0, atol=1e-5)
    assert FormOptions(size="12", mean="0.5").of(file).image_size == (12, 12)
    plain = compress.export_onnx(net, x, tmp_path / "plain.onnx")
    assert FormOptions().of(plain) == Preprocessing(image_size=(20, 20), crop_ratio=0.875)
    last = onnx.load(plain)  # channels last, as TensorFlow's are
    for dim, side in zip(last.graph.input[0].type.tensor_type.shape.dim[1:], (12, 24, 3), strict=True):
        dim.dim_value = side
    onnx.save(last, plain)
    found = read_input(tmp_path / "a.png", FormOptions(mean="0.5,0.4,0.3", std="0.2,0.3,0.4").of(plain))
    assert found.shape == (12, 24, 3) and found.is_contiguous()
    assert FormOptions(layout="NCHW").of(plain).layout == "NCHW"


def test_hidden_files_are_no_pictures(floats):
    # macOS writes a file `._NAME` beside each on disks of another kind; it is no picture.
    (floats / "pictures" / "._0.png").write_bytes(b"attributes")
    assert len(ImageFolder(floats / "pictures", Preprocessing(image_size=8), limit=9, batch_size=1).paths) == 3


def test_damaged_pictures_of_a_folder_are_left_out_and_named(tmp_path):
    form, pixels = Preprocessing(image_size=8, resize="squash"), np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3))
    for i, image in enumerate(pixels):
        Image.fromarray(image.astype(np.uint8)).save(tmp_path / f"{i}.png")
    (tmp_path / "1.png").write_bytes((tmp_path / "1.png").read_bytes()[:60])
    (tmp_path / "3.png").write_bytes(b"")
    with pytest.warns(CompressWarning, match=r"^2 of 5 images are left out: .*1\.png .*3\.png"):
        batches = list(unlabelled(str(tmp_path), form, limit=9, batch_size=2))
    expected = (pixels[[0, 2, 4]] / 255 - np.asarray(form.mean)) / np.asarray(form.std)
    np.testing.assert_allclose(np.concatenate(batches).transpose(0, 2, 3, 1), expected, atol=1e-6)
    for i in (0, 2, 4):
        (tmp_path / f"{i}.png").unlink()
    with pytest.raises(DataError, match=r"1\.png is not a readable image"):
        list(unlabelled(str(tmp_path), form, limit=9, batch_size=2))


def test_a_quantized_file_begins_anew(compress, floats):
    assert compress(*NET, "--out", "run", cwd=floats).shown
    (floats / "run" / "net.int8.onnx").rename(floats / "q.onnx")
    words = ("ptq", "--onnx", "q.onnx", "--data", "inputs.npz", "--out", "run")
    refused = compress(*words, cwd=floats).refused
    assert "quantized already" in refused and "--again" in refused
    assert compress(*words, "--again", "--json", cwd=floats).document["int8_share"] == 1
    assert "QuantizeLinear" not in {n.op_type for n in onnx.load(floats / "run" / "q.float.onnx").graph.node}
