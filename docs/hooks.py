"""MkDocs hooks: pages outside docs/ that a page links, and figures, are part of the site.

A page links `../results/x.md` or `../results/x.png`, which works where the repository is browsed. The site has both,
and the files of examples/; a link to any other file of the repository becomes its path in code type. Headings of the
library's names leave their modules out, and pages under zh/ say that they are Chinese.
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


def _goal(page: Path, link: str) -> Path:
    """Return the file that a link leads to: of a folder its README.md."""
    path = Path(os.path.normpath(page.parent / link))
    return path / "README.md" if (path / "README.md").exists() else path


def _linked(page: Path) -> Iterator[Path]:
    """Yield files of the repository outside docs/ that a page links and the site takes."""
    for match in _LINK.finditer(page.read_text("utf-8")):
        path = _goal(page, match[3])
        taken = path.suffix in _TAKEN or (path.is_relative_to(_ROOT / "examples") and path.is_file())
        if taken and path.is_relative_to(_ROOT) and not path.is_relative_to(_DOCS):
            yield path


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Take along the pages and figures that pages link outside docs/, and those that these link.

    Raises:
        FileNotFoundError: a page links a figure or a page that is not there.
    """
    waiting, seen = sorted([*_DOCS.glob("*.md"), *_DOCS.glob("zh/*.md")]), set()
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
        path = _goal(source, link)
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


def on_post_page(output: str, page: Page, **_: Any) -> str:
    """Name the language of a page, by which browsers choose fonts and readers voices."""
    return output.replace('<html lang="en"', '<html lang="zh"', 1) if page.file.src_uri.startswith("zh/") else output
