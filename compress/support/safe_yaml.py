"""Safe YAML with numbers of YAML 1.2, within limits."""

from __future__ import annotations

import re

import yaml

from compress.support.limits import DEPTH, DIGITS, RECIPE_BYTES, RECIPE_VALUES


class _Loader(yaml.SafeLoader):
    """1e-3 is a number, as in YAML 1.2, and 2:4 is none."""

    yaml_implicit_resolvers = {  # noqa: RUF012, as in its base class
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":int", ":float"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_Loader.add_implicit_resolver(_INT, re.compile(r"^[-+]?(0|[1-9]\d*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(r"^[-+]?(\d+\.\d*|\.\d+|(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+|\.(inf|Inf|INF))$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)


def load_yaml(text: str) -> object:
    """The value; None for an empty text."""
    if len(text) > RECIPE_BYTES:
        raise ValueError(f"it has {len(text):,} characters, and at most {RECIPE_BYTES:,} are read")
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            if (count := _values(node, {}, 0)) > RECIPE_VALUES:
                raise ValueError(
                    f"it stands for {count:,} values, aliases expanded, and at most {RECIPE_VALUES:,} are read"
                )
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"nested more than {DEPTH} deep") from None


def _values(node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Number of values of a node; `known` holds counted nodes, 0 while counting."""
    line = f"line {node.start_mark.line + 1}: "
    if depth > DEPTH:
        raise ValueError(f"{line}nested more than {DEPTH} deep")
    if id(node) in known:
        if not known[id(node)]:
            raise ValueError(f"{line}a value that holds itself")
        return known[id(node)]
    known[id(node)] = 0
    count = 1
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            _check_key(key, seen)
            count += _values(value, known, depth + 1)
    elif isinstance(node, yaml.SequenceNode):
        count += sum(_values(item, known, depth + 1) for item in node.value)
    elif node.tag in (_INT, _FLOAT) and len(node.value) > DIGITS:
        raise ValueError(f"{line}a number of {len(node.value):,} digits; at most {DIGITS} are read")
    known[id(node)] = count
    return count


def _check_key(key: yaml.Node, seen: set[str]) -> None:
    line = f"line {key.start_mark.line + 1}: "
    if not isinstance(key, yaml.ScalarNode) or key.tag not in ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"):
        shown = key.value if isinstance(key, yaml.ScalarNode) else type(key).__name__.removesuffix("Node").lower()
        raise ValueError(f"{line}a key is {shown!r:.80}: keys must be text; put it in quotes")
    if key.value in seen:
        raise ValueError(f"{line}key {key.value!r} occurs twice; remove one of them")
    seen.add(key.value)
