"""Make the pictures of the documentation that show a page in a browser, or a terminal of 80 columns."""

from __future__ import annotations

import io
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from rich.ansi import AnsiDecoder
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from analysis.common.study import study_parser

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
COMMAND = "python -m compress qat --recipe quickstart"
COLUMNS, LINES = 80, 40
_TERMINAL = """<body style="margin: 0; background: #161b22"><pre style="margin: 14px; color: #e6eaf0; \
font: 15px/1.25 'DejaVu Sans Mono', monospace">{code}</pre></body>"""

_COLOURS = TerminalTheme(
    (22, 27, 34),
    (230, 234, 240),
    [(22, 27, 34), (255, 127, 63), (43, 189, 146), (240, 180, 41), (74, 168, 224), (217, 152, 194), (140, 205, 242),
     (230, 234, 240)],
)  # fmt: skip


def browse(page: Path, out: Path, *, width: int, height: int, dark: bool = False, scale: int = 1) -> Path:
    """Write what a browser shows of a page without scrolling, as a PNG.

    Args:
        page: a file.
        out: the picture.
        width: of the window, CSS pixels.
        height: of the window, CSS pixels.
        dark: the user asks for dark pages.
        scale: pixels of the picture for one of the page.

    Raises:
        FileNotFoundError: no Chromium is installed.
    """
    if BROWSER is None:
        raise FileNotFoundError("no Chromium here: apt-get install chromium-headless-shell")
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}/user"]
        options += [f"--window-size={width},{height}", f"--force-device-scale-factor={scale}"]
        options += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--virtual-time-budget=2000"]
        shot = Path(folder) / "shot.png"
        command = [BROWSER, "--headless", *options, f"--screenshot={shot}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        Image.open(shot).convert("RGB").quantize(192, method=Image.Quantize.MEDIANCUT).save(out, optimize=True)
    return out


def terminal(command: str, *, seconds: float = 600) -> str:
    """Run a command in a terminal of `COLUMNS` x `LINES`, in an empty folder, and return the last screen in ANSI.

    Raises:
        TimeoutError: it did not end.
    """
    name = f"screenshot-{os.getpid()}"
    tmux = ["tmux", "-L", name]
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        shown = shlex.quote(f"$ {command}")
        python = shlex.quote(str(Path(sys.executable).parent))
        line = f"export PATH={python}:$PATH PYTHONPATH={root}; echo {shown}; {command}; touch done; sleep 60"
        size = ["-x", str(COLUMNS), "-y", str(LINES)]
        subprocess.run([*tmux, "new-session", "-d", *size, "-c", folder, "bash", "-c", line], check=True)
        try:
            end = time.monotonic() + seconds
            while not (Path(folder) / "done").exists():
                if time.monotonic() > end:
                    raise TimeoutError(f"{command} did not end within {seconds:.0f} s")
                time.sleep(0.2)
            captured = subprocess.run([*tmux, "capture-pane", "-e", "-p"], check=True, capture_output=True, text=True)
        finally:
            subprocess.run([*tmux, "kill-server"], check=False)
    return captured.stdout.rstrip("\n")


def screen(ansi: str) -> str:
    """A page with the lines of a terminal, in their colours."""
    console = Console(record=True, file=io.StringIO(), width=COLUMNS + 1, force_terminal=True, highlight=False)
    for line in AnsiDecoder().decode(ansi):
        console.print(line, soft_wrap=True)
    return console.export_html(code_format=_TERMINAL, theme=_COLOURS, inline_styles=True)


def main() -> None:
    """Make the pictures that are asked for."""
    parser = study_parser(__doc__, out="docs/figures")
    parser.add_argument("--only", choices=("report", "terminal", "search"))
    parser.add_argument("--search", type=Path, help="the folder of a finished search")
    a = parser.parse_args()
    wanted = {a.only} if a.only else {"report", "terminal", "search"}
    if "report" in wanted:
        page = Path("results/demo/report.html")
        print(browse(page, a.out / "screen_report.png", width=1100, height=900))
        print(browse(page, a.out / "screen_phone.png", width=390, height=780, dark=True))
    if "search" in wanted and a.search is not None:
        print(browse(a.search / "report.html", a.out / "screen_search.png", width=1100, height=900))
    if "terminal" in wanted:
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "terminal.html"
            ansi = terminal(COMMAND)
            page.write_text(screen(ansi))
            lines = ansi.count("\n") + 1
            print(browse(page, a.out / "screen_terminal.png", width=760, height=28 + 19 * lines))


if __name__ == "__main__":
    main()
