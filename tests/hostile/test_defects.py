"""The pages that name a test for each defect and each input name tests that are there."""

import re
from pathlib import Path

import pytest

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
