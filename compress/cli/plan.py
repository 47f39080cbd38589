"""Prints what a command will do, and refuses wrong recipes and folders, before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Literal

from compress.cli.console import ERRORS
from compress.cli.options import FormOptions
from compress.data import IMAGENET, NORMALIZATION, preprocessing_words
from compress.errors import RunError
from compress.recipe.tree import Recipe, load_recipe
from compress.support.text import display, image_size_text

# Of a command: a recipe's whole run, its network alone, the run folder or the file that is its first argument, or
# files and folders that must exist.
Plan = Literal["", "run", "network", "folder", "file", "paths"]

# Python packages of engines that are not named like them.
_LIBRARIES = {
    "any": "onnx",
    "litert": "ai_edge_litert",
    "coreml": "coremltools",
    "tensorrt-rtx": "tensorrt_rtx",
    "tensorrt-lean": "tensorrt_lean",
    "cuda": "torch",
}


# Other names of the options that a plan reads.
_SAME = {"-r": "recipe", "-o": "out", "-s": "set", "-m": "model", "--run": "from"}
_READ = "recipe from onnx data model weights device target out set image-size size resize mean std layout channels"


def announce(arguments: Sequence[str], plan: Plan) -> None:
    """Refuse a recipe or a run folder that cannot be read; print what the command will do with it."""
    if not plan or "--help" in arguments:
        return
    given, rest = options_in(arguments)
    first = next((word for word in rest[:1] if not word.startswith("-")), None)
    values = {name: found[-1] for name, found in given.items()}
    recipe, folder, model = values.get("recipe"), values.get("from"), values.get("model")
    paths = takewhile(lambda word: not word.startswith("-"), rest) if plan in {"file", "paths"} else ()
    for path in (*paths, *given.get("onnx", ())):
        if not Path(path).exists():
            raise RunError(f"{path} does not exist: give the path of a file or a folder that does")
    if plan == "paths":
        return
    if plan == "folder":
        folder = first
    elif plan == "file":
        values |= {"onnx": first} if first and "data" in values else {}
    elif recipe is None:
        recipe = first
    if recipe is None and folder is not None and model is None:
        recipe = str(Path(folder) / "recipe.yaml")
        if not Path(recipe).is_file():
            raise RunError(f"{folder} is no run folder (recipe.yaml is missing): give the folder that --out named")
    parsed = None if recipe is None else load_recipe(recipe, given.get("set", ()))
    if "onnx" in values:
        _show_file(Path(values["onnx"]), values)
    elif parsed is not None and plan == "run":
        show(_run_lines(parsed, values.get("out"), values.get("device"), folder))
    elif parsed is not None:
        where = f" of {folder}" if folder is not None else f", {weights_text(parsed)}"
        show({"network": f"{parsed.model.name}{where}", "input": input_text(parsed)})
    elif model is not None:
        size = int(size) if (size := values.get("image-size", "224")).isdecimal() else 0
        weights = f"weights of {values['weights']}" if "weights" in values else "random weights"
        show({"network": f"{model}, {weights}", "input": image_size_text(size) if size else ""})


def options_in(words: Sequence[str], read: str = _READ) -> tuple[dict[str, list[str]], list[str]]:
    """The values of the options that `read` names, and all other words."""
    given: dict[str, list[str]] = {}
    rest: list[str] = []
    following = iter(words)
    for word in following:
        option, equals, value = word.partition("=")
        name = _SAME.get(option, option.removeprefix("--"))
        if option.startswith("-") and name in read.split():
            given.setdefault(name, []).append(value if equals else next(following, ""))
        else:
            rest.append(word)
    return given, rest


def weights_text(recipe: Recipe) -> str:
    if recipe.model.weights is not None:
        return f"weights of {recipe.model.weights}"
    return f"random weights (seed {recipe.train.seed})"


def input_text(recipe: Recipe) -> str:
    spec = recipe.data
    if spec.name == "degraded":
        parts = "random parts (evaluation: the centre)" if spec.augment else "the centre"
        noise = f", noise of {spec.noise:g} grey levels" if spec.noise else ""
        height, width = (spec.scale * side for side in spec.height_width)
        return f"{parts} of {height} x {width}, scaled down by {spec.scale}{noise}"
    mean, std = NORMALIZATION.get(spec.name, IMAGENET)
    return preprocessing_words(
        spec.height_width,
        spec.mean or mean,
        spec.std or std,
        resize=spec.resize if spec.name in ("folder", "images") else "",
        crop_ratio=spec.crop_ratio,
    )


def _run_lines(recipe: Recipe, out: str | None, device: str | None, start: str | None) -> dict[str, str]:
    weights = f"float network of {start}" if start else weights_text(recipe)
    if not start and (epochs := recipe.train.epochs):
        weights += f", trained for {epochs} {'epoch' if epochs == 1 else 'epochs'}"
    return {
        "network": f"{recipe.model.name}, {weights}",
        "data": recipe.data.name if recipe.data.root is None else f"{recipe.data.name}, {recipe.data.root}",
        "input": input_text(recipe),
        "device": device or ("a GPU, if torch finds it" if Path("/proc/driver/nvidia").exists() else "cpu"),
        "folder": out or "",
        "engines": _engines_text(recipe.bench.engines),
    }


def _show_file(file: Path, values: Mapping[str, str]) -> None:
    if not file.is_file():
        return
    data, text = values.get("data", ""), ""
    if data and Path(data).is_dir():
        form = FormOptions(**{f.name: values[f.name] for f in fields(FormOptions) if f.name in values}).of(file)
        words = preprocessing_words(
            form.height_width, form.mean, form.std, resize=form.resize, crop_ratio=form.crop_ratio
        )
        known = " (ImageNet's)" if (form.mean, form.std) == IMAGENET else ""
        text = (
            f"{form.channels}, {form.layout}: {words}{known}; --size, --resize, --layout, --mean and --std change this"
        )
    show(
        {
            "network": f"{file}, {file.stat().st_size / 1e6:.3g} MB",
            "data": data,
            "input": text,
            "device": "cpu",
            "folder": values.get("out", ""),
            "engines": _engines_text([values["target"]] if "target" in values else []),
        }
    )


def _engines_text(names: Sequence[str]) -> str:
    missing = [name for name in names if find_spec(_LIBRARIES.get(name, name)) is None]
    found = ", ".join(display(name) for name in names if name not in missing)
    return found + (f"; not installed: {', '.join(missing)} (doctor says what to do)" if missing else "")


def show(lines: dict[str, str]) -> None:
    for name, text in lines.items():
        if text:
            ERRORS.print(f"{name:9}{text}", highlight=False, soft_wrap=True)
