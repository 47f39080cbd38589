"""Writes the notebooks of the course, `en/*.ipynb` and `zh/*.ipynb`, from `src/*.md`: `python docs/course/build.py`.

A source holds both languages and the code once, and reads well where the repository is browsed:

    <!-- en -->    begins English text,
    <!-- zh -->    begins the same text in Chinese,
    ```python      is a cell of code, in both languages,
    ```python solution    is the answer of the exercise before it, folded in the notebook and run by the tests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

COURSE = Path(__file__).parent
LANGUAGES = {"en": "English", "zh": "中文"}
_BLOCK = re.compile(r"^<!-- (en|zh) -->\n|^```python( solution)?\n(.*?)^```\n?", flags=re.MULTILINE | re.DOTALL)
_SOLUTION = {"en": "Answer", "zh": "答案"}
_TRY = {"en": "# Your answer:\n", "zh": "# 你的答案：\n"}


class Block(NamedTuple):
    """A block of a source: `kind` is `en`, `zh`, `code` or `solution`."""

    kind: str
    text: str


def blocks(source: str) -> list[Block]:
    """Split a lesson's source.

    Raises:
        ValueError: a text lacks its other language, or something stands before the first mark.
    """
    found, end, language = [], 0, ""
    for match in _BLOCK.finditer(source):
        found += _text(language, source[end : match.start()])
        end, language = match.end(), match[1] or ""
        if not language:
            found.append(Block("solution" if match[2] else "code", match[3].strip("\n")))
    found += _text(language, source[end:])
    texts = [block.kind for block in found if block.kind in LANGUAGES]
    kinds = " ".join(block.kind for block in found)
    if texts != ["en", "zh"] * (len(texts) // 2) or kinds.count("en zh") != len(texts) // 2:
        raise ValueError(f"every English text must be followed by the Chinese one; the blocks are {kinds}")
    return found


def _text(language: str, text: str) -> Iterator[Block]:
    if language:
        yield Block(language, text.strip())
    elif text.strip():
        raise ValueError(f"text without a language: {text.strip()[:60]!r}; put <!-- en --> or <!-- zh --> before it")


def notebook(name: str, found: list[Block], language: str) -> dict[str, Any]:
    """The notebook of one language, in nbformat 4.5."""
    cells: list[dict[str, Any]] = []

    def add(kind: str, text: str) -> None:
        cell: dict[str, Any] = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        cells.append(cell | {"source": text.splitlines(keepends=True)})

    for kind, text in found:
        if kind == "code":
            add("code", text)
        elif kind == "solution":
            add("code", _TRY[language])
            folded = f"<details><summary>{_SOLUTION[language]}</summary>\n\n```python\n{text}\n```\n\n</details>"
            add("markdown", folded)
        elif kind == language:
            add("markdown", text + ("" if cells else _other(name, language)))
    metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _other(name: str, language: str) -> str:
    (other,) = set(LANGUAGES) - {language}
    words = {"en": "Glossary", "zh": "术语表"}[language]
    return f"\n\n[{LANGUAGES[other]}](../{other}/{name}.ipynb) · [{words}](../glossary.md)"


def written() -> dict[Path, str]:
    """Every notebook's path and its text."""
    texts = {}
    for source in sorted((COURSE / "src").glob("*.md")):
        found = blocks(source.read_text("utf-8"))
        for language in LANGUAGES:
            text = json.dumps(notebook(source.stem, found, language), ensure_ascii=False, indent=1) + "\n"
            texts[COURSE / language / f"{source.stem}.ipynb"] = text
    return texts


if __name__ == "__main__":
    for path, text in written().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
