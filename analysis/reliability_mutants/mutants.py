"""Mutants of a module by the operators of Cosmic Ray: its text with one operator, number or condition changed."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from difflib import ndiff
from pathlib import Path
from typing import NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

LEFT_OUT = ("core/ReplaceComparisonOperator_Eq_Is", "core/ReplaceComparisonOperator_NotEq_IsNot")
"""Operators whose mutants compute the same: Python keeps one object of each text of the source and small number."""


class Place(NamedTuple):
    """A place in a file that an operator can change, by its number among those of the operator."""

    file: str
    operator: str
    occurrence: int


@dataclass(frozen=True)
class Mutant:
    """A changed module.

    Attributes:
        file: of the module, from the repository's root.
        operator: of Cosmic Ray.
        line: number of the first line that differs.
        change: that line before and after.
        text: of the whole module.
        function: `file:line` of the outermost function that holds it; None for what runs when the module is imported.
    """

    file: str
    operator: str
    line: int
    change: str
    text: str
    function: str | None


def places(file: str) -> list[Place]:
    """Return a place for each change that the operators know, those of annotations included, `LEFT_OUT` not."""
    nodes = list(ast_nodes(get_ast(Path(file).read_text(encoding="utf-8"))))
    found = []
    for name in operator_names():
        kind = get_operator(name)
        if not kind.arguments() and name not in LEFT_OUT:
            count = sum(1 for node in nodes for _ in kind().mutation_positions(node))
            found += [Place(file, name, occurrence) for occurrence in range(count)]
    return found


def mutant(place: Place) -> Mutant | None:
    """Make one mutant; None if it computes the same: an annotation or a docstring was changed."""
    text = Path(place.file).read_text(encoding="utf-8")
    mutated = mutate_code(text, get_operator(place.operator)(), place.occurrence)
    changed = mutated.decode() if isinstance(mutated, bytes) else mutated
    if changed is None or _meaning(changed) in {_meaning(text), ""}:
        return None
    line, change = _difference(text, changed)
    return Mutant(
        place.file, place.operator.partition("/")[2], line, change, changed, _function(place.file, text, line)
    )


def with_calls(file: str) -> str:
    """Return a module's text in which each outermost function first calls `__ran__` with its `file:line`."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    for function in _functions(tree):
        function.body.insert(0, ast.parse(f"__ran__({f'{file}:{function.lineno}'!r})").body[0])
    return ast.unparse(tree)


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return the functions of a module and the methods of its classes, without those within others."""
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    return [node for body in bodies for node in body if isinstance(node, ast.FunctionDef)]


def _function(file: str, text: str, line: int) -> str | None:
    """Return the function whose body, not its decorators and defaults, holds a line."""
    for function in _functions(ast.parse(text)):
        if function.body[0].lineno <= line <= (function.end_lineno or 0):
            return f"{file}:{function.lineno}"
    return None


def _meaning(text: str) -> str:
    """Return what Python makes of a text, without annotations and docstrings; "" if it is no Python."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(value=None)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]  # type: ignore[attr-defined]
    return ast.dump(tree)


def _difference(before: str, after: str) -> tuple[int, str]:
    old, new = before.splitlines(), after.splitlines()
    line = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(old) - 1)
    rows = [row for row in ndiff(old[line : line + 3], new[line : line + 3]) if row[0] in "+-"]
    return line + 1, " ".join(" ".join(row.split()) for row in rows[:2])
