"""Arguments refused before a command is imported: earlier forms of commands, and recipes that are not there."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence

from compress.recipe.files import read_recipe

_HELP = "--help"


def refused_inspect(arguments: Sequence[str]) -> str | None:
    """Today's form of an old command line, else None."""
    nothing = "inspect looks at one thing: a model, an onnx file, an engine or the parity of engines (inspect --help)"
    return _refused("inspect", arguments, nothing, _inspect_today)


def refused_build(arguments: Sequence[str]) -> str | None:
    """Today's form of an old command line, else None."""
    nothing = "build makes an engine of one thing: an onnx file or the network of a recipe (build --help)"
    return _refused("build", arguments, nothing, _build_today)


def refuse_recipe(arguments: Sequence[str]) -> None:
    """Refuse a recipe that cannot be read before torch is imported."""
    recipe, rest = _taken(arguments, "--recipe", "-r")
    if recipe is not None and _HELP not in rest:
        read_recipe(recipe)


def _refused(
    command: str, arguments: Sequence[str], nothing: str, today: Callable[[list[str]], list[str]]
) -> str | None:
    if not arguments:
        return nothing
    if not arguments[0].startswith("-") or arguments[0] == _HELP:
        return None
    old, new = shlex.join(arguments), shlex.join(today(list(arguments)))
    return f"`{command} {old}` is now `{command} {new}`"


def _inspect_today(words: list[str]) -> list[str]:
    if "--parity" in words:
        words.remove("--parity")
        return ["parity", *words]
    for option in ("engine", "onnx"):  # an engine's audit also took the file that the engine was built from
        file, rest = _taken(words, f"--{option}")
        if file is not None:
            return [option, file, *rest]
    return ["model", *words]


def _build_today(words: list[str]) -> list[str]:
    file, rest = _taken(words, "--onnx")
    if file is not None:
        return ["onnx", file, *rest]
    command = "explore" if "--explore" in words else "recipe"
    recipe, rest = _taken([word for word in words if word != "--explore"], "--recipe", "-r")
    return [command, recipe or "NAME", *rest]


def _taken(words: Sequence[str], *options: str) -> tuple[str | None, list[str]]:
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in options and equals:
            return value, [*words[:i], *words[i + 1 :]]
        if name in options and i + 1 < len(words):
            return words[i + 1], [*words[:i], *words[i + 2 :]]
    return None, list(words)
