"""The commands, put together, and what happens when one fails.

Exit status: 0 done; 2 something was refused, with its reason on standard error; 130 stopped with Ctrl-C (again: at
once).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import itertools
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from typer.main import get_command

from compress.cli.console import ERRORS, OUT, VERBOSITY
from compress.cli.lazy import (
    Entry,
    LazyCommand,
    Quiet,
    Verbose,
    lazy_group,
    set_verbosity,
)
from compress.errors import CompressError
from compress.files import expand_user
from compress.version import DISTRIBUTION, __version__

_COMMANDS = {
    "train": Entry("compress.cli.run:train", "Train the float baseline, export and measure it.", plan="run"),
    "ptq": Entry(
        "compress.cli.run:ptq",
        "Baseline, post-training quantization, export, engines, report. With --onnx: Q/DQ into a file, without its "
        "source.",
        plan="run",
    ),
    "qat": Entry(
        "compress.cli.run:qat",
        "Baseline, post-training quantization, quantization-aware training, export, engines, report.",
        plan="run",
    ),
    "prune": Entry(
        "compress.cli.run:prune",
        "Baseline, sparsity, fine-tuning; with a quantization section also INT8 that keeps the zeros.",
        plan="run",
    ),
    "export": Entry(
        "compress.cli.report:export",
        "Export a network of a finished run to ONNX, in another precision or opset.",
        plan="folder",
    ),
    "cast": Entry(
        "compress.cli.onnx_files:cast",
        "Write the float32 part of an ONNX file in fp16 or bf16, but for what half precision does not hold.",
        plan="file",
    ),
    "build": None,
    "bench": Entry(
        "compress.cli.bench:bench",
        "Latency of ONNX files on engines, all in turn. With a run folder, its report is updated too.",
        plan="paths",
    ),
    "inspect": None,
    "sensitivity": Entry(
        "compress.cli.studies:sensitivity",
        "Quantize each layer alone, and leave each alone float: SQNR and the metric. With a budget: a mixed-precision "
        "recipe.",
        plan="run",
    ),
    "search": Entry(
        "compress.cli.studies:search",
        "The most accurate network within a latency, or the fastest within a drop: precision, 2:4, width and depth, "
        "measured on the engine.",
        plan="run",
    ),
    "receptive-field": Entry(
        "compress.cli.model:receptive_field",
        "Theoretical receptive field of every layer: size, stride and padding, exact from the graph.",
        plan="network",
    ),
    "erf": Entry(
        "compress.cli.model:erf",
        "Effective receptive field (arXiv 1701.04128): which pixels change a unit, as figures and numbers.",
        plan="network",
    ),
    "roofline": Entry(
        "compress.cli.model:roofline",
        "Least time of a network on a device, and the most that INT8, 2:4, fusion and batching could save.",
        plan="network",
    ),
    "bundle": Entry(
        "compress.cli.report:bundle",
        "A run's file as a model repository of Triton Inference Server or of OpenVINO Model Server.",
        plan="folder",
    ),
    "predict": Entry(
        "compress.cli.report:predict",
        "Classes, masks or boxes of images, or restored images, by a run's file on an engine.",
        plan="folder",
    ),
    "report": Entry(
        "compress.cli.report:report", "Write the report of a run folder anew and print its table.", plan="paths"
    ),
    "doctor": Entry(
        "compress.cli.doctor:doctor",
        "Which engines and devices work here; for each that does not, the reason and what to install.",
    ),
    "init": Entry(
        "compress.cli.recipes:init", "Write a recipe from flags, or from a few questions: task, model, data, target."
    ),
    "recipes": Entry(
        "compress.cli.recipes:recipes",
        "List the recipes that can be named, show one with all its defaults, or explain every key.",
    ),
}
_INSPECT = {
    "model": Entry(
        "compress.cli.model:inspect_model",
        "Layers with their macs, and every placement decision with its reason. With --sparsity: which layers 2:4 masks "
        "could make faster, and by how much at most. With --draw: the graph of one block with its Q/DQ nodes.",
        plan="network",
    ),
    "onnx": Entry(
        "compress.cli.inspect_file:inspect_onnx",
        "Which operations of an ONNX file are INT8, and why the others are not.",
        plan="paths",
    ),
    "engine": Entry(
        "compress.cli.inspect_file:inspect_engine",
        "How a built engine runs each layer, the bytes that it moves, and what is wrong with that.",
        plan="paths",
    ),
    "parity": Entry(
        "compress.cli.inspect_parity:inspect_parity",
        "Each engine against fake quantization at every quantizer, and the first layer that differs by more than "
        "rounding explains. With --mend: quantization against float, which layers lose accuracy and why, and a recipe "
        "with the smallest set of changes that brings it back, each with its price; for recipes, runs and ONNX files.",
        plan="network",
    ),
}
_BUILD = {
    "onnx": Entry(
        "compress.cli.build:build_file",
        "Build a TensorRT or TensorRT-RTX engine of an ONNX file, and print the commands of the same build elsewhere.",
        plan="paths",
    ),
    "recipe": Entry(
        "compress.cli.build:build_recipe",
        "Build an engine of the network that a recipe's last run made; a run that is missing or stopped is finished "
        "first.",
        plan="run",
    ),
    "explore": Entry(
        "compress.cli.build:explore",
        "Export a recipe's network in several forms, build each, and compare the bytes that the engines move.",
        plan="run",
    ),
}

app = typer.Typer(
    name="compress",
    cls=lazy_group(_COMMANDS),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Make PyTorch vision models small and fast, and measure them on the engine.",
)
app.add_typer(
    typer.Typer(cls=lazy_group(_BUILD, group="build")),
    name="build",
    help="Build TensorRT or TensorRT-RTX engine files, also for GPUs that are not in this machine.",
)
app.add_typer(
    typer.Typer(cls=lazy_group(_INSPECT, group="inspect")),
    name="inspect",
    help="Look at a model, an ONNX file, an engine, or the parity of engines; nothing is changed.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        OUT.print(f"{DISTRIBUTION} {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def _common(
    quiet: Quiet = False,
    verbose: Verbose = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    VERBOSITY.level = 0
    set_verbosity(quiet, verbose)


# Errors of a full disk, of a quota and of a limit on the size of files.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

_STOPPED = 130  # exit status after Ctrl-C


def run() -> None:
    """Call `main` and end at once: clearing what torch imported takes Python a second or more."""
    # Threads of torch that wait sleep: spinning ones take the processors of other programs, and of those they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        main()
    except SystemExit as ended:
        at_work = [thread for thread in threading.enumerate() if not thread.daemon]
        if not isinstance(ended.code, int) or len(at_work) > 1:
            raise
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError):  # the reader of a pipe has ended
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(ended.code)


def main() -> None:
    try:
        _import_from_here()
        sys.argv[1:] = [_at_home(word, before) for before, word in itertools.pairwise(sys.argv)]
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
        _fail(_os_error(error))


def _at_home(word: str, before: str) -> str:
    """A path with its `~` resolved, as no shell does after `--out=`, nor between quotes; an empty one is refused."""
    if re.fullmatch(r"(--[\w-]+=)?", word):
        option = word.rstrip("=") or (before if before.startswith("-") else "an argument")
        raise CompressError(f"{option} is empty, and an empty path would be the working folder: give a value, or .")
    option, equals, path = word.rpartition("=") if word.startswith("--") else ("", "", word)
    return f"{option}{equals}{expand_user(path)}" if path.startswith("~/") else word


def _import_from_here() -> None:
    """Let recipes name modules of the working folder, as with `python -m`."""
    try:
        here = str(Path.cwd())
    except FileNotFoundError:
        raise CompressError("the working folder was deleted: go to one that exists, and run it there") from None
    if not {"", here} & set(sys.path):
        sys.path.append(here)


def _resumable() -> bool:
    typed = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    command = getattr(get_command(app), "commands", {}).get(typed)
    return isinstance(command, LazyCommand) and any(option.name == "resume" for option in command.load().params)


def _os_error(error: OSError) -> str:
    """An operating system's error in words: the file, what is wrong with it and what to do."""
    if error.errno in _FULL:
        resume = ", and go on with --resume" if _resumable() else " and run it again"
        where = "" if error.filename is None else f"{error.filename}: "
        return f"{where}{os.strerror(error.errno).lower()}; make room{resume}: no file is half-written"
    if error.filename is None or error.strerror is None:
        return str(error)
    if ";" in error.strerror:  # our own, which says what to do
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return f"{error.filename}: a file is in this place; name a folder, which may be a new one"
    return f"{error.filename}: {error.strerror.lower()}; name a place that exists and that you may write to"


def _fail(text: str) -> None:
    ERRORS.print(f"[bold red]error[/] {escape(text)}", highlight=False, markup=True, soft_wrap=True)
    sys.exit(2)
