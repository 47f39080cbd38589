import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from compress.records import SUMMARY_COLUMNS, read_run, summary_table
from compress.report.blocks import Code, Document, Section, Tiles, table
from compress.report.writers import escape, to_markdown
from compress.support.text import plain
from tests.report.conftest import HOSTILE
from tests.report.page import Page

READER = MarkdownIt("commonmark").enable(["table", "strikethrough"])


def rendered(text: str) -> Page:
    """The result of an independent Markdown parser."""
    return Page(READER.render(text).replace("<span></span>", ""))


@pytest.fixture(scope="module")
def text(sample) -> str:
    return (sample / "report.md").read_text(encoding="utf-8")


def test_tables_hold_the_rows_of_summary_table(sample, text):
    cells = rendered(text).cells
    at = cells.index(SUMMARY_COLUMNS[0])
    expected = [*SUMMARY_COLUMNS]
    for row in summary_table(read_run(sample).metrics):
        expected += row.cells()
    assert cells[at : at + len(expected)] == expected


def test_every_table_is_one_for_a_markdown_reader(text):
    """No line that starts as a table row is left over as a paragraph, and every row is as long as its head."""
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


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab_*`[]()<>|\\#-+.1~$&;!:/ \n\t") | st.characters(codec="utf-8"), min_size=1))
def test_a_cell_reads_as_it_was(value):
    made = Document(
        title="t",
        subtitle="",
        headline="h",
        tiles=Tiles(()),
        sections=(Section("s", "s", (table("a", "b", rows=[(value, "end")]),)),),
    )
    cells = rendered(to_markdown(made)).cells
    assert cells == ["a", "b", plain(value).strip(), "end"]


@settings(max_examples=150, deadline=None)
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
