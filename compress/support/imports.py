"""Objects that a recipe names as `package.module:name`: functions and classes in a file of the user's."""

from __future__ import annotations

import importlib
from typing import Any

from compress.errors import CompressError, near_misses


def is_import_path(name: str) -> bool:
    """Return True if `name` has the form `package.module:name`."""
    module, colon, member = name.partition(":")
    return bool(colon) and all(p.isidentifier() for part in (module, member) for p in part.split("."))


def imported(path: str, *, key: str, error: type[CompressError], what: str = "a function or class") -> Any:
    """Return the callable object that `package.module:name` names.

    Args:
        path: of the object.
        key: key of the recipe, for messages.
        error: class of the error to raise.
        what: description of what is expected, for messages.

    Raises:
        CompressError: of class `error`: the module cannot be imported, or it has no such callable.
    """
    module_name, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as cause:  # a module of the user's can fail in any way as it is imported
        raise error(f"{key} {path}: cannot import {module_name} ({type(cause).__name__}: {cause})") from cause
    for part in name.split("."):
        if not hasattr(found, part):
            raise error(f"{key} {path}: {found!r} has no {part!r}{near_misses(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise error(f"{key} {path} is a {type(found).__name__}, not {what}")
    return found
