"""Arguments refused before a command is imported: earlier forms of commands, and recipes that are not there."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from compress.recipe_files import read_recipe

_HELP = "--help"


def refused_inspect(arguments: Sequence[str]) -> str | None:
    """Return why `inspect` refuses arguments that name none of its commands, with today's form; else None."""
    words = list(arguments)
    if not words:
        return "inspect looks at one thing: a model, an onnx file, an engine or the parity of engines (inspect --help)"
    if not words[0].startswith("-") or words[0] == _HELP:
        return None
    if "--parity" in words:
        words.remove("--parity")
        return _moved("inspect", arguments, ["parity", *words])
    for option in ("engine", "onnx"):  # an engine's audit also took the file that the engine was built from
        file, rest = _taken(words, f"--{option}")
        if file is not None:
            return _moved("inspect", arguments, [option, file, *rest])
    return _moved("inspect", arguments, ["model", *words])


def refused_build(arguments: Sequence[str]) -> str | None:
    """Return why `build` refuses arguments that name none of its commands, with today's form; else None."""
    words = list(arguments)
    if not words:
        return "build makes an engine of one thing: an onnx file or the network of a recipe (build --help)"
    if not words[0].startswith("-") or words[0] == _HELP:
        return None
    file, rest = _taken(words, "--onnx")
    if file is not None:
        return _moved("build", arguments, ["onnx", file, *rest])
    command = "explore" if "--explore" in words else "recipe"
    recipe, rest = _taken([word for word in words if word != "--explore"], "--recipe", "-r")
    return _moved("build", arguments, [command, recipe or "NAME", *rest])


def refuse_recipe(arguments: Sequence[str]) -> None:
    """Refuse a recipe that no command could read, without waiting seconds for torch.

    Raises:
        RecipeError: as `read_recipe`.
    """
    recipe, rest = _taken(arguments, "--recipe", "-r")
    if recipe is not None and _HELP not in rest:
        read_recipe(recipe)


def _taken(words: Sequence[str], *options: str) -> tuple[str | None, list[str]]:
    """(value of an option, the words without it), for `--option value` and `--option=value`."""
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in options and equals:
            return value, [*words[:i], *words[i + 1 :]]
        if name in options and i + 1 < len(words):
            return words[i + 1], [*words[:i], *words[i + 2 :]]
    return None, list(words)


def _moved(command: str, old: Sequence[str], new: Sequence[str]) -> str:
    return f"`{command} {shlex.join(old)}` is now `{command} {shlex.join(new)}`"
