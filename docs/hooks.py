"""MkDocs hooks: pages show figures and name files of the repository that lie outside docs/.

A page links `../results/x.png` or `../examples/x.py`, which works where the repository is browsed. In the site, figures
are taken along, and a link to any other file becomes its path in code type, as the file is not part of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parent.parent
_FIGURES = (".png", ".gif")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#\s]+)[^)]*\)")


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Take along the figures that pages link outside docs/.

    Raises:
        FileNotFoundError: a page links a figure that is not there.
    """
    for page in Path(config.docs_dir).glob("*.md"):
        for _, _, path in _LINK.findall(page.read_text("utf-8")):
            if path.endswith(_FIGURES) and files.get_file_from_path(path) is None:
                if not (_ROOT / path).exists():
                    raise FileNotFoundError(f"{page.name} shows {path}, which is not there")
                files.append(File.generated(config, path, abs_src_path=str(_ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point figures at their place in the site, and name other files of the repository."""
    if "/" in page.file.src_uri:  # of a folder within docs/, from which ../ leads to docs/
        return markdown

    def replaced(match: re.Match[str]) -> str:
        image, text, path = match.groups()
        if path.endswith(_FIGURES):
            return f"{image}[{text}]({path})"
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    return _LINK.sub(replaced, markdown)
