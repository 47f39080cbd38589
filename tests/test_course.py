# The course: notebooks are those of their sources, alike in both languages; a lesson and its answers run in turn.
#
# `COURSE=all` runs every lesson (`make course`); otherwise one a day is run.

import datetime
import importlib.util
import json
import os
import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

from compress.support.process import sums_bytes_in_16_bits

COURSE = Path(__file__).parent.parent / "docs" / "course"
SOURCES = sorted((COURSE / "src").glob("*.md"))
TODAY = SOURCES if os.environ.get("COURSE") == "all" else [SOURCES[datetime.date.today().toordinal() % len(SOURCES)]]
spec = importlib.util.spec_from_file_location("course_build", COURSE / "build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)

every_lesson = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)


def cells(source, language):
    return json.loads((COURSE / language / f"{source.stem}.ipynb").read_text("utf-8"))["cells"]


def prose(source, language):
    texts = ("".join(c["source"]) for c in cells(source, language) if c["cell_type"] == "markdown")
    return "\n".join(text for text in texts if "<details>" not in text)


def test_notebooks_are_what_their_sources_give():
    written = build.written()
    assert set(written) == set(COURSE.glob("*/*.ipynb"))
    stale = [path.name for path, text in written.items() if path.read_text("utf-8") != text]
    assert not stale, f"{stale}: run python docs/course/build.py"


@every_lesson
def test_both_languages_have_the_same_cells(source):
    english, chinese = cells(source, "en"), cells(source, "zh")
    assert [cell["cell_type"] for cell in english] == [cell["cell_type"] for cell in chinese]
    marks = ("**", "`", "$", "\n## ", "](", "\n|")  # as many bold words, names, formulas, headings, links and rows
    for cell, other in zip(english, chinese, strict=True):
        en, zh = "".join(cell["source"]), "".join(other["source"])
        if cell["cell_type"] == "code" or "<details>" in en:
            assert en.replace("Your answer:", "你的答案：").replace(">Answer<", ">答案<") == zh
        else:
            assert re.search("[\u4e00-\u9fff]", zh) and not re.search("[\u4e00-\u9fff]", en.replace("[中文]", ""))
            assert {mark: en.count(mark) for mark in marks} == {mark: zh.count(mark) for mark in marks}, en[:80]


@every_lesson
def test_a_lesson_ends_with_three_exercises_and_what_to_read(source):
    blocks = build.blocks(source.read_text("utf-8"))
    answers = [block.text for block in blocks if block.kind == "solution"]
    assert len(answers) == 3 and all("assert " in text for text in answers)
    assert "arXiv" in blocks[-2].text or "http" in blocks[-2].text


@every_lesson
def test_links_lead_somewhere(source):
    for language in build.LANGUAGES:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose(source, language)):
            assert link.startswith("http") or (COURSE / language / link).exists(), f"{language}/{source.stem}: {link}"


def test_a_term_has_the_same_translation_everywhere():
    # Each row of the glossary is used in its lesson; where a lesson uses the English word, it has the Chinese one.
    rows = re.findall(r"^\| ([a-zA-Z].*?) \| (.*?) \| (\d+) \|$", (COURSE / "glossary.md").read_text("utf-8"), re.M)
    assert len(rows) >= 10 and len({english for english, _, _ in rows}) == len(rows)
    for source in SOURCES:
        chinese = prose(source, "zh")
        english = re.sub(r"(?<!\*)\*[^*]+\*(?!\*)|\]\([^)]*\)", "", prose(source, "en")).lower()  # no titles, no links
        for term, translated, lesson in rows:
            used = re.search(rf"\b{re.escape(term.lower())}", english) is not None
            assert used or int(source.stem[:2]) != int(lesson), f"{source.stem} does not say {term!r}"
            assert not used or translated in chinese, f"{source.stem} says {term!r} and not {translated}"


def test_the_index_lists_every_lesson():
    page = (COURSE / "index.md").read_text("utf-8")
    assert re.findall(r"\(en/(\w+)\.ipynb\)", page) == [source.stem for source in SOURCES]
    assert all(f"](zh/{source.stem}.ipynb)" in page for source in SOURCES)
    assert all(title in page for s in SOURCES for title in re.findall(r"^# (\d+\. .*)", prose(s, "en"), re.M))


@pytest.mark.parametrize("source", TODAY, ids=lambda path: path.stem)
def test_a_lesson_and_its_answers_run(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    if source.stem == "06_integers" and sums_bytes_in_16_bits():
        pytest.skip("its comparison of bytes needs VNNI: without it, ONNX Runtime's sums saturate")
    names = {}
    for i, block in enumerate(build.blocks(source.read_text("utf-8"))):
        if block.kind in ("code", "solution"):
            exec(compile(block.text, f"{source.name}, block {i}", "exec"), names)
            plt.close("all")
