# The command line as a user meets it: exit status, what is on which stream, what is said.
#
# Refusals without torch and an interrupt run in processes of their own; all other cases call the same `main` in this
# one, which saves the seconds that a process takes to import torch.

import contextlib
import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import onnx
import pytest
import torch
import torchvision
from rich.console import Console
from rich.progress import Progress
from typer.main import get_command
from typer.testing import CliRunner

from compress import ModelSpec, __version__, build_model, load_recipe
from compress.cli import console, doctor
from compress.cli.app import app
from compress.cli.console import VERBOSITY, LineProgress, progress
from compress.cli.recipes import init
from compress.errors import ModelError, RecipeError
from compress.pipeline.run import open_run
from compress.plots.results import Point, draw_tradeoff
from compress.plots.style import WIDE, settle, styled
from compress.version import DISTRIBUTION
from tests.hostile.disk import read_only, room_for
from tests.onnx_models import onnx_model

ROOT = Path(__file__).parents[2]


SAID = (
    "input    RGB, NCHW: centre crop of 20 x 20 after resizing to 23, mean 0.485, 0.456, 0.406, std 0.5; --size, "
    "--resize, --layout, --mean and --std change this"
)


def test_a_wrong_key_is_refused_and_a_plan_is_shown_without_torch(tmp_path):
    # In a process in which torch cannot be imported.
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    seen = {}
    node = onnx.helper.make_node("Relu", ["x"], ["y"])
    onnx.save(onnx_model([node], {"x": ["n", 3, 20, 20]}, {}), tmp_path / "net.onnx")
    (tmp_path / "images").mkdir()
    for words in (
        ("sensitivity", "quickstart", "-s", "qat.epoch=1"),
        ("qat", "quickstart", "-q", "-s", "qat.epochs=1"),
        ("erf", "--model", "resnet50"),
        ("ptq", "--onnx", "net.onnx", "--data", "images", "--target=openvino", "--std", "0.5"),
        ("predict", "runs/nowhere", "a.jpg"),
        ("report", "runs/nowhere"),
        ("bench", "net.onnx", "none.onnx"),
    ):
        command = [sys.executable, "-m", "compress", *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
        seen[words[0]] = done.stderr
    assert "did you mean 'epochs'" in seen["sensitivity"] and "torch was imported" not in seen["sensitivity"]
    plan = seen["qat"].partition("Traceback")[0]
    for text in ("network  resnet18", "data     digits", "24 x 24, mean 0.305, std 0.376", "engines  OpenVINO"):
        assert text in plan
    assert seen["erf"].startswith("network  resnet50, random weights\ninput    224 px\n")
    lines = seen["ptq"].splitlines()
    assert lines[1:3] + lines[4:5] == ["data     images", SAID, "engines  OpenVINO"], seen["ptq"]
    assert seen["predict"].startswith("error RunError: runs/nowhere is no run folder")
    for name, path in {"report": "runs/nowhere", "bench": "none.onnx"}.items():
        assert seen[name].startswith(f"error RunError: {path} does not exist"), seen[name]
    assert (done.returncode, done.stdout) == (2, "") and "Traceback" not in done.stderr  # of the last one
    assert all("torch was imported" in seen[name] for name in ("qat", "erf", "ptq"))


REFUSALS = [
    (("qat", "--recipe", "resnet5O.yaml"), "did you mean 'resnet50'"),
    (("ptq", "--recipe", "resnet50", "--set", "data.name=folder", "--set", "data.root=/none"), "/none"),
    (("report", "nowhere"), "nowhere"),
    (("qat", "--recipe", "resnet50", "--set", "qat.epoch=1"), "did you mean 'epochs'"),
    (("ptq", "--recipe", "resnet50", "--set", "model.weights=/none.pt"), "/none.pt"),
    (("sensitivity", "--recipe", "resnet50", "--max-drop", "1", "--costs", "h2000"), "did you mean 'h200'"),
    (("bench", "none.onnx", "--engine", "openvino"), "none.onnx does not exist"),
    (("bench", "--engine", "openvino", "none.onnx"), "there is no file none.onnx"),
    (("bench", ":b:.onnx", "--engine", "openvino"), ":b:.onnx does not exist"),
    (("qat", "--recipe", "resnet50", "--set", "quantization.target=trt"), "did you mean 'tensorrt'"),
    (("qat", "--recipe", "resnet50", "--set", "bench.engines=[ort]"), "did you mean 'onnxruntime'"),
    (("qat", "--recipe", "quickstart", "--out", "/proc/nowhere/run"), "name a place that exists"),
    (("roofline", "--model", "resnet18", "--out", __file__), "name a folder"),
    (("qat", "resnet50", "--recipe", "quickstart"), "two recipes are named, resnet50 and quickstart"),
    (("qat",), "name a recipe"),
    (("inspect",), "a model, an onnx file, an engine"),
    (("inspect", "model"), "give one of --recipe and --model"),
    (("inspect", "model", "--model", "resnet18", "--sparsity", "--device", "t4"), "has no peak for int8-2:4"),
    (("inspect", "model", "--recipe", "resnet50-sparse", "--sparsity", "-s", "sparsity.pattern='1:4'"), "for 2:4 only"),
    (("inspect", "model", "--model", "resnet18", "--draw", ""), "--draw is empty"),
    (("roofline", "--model", "resnet18", "--device", "h200", "--out="), "--out is empty"),
    (("erf", "--model", "resnet18", "-o", ""), "-o is empty"),
    (("predict", "runs/x", ""), "an argument is empty"),
    (("sensitivity", "--recipe", "resnet50", "--max-drop", "nan"), "--max-drop is nan"),
    (("sensitivity", "--recipe", "resnet50", "--images", "-1"), "'--images'"),
    (("inspect", "onnx", "/dev/zero"), "/dev/zero"),
    (("inspect", "onnx", "none.onnx"), "does not exist"),
    (("inspect", "parity", "--run", "."), ". is no run folder (recipe.yaml is missing)"),
    (("build", "explore", "resnet50", "--device", "h2000"), "did you mean 'h200'"),
    (("build", "recipe", "quickstart", "--sm", "89"), "quantization.target is openvino"),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSALS)
def test_a_refusal_has_a_reason_a_status_and_leaves_nothing(arguments, text, tmp_path, compress):
    done = compress(*arguments, cwd=tmp_path)
    assert text in done.refused and done.stdout == ""
    assert not [p for p in tmp_path.rglob("*") if p.is_file()]


def test_inspect_as_json_is_one_document(compress):
    document = compress("inspect", "model", "--model", "resnet18", "--set", "data.image_size=64", "--json").document
    assert len([row for row in document["placement"] if row["rule"] == "weight"]) == 21
    assert all(row["reason"] for row in document["placement"])


def test_inspect_says_what_sparsity_could_bring_before_training(compress):
    arguments = ("inspect", "model", "--model", "resnet18", "--sparsity", "--device", "a100", "--batch-size", "8")
    document = compress(*arguments, "--json").document
    rows = {row["layer"]: row for row in document["rows"]}
    assert len(rows) == 21 and document["batch_size"] == 8
    assert not rows["conv1"]["masked"] and rows["conv1"]["speedup"] == 1.0
    assert 1.0 < rows["layer4.1.conv2"]["speedup"] <= 2.0
    assert 1.0 < document["speedup_of_large_layers"] <= document["speedup"] < 2.0
    shown = compress(*arguments).shown
    assert "at most" in shown and "3 input channels" in shown


def test_doctor_says_why_not(compress):
    engines = {e["name"]: e for e in compress("doctor", "--json").document["engines"]}
    assert engines["openvino"]["available"] and engines["onnxruntime"]["available"]
    for engine in engines.values():
        assert engine["available"] or (engine["reason"] and engine["install"])


def test_recipes_lists_those_that_ship(compress, tmp_path):
    rows = compress("recipes", "--json", cwd=tmp_path).document
    assert {"resnet50", "resnet50-cpu", "mobilenet_v2"} <= {row["name"] for row in rows}


def stop(*_, **__):
    raise KeyboardInterrupt


def test_ctrl_c_says_what_is_left(compress, monkeypatch, tmp_path):
    monkeypatch.setattr("compress.pipeline.run", stop)
    done = compress("qat", "--recipe", "resnet50", "--out", str(tmp_path / "run"))
    assert done.returncode == 130 and done.stdout == ""
    assert "stopped; what was finished is kept, and --resume goes on with it" in done.stderr
    monkeypatch.setattr("compress.cli.report.write_report", stop)
    done = compress("report", str(tmp_path))  # has no --resume
    assert done.returncode == 130 and done.stderr.strip() == "stopped"


def test_ctrl_c_while_torch_is_imported_leaves_no_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}

    def started(*arguments):
        return subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            env=environment,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's children ignore it
        )

    done = started("-m", "compress", "doctor")
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
    assert (
        "KeyboardInterrupt" in started("-c", "import compress; compress.quantize").stderr
    )  # others decide for themselves


def test_a_working_folder_that_was_deleted_is_said(compress, monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = compress("recipes")
    assert "the working folder was deleted: go to one that exists" in done.refused and done.stdout == ""


def test_resume_says_what_it_finds(compress, monkeypatch, tmp_path):
    monkeypatch.setattr("compress.pipeline.run", stop)
    printed = compress("qat", "--recipe", "resnet50", "--resume", "--out", str(tmp_path / "typo")).stderr
    assert "typo holds no run: a new one begins" in printed
    folder = open_run(tmp_path / "run", load_recipe("resnet50"), "qat", resume=False)
    folder.finish("train")
    folder.finish("ptq")
    folder.release()
    printed = compress("qat", "--recipe", "resnet50", "--resume", "--out", str(tmp_path / "run")).stderr
    assert "run: finished so far: train, ptq" in printed


def commands_in(text):
    # (command, its arguments) of each `python -m compress` line or cell; words after two spaces or # explain it.
    for line in re.findall(r"^(?:\| `)?python -m compress +([^`\n]*)", text, flags=re.MULTILINE):
        for one in re.split(r" \\?\| ", re.sub(r"\s+#\s.*", "", line)):
            name, _, rest = one.partition(" ")
            yield name, tuple(re.split(r"\s{2,}", rest.strip())[0].split())


def command_of(name, arguments):
    # The command that words of a command line name, in a group where they do, with its full name and its arguments.
    command = get_command(app).commands[name]
    while hasattr(command, "commands"):
        command, name, arguments = command.commands[arguments[0]], f"{name} {arguments[0]}", arguments[1:]
    return command, name, list(arguments)


def all_commands(group, prefix=""):
    for name, command in group.commands.items():
        yield from all_commands(command, f"{name} ") if hasattr(command, "commands") else [prefix + name]


PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md")]


@pytest.mark.parametrize(
    ("name", "arguments"), sorted({one for page in PAGES for one in commands_in(page.read_text("utf-8"))})
)
def test_commands_of_the_pages_are_taken(name, arguments):
    command, name, arguments = command_of(name, arguments)
    assert not command.make_context(name, arguments).args  # parsed to the end, and nothing is run


def test_every_command_is_on_the_page_of_commands():
    page = commands_in((ROOT / "docs" / "commands.md").read_text("utf-8"))
    assert {command_of(name, arguments)[1] for name, arguments in page} == set(all_commands(get_command(app)))


@pytest.mark.parametrize("line", ["--help", "inspect --help", "build --help", "qat --recipe TYPO", "search -r TYPO"])
def test_help_and_a_recipe_that_is_not_there_need_no_torch(line):
    # The whole list and those of the groups; a command's own help imports what the command does.
    lines = (
        "import sys",
        "from compress.cli.app import app",
        f"try: app({line.split()!r})",
        "except SystemExit as ended: assert not ended.code",
        "except Exception as error: assert \"no recipe 'TYPO'\" in str(error)",
        "print(*sys.modules)",
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", "\n".join(lines)]
    loaded = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert "compress.cli.app" in loaded and "torch" not in loaded


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("inspect --onnx m.onnx --json", "inspect onnx m.onnx --json"),
        ("inspect --engine=e.log --onnx m.onnx --device orin", "inspect engine e.log --onnx m.onnx --device orin"),
        ("inspect --parity --run runs/x", "inspect parity --run runs/x"),
        ("inspect --recipe r --sparsity --device a100", "inspect model --recipe r --sparsity --device a100"),
        ("inspect -m resnet18 --draw layer1.0 --out b.png", "inspect model -m resnet18 --draw layer1.0 --out b.png"),
        ("build --onnx m.onnx --sm 89", "build onnx m.onnx --sm 89"),
        ("build -r resnet50 --variant ptq", "build recipe resnet50 --variant ptq"),
        ("build --recipe resnet50 --explore --device rtx4090", "build explore resnet50 --device rtx4090"),
    ],
)
def test_old_forms_are_refused_with_the_new_one_named(compress, old, new):
    assert f"`{old}` is now `{new}`" in compress(*old.split()).refused
    command, name, arguments = command_of(new.split()[0], new.split()[1:])
    command.make_context(name, arguments)


def test_version_is_printed(compress):
    assert compress("--version").shown.split() == [DISTRIBUTION, __version__]


def test_flags_are_shown_without_a_value(compress):
    assert "<bool>" not in compress("qat", "--help").stdout.replace("--help   <bool>", "").split("--help")[0]


def test_an_empty_recipe_is_refused(compress, tmp_path):
    (tmp_path / "empty.yaml").touch()
    assert "names at least its model" in compress("qat", "--recipe", "empty.yaml", cwd=tmp_path).refused
    assert [path.name for path in tmp_path.iterdir()] == ["empty.yaml"]


def test_a_bench_that_measures_nothing_fails(compress, tmp_path):
    (tmp_path / "broken.onnx").write_bytes(b"no graph")
    for path, name in ((tmp_path / "broken.onnx", "broken"), ("/etc/passwd", "passwd")):
        done = compress("bench", str(path), "--engine", "openvino", "--seconds", "0.1")
        assert "nothing was measured" in done.refused and name in done.stdout


def test_names_that_look_like_markup_are_shown_as_they_are(compress, tmp_path):
    path = tmp_path / "o[/red]" / ":b:[bold].yaml"
    words = ("init", path, "--model", "resnet18", "--data", "digits")
    assert str(path) in compress(*words).shown and path.is_file()
    assert f"{path} is there already" in compress(*words).refused


def test_the_console_script_finds_modules_beside_it(compress, monkeypatch, tmp_path):
    # As `python -m` does: a script's own folder is first in sys.path, not the working one.
    (tmp_path / "beside_it.py").write_text("from torchvision.models import squeezenet1_1 as make")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(ROOT))])
    (tmp_path / "r.yaml").write_text("{model: {name: 'beside_it:make'}, data: {name: shapes, image_size: 32}}")
    assert compress("inspect", "model", "--recipe", "r.yaml", cwd=tmp_path).shown


def test_progress_through_a_pipe_is_lines(compress, tmp_path):
    # After the plan each epoch and each result has a line with the time of day.
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "{model: {name: squeezenet1_1}, "
        "data: {name: shapes, image_size: 32, batch_size: 32, train_images: 64, val_images: 32},"
        " train: {epochs: 2}, bench: {engines: []}, quantization: null, qat: null}"
    )
    done = compress("train", "--recipe", recipe, "--out", tmp_path / "run")
    assert done.shown
    plan, lines = done.stderr.splitlines()[:5], done.stderr.splitlines()[5:]
    assert [line.split()[0] for line in plan] == ["network", "data", "input", "device", "folder"]
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    assert [i for i in (1, 2) if any(f"train: epoch {i} of 2, loss" in line for line in lines)] == [1, 2]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("option", "lines"), [("--quiet", 0), ("--verbose", 1)])
def test_progress_is_chosen_before_or_after_the_command(compress, capsys, option, lines, before):
    assert compress(*((option, "recipes") if before else ("recipes", option))).shown
    with progress() as listener:
        listener.start("calibrate", 1)
        listener.advance("calibrate")
    assert len(capsys.readouterr().err.splitlines()) == lines
    assert compress("recipes").shown and VERBOSITY.level == 0


# Files that other tools export are read, and the file of a detector is distinguished from that of a classifier.


def test_completion_for_shells_is_offered(compress):
    shown = compress("--help").stdout
    assert "--install-completion" in shown and "--show-completion" in shown


@pytest.mark.parametrize("suffix", [".th", ".ckpt", ".pth"])
def test_weights_may_have_any_usual_ending(tmp_path, suffix):
    network = torchvision.models.squeezenet1_1(num_classes=3)
    torch.save(network.state_dict(), tmp_path / f"weights{suffix}")
    spec = ModelSpec(name="squeezenet1_1", weights=str(tmp_path / f"weights{suffix}"))
    torch.testing.assert_close(build_model(spec, num_classes=3).state_dict(), network.state_dict(), rtol=0, atol=0)


def test_a_detector_named_as_a_classifier_is_called_a_detector():
    with pytest.raises(ModelError, match="task: detection"):
        build_model(ModelSpec(name="retinanet_resnet50_fpn"), num_classes=3)


def test_no_tick_is_above_100_percent():
    points = [
        Point(variant=variant, engine="openvino", batch_size=1, score=score, p50_ms=time)
        for variant, score, time in (("float", 100.0, 4.0), ("ptq", 99.8, 1.0))
    ]
    with styled():
        assert max(settle(draw_tradeoff(points, WIDE)).axes[0].get_yticks()) <= 100.0


# `init` writes a recipe that is read back, or nothing.


def invoke(*words):
    return CliRunner().invoke(app, ["init", *map(str, words)], catch_exceptions=False)


def test_flags_become_a_recipe(tmp_path):
    path = tmp_path / "mine.yaml"
    done = invoke(
        path,
        "--model",
        "resnet18",
        "--weights",
        "IMAGENET1K_V1",
        "--data",
        "folder",
        "--root",
        "/data/mine",
        "--image-size",
        "160",
        "--target",
        "tensorrt,openvino",
        "--qat-epochs",
        "0",
    )
    assert done.exit_code == 0 and f"python -m compress ptq --recipe {path}" in done.output
    recipe = load_recipe(path)
    assert (recipe.model.name, recipe.model.weights, recipe.train.epochs) == ("resnet18", "IMAGENET1K_V1", 0)
    assert (recipe.data.name, recipe.data.root, recipe.data.image_size) == ("folder", "/data/mine", 160)
    assert recipe.quantization.targets == recipe.bench.engines == ("tensorrt", "openvino") and recipe.qat is None


def test_a_tilde_that_no_shell_resolved_is_the_home(compress, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not compress("init", "~/r.yaml", "--data", "folder", "--root=~/data").returncode
    assert load_recipe(tmp_path / "r.yaml").data.root == str(tmp_path / "data")


def test_without_flags_it_is_the_digits(tmp_path):
    assert initialized(tmp_path).data.name == "digits"


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--target", "tensorrrt"], "did you mean 'tensorrt'"),
        (["--task", "regression"], "one of: classification"),
        (["--data", "folder"], "data.root is missing"),
        (["--task", "detection"], "data.root is missing"),
    ],
)
def test_what_is_refused_leaves_no_file(tmp_path, words, match):
    with pytest.raises(RecipeError, match=match):
        invoke(tmp_path / "r.yaml", *words)
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_only_with_force(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("mine")
    with pytest.raises(RecipeError, match="--force"):
        invoke(path)
    assert path.read_text() == "mine"
    assert invoke(path, "--force").exit_code == 0 and load_recipe(path)


def test_each_answer_is_checked(tmp_path, monkeypatch):
    # On a terminal; a wrong answer is asked for again, with what is allowed.
    (tmp_path / "mine" / "train" / "ant").mkdir(parents=True)
    (tmp_path / "mine" / "val" / "ant").mkdir(parents=True)
    answers = ["clasification", "classification", "resnet18x", "none.onnx", "resnet18", "none.pth", "", "foldr", "coco"]
    answers += ["folder", "", "/nowhere", str(tmp_path / "mine"), "big", "64", "openvina", "openvino"]
    given = iter(answers)
    monkeypatch.setattr("typer.prompt", lambda question, default: next(given))
    monkeypatch.setattr("compress.cli.recipes.sys.stdin", SimpleNamespace(isatty=lambda: True))
    init(tmp_path / "r.yaml")
    recipe = load_recipe(tmp_path / "r.yaml")
    assert (recipe.data.root, recipe.data.image_size, recipe.model.weights) == (str(tmp_path / "mine"), 64, None)
    assert next(given, None) is None


@pytest.mark.parametrize("key", ["\x03", "\x04"], ids=["Ctrl-C", "Ctrl-D"])
def test_stopped_at_a_question_it_ends_like_any_command(tmp_path, key):
    # In a terminal, whose driver turns the keys into a signal and an end of input.
    child, terminal = pty.fork()
    if not child:
        os.execv(sys.executable, [sys.executable, "-m", "compress", "init", str(tmp_path / "r.yaml")])
    seen = b""
    while b"]:" not in seen:
        seen += os.read(terminal, 1024)
    with contextlib.suppress(OSError):  # how a terminal ends on Linux
        while True:
            os.write(terminal, key.encode())  # again, as people do: Python misses a signal before it waits for input
            while select.select([terminal], [], [], 10)[0]:
                seen += os.read(terminal, 1024)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    assert seen.decode().splitlines()[-1] == "stopped" and not list(tmp_path.iterdir())


def initialized(folder, *words):
    assert invoke(folder / "r.yaml", *words).exit_code == 0
    return load_recipe(folder / "r.yaml")


def test_images_without_labels_have_the_outputs_of_their_network(tmp_path):
    recipe = initialized(tmp_path, "--data", "images", "--root", tmp_path, "--classes", "ant,bee")
    assert (recipe.data.num_classes, recipe.train.epochs) == (2, 0)


def test_a_name_of_two_lines_adds_no_key(tmp_path):
    recipe = initialized(tmp_path, "--model", "timm:a\nqat: null", "--data", "digits")
    assert recipe.model.name == "timm:a\nqat: null" and recipe.qat is not None


# Progress as lines: what is written, and that silence does not last.


def label(fields):
    return f"loss {fields['loss']:.2f}" if fields else ""


@pytest.fixture
def lines():
    return []


def texts(lines):
    return [line.split(" ", 1)[1] for line in lines]


def test_a_phase_has_a_line_at_its_end_unless_a_note_tells_it(lines):
    with LineProgress(lines.append, label, short=0) as progress:
        progress.start("calibrate", 2)
        progress.advance("calibrate", loss=0.5)
        progress.advance("calibrate")
        progress.start("train", 1)
        progress.advance("train")
        time.sleep(1.2)  # longer than the thread that watches waits
        progress.start("train: evaluate", 1)
        progress.advance("train: evaluate")
        progress.note("train: epoch 1, top-1 91.2 %")
        progress.start("adaround", 0)
    assert texts(lines) == ["calibrate: 2 of 2, loss 0.50", "train: epoch 1, top-1 91.2 %", "adaround: done"]


def test_a_short_phase_says_nothing(lines):
    with LineProgress(lines.append, label) as progress:
        progress.start("calibrate", 1)
        progress.advance("calibrate")
    assert lines == []


def test_an_error_leaves_an_open_phase_without_an_end(lines):
    with pytest.raises(ValueError), LineProgress(lines.append, label, short=0) as progress:
        progress.start("train", 5)
        raise ValueError
    assert lines == []


def test_long_work_is_not_silent(lines):
    with LineProgress(lines.append, label, every=0.05) as progress:
        progress.start("export", 3)
        waits_until = time.monotonic() + 10
        while len(lines) < 3 and time.monotonic() < waits_until:
            time.sleep(0.01)
        progress.finish("export")
        while "after" not in lines[-1] and time.monotonic() < waits_until:
            time.sleep(0.01)
    assert (
        len(lines) >= 3 and texts(lines)[0].startswith("export: 0 of 3") and texts(lines)[-1] == "at work after export"
    )


# What a terminal of 80 columns shows: names and times in one piece, sentences as lines.


def terminal(width=80):
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, markup=False, emoji=False)


def lines_of(terminal):
    # What was written, whose lines are as long as the terminal is wide at most.
    lines = terminal.file.getvalue().splitlines()
    assert all(len(line) <= terminal.width for line in lines)
    return lines


@pytest.fixture
def shown(monkeypatch):
    made = terminal()
    for module in (console, doctor):
        monkeypatch.setattr(module, "OUT", made)
    return made


def test_doctor_breaks_no_name(shown):
    doctor.doctor()
    text = " ".join(" ".join(lines_of(shown)).split())
    assert all(name in text for name in ("onnxruntime", "tensorrt-lean", "CPUExecutionProvider"))
    assert "cuda: " in text and text.count("What to do: ") >= 3


def test_sentences_of_a_wide_table_are_lines_below_it(shown):
    reason = "a convolution computes in INT8 when its input and weight are quantized"
    rows = [(f"layer{i}.0.downsample.0", f"layer{i}.conv1", "int8", "conv input", reason) for i in range(6)]
    console.print_table(
        "placement", ("tensor", "asked by", "decision", "rule", "reason"), [*rows, ("x", "", "", "", "")]
    )
    text = " ".join(" ".join(lines_of(shown)).split())
    assert all(row[0] in text for row in rows)
    assert text.count(reason) == 1 and "layer2.0.downsample.0 and 3 more: a convolution" in text


def test_numbers_that_do_not_fit_are_left_out_and_named(shown):
    # The table of a run: engine, batch and variant were squeezed to nothing.
    titles = ("engine", "batch", "variant", "top-1", "p50 ms", "speed-up", "p99 ms", "images/s", "file", "of float")
    rows = [("openvino (bf16)", "1", "ptq", "98.66", "0.226", "2.55x", "0.31", "4400", "11.2 MB", "0.251")]
    console.print_table("run", titles, rows, numbers=titles[3:])
    lines, text = lines_of(shown), shown.file.getvalue()
    assert all(cell in text for cell in rows[0][:6]) and lines[-1].startswith("not shown in 80 columns: ")
    left = lines[-1].partition(": ")[2].split(", ")
    assert left == list(titles[-len(left) :]) and not any(title in text.splitlines()[2] for title in left)


def test_a_table_that_fits_is_a_table(shown):
    console.print_table("t", ("a", "b", "c"), [("x", "y", "z" * 50)])
    assert "│ x │ y │ " + "z" * 50 in shown.file.getvalue()


@pytest.mark.parametrize(("width", "times"), [(80, 1), (140, 2)])
def test_a_bar_shows_its_time_and_its_figures_whole(width, times):
    made = terminal(width)
    with Progress(*console.bar_columns(width), console=made, auto_refresh=False) as bars:
        listener = console.BarProgress(bars)
        listener.start("accuracy: torch (fake quantization)", 8)
        listener.start("train: evaluate", 63)
        listener.advance("train: evaluate", 21, loss=1.191, accuracy=0.615, images_per_s=640)
        bars.refresh()
    last = [line for line in made.file.getvalue().splitlines() if "21/63" in line][-1]
    assert "loss 1.191  accuracy 61.5%  images/s 640" in last
    assert last.count(":") == 1 + 2 * times and "…" not in last  # h:mm:ss, or -:--:--


def test_a_line_above_the_bars_breaks_between_words():
    said = "train: epoch 3 of 3, loss 0.1636, top-1 99.11 %, 25 images/s, 55 s, 1 % of it waiting for images"
    made = terminal()
    console.BarProgress(Progress(console=made)).note(said)
    assert " ".join(line.rstrip() for line in lines_of(made)) == said


# A full disk and a folder that may not be written to end a command in one sentence.

OPTIONS = ("--model", "resnet18", "--data", "digits", "--force")


def test_a_full_disk(compress, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    assert compress("init", recipe, *OPTIONS).shown
    before = recipe.read_bytes()
    with room_for(10):
        done = compress("init", str(recipe), *OPTIONS, "--epochs", "3")
    assert done.returncode == 2 and recipe.read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    assert done.stderr == f"error {recipe}: file too large; make room and run it again: no file is half-written\n"


@pytest.mark.parametrize("arguments", [("init", "{}/older", *OPTIONS), ("report", "{}/run")])
def test_a_read_only_folder(compress, tmp_path, arguments):
    # A first call imports the modules that the command needs, while files may still be written.
    assert compress("init", tmp_path / "recipe.yaml", *OPTIONS).shown
    with read_only() as folder:
        done = compress(*(argument.format(folder) for argument in arguments))
    assert done.returncode == 2
    assert re.fullmatch(rf"error {folder}/\S+: permission denied; name a place that .* write to\n", done.stderr)
