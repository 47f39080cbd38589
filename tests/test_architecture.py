"""Imports point down: the layers of CONTRIBUTING.md, read from the import statements."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "compress"
LAYERS = [
    {"errors", "version"},
    {"files", "progress"},
    {"graph"},
    {"quantization", "sparsity", "receptive_field", "roofline", "data", "weights"},
    {"models"},
    {"export"},
    {"engines"},
    {"measure"},
    {"training"},
    {"recipe"},
    {"report"},
    {"pipeline"},
    {"cli"},
]
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
TOP = {"__init__.py", "__main__.py"}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in TOP)


def unit(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Parts of compress that a file imports at any depth, those for type checking only left out."""
    tree = ast.parse(path.read_text())
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    skipped = {id(inner) for guard in guards for inner in ast.walk(guard)}
    names = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [f"compress.{a.name}" for a in node.names] if node.module == "compress" else [node.module]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        names |= {module.split(".")[1] for module in modules if module.startswith("compress.")}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    own = unit(path)
    assert own in RANK, f"{own} stands in no layer"
    for other in imported(path) - {own}:
        peers = own in {"quantization", "sparsity", "receptive_field", "roofline"}
        assert RANK[other] < RANK[own] or (peers and RANK[other] == RANK[own] and other == "quantization"), (
            f"{path.name} ({own}) imports {other}, which is not below it"
        )


def test_packages_ship():
    """A package that pyproject does not list would be missing after `pip install .`."""
    import tomllib

    listed = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {"compress", "compress.recipes"} | {f"compress.{p.parent.name}" for p in PACKAGE.glob("*/__init__.py")}
    assert set(listed) == found


def test_nothing_prints_below_the_command_line():
    for path in FILES:
        if unit(path) == "cli":
            continue
        calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], path


def test_user_input_is_not_asserted_on():
    """Asserts narrow types for the type checker; none carries a message for a user."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Assert) and node.msg is not None), f"{path}:{node.lineno}"
