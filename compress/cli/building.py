"""The command that builds engine files: build."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from compress.cli.console import OUT, print_json, print_table, progress
from compress.cli.exploring import show_exploration
from compress.cli.options import JsonOption, SetOption
from compress.engines.onnx_file import read_onnx
from compress.engines.tensorrt_build import BuiltEngine, build_tensorrt
from compress.engines.tensorrt_commands import build_commands
from compress.engines.tensorrt_library import FLAVOURS
from compress.engines.tensorrt_metadata import log_path
from compress.engines.tensorrt_options import PORTABLE_SMS, TensorRTOptions, parse_options
from compress.errors import EngineError, RecipeError, near_misses
from compress.pipeline import default_folder, run
from compress.pipeline.again import variants_in
from compress.pipeline.explore import LEAST_AGREEMENT
from compress.pipeline.folder import read_state
from compress.recipe import Recipe, load_recipe


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("build")(build)


def build(
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", "-r", help="A recipe: its last finished network; run first, or on, if need be."),
    ] = None,
    onnx: Annotated[Path | None, typer.Option("--onnx", help="An ONNX file.")] = None,
    engine: Annotated[str, typer.Option("--engine", help="tensorrt-rtx (any machine) or tensorrt.")] = "tensorrt-rtx",
    sm: Annotated[str | None, typer.Option("--sm", help="Compute capabilities, such as 89,120 (tensorrt-rtx).")] = None,
    batch: Annotated[str | None, typer.Option(help="Least, best and largest batch: 1,8,32.")] = None,
    size: Annotated[
        str | None, typer.Option(help="Least, best and largest side, where the file leaves it open.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Further ones: optimization_level=5, ...")
    ] = None,
    variant: Annotated[str, typer.Option(help="With --recipe: float, ptq, qat, ...; default: the last.")] = "",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Engine file; default beside the ONNX file.")] = None,
    explore: Annotated[
        bool, typer.Option("--explore", help="With --recipe: try the forms of export, and compare what they move.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="With --explore: under whose roofs, such as rtx4090; also finds where INT8 pays.")
    ] = None,
    least_agreement: Annotated[
        float, typer.Option(help="With --explore: share of images that must get the float network's class.")
    ] = LEAST_AGREEMENT,
    commands: Annotated[bool, typer.Option("--commands", help="Print the commands alone; build nothing.")] = False,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build a TensorRT or TensorRT-RTX engine file, and print what to type for the same build elsewhere."""
    if engine not in FLAVOURS:
        raise EngineError(f"--engine is {engine!r}{near_misses(engine, FLAVOURS)} (one of: {', '.join(FLAVOURS)})")
    if (recipe is None) == (onnx is None):
        raise RecipeError("build takes one of --recipe and --onnx")
    parsed = load_recipe(recipe, set_ or ()) if recipe is not None else None
    sms = sm or (",".join(map(str, parsed.bench.sm)) if parsed and FLAVOURS[engine].portable else "")
    options = _options({"sm": sms, "batch": batch or "", "size": size or ""}, option or [])
    if explore:
        if recipe is None:
            raise RecipeError("--explore exports a network anew: give --recipe, not --onnx")
        told = options if options.sms else replace(options, sms=PORTABLE_SMS)
        show_exploration(
            _file_of(recipe, parsed, variant).parent,
            engine,
            told,
            device=device,
            batch_size=told.batch[1],
            least_agreement=least_agreement,
            as_json=as_json,
        )
        return
    path = onnx if onnx is not None else _file_of(str(recipe), parsed, variant)
    if commands:
        _show_commands(path, options, as_json)
        return
    with progress() as bars:
        built = build_tensorrt(path, engine, options=options, out=out, progress=bars)
    _show(built, path, options, as_json)


def _options(given: dict[str, str], further: list[str]) -> TensorRTOptions:
    told = {name: value for name, value in given.items() if value}
    for text in further:
        name, equals, value = text.partition("=")
        if not equals:
            raise EngineError(f"--option {text!r} is not of the form name=value, such as optimization_level=5")
        told[name] = value
    return parse_options(told)


def _file_of(name: str, recipe: Recipe | None, variant: str) -> Path:
    """The ONNX file of a network of the recipe, from its last run of the same recipe, or of one made now."""
    assert recipe is not None
    command = "prune" if recipe.sparsity else "qat" if recipe.qat and recipe.quantization else "ptq"
    command = command if recipe.sparsity or recipe.quantization else "train"
    folder = default_folder(name, command, resume=True, recipe=recipe)
    if not _holds(folder, recipe, "export"):
        begun = _holds(folder, recipe)
        folder = folder if begun else default_folder(name, command, resume=False)
        with progress() as bars:
            run(recipe, command, folder, resume=begun, progress=bars)
    known = variants_in(folder)
    chosen = variant or known[-1]
    if chosen not in known:
        raise RecipeError(f"{folder} holds no {chosen!r}{near_misses(chosen, known)}; it holds {', '.join(known)}")
    return folder / f"{chosen}.onnx"


def _holds(folder: Path, recipe: Recipe, step: str = "") -> bool:
    """Whether a folder holds a run of this very recipe, which has taken a step."""
    if not (folder / "state.json").is_file():
        return False
    state = read_state(folder)
    return state.recipe == recipe.digest() and (not step or state.done(step))


def _show(built: BuiltEngine, path: Path, options: TensorRTOptions, as_json: bool) -> None:
    told = built.metadata
    texts = build_commands(read_onnx(path), options, engine=built.path)
    if as_json:
        document: dict[str, Any] = {"file": str(built.path), "reused": built.reused, **told.to_dict()}
        print_json({**document, "commands": [{"target": c.target, "text": c.text()} for c in texts]})
        return
    state = "there already" if built.reused else f"built in {told.build_seconds:.1f} s"
    rows = [
        ("engine", f"{built.path} ({told.engine_bytes:,} bytes), {state}"),
        ("library", f"{told.engine} {told.version}"),
        ("runs on", f"SM {', '.join(map(str, told.sms))}" + (f" ({told.gpu})" if told.gpu else "")),
        ("takes", "; ".join(f"{name} {p.min} to {p.max}, best {p.opt}" for name, p in told.profiles.items())),
        ("log", str(log_path(built.path))),
        *(("note", note) for note in told.notes),
    ]
    print_table(str(path), ("", ""), rows)
    OUT.print("The same elsewhere (--commands prints all of them):", highlight=False)
    for command in texts:
        if command.purpose == "build" and command.words[0] in {"trtexec", "tensorrt_rtx"}:
            OUT.print(f"# {command.target}\n{command.text()}", markup=False, highlight=False, soft_wrap=True)


def _show_commands(path: Path, options: TensorRTOptions, as_json: bool) -> None:
    texts = build_commands(read_onnx(path), options)
    if as_json:
        print_json([{"target": c.target, "purpose": c.purpose, "text": c.text()} for c in texts])
        return
    for command in texts:
        OUT.print(
            f"# {command.target}: {command.purpose}\n{command.text()}", markup=False, highlight=False, soft_wrap=True
        )
