# The run folder: who is let in, what may change on a resume, and damaged or changed contents.

import dataclasses
import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import socket
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn

from compress import CompressError, DataSpec, load_data, run
from compress.errors import ExportError, RunError
from compress.pipeline.run import lock_folder, open_run, read_state, recipe_of
from compress.pipeline.saved import export_again, finished_run, network, variants_in
from compress.recipe.tree import parse_recipe
from compress.records.files import read_run
from compress.report.document import write_report
from compress.variants import Variant
from tests.images import write_images
from tests.networks import Net, tiny
from tests.pipeline.inject import digests

RECIPE = parse_recipe({"train": {"epochs": 1}})


def _enter(path, barrier, answers):
    barrier.wait()
    try:
        open_run(path, RECIPE, "ptq", resume=False)
        answers.put("in")
    except CompressError as error:
        answers.put(str(error))
    barrier.wait()  # nobody leaves before both have tried


def test_of_two_processes_that_begin_at_once_one_is_let_in(tmp_path):
    context = multiprocessing.get_context("fork")
    for attempt in range(8):
        barrier, answers = context.Barrier(2), context.Queue()
        both = [
            context.Process(target=_enter, args=(tmp_path / str(attempt), barrier, answers), daemon=True)
            for _ in range(2)
        ]
        for process in both:
            process.start()
        outcomes = sorted(answers.get(timeout=30) for _ in both)
        for process in both:
            process.join()
        assert outcomes[0] != "in" and "another process is at work" in outcomes[0], outcomes
        assert outcomes[1] == "in"


def test_the_refusal_names_the_process_that_is_at_work(tmp_path):
    folder = open_run(tmp_path / "run", RECIPE, "ptq", resume=False)
    with pytest.raises(RunError, match=rf"at work in .* \(process {os.getpid()} on "):
        open_run(tmp_path / "run", RECIPE, "ptq", resume=True)
    folder.release()


def test_a_refused_folder_is_unlocked(tmp_path):
    open_run(tmp_path, RECIPE, "ptq", resume=False).release()
    with pytest.raises(RunError, match="--resume"):
        open_run(tmp_path, RECIPE, "ptq", resume=False)
    open_run(tmp_path, RECIPE, "ptq", resume=True).release()


def begun(path, *steps, command="qat"):
    folder = open_run(path, RECIPE, command, resume=False)
    for step in steps:
        folder.finish(step, top1=0.5)
    folder.release()


def changed(section, **values):
    return dataclasses.replace(RECIPE, **{section: dataclasses.replace(getattr(RECIPE, section), **values)})


@pytest.mark.parametrize(
    ("steps", "section", "values"),
    [
        (("train", "ptq"), "qat", {"lr": 0.5}),
        (("train",), "quantization", {"equalize": True}),
        (("train", "ptq", "qat"), "export", {"opset": 20}),
        (("train", "ptq", "qat", "export"), "bench", {"runs": 7}),
        (("train", "ptq", "qat", "export", "bench"), "data", {"workers": 1}),
        ((), "train", {"lr": 0.5}),
    ],
)
def test_keys_of_steps_to_come_may_change(tmp_path, steps, section, values):
    begun(tmp_path, *steps)
    other = changed(section, **values)
    open_run(tmp_path, other, "qat", resume=True).release()
    assert recipe_of(tmp_path) == other and read_state(tmp_path).recipe == other.digest()
    (line,) = read_state(tmp_path).changes
    assert f"{section}.{next(iter(values))}" in line
    open_run(tmp_path, other, "qat", resume=True).release()
    assert len(read_state(tmp_path).changes) == 1


@pytest.mark.parametrize(
    ("steps", "section", "values"),
    [
        (("train",), "train", {"lr": 0.5}),
        (("train",), "data", {"image_size": 32}),
        (("train", "ptq"), "quantization", {"equalize": True}),
        (("train", "ptq", "qat"), "qat", {"lr": 0.5}),
        (("train", "ptq", "qat", "export"), "export", {"opset": 20}),
        (("train", "ptq", "qat", "export", "evaluate"), "bench", {"runs": 7}),
    ],
)
def test_keys_of_steps_that_were_taken_may_not(tmp_path, steps, section, values):
    begun(tmp_path, *steps)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.name != ".lock"}
    words = rf"differs in {section}.{next(iter(values))} .*taken: {', '.join(steps)}"
    with pytest.raises(RunError, match=words):
        open_run(tmp_path, changed(section, **values), "qat", resume=True)
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(("command", "steps"), [("qat", ("train", "ptq")), ("sensitivity", ())])
def test_a_training_that_was_begun_and_a_study_keep_their_keys(tmp_path, command, steps):
    begun(tmp_path, *steps, command=command)
    (tmp_path / "qat.checkpoint.safetensors").touch()
    with pytest.raises(RunError, match=r"differs in qat\.lr"):
        open_run(tmp_path, changed("qat", lr=0.5), command, resume=True)


DAMAGE = {
    "empty": "",
    "binary": b"\xff\xfe\x00",
    "deep": "[" * 100_000,
    "list": "[1]",
    "no recipe": {"recipe": None},
    "no steps": {"steps": None},
    "command 5": {"command": 5},
    "later format": {"format": 99},
    "format true": {"format": True},
    "steps are a list": {"steps": ["train"]},
    "facts are null": {"steps": {"train": None}},
    "notes are text": {"steps": {"train": {"notes": "abc"}}},
    "left_out is a list": {"steps": {"train": {"left_out": [1]}}},
    "unknown key": {"extra": 1},
    "digits": '{"format": 2, "command": "qat", "recipe": ' + "9" * 5000 + "}",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_state_is_named(tmp_path, name):
    begun(tmp_path, "train")
    path, damage = tmp_path / "state.json", DAMAGE[name]
    if isinstance(damage, dict):
        tree = json.loads(path.read_text()) | damage
        damage = json.dumps({key: value for key, value in tree.items() if value is not None})
    path.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    with pytest.raises(RunError, match=r"state\.json cannot be read: .*--out"):
        open_run(tmp_path, RECIPE, "qat", resume=True)


def test_a_state_of_the_first_format_is_read(tmp_path):
    begun(tmp_path, "train")
    path = tmp_path / "state.json"
    first = {key: json.loads(path.read_text())[key] for key in ("command", "recipe", "steps")} | {"format": 1}
    path.write_text(json.dumps(first))
    folder = open_run(tmp_path, RECIPE, "qat", resume=True)
    assert folder.done("train")
    folder.release()


@pytest.mark.parametrize("text", ["{", "5", '[{"a": 1}]', "[" * 100_000, '[{"name": "top1"}]'])
def test_damaged_metrics_are_named(tmp_path, text):
    begun(tmp_path, "train")
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(RunError, match=r"metrics\.json"):
        read_state(tmp_path).metrics()


@pytest.fixture
def pictures(tmp_path):
    return write_images(tmp_path / "data", ("cat", "dog"), 3, size=(8, 8), ending="bmp")


def _rename(root):
    for part in ("train", "val"):
        (root / part / "cat").rename(root / part / "zebra")


def _exchange(root):
    first, second = root / "train" / "cat" / "0.bmp", root / "train" / "dog" / "1.bmp"
    first.rename(root / "x"), second.rename(first), (root / "x").rename(second)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_rename, "the classes of train were cat, dog, and are dog, zebra"),
        (_exchange, "images of train were added, removed, renamed, exchanged"),
        (lambda root: (root / "val" / "dog" / "2.bmp").unlink(), "val had 6 images, and has 5"),
    ],
)
def test_data_that_changed_are_refused(pictures, tmp_path, change, words):
    spec = DataSpec(name="folder", root=str(pictures), image_size=8, workers=0, augment=False)
    recipe = dataclasses.replace(RECIPE, data=spec)
    out = tmp_path / "run"
    open_run(out, recipe, "qat", resume=False, data=load_data(spec).fingerprints()).release()
    open_run(out, recipe, "qat", resume=True, data=load_data(spec).fingerprints()).release()
    change(pictures)
    with pytest.raises(RunError, match=words):
        open_run(out, recipe, "qat", resume=True, data=load_data(spec).fingerprints())


def test_data_that_moved_are_the_same(pictures, tmp_path):
    spec = DataSpec(name="folder", root=str(pictures), image_size=8, workers=0, augment=False)
    here = load_data(spec).fingerprints()
    pictures.rename(tmp_path / "elsewhere")
    assert here == load_data(dataclasses.replace(spec, root=str(tmp_path / "elsewhere"))).fingerprints()


@pytest.mark.parametrize("name", ["digits", "shapes"])
def test_every_data_set_has_a_fingerprint_that_follows_its_images(name):
    spec = DataSpec(name=name, train_images=30, val_images=20, image_size=16)
    first, again = load_data(spec).fingerprints(), load_data(spec).fingerprints()
    assert first == again and first["train"] != first["val"]
    fewer = load_data(dataclasses.replace(spec, train_images=29)).fingerprints()
    assert fewer["train"].digest() != first["train"].digest() and fewer["val"] == first["val"]


@pytest.mark.parametrize(
    ("error", "change", "words"),
    [
        (CompressError, {"export": {"opset": 99}}, r"export\.opset is 99.*19 to \d\d"),
        (CompressError, {"quantization": {"smooth": 0.5}}, "smooth: no LayerNorm"),
        (
            CompressError,
            {"quantization": {"bias_correction": "analytic"}, "model": {"name": "tests.pipeline.test_resume:network"}},
            "analytic needs BatchNorm",
        ),
        (CompressError, {"data": {"image_size": 8192, "batch_size": 2**20}}, r"data\.batch_size 1048576"),
        (ExportError, {"model": {"name": "tests.pipeline.test_folder:unwritable"}}, "bessel"),
    ],
)
def test_what_only_a_late_step_would_refuse_is_refused_at_once(tmp_path, error, change, words):
    tree = {
        "model": {"name": "tests.networks:tiny"},
        "data": {"image_size": 16, "train_images": 40, "val_images": 20},
        "train": {"epochs": 1000},
    }
    with pytest.raises(error, match=words):
        run(parse_recipe({**tree, **change}), "qat", tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def unwritable(num_classes):
    # What torch.fx traces and quantizes, and no exporter writes: a special function without an ONNX operator.
    def run(net, x):
        x = torch.special.bessel_j0(net.conv(x))
        return net.fc(net.more(x).mean((2, 3)))

    return Net(run, conv=nn.Conv2d(3, 4, 3), more=nn.Conv2d(4, 4, 3), fc=nn.Linear(4, num_classes))


PLACES = {
    "model": {"name": "tests.networks:tiny", "weights": "start/w.pth"},
    "data": {"name": "folder", "root": "images", "image_size": 16, "batch_size": 4},
    "train": {"epochs": 0},
    "quantization": {"target": "openvino", "calibration_images": 4},
    "bench": {"engines": ["openvino"], "batch_sizes": [1], "runs": 2, "seconds": 0.1},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    # The folder in which a recipe with relative paths was run.
    home = tmp_path_factory.mktemp("at") / "home"
    write_images(home / "images", ("dark", "light"), 3)
    (home / "start").mkdir()
    torch.manual_seed(0)
    torch.save(tiny(num_classes=2).state_dict(), home / "start" / "w.pth")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        run(parse_recipe(PLACES), "ptq", "run", device="cpu")
    return home


@pytest.fixture
def begun_elsewhere(home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return home / "run"


@contextmanager
def renamed(path, name):
    moved = path.rename(path.with_name(name))
    try:
        yield moved
    finally:
        moved.rename(path)


def test_a_run_is_used_from_another_folder_and_its_recipe_stays_as_it_was_written(begun_elsewhere, monkeypatch):
    again = finished_run(begun_elsewhere)
    assert again.recipe.data.root == str(begun_elsewhere.parent / "images")
    answers = network(again, Variant.PTQ)(again.example)
    assert recipe_of(begun_elsewhere) == parse_recipe(PLACES)
    monkeypatch.chdir(begun_elsewhere.parent)
    at_home = finished_run(begun_elsewhere)
    assert at_home.recipe == parse_recipe(PLACES)
    assert torch.equal(network(at_home, Variant.PTQ)(at_home.example), answers)


def test_a_run_that_was_moved_with_its_data_takes_those_beside_the_process(begun_elsewhere, monkeypatch):
    with renamed(begun_elsewhere.parent, "moved") as moved:
        with pytest.raises(CompressError, match=r"data.root"):
            finished_run(moved / "run")
        monkeypatch.chdir(moved)
        assert finished_run(moved / "run").recipe == parse_recipe(PLACES)


# Two hosts on one folder, a lock that a dead one has left, and file systems without locks.

LOCK_RECIPE = parse_recipe({})


@pytest.fixture
def without_locks(monkeypatch):
    def none(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)


def opened(path, **options):
    return open_run(path, LOCK_RECIPE, "ptq", resume=True, **options)


def test_a_folder_that_another_host_holds_names_the_host_and_the_way_out(tmp_path):
    opened(tmp_path).release()
    with (tmp_path / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("process 7 on elsewhere")
        held.flush()
        with pytest.raises(RunError, match=r"at work in .*\(process 7 on elsewhere\).*host is dead.*remove .*\.lock "):
            opened(tmp_path)
        (tmp_path / ".lock").unlink()
        opened(tmp_path).release()


def test_without_locks_a_file_keeps_the_others_out(tmp_path, without_locks):
    first = opened(tmp_path)
    assert (tmp_path / ".owner").read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(RunError, match=rf"another process is at work in .*\(process {os.getpid()} on "):
        opened(tmp_path)
    first.release()
    first.release()
    assert not (tmp_path / ".owner").exists()
    opened(tmp_path).release()


def test_a_lock_that_nobody_refers_to_is_released(tmp_path, without_locks):
    lock = lock_folder(tmp_path)
    assert (tmp_path / ".owner").exists()
    del lock
    assert not (tmp_path / ".owner").exists()


@pytest.mark.parametrize(
    ("holder", "message"),
    [
        (f"process {2**22 + 5} on {socket.gethostname()}", r"not there any more .*has left its lock.*remove .*\.owner"),
        ("process 7 on elsewhere", r"at work in .*\(process 7 on elsewhere\).*host is dead.*remove .*\.owner "),
        ("", r"another process is at work in [^(]*: wait"),
    ],
)
def test_a_lock_that_was_left_behind_is_taken_by_removing_it(tmp_path, without_locks, holder, message):
    opened(tmp_path).release()
    state = (tmp_path / "state.json").read_bytes() if (tmp_path / "state.json").exists() else None
    (tmp_path / ".owner").write_text(holder)
    with pytest.raises(RunError, match=message):
        opened(tmp_path)
    assert (tmp_path / ".owner").read_text() == holder
    assert state is None or (tmp_path / "state.json").read_bytes() == state
    (tmp_path / ".owner").unlink()
    opened(tmp_path).release()


def test_a_forked_process_does_not_release_the_lock(tmp_path, without_locks):
    lock = lock_folder(tmp_path)
    child = os.fork()
    if not child:
        lock.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / ".owner").exists()
    lock.close()


# Run folders of earlier versions are read, reported, exported and gone on with; see formats/README.md.

FOLDERS = sorted(path for path in (Path(__file__).parent / "formats").iterdir() if path.is_dir())


@pytest.fixture(params=FOLDERS, ids=lambda path: path.name)
def folder(request, tmp_path):
    return Path(shutil.copytree(request.param, tmp_path / "run"))


def test_it_is_read_and_reported(folder):
    data = read_run(folder)
    values = {(metric.name, metric.variant): metric.value for metric in data.metrics if metric.value is not None}
    assert {variant for _, variant in values} >= {"float", "ptq"}
    _, page = write_report(folder)
    assert "PTQ" in page.read_text()


def test_it_goes_on_and_its_weights_stay_what_they_were(folder):
    before = digests(folder)
    assert set(before) == {"float.safetensors", "ptq.safetensors"}
    (folder / "ptq.onnx").unlink()
    run(recipe_of(folder), "ptq", folder, resume=True, device="cpu")
    assert digests(folder) == before
    assert (folder / "ptq.onnx").is_file()  # removed, and written again


def test_its_weights_compute_what_its_file_does(folder):
    # The file that ONNX's reference evaluator runs is the fixture's own; the weights are loaded and exported today.
    assert [variant.value for variant in variants_in(folder)] == ["float", "ptq"]
    x = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)
    (expected,) = ReferenceEvaluator(str(folder / "ptq.onnx")).run(None, {"input": x})
    path = export_again(folder, variant="ptq", out=folder / "again.onnx")
    (got,) = ReferenceEvaluator(str(path)).run(None, {"input": x})
    np.testing.assert_allclose(got, expected, atol=1e-5)
