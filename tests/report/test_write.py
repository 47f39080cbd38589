import json
import os
import subprocess
import sys

import pytest

from compress.errors import RunError
from compress.report import write_report
from tests.report.page import Page
from tests.report.sample import metric, sample_epochs, write_csv


def test_files_that_a_report_leaves(sample, run_folder):
    before = {path.name for path in run_folder.iterdir()}
    assert {path.name for path in sample.iterdir()} - before == {"figures", "report.md", "report.html"}
    names = ("accuracy_latency", "block", "bytes", "histograms", "latency", "sqnr", "training")
    assert sorted(path.name for path in (sample / "figures").iterdir()) == [f"{name}.png" for name in names]


def test_equal_input_gives_equal_files(tmp_path):
    """Also from another process, whose sets and dictionaries are in another order."""
    contents = []
    for name in ("here", "there"):
        folder = tmp_path / name / "run"
        folder.mkdir(parents=True)
        write_csv(folder / "train.csv", sample_epochs(4, lr=0.1, start=0.5, end=0.9))
        (folder / "metrics.json").write_text(json.dumps([metric("file_bytes", "float", "", 5e6, "bytes")]))
        if name == "here":
            write_report(folder)
        else:
            line = f"from compress.report import write_report; write_report({str(folder)!r})"
            subprocess.run([sys.executable, "-c", line], env=os.environ | {"PYTHONHASHSEED": "3"}, check=True)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        contents.append({path.relative_to(folder): path.read_bytes() for path in files})
    assert contents[0] == contents[1]
    assert len(contents[0]) == 6  # two inputs, two figures, two pages


def test_missing_parts_are_left_out_with_the_reason(tmp_path):
    (tmp_path / "metrics.json").write_text(json.dumps([metric("top1", "float", "onnxruntime", 97.5, "%")]))
    markdown, html = write_report(tmp_path)
    assert not (tmp_path / "figures").exists()
    page = Page(html.read_text(encoding="utf-8"))
    assert page.tags("svg") == []
    for text in (page.text, markdown.read_text(encoding="utf-8")):
        text = text.replace("\\", "")
        assert "97.50" in text
        for line in (
            "The float model reaches 97.50 % top-1 on ONNX Runtime; nothing was quantized yet.",
            "No figure “Accuracy against latency”: no engine has both a top-1 and a latency in metrics.json.",
            "No figure “Latency”: no engine has a latency in metrics.json.",
            "No figure “Loss and accuracy by epoch”: neither train.csv nor qat.csv holds an epoch",
            "No figure “Quantization noise by layer”: layers.json is not in the run folder.",
            "No figure “Activations and their amax”: histograms.json is not in the run folder.",
            "No placement: placement.csv is not in the run folder.",
            "No audit of the exported file: audit.json is not in the run folder.",
            "No machine: environment.json is not in the run folder.",
            "No recipe: recipe.yaml is not in the run folder.",
            "No engine was compared with fake quantization in this run.",
        ):
            assert line in text
    assert "None" not in page.text and "nan" not in page.cells


def test_a_run_with_only_its_recipe_has_a_report(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: {name: vgg16}\n")
    _, html = write_report(tmp_path)
    page = Page(html.read_text(encoding="utf-8"))
    assert page.headings[0] == "vgg16"
    assert "This run has measured nothing yet." in page.text
    assert "No results: metrics.json is not in the run folder." in page.text


@pytest.mark.parametrize("recipe", ["model: [1, 2]\n", "- a\n- b\n", "{unclosed", ""])
def test_a_recipe_of_another_shape_does_not_stop_the_report(tmp_path, recipe):
    folder = tmp_path / "my-run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(recipe)
    _, html = write_report(folder)
    assert Page(html.read_text(encoding="utf-8")).headings[0].strip() == "my-run"


def test_a_damaged_file_leaves_the_earlier_report_as_it_was(tmp_path):
    (tmp_path / "metrics.json").write_text(json.dumps([metric("top1", "float", "onnxruntime", 97.5, "%")]))
    paths = write_report(tmp_path)
    before = [path.read_bytes() for path in paths]
    (tmp_path / "layers.json").write_text("[{")
    with pytest.raises(RunError, match=r"layers\.json"):
        write_report(tmp_path)
    assert [path.read_bytes() for path in paths] == before
    assert not list(tmp_path.rglob("*.part"))


def test_a_page_that_cannot_be_written_leaves_nothing_half_written(tmp_path):
    (tmp_path / "recipe.yaml").write_text("model: {name: vgg16}\n")
    (tmp_path / "report.html").mkdir()  # in the page's way
    with pytest.raises(OSError):
        write_report(tmp_path)
    assert not list(tmp_path.rglob("*.part"))


def test_a_figure_without_data_any_more_goes(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "sqnr.png").write_bytes(b"old")
    (tmp_path / "figures" / "mine.png").write_bytes(b"kept")
    (tmp_path / "recipe.yaml").write_text("")
    write_report(tmp_path)
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["mine.png"]
