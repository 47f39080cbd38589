# A full disk, a folder that may not be written to, a device in the place of a file: older files stay, in one sentence.
#
# The disk is full for real: the system lets no file of this process grow beyond some number of bytes.

import os
import re
from pathlib import Path

import onnx
import pytest
import torch
from matplotlib.figure import Figure
from onnx import helper, numpy_helper
from torch import nn

import compress
from compress.errors import RunError
from compress.files import write_json, write_text
from compress.onnx_ptq.source import SourceFile
from compress.onnx_ptq.write import save_model
from compress.pipeline.run import open_run
from compress.plots.style import save_figure
from compress.quantization.ptq.rounding import Rounder
from compress.quantization.ptq.walk import walk
from compress.recipe.tree import parse_recipe
from compress.training.log import write_log
from tests.hostile.disk import read_only, room_for
from tests.onnx_models import onnx_model


def product(size):
    nodes, weight = [helper.make_node("MatMul", ["x", "w"], ["y"])], torch.ones(size, size).numpy()
    return onnx_model(nodes, {"x": [1, size]}, {"y": [1, size]}, {"w": weight})


def save_beside(path):
    save_model(SourceFile(path=path, proto=product(40), external=True), path)


WRITERS = {
    "text": lambda path: write_text(path, "new " * 100),
    "JSON": lambda path: write_json(path, list(range(100))),
    "weights": lambda path: compress.save(nn.Linear(4, 4), path),
    "figure": lambda path: save_figure(Figure((1, 1)), path, dpi=20),
    "training's table": lambda path: write_log([], path),
    "ONNX": lambda path: save_model(SourceFile(path=path, proto=product(4)), path),
    "ONNX with weights beside it": save_beside,
}


# With the mark of a file of our own, as those of other programs are not replaced.
OLDER = b"older compress.target"


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_older_file(name, tmp_path):
    path = tmp_path / "a.safetensors"
    WRITERS[name](path)
    size = path.stat().st_size
    for older in tmp_path.iterdir():
        older.write_bytes(OLDER)
    names = sorted(tmp_path.iterdir())
    for room in (0, 1, size // 2, size - 1):
        with room_for(room), pytest.raises((OSError, compress.CompressError)) as caught:
            WRITERS[name](path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
        assert sorted(tmp_path.iterdir()) == names and all(older.read_bytes() == OLDER for older in names)
    WRITERS[name](path)
    assert path.stat().st_size - size in (0, 2)  # weights go to a name that is free, `.2.data`


def test_a_rounding_that_finds_no_room_is_learned_again(tmp_path):
    x = torch.randn(8, 8)

    def rounded():
        torch.manual_seed(0)
        qmodel = compress.quantize(nn.Sequential(nn.Linear(8, 4)).eval(), x, [x])
        walk(qmodel, [x], Rounder(compress.AdaRoundSpec(steps=2), folder=tmp_path).visit, images=8)
        return qmodel.state_dict()["0.weight"]

    with room_for(100), pytest.raises(OSError, match=r"0\.safetensors"):
        rounded()
    assert not list(tmp_path.iterdir())
    assert torch.equal(rounded(), rounded())


def weight_of(path):
    onnx.checker.check_model(path)
    return numpy_helper.to_array(onnx.load(path).graph.initializer[0])


def test_a_model_is_never_beside_the_weights_of_another(tmp_path, monkeypatch):
    # A death between the two renames leaves the older model with its own weights.
    path = tmp_path / "m.onnx"
    save_beside(path)
    renamed, replace = [], Path.replace

    def rename(source, target):
        if renamed:
            raise KeyboardInterrupt
        renamed.append(replace(source, target))

    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(Path, "replace", rename)
        save_model(SourceFile(path=path, proto=product(64), external=True), path)
    assert renamed and weight_of(path).shape == (40, 40) and (weight_of(path) == 1).all()
    for size in (64, 48):
        save_model(SourceFile(path=path, proto=product(size), external=True), path)
        assert weight_of(path).shape == (size, size) and (weight_of(path) == 1).all()
        assert len(list(tmp_path.iterdir())) == 3  # with the orphan of the death, which may be another model's


def test_a_pipe_or_a_device_is_no_file_to_write(tmp_path, monkeypatch):
    # As root, a rename onto /dev/null or /dev/stdout would take it from the whole machine.
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(os, "open", None)  # so that nothing happens to this machine if it is tried
    for path in (tmp_path / "pipe", "/dev/null", "/dev/stdout", "/dev/./none"):
        with pytest.raises(OSError, match="it is a device or a pipe; name a file"):
            write_text(path, "text")
    assert (tmp_path / "pipe").is_fifo() and len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_to():
    with read_only() as folder:
        for path in (folder / "older", folder / "new"):
            with pytest.raises(PermissionError) as caught:
                write_text(path, "new")
            assert caught.value.filename == str(path)
        with pytest.raises(PermissionError, match="another"):
            open_run(folder / "another", parse_recipe({}), "ptq", resume=False)
        with pytest.raises(RunError, match=r"run cannot be written to .*--out"):
            open_run(folder / "run", parse_recipe({}), "ptq", resume=True)


# The pages that name a test for each defect and each input name tests that are there.

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "results" / "reliability" / "defects.md"


@pytest.mark.parametrize(("page", "least"), [(PAGE, 60), (ROOT / "SECURITY.md", 25)], ids=["defects", "security"])
def test_each_test_that_the_page_names_is_there(page, least):
    found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8"))
    assert len(found) > least
    assert [pair for pair in found if f"def {pair[1]}(" not in (ROOT / pair[0]).read_text(encoding="utf-8")] == []


def test_every_input_names_a_test():
    rows = [line for line in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    assert len(rows) > 10 and [row for row in rows[1:] if "::" not in row] == []


def test_every_row_names_a_test():
    rows = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| ([A-E]\d*|Done when)\b", line)
    ]
    assert [row for row in rows if "::" not in row] == [] and {row[2] for row in rows} == set("ABCDE")
