"""The commands `recipes` and `init`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from compress.cli.console import OUT, print_json, print_table
from compress.cli.options import JsonOption
from compress.data.spec import DATASETS
from compress.errors import RecipeError
from compress.files import write_text
from compress.measure.spec import ENGINE_NAMES
from compress.quantization.spec import TARGETS
from compress.recipe.files import find_recipe, recipe_names
from compress.recipe.keys import keys_of_section, recipe_keys, recipe_keys_markdown
from compress.recipe.tree import load_recipe, parse_recipe


def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this recipe, resolved; with --keys, this section.")] = None,
    keys: Annotated[
        bool, typer.Option("--keys", metavar="", help="Every key: its type, its default and its description.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print recipes or keys."""
    if keys:
        if as_json:
            print_json([asdict(key) for key in (recipe_keys() if name is None else keys_of_section(name))])
        else:
            OUT.print(recipe_keys_markdown(name), end="", highlight=False, soft_wrap=True)
        return
    if name is not None:
        recipe = load_recipe(name)
        if as_json:
            print_json(asdict(recipe))
        else:
            OUT.print(recipe.to_yaml(), highlight=False)
        return
    found = [(n, str(find_recipe(n)), _first_line(find_recipe(n))) for n in recipe_names()]
    if as_json:
        print_json([{"name": n, "path": p, "about": text} for n, p, text in found])
    else:
        print_table("recipes", ("name", "about", "path"), [(n, text, p) for n, p, text in found])


def _first_line(path: Path) -> str:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("# ") if first.startswith("#") else ""


_MODELS = {
    "classification": "resnet50",
    "segmentation": "lraspp_mobilenet_v3_large",
    "detection": "retinanet_resnet50_fpn",
}
_DATA = {"classification": "folder", "segmentation": "masks", "detection": "coco"}


def init(
    path: Annotated[Path, typer.Argument(help="File to write.")] = Path("recipe.yaml"),
    task: Annotated[str | None, typer.Option(help=", ".join(_MODELS))] = None,
    model: Annotated[
        str | None, typer.Option(help="resnet50, timm:NAME, package.module:function, or net.onnx.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="A file, or torchvision's name such as IMAGENET1K_V2.")] = None,
    data: Annotated[str | None, typer.Option(help=f"{', '.join(DATASETS)}, or package.module:function.")] = None,
    root: Annotated[str | None, typer.Option(help="Folder of the data.")] = None,
    classes: Annotated[str | None, typer.Option(help="Names of the classes, a,b,c, where the data do not say.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the input in pixels.")] = None,
    target: Annotated[str | None, typer.Option(help=f"One or more of {', '.join(TARGETS)}, with commas.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs of the float baseline; 0 takes the weights as they are.")
    ] = None,
    qat_epochs: Annotated[int | None, typer.Option(help="Epochs of quantization-aware training; 0 = none.")] = None,
    force: Annotated[bool, typer.Option("--force", metavar="", help="Replace a file that is there.")] = False,
) -> None:
    """Write a recipe from flags or answers."""
    if path.exists() and not force:
        raise RecipeError(f"{path} is there already; name another file, or replace it with --force")
    ask = sys.stdin.isatty()
    task = task or _answer(ask, "Task (classification, segmentation, detection)", "classification")
    if task not in _MODELS:
        raise RecipeError(f"--task is {task!r} (one of: {', '.join(_MODELS)})")
    model = model or _answer(ask, "Model", _MODELS[task])
    data = data or _answer(ask, f"Data ({', '.join(DATASETS)})", _DATA[task] if root else "digits")
    if data in ("folder", "masks", "voc", "coco"):
        root = root or _answer(ask, "Folder of the data", "")
    image_size = image_size or int(_answer(ask, "Side of the input in pixels", "64" if data == "digits" else "224"))
    target = target or _answer(ask, f"Targets ({', '.join(TARGETS)})", "openvino")
    targets = [name.strip() for name in target.split(",")]
    tree: dict[str, Any] = {
        **({} if task == "classification" else {"task": task}),
        "model": _given(name=model, weights=weights),
        "data": _given(name=data, root=root, image_size=image_size, classes=classes.split(",") if classes else None),
        "train": {"epochs": epochs if epochs is not None else 0 if weights else 8},
        "quantization": {"target": targets if len(targets) > 1 else targets[0]},
        "qat": None if qat_epochs == 0 else {"epochs": qat_epochs or 2},
        "bench": {"engines": [name for name in targets if name in ENGINE_NAMES] or ["openvino"]},
    }
    parse_recipe(tree, source=str(path))
    title = " ".join(f"{model} on {data}, for {', '.join(targets)}".split())  # one line: the rest would be keys
    write_text(path, f"# {title}.\n" + yaml.safe_dump(tree, sort_keys=False))
    command = "ptq" if tree["qat"] is None else "qat"
    OUT.print(f"{path}\nnext: python -m compress {command} --recipe {path}", highlight=False, soft_wrap=True)


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != ""}


def _answer(ask: bool, question: str, default: str) -> str:
    return str(typer.prompt(question, default=default)) if ask else default
