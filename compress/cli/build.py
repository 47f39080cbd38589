"""The commands `build onnx`, `build recipe` and `build explore`."""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from compress.audit.engine import unknown_part
from compress.cli.console import OUT, print_json, print_next, print_table, progress
from compress.cli.options import FromOption, JsonOption, RecipeOption, SetOption, VariantOption
from compress.engines.base import read_onnx
from compress.engines.registry import require_engine
from compress.engines.tensorrt.build import BuiltEngine, build_commands, build_tensorrt, check_builder
from compress.engines.tensorrt.library import BUILDERS
from compress.engines.tensorrt.metadata import log_path
from compress.engines.tensorrt.options import PORTABLE_SMS, TensorRTOptions, parse_options
from compress.errors import EngineError, RecipeError, near_misses
from compress.files import bytes_of
from compress.pipeline import default_folder, run
from compress.pipeline.run import holds_run
from compress.pipeline.saved import chosen_variant, finished_run, network, networks_of
from compress.pipeline.steps.export import PHONES
from compress.pipeline.studies.explore import LEAST_AGREEMENT, Explorer, FormResult, best
from compress.recipe.tree import Recipe, load_recipe
from compress.roofline_model.model import find_device
from compress.variants import Variant

ENGINE = "tensorrt-rtx"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of a build."""

    engine: Annotated[
        str, typer.Option("--engine", help="tensorrt-rtx (any machine), tensorrt; litert, executorch, coreml (phones).")
    ] = ENGINE
    sm: Annotated[str | None, typer.Option("--sm", help="Compute capabilities, such as 89,120 (tensorrt-rtx).")] = None
    batch: Annotated[str | None, typer.Option(help="Least, best and largest batch: 1,8,32.")] = None
    size: Annotated[str | None, typer.Option(help="Least, best and largest side, where the file leaves it open.")] = (
        None
    )
    option: Annotated[
        list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Further ones: optimization_level=5, ...")
    ] = None

    def parsed(self, recipe: Recipe | None = None) -> TensorRTOptions:
        engine = self.engine
        if engine not in BUILDERS:
            raise EngineError(f"--engine is {engine!r}{near_misses(engine, BUILDERS)} (one of: {', '.join(BUILDERS)})")
        portable = recipe is not None and BUILDERS[engine].portable
        sms = self.sm or (",".join(map(str, recipe.bench.sm)) if recipe is not None and portable else "")
        given = {name: value for name, value in (("sm", sms), ("batch", self.batch), ("size", self.size)) if value}
        for text in self.option or []:
            name, equals, value = text.partition("=")
            if not equals:
                raise EngineError(f"--option {text!r} is not of the form name=value, such as optimization_level=5")
            given[name] = value
        return parse_options(given)


@dataclass(frozen=True, kw_only=True)
class Output:
    """Options that say where a build goes and how it is shown."""

    out: Annotated[Path | None, typer.Option("--out", "-o", help="Engine file; default beside the ONNX file.")] = None
    commands: Annotated[
        bool, typer.Option("--commands", metavar="", help="Print the commands of the build, and build nothing.")
    ] = False
    as_json: JsonOption = False


def build_file(
    file: Annotated[Path, typer.Argument(help="An ONNX file.")], build: EngineOptions, output: Output
) -> None:
    if build.engine in PHONES:
        _write_for_phone(file, build.engine, output.out, build.batch, output.as_json)
        return
    _build(file, build.engine, build.parsed(), output)


def build_recipe(
    recipe: RecipeOption,
    *,
    from_: FromOption = None,
    build: EngineOptions,
    variant: VariantOption = "",
    output: Output,
    set_: SetOption = None,
) -> None:
    parsed = load_recipe(recipe, set_ or ())
    engine, options = build.engine, build.parsed(parsed)
    if not output.commands:  # before a run that may be missing is made
        check_builder(engine, options)
        _check_target(parsed, variant)
    _build(exported_file(recipe, parsed, variant, engine, folder=from_), engine, options, output)


def _check_target(recipe: Recipe, variant: str) -> None:
    spec = recipe.quantization
    if spec is not None and "tensorrt" not in spec.targets and variant not in {"float", "sparse"}:
        raise RecipeError(
            f"quantization.target is {', '.join(spec.targets)}, whose INT8 files hold unsigned integers or offsets: "
            "TensorRT takes none: --set quantization.target=tensorrt, or --variant float"
        )


def _write_for_phone(file: Path, engine: str, out: Path | None, batch: str | None, as_json: bool) -> None:
    write, suffix = PHONES[engine]
    size = (batch or "1").rpartition(",")[2]
    if not size.isdecimal() or int(size) < 1:
        raise EngineError(f"--batch is {batch!r}: a {suffix} file has one batch size, such as --batch 1")
    path = write(file, out or file.with_suffix(suffix), batch_size=int(size))
    if as_json:
        print_json({"file": str(path), "bytes": bytes_of(path)})
        return
    OUT.print(f"{path} ({bytes_of(path):,} bytes)", highlight=False)
    print_next(f"inspect engine {path}")


def exported_file(
    name: str, recipe: Recipe, variant: str = "", engine: str = ENGINE, *, folder: Path | None = None
) -> Path:
    """The ONNX file of `folder`, or of the recipe's last run, for an engine; a missing or stopped run is finished."""
    command = "prune" if recipe.sparsity else "qat" if recipe.qat and recipe.quantization else "ptq"
    command = command if recipe.sparsity or recipe.quantization else "train"
    if folder is None:
        folder = default_folder(name, command, resume=True, recipe=recipe)
        if not holds_run(folder, recipe, step="export"):
            begun = holds_run(folder, recipe)
            folder = folder if begun else default_folder(name, command, resume=False)
            with progress() as bars:
                run(recipe, command, folder, resume=begun, progress=bars)
    return networks_of([folder])[str(chosen_variant(folder, variant))].of(engine)


def _build(path: Path, engine: str, options: TensorRTOptions, output: Output) -> None:
    if output.commands:
        _show_commands(path, options, output.as_json)
        return
    with progress() as bars:
        built = build_tensorrt(path, engine, options=options, out=output.out, progress=bars)
    _show(built, path, options, output.as_json)


def _show(built: BuiltEngine, path: Path, options: TensorRTOptions, as_json: bool) -> None:
    metadata = built.metadata
    texts = build_commands(read_onnx(path), options, engine=built.path)
    if as_json:
        document: dict[str, Any] = {"file": str(built.path), "reused": built.reused, **metadata.to_dict()}
        print_json({**document, "commands": [{"target": c.target, "text": c.text()} for c in texts]})
        return
    state = "there already" if built.reused else f"built in {metadata.build_seconds:.1f} s"
    rows = [
        ("engine", f"{built.path} ({metadata.engine_bytes:,} bytes), {state}"),
        ("library", f"{metadata.engine} {metadata.version}"),
        ("runs on", f"SM {', '.join(map(str, metadata.sms))}" + (f" ({metadata.gpu})" if metadata.gpu else "")),
        ("takes", "; ".join(f"{name} {p.min} to {p.max}, best {p.opt}" for name, p in metadata.profiles.items())),
        ("log", str(log_path(built.path))),
        *(("note", note) for note in metadata.notes),
    ]
    print_table(str(path), ("", ""), rows)
    OUT.print("The same elsewhere (--commands prints all of them):", highlight=False)
    for command in texts:
        if command.purpose == "build" and command.words[0] in {"trtexec", "tensorrt_rtx"}:
            OUT.print(f"# {command.target}\n{command.text()}", highlight=False, soft_wrap=True)
    print_next(f"inspect engine {built.path} --onnx {path}")


def _show_commands(path: Path, options: TensorRTOptions, as_json: bool) -> None:
    texts = build_commands(read_onnx(path), options)
    if as_json:
        print_json([{"target": c.target, "purpose": c.purpose, "text": c.text()} for c in texts])
        return
    for command in texts:
        OUT.print(f"# {command.target}: {command.purpose}\n{command.text()}", highlight=False, soft_wrap=True)


_IMAGES = 64
_COLUMNS = ("form", "SM", "MB an image", "kernels", "8-bit macs", "least ms", "agreement", "--set")


def explore(
    recipe: RecipeOption,
    *,
    from_: FromOption = None,
    build: EngineOptions,
    variant: VariantOption = "",
    device: Annotated[
        str | None, typer.Option(help="Device whose roofs bound the time, such as rtx4090; also finds where INT8 pays.")
    ] = None,
    least_agreement: Annotated[
        float, typer.Option(help="Share of images that must get the float network's class.")
    ] = LEAST_AGREEMENT,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    parsed = load_recipe(recipe, set_ or ())
    if device is not None:
        find_device(device)  # refused before a run that may be missing is made
    engine, options = build.engine, build.parsed(parsed)
    options = options if options.sms else replace(options, sms=PORTABLE_SMS)
    check_builder(engine, options if BUILDERS[engine].portable else replace(options, sms=()))
    require_engine("onnxruntime")  # compares the answers of the forms
    folder = exported_file(recipe, parsed, variant, folder=from_).parent
    this = finished_run(folder)
    spec = this.recipe.quantization
    with progress() as bars, tempfile.TemporaryDirectory() as files:
        rows = Explorer(
            model=network(this, Variant.FLOAT),
            recipe=this.recipe,
            example=this.example,
            calibration=this.batches("train", 32, limit=spec.calibration_images if spec else 64),
            images=this.batches("val", _IMAGES, limit=_IMAGES)[0],
            folder=Path(files),
            engine=engine,
            options=options,
            device=device,
            batch_size=options.batch[1],
            progress=bars,
        ).explore()
    chosen = best(rows, least_agreement=least_agreement)
    if as_json:
        print_json({"rows": [asdict(row) for row in rows], "best": {sm: r.form for sm, r in chosen.items()}})
        return
    numbers = ("SM", "MB an image", "kernels", "8-bit macs", "least ms", "agreement")
    print_table(f"{folder}: forms on {engine}", _COLUMNS, [_cells(row) for row in rows], numbers=numbers)
    for row in rows:
        if row.error:
            OUT.print(f"{row.form}, SM {row.sm}: not built: {row.error}", highlight=False)
    for capability, row in chosen.items():
        given = " ".join(f"--set '{text}'" for text in row.overrides) or "the recipe as it is"
        text = f"SM {capability}: fewest bytes with {row.form}: {given}"
        OUT.print(text, highlight=False, soft_wrap=True)
    print_next(f"build recipe --from {folder} --engine {engine}")


def _cells(row: FormResult) -> tuple[str, ...]:
    shown = " ".join(text if len(text) < 50 else f"{text[:47]}..." for text in row.overrides)
    if row.error:
        return (row.form, str(row.sm), "not built", "", "", "", "", shown)
    return (
        row.form,
        str(row.sm),
        f"{row.activation_bytes / 1e6:.2f}{unknown_part(row.unknown_sizes)}",
        str(row.kernels),
        f"{row.int8_share:.0%}",
        "" if row.least_ms is None else f"{row.least_ms:.3f}",
        "not run" if row.agreement is None else f"{row.agreement:.1%}",
        shown,
    )
