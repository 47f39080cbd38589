"""The page that names a test for each defect names tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "results" / "reliability" / "defects.md"


def test_each_test_that_the_page_names_is_there():
    found = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8"))
    assert len(found) > 60
    assert [pair for pair in found if f"def {pair[1]}(" not in (ROOT / pair[0]).read_text(encoding="utf-8")] == []


def test_every_row_names_a_test():
    rows = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if re.match(r"\| ([A-E]\d*|Done when)\b", line)
    ]
    assert [row for row in rows if "::" not in row] == [] and {row[2] for row in rows} == set("ABCDE")
