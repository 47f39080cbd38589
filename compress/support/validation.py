"""Checks dataclasses by pydantic's `Field` in `Annotated`."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from compress.errors import CompressError, near_misses
from compress.support.limits import BATCH, CLASSES, COUNT, MOST_IMAGE_PIXELS, SEED, WORKERS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

AtLeastOne = Annotated[int, Field(ge=1, le=COUNT)]
NotNegativeInt = Annotated[int, Field(ge=0, le=COUNT)]
Seed = Annotated[int, Field(ge=0, le=SEED)]
BatchSize = Annotated[int, Field(ge=1, le=BATCH)]
Workers = Annotated[int, Field(ge=0, le=WORKERS)]
Threads = Annotated[int, Field(ge=1, le=WORKERS)]
Classes = Annotated[int, Field(ge=1, le=CLASSES)]
Pixels = Annotated[int, Field(ge=1, le=MOST_IMAGE_PIXELS)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ShareBelowOne = Annotated[float, Field(ge=0, lt=1)]

# No unknown keys, no guessed types, no NaN; values travel as JSON, where a list may become a tuple.
_STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

_BOUNDS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "finite_number"}
_SHOWN = 120  # characters of a value that a message shows
_TYPES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
_CONTAINERS = {tuple: "a list", list: "a list", dict: "a mapping", Mapping: "a mapping"}


def parse(cls: type[T], tree: Any, *, where: str = "") -> tuple[T | None, list[str]]:
    """A dataclass from a tree that can be JSON.

    `where` begins locations in messages.

    Returns:
        The dataclass and (), or None and a line for each refused value.
    """
    text = json.dumps({"document": tree}, default=_plain, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        return None, [f"{where}{': ' if where else ''}it holds {half!r}, half of a character; take it out"]
    try:
        document: T = vars(_document(cls).model_validate_json(text))["document"]
        return document, []
    except ValidationError as error:
        lines = [_explain(cls, item, where) for item in error.errors()]
        return None, list(dict.fromkeys(lines))


def switched(hint: Any, tree: object) -> object:
    """With `on` and `off` where the type has them, which YAML 1.1 reads as booleans."""
    if isinstance(tree, bool):
        words = [word for member in members(hint) if get_origin(member) is Literal for word in get_args(member)]
        word = "on" if tree else "off"
        return word if word in words else tree
    if isinstance(tree, dict):
        return {key: switched(_declared(hint, [key]), value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [switched(_declared(hint, [0]), value) for value in tree]
    return tree


def validate(
    spec: T,
    cls: type[T],
    *,
    section: str,
    error: type[CompressError],
    rules: Callable[[T], Iterable[str]] = lambda _: (),
) -> None:
    """Refuse values unlike their fields, and contradictions.

    `rules` yields contradictions of values in range.
    """
    if not isinstance(spec, cls):
        raise error(f"{section} is {spec!r}: it must be a compress.{cls.__name__}, such as {cls.__name__}()")
    lines = parse(type(spec), dataclasses.asdict(spec), where=section)[1] or list(rules(spec))
    if lines:
        raise error("\n".join(lines))


def range_words(hint: Any) -> str:
    """The range of an `Annotated` number, such as `2 to 8`, or "".

    >>> range_words(AtLeastOne), range_words(Share), range_words(ShareBelowOne), range_words(int)
    ('1 to 1,000,000,000', '0 to 1', 'at least 0 and below 1', '')
    """
    fields = [extra for extra in getattr(hint, "__metadata__", ()) if isinstance(extra, FieldInfo)]
    bounds = {
        name: getattr(bound, name)
        for field in fields
        for bound in field.metadata
        for name in ("ge", "gt", "le", "lt")
        if hasattr(bound, name)
    }
    if bounds.keys() == {"ge", "le"}:
        return f"{_number(bounds['ge'])} to {_number(bounds['le'])}"
    if bounds.keys() == {"ge"}:
        return f"{_number(bounds['ge'])} or more"
    words = {"ge": "at least", "gt": "above", "lt": "below", "le": "at most"}
    return " and ".join(f"{word} {_number(bounds[name])}" for name, word in words.items() if name in bounds)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def keys_of(section: type[DataclassInstance]) -> str:
    return ", ".join(field.name for field in dataclasses.fields(section))


@functools.cache
def _document(cls: type) -> type[BaseModel]:
    return create_model(f"{cls.__name__}Document", __config__=_STRICT, document=(cls, ...))


def _plain(value: Any) -> object:
    """Numbers of numpy and torch as Python's, others as text."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else repr(value)


def _shown(got: Any) -> str:
    text = repr(got)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 4 :]}"


def _explain(cls: type, error: Mapping[str, Any], where: str) -> str:
    location = _without_alternatives(cls, error["loc"][1:])
    path = ".".join(map(str, (where, *location) if where else location))
    kind, got, hint = error["type"], error["input"], _declared(cls, location)
    null = ", or null" if type(None) in members(hint) else ""
    if kind == "unexpected_keyword_argument":
        section = next(_sections(_declared(cls, location[:-1])))
        names = [field.name for field in dataclasses.fields(section)]
        return f"{path}: unknown key{near_misses(str(location[-1]), names)} (allowed: {', '.join(names)})"
    if kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"{path} is missing"
    if kind == "dataclass_type":
        return f"{path}: got {_shown(got)}; expected a section with keys {keys_of(next(_sections(hint)))}"
    allowed = [str(value) for member in members(hint) if get_origin(member) is Literal for value in get_args(member)]
    ranged = isinstance(got, (int, float)) and any(range_words(member) for member in members(hint))
    if allowed and not ranged:
        several = ", or a list of them" if any(get_origin(member) is tuple for member in members(hint)) else ""
        return f"{path} is {_shown(got)}{near_misses(str(got), allowed)} (one of: {', '.join(allowed)}{null}{several})"
    if kind in _BOUNDS or (allowed and ranged):
        words = ", ".join(filter(None, (range_words(member) for member in members(hint))))
        finite = "" if math.isfinite(got) else "a finite number"
        null = f", or {', '.join(allowed)}{null}" if allowed else null
        return f"{path} is {_shown(got)}: it must be {', '.join(filter(None, (finite, words)))}{null}"
    if kind.endswith("_type") and (words := type_words(hint)):
        return f"{path} is {_shown(got)}: it must be {words}"
    return f"{path}: got {_shown(got)}; {error['msg'][0].lower()}{error['msg'][1:]}"


def type_words(hint: Any) -> str:
    """Types that YAML has, or "".

    >>> type_words(int | tuple[int, int]), type_words(AtLeastOne | None)
    ('a whole number or a list', 'a whole number, 1 to 1,000,000,000, or null')
    """
    words = []
    for member in members(hint):
        plain = get_args(member)[0] if get_origin(member) is Annotated else member
        word = _TYPES.get(plain) or _CONTAINERS.get(get_origin(plain) or plain)
        if word is None:
            return ""
        limits = range_words(member)
        words.append(f"{word}, {limits}," if limits else word)
    return " or ".join(words).removesuffix(",")


def _without_alternatives(cls: Any, location: Sequence[str | int]) -> tuple[str | int, ...]:
    kept: list[str | int] = []
    for part in location:
        alternatives = [m for m in members(_declared(cls, kept)) if m is not type(None)] if kept else []
        if isinstance(part, str) and len(alternatives) > 1:
            continue
        kept.append(part)
    return tuple(kept)


def _declared(cls: Any, location: Sequence[str | int]) -> object:
    hint: Any = cls
    for part in location:
        if isinstance(part, int):
            lists = (member for member in members(hint) if get_origin(member) in (tuple, list))
            hint = next((get_args(member)[0] for member in lists), Any)
        else:
            section = next(_sections(hint), None)
            mapped = (get_args(member)[1] for member in members(hint) if get_origin(member) in (dict, Mapping))
            fields = {} if section is None else _hints(section)
            hint = next(mapped, Any) if section is None else fields.get(part, Any)
    return hint


@functools.cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


def _sections(hint: Any) -> Iterator[Any]:
    return (member for member in members(hint) if dataclasses.is_dataclass(member))
