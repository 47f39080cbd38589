"""The screenshots of docs/index.md, of a finished run: `python docs/screens.py runs/quickstart-qat`.

Chromium takes them, and each holds the version of the package, which a test compares with today's.
"""

from __future__ import annotations

import argparse
import io
import os
import pty
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, PngImagePlugin
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from compress.version import __version__

FIGURES = Path(__file__).parent / "figures"
COLUMNS = 80


def terminal_output(*command: str) -> str:
    """Run a command in a terminal of 80 columns."""
    kept = io.BytesIO()

    def read(file: int) -> bytes:
        data = os.read(file, 1024)
        kept.write(data)
        return data

    pty.spawn(["env", f"COLUMNS={COLUMNS}", "TERM=xterm-256color", *command], read)
    return kept.getvalue().decode().replace("\r", "")


def terminal_page(text: str) -> str:
    """The output as an HTML page."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text))
    return console.export_html(theme=MONOKAI, inline_styles=True)


def shoot(page: Path, name: str, size: tuple[int, int], *options: str) -> None:
    """Write figures/screen_<name>.png."""
    browser = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
    if browser is None:
        sys.exit("no chromium-headless-shell, chromium or google-chrome on this machine: install one")
    target = FIGURES / f"screen_{name}.png"
    window = f"--window-size={size[0]},{size[1]}"
    fixed = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", window, f"--screenshot={target}")
    subprocess.run([browser, *fixed, *options, page.resolve().as_uri()], check=True, capture_output=True)
    about = PngImagePlugin.PngInfo()
    about.add_text("compress", __version__)
    with Image.open(target) as image:
        image.convert("P", palette=Image.Palette.ADAPTIVE, colors=128).save(target, optimize=True, pnginfo=about)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="A run folder.")
    run = parser.parse_args().run
    text = terminal_output(sys.executable, "-m", "compress", "report", str(run))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "terminal.html"
        page.write_text(terminal_page(text), encoding="utf-8")
        shoot(page, "terminal", (10 * COLUMNS - 10, 19 * (text.count("\n") + 2)))
    shoot(run / "report.html", "report", (1100, 900))
    shoot(run / "report.html", "phone", (390, 780), "--blink-settings=preferredColorScheme=0")
