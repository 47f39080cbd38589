"""The commands, put together, and what happens when one fails.

Exit status: 0 done; 2 something was refused, with its reason on standard error; 130 stopped with Ctrl-C. Nothing that
was finished is lost in any of these: `--resume` goes on with it, where a command has it. Ctrl-C pressed again ends at
once; no file is half-written even then.
"""

from __future__ import annotations

import errno
import inspect
import signal
import sys

import typer
from rich.markup import escape

from compress.cli import building, fields, inspecting, running, sensing, showing
from compress.cli.console import ERRORS
from compress.errors import CompressError

app = typer.Typer(
    name="compress",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Make PyTorch vision models small and fast, and measure them on the engine.",
)
_STOPPED = 130
"""Exit status after Ctrl-C."""

for module in (running, building, inspecting, showing, sensing, fields):
    module.register(app)


def main() -> None:
    """Run the command line; see the module's docstring for exit statuses."""
    try:
        app()
    except CompressError as error:
        _fail(f"{type(error).__name__}: {error}")
    except (KeyboardInterrupt, SystemExit) as ended:  # typer ends with 130 in the place of KeyboardInterrupt
        if isinstance(ended, SystemExit) and ended.code != _STOPPED:
            raise
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        ERRORS.print("stopped; what was finished is kept, and --resume goes on with it" if _resumable() else "stopped")
        sys.exit(_STOPPED)
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        advice = "; make room and go on with --resume: no file is half-written" if full else ""
        _fail(f"{error}{advice}")


def _resumable() -> bool:
    """Whether the command that was typed has `--resume`."""
    typed = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    functions = {command.name: command.callback for command in app.registered_commands}
    function = functions.get(typed)
    return function is not None and "resume" in inspect.signature(function).parameters


def _fail(text: str) -> None:
    ERRORS.print(f"[bold red]error[/] {escape(text)}", highlight=False, soft_wrap=True)
    sys.exit(2)
