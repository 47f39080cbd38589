"""Keys of a recipe, from the docstrings of specs."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import yaml

from compress.errors import RecipeError, near_misses
from compress.recipe.tree import Recipe
from compress.support.validation import members, range_words

_HEAD = """# The keys of a recipe

A recipe is a YAML file with the sections below; every section and every key may be left out, and then has its default.
`--set section.key=value` changes one key (`--set quantization.weights.num_bits=4`, `--set bench.batch_sizes=[1,8]`),
`base: NAME` at the top of a recipe takes all keys of another one, which those of the file change, and
`python -m compress recipes NAME` shows a recipe with all of its values. Paths are relative to the folder that the
command is started in. `python -m compress recipes --keys` prints this page, and `recipes --keys SECTION` a part
of it.

"""

_YAML = {"None": "null", "True": "true", "False": "false"}  # Python's constants in docstrings, as a recipe writes them


@dataclass(frozen=True, kw_only=True)
class RecipeKey:
    """One key.

    Attributes:
        section: such as `quantization.weights`; `[]` marks a list.
        kind: type and range.
        default: as YAML; "" = must be given, or a section.
    """

    section: str
    name: str
    kind: str
    default: str
    about: str


def recipe_keys() -> tuple[RecipeKey, ...]:
    """Return all keys, in the order of the sections. Of a section that extends another, keys that differ."""
    about = attribute_texts(Recipe)
    keys = []
    for field in dataclasses.fields(Recipe):
        members = _members(get_type_hints(Recipe)[field.name])
        spec = next((m for m in members if dataclasses.is_dataclass(m)), None)
        default = "null" if field.default is None else "" if spec is not None else _default(field)
        kind = "section, or null" if type(None) in members else "section"
        if spec is None:
            kind = _kind(get_type_hints(Recipe, include_extras=True)[field.name])
        keys.append(RecipeKey(section="", name=field.name, kind=kind, default=default, about=about[field.name]))
        if spec is not None and field.name != "teacher":  # its keys are those of `model`
            keys += _keys_of(spec, field.name)
    return tuple(keys)


def keys_of_section(section: str) -> tuple[RecipeKey, ...]:
    keys = recipe_keys()
    found = tuple(key for key in keys if re.match(rf"{re.escape(section)}(\[\])?(\.|$)", key.section))
    if not found:
        names = list(dict.fromkeys(key.section for key in keys if key.section))
        raise RecipeError(
            f"{section!r} is no section of a recipe{near_misses(section, names)} (one of: {', '.join(names)}); "
            "a recipe is shown without --keys"
        )
    return found


def recipe_keys_markdown(section: str | None = None) -> str:
    if section is not None:
        return _sections(keys_of_section(section)).removeprefix("\n")
    keys = recipe_keys()
    return _HEAD + _table([key for key in keys if not key.section]) + _sections(keys)


def _sections(keys: Sequence[RecipeKey]) -> str:
    parts = []
    for section in dict.fromkeys(key.section for key in keys if key.section):
        note = "\nAll keys of `train`; these have another default, or are there for this section only.\n"
        extends = note if section in {"qat", "finetune"} else ""
        parts.append(f"\n## {section}\n{extends}\n{_table([key for key in keys if key.section == section])}")
    return "".join(parts)


def attribute_texts(spec: type) -> dict[str, str]:
    texts = dict.fromkeys((field.name for field in dataclasses.fields(spec)), "")
    for cls in reversed([c for c in spec.__mro__ if dataclasses.is_dataclass(c)]):
        for names, text in _entries(inspect.getdoc(cls) or ""):
            for name in names:
                texts[name] = texts.get(name) or text
    return texts


def _entries(doc: str) -> Iterator[tuple[list[str], str]]:
    """Yield (names, text) of `Attributes:`."""
    body = doc.partition("Attributes:\n")[2]
    for entry in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {8}.*)*)", body, flags=re.MULTILINE):
        text = " ".join(entry[1].split())
        yield re.split(r",\s*", entry[0]), re.sub(r"\b(None|True|False)\b", lambda word: _YAML[word[0]], text)


def _keys_of(spec: Any, section: str) -> Iterator[RecipeKey]:
    base: Any = next((c for c in spec.__mro__[1:] if dataclasses.is_dataclass(c)), None)
    known = {field.name: field.default for field in dataclasses.fields(base)} if base else {}
    hints, declared = get_type_hints(spec), get_type_hints(spec, include_extras=True)
    texts, nested = attribute_texts(spec), []
    for field in dataclasses.fields(spec):
        if field.name in known and known[field.name] == field.default:
            continue
        members = _members(hints[field.name])
        inner = next((m for m in members if dataclasses.is_dataclass(m)), None)
        if inner is not None:
            nested.append((inner, f"{section}.{field.name}{'[]' if get_origin(hints[field.name]) is tuple else ''}"))
        yield RecipeKey(
            section=section,
            name=field.name,
            kind=_kind(declared[field.name]),
            default=_default(field),
            about=texts[field.name],
        )
    for inner, path in nested:
        if not path.startswith("quantization.rules[]."):  # weights and activations of a rule are those of the section
            yield from _keys_of(inner, path)


def _members(hint: Any) -> list[Any]:
    inner = [member for argument in get_args(hint) for member in _members(argument)]
    return inner or [hint]


_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null"}


def _kind(hint: Any, *, plural: str = "") -> str:
    if len(alternatives := members(hint)) > 1:
        return ", or ".join(dict.fromkeys(_kind(alternative) for alternative in alternatives))
    if get_origin(hint) is Annotated:
        return f"{_kind(get_args(hint)[0], plural=plural)}, {range_words(hint)}"
    if get_origin(hint) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(hint))
    if get_origin(hint) is tuple:
        return f"list of {_kind(get_args(hint)[0], plural='s')}"
    if dataclasses.is_dataclass(hint):
        return f"section{plural}"
    return _NAMES[hint] + plural if hint in _NAMES else "mapping"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        made = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        return "{}" if made == {} else ""
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()


def _table(keys: list[RecipeKey]) -> str:
    rows = [
        f"| `{key.name}` | {key.kind} | {f'`{key.default}`' if key.default else ''} | {key.about.replace('|', '/')} |\n"
        for key in keys
    ]
    return "| key | values | default | meaning |\n|---|---|---|---|\n" + "".join(rows)
