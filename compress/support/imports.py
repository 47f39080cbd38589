"""Objects that a recipe names as `package.module:name`."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from compress.errors import CompressError, near_misses

_INSTALLED = tuple({Path(sysconfig.get_path(name)) for name in ("purelib", "platlib", "stdlib")})
_MOST_SOURCES = 1000
_NAMED_BYTES = 1 << 26


def is_import_path(name: str) -> bool:
    module, colon, member = name.partition(":")
    return bool(colon) and all(p.isidentifier() for part in (module, member) for p in part.split("."))


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def any_failure(refusal: Callable[[Exception], CompressError]) -> Iterator[None]:
    """Raise `refusal(error)` in the place of any error of the block; a `CompressError` passes."""
    try:
        yield
    except CompressError:
        raise
    except Exception as error:  # the user's code, and readers of damaged files, can fail in any way
        raise refusal(error) from error


def imported(path: str, *, key: str, error: type[CompressError], what: str = "a function or class") -> Any:
    """The callable that a path names; `key` and `what` are for messages."""
    module_name, _, name = path.partition(":")
    with any_failure(lambda cause: error(f"{key} {path}: cannot import {module_name} ({described(cause)})")):
        found, where = importlib.import_module(module_name), module_name
    for part in name.split("."):
        if not hasattr(found, part):
            raise error(f"{key} {path}: {where} has no {part!r}{near_misses(part, dir(found))}")
        found, where = getattr(found, part), f"{where}.{part}"
    if not callable(found):
        raise error(f"{key} {path} is a {type(found).__name__}, not {what}")
    return found


def own_sources(paths: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the user's modules that these objects are in or import, of their packages, and of files they name."""
    found: dict[str, str] = {}
    waiting = [path.partition(":")[0] for path in paths if is_import_path(path)]
    while waiting and len(found) < _MOST_SOURCES:
        name = waiting.pop()
        path = None if name in found else _own_source(name)
        if path is None:
            continue
        source, parent = path.read_bytes(), name.rpartition(".")[0]
        found[name] = hashlib.sha256(source).hexdigest()
        waiting += [parent] if parent else []
        with contextlib.suppress(SyntaxError):
            for node in ast.walk(ast.parse(source)):
                waiting += _imported_by(node, name if path.name == "__init__.py" else parent)
                found.update({f"{name}: {file}": value for file, value in _named_file(node, path.parent).items()})
    return dict(sorted(found.items()))


def _named_file(node: ast.AST, folder: Path) -> dict[str, str]:
    """SHA-256 of a file beside a module that names it, such as one of anchors."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or not Path(node.value).suffix:
        return {}
    with contextlib.suppress(OSError, ValueError):  # a text that is no name
        place = folder / node.value
        if place.is_relative_to(folder) and place.is_file() and place.stat().st_size <= _NAMED_BYTES:
            return {node.value: hashlib.sha256(place.read_bytes()).hexdigest()}
    return {}


def _imported_by(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called, name = getattr(node.func, "attr", getattr(node.func, "id", "")), node.args[0].value
        if called in {"import_module", "__import__"} and isinstance(name, str):
            with contextlib.suppress(ImportError, ValueError):
                return [importlib.util.resolve_name(name, package)]
    if not isinstance(node, ast.ImportFrom):
        return []
    within = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else ()
    module = ".".join(filter(None, (*within, node.module)))
    return [module, *(f"{module}.{alias.name}" for alias in node.names)] if module else []


def _own_source(name: str) -> Path | None:
    if name.partition(".")[0] in {"compress", *sys.stdlib_module_names}:
        return None
    try:
        spec = importlib.util.find_spec(name)
        path = Path(spec.origin) if spec is not None and spec.origin else None
        if path is None or path.suffix != ".py" or any(path.is_relative_to(folder) for folder in _INSTALLED):
            return None
        return path
    except Exception:  # a module that cannot be imported is refused where it is used
        return None
