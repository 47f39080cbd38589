import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from PIL import Image

from compress.audit.engine import audit_listing
from compress.audit.files import read_engine_layers
from compress.errors import RunError
from compress.plots.results import draw_engines, role_bytes
from compress.plots.style import NARROW, WIDE, styled
from compress.records.files import ENGINES, EngineRow, IntervalRow, read_run
from compress.records.summary import shown_rows, summary_columns
from compress.report.blocks import Code, Document, Gallery, Section, Tiles, escape, table, to_markdown
from compress.report.document import (
    class_names,
    class_table,
    headline,
    prediction_blocks,
    write_comparison,
    write_report,
)
from compress.support.text import plain
from tests.figures import quick_figures
from tests.records.test_summary import metrics_of
from tests.report.conftest import HOSTILE
from tests.report.page import Page
from tests.report.sample import ORT, metric, resnet50_layers, sample_epochs, sample_placement, write_csv

FIGURES = ("accuracy_latency", "latency", "training", "sqnr", "histograms", "bytes", "block")


@pytest.fixture(scope="module")
def text(sample) -> str:
    return (sample / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text) -> Page:
    return Page(text)


def test_nothing_is_fetched_and_nothing_runs(text, page):
    assert "http" not in text.lower()
    assert "//" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    script = (files("compress.report") / "templates" / "page.js").read_text(encoding="utf-8")
    assert re.findall(r"<script>\n?(.*?)</script>", text, flags=re.DOTALL) == [script] and len(page.tags("script")) == 1
    for call in ("fetch(", "XMLHttpRequest", "import(", "eval(", "innerHTML", "document.write"):
        assert call not in script
    assert not page.kinds & {"link", "iframe", "object", "embed", "base", "form"}
    assert not [key for _, attrs in page.elements for key in attrs if key.startswith("on")]
    assert all(attrs.get("href", "#").startswith("#") and "src" not in attrs for _, attrs in page.elements)


def test_every_figure_is_embedded_for_both_widths_with_a_text_alternative(page):
    figures = page.tags("svg")
    assert len(figures) == 2 * len(FIGURES)
    assert len(page.tags("figure")) == len(page.tags("figcaption")) == len(FIGURES)
    assert all(attrs["role"] == "img" and len(attrs["aria-label"] or "") > 40 for attrs in figures)
    assert [a["class"] for a in page.tags("div") if a.get("class") in ("wide", "narrow")] == ["wide", "narrow"] * len(
        FIGURES
    )


def test_ids_are_unique_and_every_reference_has_its_target(text, page):
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = {attrs["href"] for _, attrs in page.elements if "href" in attrs}
    targets |= {f"#{name}" for name in re.findall(r"url\(#([^)]+)\)", text)}
    targets |= {f"#{attrs['aria-labelledby']}" for _, attrs in page.elements if "aria-labelledby" in attrs}
    assert {target[1:] for target in targets} <= set(ids)


def test_fits_phones_dark_screens_and_paper(text, page):
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in page.tags("meta")
    for rule in ("prefers-color-scheme: dark", "@media print", "max-width: 640px", "overflow-x: auto"):
        assert rule in text
    assert set(re.findall(r"var\((--[\w-]+)\)", text)) <= set(re.findall(r"(--[\w-]+):", text))  # used, defined
    assert len(page.tags("table")) == len([a for a in page.tags("div") if a.get("class") == "scroll"])


def test_the_table_shows_the_rows_of_summary_table(sample, page):
    rows = shown_rows(read_run(sample).metrics)
    cells = page.cells
    at = cells.index("of float") + 1
    for row in rows:
        expected = list(row.cells())
        if cells[at] != expected[2] or cells[at + 1] != expected[3]:
            batch = f"batch {expected[1]}" if expected[1].isdigit() else expected[1]
            assert cells[at] == f"{expected[0]}, {batch}"
            at += 1
        assert cells[at : at + len(expected) - 2] == expected[2:]
        at += len(expected) - 2


def test_everything_that_was_asked_for_is_there(page):
    for heading in (
        "Results",
        "Accuracy against latency",
        "Latency",
        "Loss and accuracy by epoch",
        "Quantization noise by layer",
        "Activations and their amax",
        "Weights and files",
        "A block with its quantizers",
        "What is quantized, what is float, and why",
        "Machine and versions",
        "How it was measured",
        "Recipe",
    ):
        assert heading in page.headings
    text = page.text
    assert "INT8 (QAT) is 1.9× faster than float at batch 1 on OpenVINO (bf16)" in text
    assert "TensorRT: the tensorrt package is not installed" in text
    assert "108 quantizers are placed on 108 tensors (all INT8)" in text
    assert "variants in turn, 20 warm-up and 200 timed runs, 2 threads" in text
    assert "3 images of the training split could not be read" in text
    assert "versions.openvino" in text and "2026.0" in text
    assert "calibration_images: 512" in text
    assert "its input is float: rule 'conv1' leaves it so" in text
    assert all(name in page.cells for name, *_ in resnet50_layers())
    assert page.cells.count("fuses with the layer before") == 1 + 40  # the summary, and each decision
    assert all(row["reason"] in page.cells for row in sample_placement())


def test_markup_in_names_is_text(hostile):
    source = (hostile / "report.html").read_text(encoding="utf-8")
    page = Page(source)
    assert "a.b" not in page.kinds
    assert len(page.tags("script")) == source.lower().count("<script") == 1  # the page's own
    assert not [attrs for _, attrs in page.elements if "evil.example" in (attrs.get("href") or "")]
    assert plain(HOSTILE) in page.cells and plain(HOSTILE) in page.headings[0]
    assert len(page.tags("svg")) == 2 * 6  # all but training, which the run has not
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e]", source)


def test_text_in_figures_is_as_given(hostile):
    # Our own rewriting of colours, ids and numbers in the SVG must not touch what is written there.
    source = (hostile / "report.html").read_text(encoding="utf-8")
    figures = re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL)
    shown = "".join(Page(figure).text for figure in figures)
    assert "plain" in shown
    assert 'rt("x")</' not in "".join(re.findall(r"<[^>]*>", "".join(figures)))
    assert HOSTILE[:5] in shown


# The page in a real browser, where one is installed: a click sorts, the summary can be copied, nothing is cut off.

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)

PROBE = """
<script>
var failures = [];
window.onerror = function (message) { failures.push(message); };
window.onload = function () {
  var table = document.querySelector("table.sortable"), at = 2;
  var button = table.querySelectorAll("thead th")[at].querySelector("button");
  function column() {
    return Array.from(table.tBodies[0].rows).filter(function (r) { return r.cells.length > 2; })
      .map(function (r) { return r.cells[at].textContent; }).join(",");
  }
  button.click(); var up = column(); button.click(); var down = column();
  var wide = document.documentElement.scrollWidth - window.innerWidth;
  var cut = Array.from(document.querySelectorAll(".tiles li, h1, h2, .headline"))
    .filter(function (e) { return e.scrollWidth > e.clientWidth + 1; }).length;
  var out = document.createElement("pre");
  out.id = "probe";
  out.textContent = [up, down, wide, cut, document.getElementById("copy").hidden, failures.join(";")].join("|");
  document.body.appendChild(out);
};
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
@pytest.mark.parametrize("width", [1200, 390])
def test_in_a_browser(sample, tmp_path, width):
    page = (sample / "report.html").read_text(encoding="utf-8")
    file = tmp_path / "probe.html"
    file.write_text(page.replace("</body>", PROBE), encoding="utf-8")
    options = ["--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'user'}", f"--window-size={width},900"]
    command = [BROWSER, "--headless", *options, "--virtual-time-budget=2000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    assert found, done.stderr[-2000:]
    up, down, wide, cut, hidden, failures = found[1].split("|")
    times = [float(text) for text in up.split(",")]
    assert times == sorted(times) and len(times) == 3
    assert [float(text) for text in down.split(",")] == times[::-1]
    assert (int(wide) <= 0, cut, hidden, failures) == (True, "0", "false", "")


# Predictions, classes, intervals, curves of every training, hover values and the comparison of two runs.

INTERVAL = {"metric": "map", "unit": "%", "images": 87, "value": 40.2, "low": 35.0, "high": 45.0}


def interval(low, high, difference, **more):
    ends = {"difference": difference, "difference_low": low, "difference_high": high}
    return {**INTERVAL, **ends, "measurable": not low <= 0 <= high, "engine": ORT, "variant": "qat", **more}


def detection_run(folder):
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


def page_of(folder):
    return Page((folder / "report.html").read_text(encoding="utf-8"))


def test_pictures_classes_and_intervals_are_shown(run):
    page = page_of(run)
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
    other = shutil.copytree(run, tmp_path / "named")
    (other / "recipe.yaml").write_text("task: detection\ndata: {classes: [WBC, Red cells]}\n")
    data = read_run(other)
    gallery = next(block for block in prediction_blocks(data) if isinstance(block, Gallery))
    assert gallery.legend == (("WBC", "#800000"), ("Red cells", "#008000"))  # PASCAL VOC's first two colours
    found = class_table(data.metrics, class_names(data))
    assert found is not None and [row[0] for row in found.rows] == ["WBC", "Red cells"]


def test_every_training_has_its_curve_and_marks_tell_their_values(run, sample):
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "Fine-tuning after pruning was not evaluated after 2 epochs; sparse QAT was" in text
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
    other = shutil.copytree(run, tmp_path / "second")
    rows = json.loads((other / "metrics.json").read_text())
    for row in rows:
        row["value"] *= 0.5 if row["variant"] == "qat" and row["name"] in ("map", "p50_ms") else 1
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
    other = shutil.copytree(run, tmp_path / "other")
    rows = json.loads((other / "predictions.json").read_text())
    rows[0]["file"] = "../first/predictions/0-qat.jpg"
    (other / "predictions.json").write_text(json.dumps(rows))
    with pytest.raises(RunError, match="outside the run folder"):
        write_report(other)


def test_files_that_a_report_leaves(sample, run_folder):
    before = {path.name for path in run_folder.iterdir()}
    assert {path.name for path in sample.iterdir()} - before == {"figures", "report.md", "report.html"}
    names = ("accuracy_latency", "block", "bytes", "histograms", "latency", "sqnr", "training")
    assert sorted(path.name for path in (sample / "figures").iterdir()) == [f"{name}.png" for name in names]


def test_equal_input_gives_equal_files(tmp_path):
    # Also from another process, whose sets and dictionaries are in another order.
    contents = []
    for name in ("here", "there"):
        folder = tmp_path / name / "run"
        folder.mkdir(parents=True)
        write_csv(folder / "train.csv", sample_epochs(4, lr=0.1, start=0.5, end=0.9))
        (folder / "metrics.json").write_text(json.dumps([metric("file_bytes", "float", "", 5e6, "bytes")]))
        if name == "here":
            write_report(folder)
        else:
            line = f"from compress.report.document import write_report; write_report({str(folder)!r})"
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
    write_report(tmp_path)
    page = page_of(tmp_path)
    assert page.headings[0] == "vgg16"
    assert "This run has measured nothing yet." in page.text
    assert "No results: metrics.json is not in the run folder." in page.text


@pytest.mark.parametrize("recipe", ["model: [1, 2]\n", "- a\n- b\n", "{unclosed", ""])
def test_a_recipe_of_another_shape_does_not_stop_the_report(tmp_path, recipe):
    (tmp_path / "my-run").mkdir()
    (tmp_path / "my-run" / "recipe.yaml").write_text(recipe)
    write_report(tmp_path / "my-run")
    assert page_of(tmp_path / "my-run").headings[0].strip() == "my-run"


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


READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])

SUMMARY_COLUMNS = summary_columns(())


def rendered(markdown: str) -> Page:
    return Page(READER.render(markdown).replace("<span></span>", ""))


@pytest.fixture(scope="module")
def markdown(sample) -> str:
    return (sample / "report.md").read_text(encoding="utf-8")


def test_tables_hold_the_rows_of_summary_table(sample, markdown):
    cells = rendered(markdown).cells
    at = cells.index(SUMMARY_COLUMNS[0])
    expected = [*SUMMARY_COLUMNS, *(cell for row in shown_rows(read_run(sample).metrics) for cell in row.cells())]
    assert cells[at : at + len(expected)] == expected


def test_every_table_is_one_for_a_markdown_reader(markdown):
    # No line that starts as a table row is left over as a paragraph, and every row is as long as its head.
    page = rendered(markdown)
    lines = [line for line in markdown.split("\n") if line.startswith("| ")]
    assert len(page.tags("tr")) == len(lines) - len(page.tags("table"))  # less the rules under the heads
    tables = re.findall(r"(?:^\| .*\n?)+", markdown, flags=re.MULTILINE)
    assert len(tables) == len(page.tags("table"))
    for rows in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows.splitlines()}) == 1, rows
    assert "| ---" not in page.text


def test_images_lie_beside_it_and_have_a_text_alternative(sample, markdown):
    images = rendered(markdown).tags("img")
    assert len(images) == 7
    for attrs in images:
        assert (sample / (attrs["src"] or "")).read_bytes().startswith(b"\x89PNG")
        assert len(attrs["alt"] or "") > 40


def test_markup_in_names_is_text_in_markdown(hostile):
    page = rendered((hostile / "report.md").read_text(encoding="utf-8"))
    assert plain(HOSTILE).strip() in [cell.strip() for cell in page.cells]
    assert not page.kinds & {"script", "svg", "del", "a"}
    assert page.headings[0] == plain(HOSTILE).strip()


def of_section(block):
    # The Markdown page of a document with one section that holds this block.
    section = Section("s", "Section", (block,))
    made = Document(title="t", subtitle="", headline="h", tiles=Tiles(()), sections=(section,))
    return rendered(to_markdown(made))


@settings(max_examples=150)
@given(st.text(alphabet=st.sampled_from("ab_*`[]()<>|\\#-+.1~$&;!:/ \n\t") | st.characters(codec="utf-8"), min_size=1))
def test_a_cell_reads_as_it_was(value):
    cells = of_section(table("a", "b", rows=[(value, "end")])).cells
    assert cells == ["a", "b", plain(value).strip(), "end"]


@settings(max_examples=150)
@given(st.text(alphabet=st.sampled_from("ab_*`[]()<>|\\#-+.1~$&;!:/= "), min_size=1))
def test_a_list_item_reads_as_it_was(value):
    page = rendered(f"- {escape(value)}")
    assert page.text.strip() == value.strip() and page.kinds <= {"ul", "li", "p"}


def test_a_recipe_cannot_leave_its_fence():
    recipe = "a: 1\n```\n# heading\n````\nb: 2\n"
    page = of_section(Code(recipe, "yaml"))
    assert page.headings == ["t", "Section"] and recipe in page.text


# The report's part on engines, from a recorded engine through JSON to the page.

RECORDED = Path(__file__).parent.parent / "audit" / "nvidia"


@pytest.fixture(scope="module")
def reported(run_folder, tmp_path_factory):
    folder = shutil.copytree(run_folder, tmp_path_factory.mktemp("engines") / "run")
    audits = {"ptq": "rtx_1_7_int8.log", "qat": "rtx_1_7_int8_fp16.log", "sparse-qat": "inspector_10.json"}
    rows = [
        EngineRow.of(audit_listing(read_engine_layers(RECORDED / file)), variant=variant, engine="tensorrt-rtx SM 89")
        for variant, file in audits.items()
    ]
    rows.append(EngineRow(variant="ptq", engine="openvino (f32)", unmet=("1 of 3 <INT8> operations",)))
    ENGINES.write(folder, rows)
    with quick_figures():
        write_report(folder)
    return folder


def test_read_back(reported):
    first, second, sparse, last = read_run(reported).engines
    audit = audit_listing(read_engine_layers(RECORDED / "rtx_1_7_int8.log"))
    assert first.kernels == audit.kernels and len(first.layers) == audit.kernels
    assert sum(role_bytes(first).values()) == first.activation_bytes == audit.activation_bytes
    assert role_bytes(first)["requantize"] == sum(x.activation_bytes for x in audit.layers if x.role == "requantize")
    assert second.activation_bytes < first.activation_bytes
    assert (first.sparse_kernels, sparse.sparse_kernels) == ("", "1 of 2 sparse")
    assert last.layers == () and last.unmet


def test_page_and_markdown_tell_it(reported):
    page, markdown = ((reported / f"report.{end}").read_text(encoding="utf-8") for end in ("html", "md"))
    for text_part in ("What the engines made of it", "conv0", "correlation", "requantize", "1 of 2 sparse"):
        assert text_part in page and text_part in markdown
    assert "1 of 3 &lt;INT8&gt; operations" in page
    assert "What the engines move" in page


def test_figure_has_a_bar_piece_for_each_role(reported):
    engines = [engine for engine in read_run(reported).engines if engine.layers]
    with styled():
        for form in (WIDE, NARROW):
            axes = draw_engines(engines, form).axes[0]
            assert len(axes.patches) == sum(len(role_bytes(engine)) for engine in engines)
            ends = [
                sum(p.get_width() for p in axes.patches if round(p.get_y() + p.get_height() / 2) == y) for y in range(3)
            ]
            assert ends == pytest.approx([engine.activation_bytes for engine in engines])


def test_a_run_without_engines_has_no_such_part(sample):
    assert "What the engines made of it" not in (sample / "report.html").read_text(encoding="utf-8")


def test_another_file_of_that_name_is_refused(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    (folder / "engine_audit.json").write_text(json.dumps([{"engine": "x"}]), encoding="utf-8")
    with pytest.raises(RunError, match=r"engine_audit\.json, row 1: variant"):
        read_run(folder)
    assert asdict(audit_listing(read_engine_layers(RECORDED / "rtx_1_7_int8.log")))  # what --json prints is plain data
