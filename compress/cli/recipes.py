"""The commands `recipes` and `init`."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from compress.cli.console import OUT, print_json, print_next, print_table
from compress.cli.options import JsonOption
from compress.data import DATASETS, LEAST_SIDE
from compress.errors import RecipeError, near_misses
from compress.files import expand_user, write_text
from compress.measure import ENGINE_NAMES
from compress.quantization import TARGETS
from compress.recipe.tree import (
    MADE_FOR,
    find_recipe,
    keys_of_section,
    load_recipe,
    parse_recipe,
    recipe_keys,
    recipe_keys_markdown,
    recipe_names,
)
from compress.support.imports import is_import_path
from compress.support.limits import CLASSES, IMAGE_SIDE


def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this recipe, resolved; with --keys, this section.")] = None,
    keys: Annotated[
        bool, typer.Option("--keys", metavar="", help="Every key: its type, its default and its description.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
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
    found = [(n, str(find_recipe(n)), _first_sentence(find_recipe(n))) for n in recipe_names()]
    if as_json:
        print_json([{"name": n, "path": p, "about": text} for n, p, text in found])
    else:
        print_table("recipes", ("name", "about", "path"), [(n, text, p) for n, p, text in found])
        print_next("recipes NAME", "qat --recipe NAME")


def _first_sentence(path: Path) -> str:
    lines = itertools.takewhile(lambda line: line.startswith("# "), path.read_text(encoding="utf-8").splitlines())
    return re.split(r"(?<=[.;])\s", " ".join(line[2:] for line in lines), maxsplit=1)[0].rstrip(";")


_MODELS = {
    "classification": "resnet50",
    "segmentation": "lraspp_mobilenet_v3_large",
    "detection": "retinanet_resnet50_fpn",
    "restoration": "examples.super_resolution:Rfdn",
}
_LAYOUTS = {
    "folder": "train/CLASS/*.jpg and val/CLASS/*.jpg",
    "voc": "JPEGImages, Annotations and ImageSets/Main",
}
# Data in a folder, and the folders that must be in it.
_ROOTED: dict[str, tuple[str, ...]] = {
    "folder": ("train", "val"),
    "images": (),
    "voc": ("JPEGImages", "Annotations", "ImageSets/Main"),
    "masks": (),
    "coco": (),
    "degraded": (),
}
WEIGHTS_SUFFIXES = (".safetensors", ".pt", ".pth", ".th", ".ckpt", ".bin")
_DATA = {"classification": "folder", "segmentation": "masks", "detection": "coco", "restoration": "degraded"}


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
    if path.exists() and not force:
        raise RecipeError(f"{path} is there already; name another file, or replace it with --force")
    task = task or _answer(f"Task ({', '.join(_MODELS)})", "classification", _one_of(_MODELS))
    if refused := _one_of(_MODELS)(task):
        raise RecipeError(f"--task: {refused}")
    model = model or _answer(
        "Model (of torchvision, timm:NAME, package.module:function, or net.onnx)", _MODELS[task], _model
    )
    weights = weights or _answer("Weights (a file, a name such as IMAGENET1K_V2; empty = none)", "", _weights)
    known = [name for name in DATASETS if MADE_FOR.get(name, "classification") == task]
    usual = "digits" if task == "classification" and not root else _DATA[task]
    data = data or _answer(f"Data ({', '.join(known)}, or package.module:function)", usual, _dataset(known))
    if data in _ROOTED:
        root = root or _answer(
            "Folder of the data (on another machine: give it as --root)", "", lambda given: _folder(str(data), given)
        )
        if (said := _folder(data, root)) and root:
            OUT.print(f"note: {said}", highlight=False, soft_wrap=True)
    names = classes.split(",") if classes else None
    outputs = str(len(names)) if names else "1000"
    outputs = _answer("Number of the network's outputs", outputs, _whole(1, CLASSES)) if data == "images" else ""
    side = "64" if data == "digits" else "224"
    image_size = image_size or int(_answer("Side of the input in pixels", side, _whole(LEAST_SIDE, IMAGE_SIDE)))
    target = target or _answer(f"Targets, with commas ({', '.join(TARGETS)})", "openvino", _targets)
    targets = [name.strip() for name in target.split(",")]
    tree: dict[str, Any] = {
        **({} if task == "classification" else {"task": task}),
        "model": _given(name=model, weights=weights),
        "data": _given(
            name=data, root=root, image_size=image_size, classes=names, num_classes=outputs and int(outputs)
        ),
        "train": {"epochs": epochs if epochs is not None else 0 if weights or outputs else 8},
        "quantization": {"target": targets if len(targets) > 1 else targets[0]},
        "qat": None if qat_epochs == 0 else {"epochs": qat_epochs or 2},
        "bench": {"engines": [name for name in targets if name in ENGINE_NAMES] or ["openvino"]},
    }
    parse_recipe(tree, source=str(path))
    title = " ".join(f"{model} on {data}, for {', '.join(targets)}".split())  # one line: the rest would be keys
    write_text(path, f"# {title}.\n" + yaml.safe_dump(tree, sort_keys=False))
    command = "ptq" if tree["qat"] is None else "qat"
    OUT.print(str(path), highlight=False, soft_wrap=True)
    print_next(f"{command} --recipe {path}")


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != ""}


Refusal = Callable[[str], str]  # returns why an answer is refused, "" if it is not


def _answer(question: str, default: str, refusal: Refusal = lambda given: "") -> str:
    while sys.stdin.isatty():
        try:
            given = str(typer.prompt(question, default=default)).strip()
        except typer.Abort:  # Ctrl-C or Ctrl-D
            OUT.print()
            raise KeyboardInterrupt from None
        if not (reason := refusal(given)):
            return given
        OUT.print(reason, highlight=False, soft_wrap=True)
    return default


def _one_of(names: Collection[str]) -> Refusal:
    return lambda given: (
        "" if given in names else f"there is no {given!r}{near_misses(given, names)} (one of: {', '.join(names)})"
    )


def _dataset(known: Collection[str]) -> Refusal:
    return lambda given: "" if is_import_path(given) else _one_of(known)(given)


def _model(given: str) -> str:
    if given.endswith(".onnx"):
        return "" if expand_user(given).is_file() else f"there is no file {given}"
    if ":" in given or given in _MODELS.values():
        return ""
    from torchvision.models import list_models  # lazy: it takes seconds, and the usual names do not need it

    known = list_models()
    return "" if given in known else f"torchvision has no {given!r}{near_misses(given, known)}"


def _targets(given: str) -> str:
    return next(filter(None, (_one_of(TARGETS)(name.strip()) for name in given.split(","))), "")


def _whole(least: int, most: int) -> Refusal:
    return lambda given: (
        "" if given.isdecimal() and least <= int(given) <= most else f"{given!r}: a whole number, {least} to {most:,}"
    )


def _weights(given: str) -> str:
    looks_like_file = "/" in given or Path(given).suffix in WEIGHTS_SUFFIXES
    return f"there is no file {given}" if looks_like_file and not expand_user(given).is_file() else ""


def _folder(data: str, given: str) -> str:
    root = expand_user(given)
    if not given or not root.is_dir():
        return f"there is no folder {given}" if given else "name a folder"
    missing = [part for part in _ROOTED[data] if not (root / part).is_dir()]
    return f"{root} holds no {' and no '.join(missing)}; {data} needs {_LAYOUTS[data]}" if missing else ""
