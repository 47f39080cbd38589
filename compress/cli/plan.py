"""What a command is about to do, printed before torch is imported; wrong recipes and folders are refused there too."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from compress.cli.console import ERRORS
from compress.data import IMAGENET, NORMALIZATION, preprocessing_words
from compress.errors import RunError
from compress.recipe.tree import Recipe, load_recipe
from compress.support.text import display, image_size_text

# Of a command: a recipe's whole run, its network alone, or the run folder that is its first argument.
Plan = Literal["", "run", "network", "folder"]

# Python packages of engines that are not named like them.
_LIBRARIES = {
    "any": "onnx",
    "litert": "ai_edge_litert",
    "tensorrt-rtx": "tensorrt_rtx",
    "tensorrt-lean": "tensorrt_lean",
    "cuda": "torch",
}


def announce(arguments: Sequence[str], plan: Plan) -> None:
    """Refuse a recipe or a run folder that cannot be read; print what the command will do with it."""
    if not plan or "--help" in arguments:
        return
    recipe, rest = taken(arguments, "--recipe", "-r")
    folder, rest = taken(rest, "--from", "--run")
    values = {name: taken(rest, f"--{name}")[0] for name in ("onnx", "data", "model", "weights", "device", "target")}
    out, rest = taken(rest, "--out", "-o")
    first = rest[0] if rest and not rest[0].startswith("-") else None
    if plan == "folder":
        folder = first
    elif recipe is None:
        recipe = first
    overrides: list[str] = []
    while (found := taken(rest, "--set", "-s"))[0] is not None:
        overrides.append(str(found[0]))
        rest = found[1]
    if recipe is None and folder is not None and values["model"] is None:
        recipe = str(Path(folder) / "recipe.yaml")
        if not Path(recipe).is_file():
            raise RunError(f"{folder} is no run folder (recipe.yaml is missing): give the folder that --out named")
    parsed = None if recipe is None else load_recipe(recipe, overrides)
    if values["onnx"] is not None:
        _show_file(Path(values["onnx"]), values["data"], values["target"], out)
    elif parsed is not None and plan == "run":
        show(_run_lines(parsed, out, values["device"], folder))
    elif parsed is not None:
        where = f" of {folder}" if folder is not None else f", {weights_text(parsed)}"
        show({"network": f"{parsed.model.name}{where}", "input": input_text(parsed)})
    elif values["model"] is not None:
        size = int(size) if (size := taken(rest, "--image-size")[0] or "224").isdecimal() else 0
        weights = f"weights of {values['weights']}" if values["weights"] else "random weights"
        show({"network": f"{values['model']}, {weights}", "input": image_size_text(size) if size else ""})


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


def _show_file(file: Path, data: str | None, target: str | None, out: str | None) -> None:
    if file.is_file():
        show(
            {
                "network": f"{file}, {file.stat().st_size / 1e6:.3g} MB",
                "data": data or "",
                "device": "cpu",
                "folder": out or "",
                "engines": _engines_text([target] if target else []),
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


def taken(words: Sequence[str], *options: str) -> tuple[str | None, list[str]]:
    """Return the value of the first of these options, or None, and the words without it."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in options and equals:
            return value, [*words[:i], *words[i + 1 :]]
        if name in options and i + 1 < len(words):
            return words[i + 1], [*words[:i], *words[i + 2 :]]
    return None, list(words)
