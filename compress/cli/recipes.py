"""The command `recipes`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from compress.cli.console import OUT, print_json, print_table
from compress.cli.options import JsonOption
from compress.recipe.files import find_recipe, recipe_names
from compress.recipe.keys import keys_of_section, recipe_keys, recipe_keys_markdown
from compress.recipe.tree import load_recipe


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
