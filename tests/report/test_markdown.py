import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from compress.audit.engine import audit_listing
from compress.audit.files import read_engine_layers
from compress.errors import RunError
from compress.plots.results import draw_engines, role_bytes
from compress.plots.style import NARROW, WIDE, styled
from compress.records.files import ENGINES, EngineRow, read_run
from compress.records.summary import shown_rows, summary_columns
from compress.report.blocks import Code, Document, Section, Tiles, escape, table, to_markdown
from compress.report.write import write_report
from compress.support.text import plain
from tests.report.conftest import HOSTILE
from tests.report.page import Page

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])

SUMMARY_COLUMNS = summary_columns(())


def rendered(text: str) -> Page:
    return Page(READER.render(text).replace("<span></span>", ""))


@pytest.fixture(scope="module")
def text(sample) -> str:
    return (sample / "report.md").read_text(encoding="utf-8")


def test_tables_hold_the_rows_of_summary_table(sample, text):
    cells = rendered(text).cells
    at = cells.index(SUMMARY_COLUMNS[0])
    expected = [*SUMMARY_COLUMNS]
    for row in shown_rows(read_run(sample).metrics):
        expected += row.cells()
    assert cells[at : at + len(expected)] == expected


def test_every_table_is_one_for_a_markdown_reader(text):
    # No line that starts as a table row is left over as a paragraph, and every row is as long as its head.
    page = rendered(text)
    lines = [line for line in text.split("\n") if line.startswith("| ")]
    assert len(page.tags("tr")) == len(lines) - len(page.tags("table"))  # less the rules under the heads
    tables = re.findall(r"(?:^\| .*\n?)+", text, flags=re.MULTILINE)
    assert len(tables) == len(page.tags("table"))
    for rows in tables:
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows.splitlines()}) == 1, rows
    assert "| ---" not in page.text


def test_images_lie_beside_it_and_have_a_text_alternative(sample, text):
    images = rendered(text).tags("img")
    assert len(images) == 7
    for attrs in images:
        assert (sample / (attrs["src"] or "")).read_bytes().startswith(b"\x89PNG")
        assert len(attrs["alt"] or "") > 40


def test_markup_in_names_is_text(hostile):
    text = (hostile / "report.md").read_text(encoding="utf-8")
    page = rendered(text)
    cells = [cell.strip() for cell in page.cells]
    assert plain(HOSTILE).strip() in cells
    assert page.tags("a") == []
    assert not {tag for tag, _ in page.elements} & {"script", "svg", "del"}
    assert page.headings[0] == plain(HOSTILE).strip()


@settings(max_examples=150)
@given(st.text(alphabet=st.sampled_from("ab_*`[]()<>|\\#-+.1~$&;!:/ \n\t") | st.characters(codec="utf-8"), min_size=1))
def test_a_cell_reads_as_it_was(value):
    made = Document(
        title="t",
        subtitle="",
        headline="h",
        tiles=Tiles(()),
        sections=(Section("s", "s", (table("a", "b", rows=[(value, "end")]),)),),
    )
    assert rendered(to_markdown(made)).cells == ["a", "b", plain(value).strip(), "end"]


@settings(max_examples=150)
@given(st.text(alphabet=st.sampled_from("ab_*`[]()<>|\\#-+.1~$&;!:/= "), min_size=1))
def test_a_list_item_reads_as_it_was(value):
    page = rendered(f"- {escape(value)}")
    assert page.text.strip() == value.strip()
    assert {tag for tag, _ in page.elements} <= {"ul", "li", "p"}


def test_a_recipe_cannot_leave_its_fence():
    recipe = "a: 1\n```\n# heading\n````\nb: 2\n"
    made = Document(
        title="t",
        subtitle="",
        headline="h",
        tiles=Tiles(()),
        sections=(Section("r", "Recipe", (Code(recipe, "yaml"),)),),
    )
    assert rendered(to_markdown(made)).headings == ["t", "Recipe"]
    assert recipe in rendered(to_markdown(made)).text


# The report's part on engines, from a recorded engine through JSON to the page.

RECORDED = Path(__file__).parent.parent / "audit" / "nvidia"


@pytest.fixture(scope="module")
def reported(run_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines") / "run"
    shutil.copytree(run_folder, folder)
    audits = {"ptq": "rtx_1_7_int8.log", "qat": "rtx_1_7_int8_fp16.log", "sparse-qat": "inspector_10.json"}
    rows = [
        EngineRow.of(audit_listing(read_engine_layers(RECORDED / file)), variant=variant, engine="tensorrt-rtx SM 89")
        for variant, file in audits.items()
    ]
    rows.append(EngineRow(variant="ptq", engine="openvino (f32)", unmet=("1 of 3 <INT8> operations",)))
    ENGINES.write(folder, rows)
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
    page, text = ((reported / f"report.{end}").read_text(encoding="utf-8") for end in ("html", "md"))
    for text_part in ("What the engines made of it", "conv0", "correlation", "requantize", "1 of 2 sparse"):
        assert text_part in page and text_part in text
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
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    (folder / "engine_audit.json").write_text(json.dumps([{"engine": "x"}]), encoding="utf-8")
    with pytest.raises(RunError, match=r"engine_audit\.json, row 1: variant"):
        read_run(folder)
    assert asdict(audit_listing(read_engine_layers(RECORDED / "rtx_1_7_int8.log")))  # what --json prints is plain data
