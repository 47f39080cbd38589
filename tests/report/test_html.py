import re
from importlib.resources import files

import pytest

from compress.records import read_run, summary_table
from compress.support.text import plain
from tests.report.conftest import HOSTILE
from tests.report.page import Page
from tests.report.sample import resnet50_layers, sample_placement

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
    tags = {tag for tag, _ in page.elements}
    script = (files("compress.report") / "templates" / "page.js").read_text(encoding="utf-8")
    assert re.findall(r"<script>\n?(.*?)</script>", text, flags=re.DOTALL) == [script] and len(page.tags("script")) == 1
    for call in ("fetch(", "XMLHttpRequest", "import(", "eval(", "innerHTML", "document.write"):
        assert call not in script
    assert not tags & {"link", "iframe", "object", "embed", "base", "form"}
    assert not [key for _, attrs in page.elements for key in attrs if key.startswith("on")]
    for attrs in (attrs for _, attrs in page.elements):
        assert attrs.get("href", "#").startswith("#")
        assert "src" not in attrs


def test_every_figure_is_embedded_for_both_widths_with_a_text_alternative(page):
    figures = page.tags("svg")
    assert len(figures) == 2 * len(FIGURES)
    assert len(page.tags("figure")) == len(page.tags("figcaption")) == len(FIGURES)
    for attrs in figures:
        assert attrs["role"] == "img"
        assert len(attrs["aria-label"] or "") > 40
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
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    defined = set(re.findall(r"(--[\w-]+):", text))
    assert used <= defined
    assert len(page.tags("table")) == len([a for a in page.tags("div") if a.get("class") == "scroll"])


def test_the_table_shows_the_rows_of_summary_table(sample, page):
    rows = summary_table(read_run(sample).metrics)
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
    assert "INT8 (QAT) is 1.9× as fast as float at batch 1 on OpenVINO (bf16)" in text
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
    assert "a.b" not in {tag for tag, _ in page.elements}
    assert len(page.tags("script")) == source.lower().count("<script") == 1  # the page's own
    assert not [attrs for _, attrs in page.elements if "evil.example" in (attrs.get("href") or "")]
    assert plain(HOSTILE) in page.cells
    assert plain(HOSTILE) in page.headings[0]
    assert len(page.tags("svg")) == 2 * 6  # all but training, which the run has not
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e]", source)


def test_text_in_figures_is_as_given(hostile):
    """Our own rewriting of colours, ids and numbers in the SVG must not touch what is written there."""
    source = (hostile / "report.html").read_text(encoding="utf-8")
    figures = re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL)
    shown = "".join(Page(figure).text for figure in figures)
    assert "plain" in shown
    assert 'rt("x")</' not in "".join(re.findall(r"<[^>]*>", "".join(figures)))
    assert HOSTILE[:5] in shown
