"""Predictions, classes, intervals, curves of every training, hover values and the comparison of two runs."""

import json
import re
import shutil
from dataclasses import replace

import pytest
from PIL import Image

from compress.errors import RunError
from compress.records import read_run
from compress.records.rows import IntervalRow
from compress.report import write_comparison, write_report
from compress.report.blocks import Gallery
from compress.report.headline import headline
from compress.report.task_blocks import class_names, class_table, prediction_blocks
from tests.records.test_summary import metrics_of
from tests.report.page import Page
from tests.report.sample import ORT, metric, sample_epochs, write_csv

INTERVAL = {"metric": "map", "unit": "%", "images": 87, "value": 40.2, "low": 35.0, "high": 45.0}


def interval(low, high, difference, **more):
    ends = {"difference": difference, "difference_low": low, "difference_high": high}
    return {**INTERVAL, **ends, "measurable": not low <= 0 <= high, "engine": ORT, "variant": "qat", **more}


def detection_run(folder):
    """A small run of a detector."""
    folder.mkdir(parents=True)
    rows = []
    for variant, value in (("float", 40.0), ("qat", 40.2)):
        rows.append(metric("map", variant, ORT, value, "%", direction="higher"))
        rows.append(metric("ap_wbc", variant, ORT, value + 20, "%"))
        rows.append(metric("ap_red_cells", variant, ORT, value - 20 if variant == "float" else 18.5, "%"))
        rows.append(metric("p50_ms", variant, ORT, 10.0 if variant == "float" else 4.0, "ms", batch_size=1))
    write = {"metrics": rows, "intervals": [interval(-0.6, 1.1, 0.2)], "predictions": [], "precision": []}
    for variant in ("truth", "float", "qat"):
        engine = "" if variant == "truth" else ORT
        file = f"predictions/0-{variant}.jpg"
        (folder / "predictions").mkdir(exist_ok=True)
        Image.new("RGB", (24, 16), (90, 40, 60)).save(folder / file)
        write["predictions"].append({"image": 5, "variant": variant, "engine": engine, "file": file})
    for label in ("wbc", "red cells"):
        precision = [1 - i / 150 for i in range(101)]
        write["precision"].append({"variant": "qat", "engine": ORT, "label": label, "precision": precision})
    for name, value in write.items():
        (folder / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
    write_csv(folder / "sparse.csv", sample_epochs(2, lr=0.01, start=0.5, end=0.6))
    write_csv(folder / "sparse-qat.csv", sample_epochs(3, lr=0.01, start=0.6, end=0.7))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = detection_run(tmp_path_factory.mktemp("runs") / "first")
    write_report(folder)
    return folder


def test_pictures_classes_and_intervals_are_shown(run):
    text = (run / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    pictures = page.tags("img")
    assert len(pictures) == 3 and all(one["src"].startswith("data:image/jpeg;base64,") for one in pictures)
    assert [one["alt"] for one in pictures][1:] == [f"image 5, {v} on ONNX Runtime" for v in ("float", "QAT")]
    at = page.cells.index("red cells")
    assert page.cells[at : at + 4] == ["red cells", "20.00", "18.50", "\u22121.50"]
    at = page.cells.index("no measurable change")
    assert page.cells[at - 2 : at] == ["+0.20", "\u22120.60 to +1.10"]
    assert "shows no measurable change of mAP (40.00 \u2192 40.20 %)" in page.text.replace("\u00a0", " ")
    assert "gains" not in page.text.split("Results")[0]
    markdown = (run / "report.md").read_text(encoding="utf-8")
    assert "](predictions/0-qat.jpg)" in markdown and "figures/precision.png" in markdown


def test_classes_have_their_names_and_their_colours(run, tmp_path):
    other = tmp_path / "named"
    shutil.copytree(run, other)
    (other / "recipe.yaml").write_text("task: detection\ndata: {classes: [WBC, Red cells]}\n")
    data = read_run(other)
    gallery = next(block for block in prediction_blocks(data) if isinstance(block, Gallery))
    assert gallery.legend == (("WBC", "#800000"), ("Red cells", "#008000"))  # PASCAL VOC's first two colours
    found = class_table(data.metrics, class_names(data))
    assert found is not None and [row[0] for row in found.rows] == ["WBC", "Red cells"]


def test_every_training_has_its_curve(run):
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "Fine-tuning after pruning was not evaluated after 2 epochs; sparse QAT was" in text


def test_marks_tell_their_values(run, sample):
    text = (run / "report.html").read_text(encoding="utf-8")
    titles = re.findall(r'<g class="mark"><title>([^<]*)</title>', text)
    for expected in (
        "QAT, ONNX Runtime: mAP 40.20 %, p50 4.00 ms",
        "QAT, ONNX Runtime, batch 1: p50 4.00 ms",
        "sparse QAT, training images, epoch 3: 0.7",
        "QAT, wbc: AP50 66.7 %",
    ):
        assert sum(title.startswith(expected) for title in titles) == 2, expected  # the wide and the narrow figure
    whole = (sample / "report.html").read_text(encoding="utf-8")
    for figure in re.findall(r"<figure>.*?</figure>", whole, flags=re.DOTALL):
        assert figure.count('class="mark"') >= 2


def test_a_measurable_change_is_told_in_points():
    rows = metrics_of(
        metric("map", "float", ORT, 40.0, "%", direction="higher"),
        metric("map", "qat", ORT, 38.0, "%", direction="higher"),
    )
    row = IntervalRow(**interval(-3.0, -1.0, -2.0))
    assert "loses 2.00 points of mAP" in headline(rows, intervals=[row]).sentence
    lower = [replace(row, unit="m", direction="lower", value=row.value / 3000) for row in rows]
    assert "lowers mAP by 0.0006667 m (0.01333 \u2192 0.01267 m)" in headline(lower).sentence.replace("\u00a0", " ")
    other = IntervalRow(**interval(-3.0, 1.0, -2.0, engine="openvino (f32)"))
    assert "loses 2.00 points of mAP" in headline(rows, intervals=[other]).sentence  # of another engine


def test_two_runs_are_compared(run, sample, tmp_path):
    other = tmp_path / "second"
    shutil.copytree(run, other)
    rows = json.loads((other / "metrics.json").read_text())
    for row in rows:
        if row["variant"] == "qat" and row["name"] in ("map", "p50_ms"):
            row["value"] *= 0.5
    (other / "metrics.json").write_text(json.dumps(rows))
    (other / "recipe.yaml").write_text("qat: {epochs: 3}\n")
    markdown, page = write_comparison(other, run)
    cells = Page(page.read_text(encoding="utf-8")).cells
    at = cells.index("QAT")
    assert cells[at : at + 7] == ["QAT", "20.10", "40.20", "+20.10", "2.00", "4.00", "2.00×"]
    assert cells[cells.index("qat.epochs") + 1 :][:2] == ["3", "n/a"]
    assert markdown.parent == other and "second and first" in markdown.read_text(encoding="utf-8")
    for pair, words in (((run, run), "the same folder"), ((run, sample), "runs of one task")):
        with pytest.raises(RunError, match=words):
            write_comparison(*pair)


def test_pictures_outside_the_folder_are_refused(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    rows = json.loads((other / "predictions.json").read_text())
    rows[0]["file"] = "../first/predictions/0-qat.jpg"
    (other / "predictions.json").write_text(json.dumps(rows))
    with pytest.raises(RunError, match="outside the run folder"):
        write_report(other)
