"""MkDocs hooks: pages outside docs/ that a page links, and figures, are part of the site.

A page links `../results/x.md` or `../results/x.png`, which works where the repository is browsed. In the site both are
taken along; a link to any other file of the repository becomes its path in code type. Names of the library are headings
without the modules in which they stand.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parent.parent
_DOCS = _ROOT / "docs"
_TAKEN = (".png", ".gif", ".md", ".html")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?([^)]*)\)")
_NAME = re.compile(r"^::: (compress\.\S+\.(\w+))$", flags=re.MULTILINE)


def _linked(page: Path) -> Iterator[Path]:
    """Yield files of the repository outside docs/ that a page links and the site takes."""
    for match in _LINK.finditer(page.read_text("utf-8")):
        path = Path(os.path.normpath(page.parent / match[3]))
        if path.suffix in _TAKEN and path.is_relative_to(_ROOT) and not path.is_relative_to(_DOCS):
            yield path


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Take along the pages and figures that pages link outside docs/, and those that these link.

    Raises:
        FileNotFoundError: a page links a figure or a page that is not there.
    """
    waiting, seen = sorted(Path(config.docs_dir).glob("*.md")), set()
    while waiting:
        page = waiting.pop()
        for path in _linked(page):
            if path in seen:
                continue
            if not path.exists():
                raise FileNotFoundError(f"{page.name} shows {path.relative_to(_ROOT)}, which is not there")
            seen.add(path)
            files.append(File.generated(config, str(path.relative_to(_ROOT)), abs_src_path=str(path)))
            if path.suffix == ".md":
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Point links at their places in the site, and name the files that are not part of it."""
    source = Path(str(page.file.abs_src_path))

    def replaced(match: re.Match[str]) -> str:
        image, text, link, anchor, rest = match.groups()
        path = Path(os.path.normpath(source.parent / link))
        if not path.is_relative_to(_ROOT):
            return match[0]
        uri = str(path.relative_to(_DOCS if path.is_relative_to(_DOCS) else _ROOT))
        if files.get_file_from_path(uri) is not None:
            place = os.path.relpath(uri, Path(page.file.src_uri).parent)
            return f"{image}[{text}]({place}{anchor or ''}{rest})"
        shown = str(path.relative_to(_ROOT))
        return f"`{shown}`" if text.strip("`") in shown else f"{text} (`{shown}`)"

    markdown = _LINK.sub(replaced, markdown)
    return _NAME.sub(r"::: \1\n    options:\n      heading: compress.\2\n      toc_label: \2", markdown)
