"""The recipe: one typed tree, read from YAML, changed by `key=value` overrides, refused when anything is off.

The sections are the very dataclasses that the library's functions take, so nothing is declared twice; pydantic
validates them at this boundary, strictly: no unknown keys, no guessed types. Values travel as JSON, where a list may
become a tuple and an integer a float, and a string never becomes a number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from compress.data.load import check_data_spec
from compress.data.spec import DataSpec
from compress.errors import CompressError, RecipeError, near_misses
from compress.export.spec import ExportSpec
from compress.measure.spec import BenchSpec, check_bench_spec
from compress.models import ModelSpec
from compress.quantization.spec import QuantSpec, check_quant_spec
from compress.sparsity.spec import SparsitySpec, check_sparsity_spec
from compress.training.spec import FinetuneSpec, QATSpec, TrainSpec, check_train_spec


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """From a model to an engine.

    Attributes:
        model: which network, with which weights.
        data: what it is trained, calibrated and evaluated on.
        train: training of the float baseline; 0 epochs takes the model's weights as they are.
        quantization: None = the network stays float.
        qat: None = post-training quantization only.
        sparsity: None = dense.
        finetune: training behind the sparsity, before any quantization.
        export: the ONNX file.
        bench: what is measured, on which engines.
    """

    model: ModelSpec = field(default_factory=ModelSpec)
    data: DataSpec = field(default_factory=DataSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    quantization: QuantSpec | None = field(default_factory=QuantSpec)
    qat: QATSpec | None = field(default_factory=QATSpec)
    sparsity: SparsitySpec | None = None
    finetune: FinetuneSpec = field(default_factory=FinetuneSpec)
    export: ExportSpec = field(default_factory=ExportSpec)
    bench: BenchSpec = field(default_factory=BenchSpec)

    def to_yaml(self) -> str:
        """The whole recipe, defaults included, as YAML that `load_recipe` reads back to an equal recipe."""
        return yaml.safe_dump(_plain(self), sort_keys=False, width=100, allow_unicode=True)

    def digest(self) -> str:
        """Sixteen hex digits that differ between recipes that differ."""
        return hashlib.sha256(json.dumps(_plain(self), sort_keys=True).encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Dataclasses and tuples as dicts and lists."""
    return json.loads(json.dumps(dataclasses.asdict(value)))


class _Document(BaseModel):
    """The YAML boundary: strict, and closed to unknown keys, in every nested section."""

    model_config = ConfigDict(strict=True, extra="forbid")

    recipe: Recipe


class _Loader(yaml.SafeLoader):
    """Safe YAML with the numbers of YAML 1.2, which refuses a key that stands twice.

    YAML 1.1 asks for 1.0e-3 where people write 1e-3, and reads 2:4 as 124, to the base of 60.
    """

    yaml_implicit_resolvers = {  # noqa: RUF012, as in its base class
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":int", ":float"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise RecipeError(f"line {key.start_mark.line + 1}: key {key.value!r} stands twice; keep one of them")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9]\d*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.\d*|\.\d+|(\d+\.?\d*|\.\d+)[eE][-+]?\d+|\.(inf|Inf|INF))$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)


def load_recipe(recipe: Path | str, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        recipe: a path; or a name (`resnet50`, `resnet50.yaml`) in ./recipes or among those that ship with compress.
        overrides: `section.key=value` each, the value in YAML; an index reaches into a list (`rules.0.enable=false`).

    Raises:
        RecipeError: no such recipe, not YAML, or keys, types or ranges that are not allowed (all of them are listed).
    """
    path = find_recipe(recipe)
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecipeError as error:
        raise RecipeError(f"{path}, {error}") from None
    return parse_recipe({} if tree is None else tree, overrides, source=str(path))


def parse_recipe(tree: Any, overrides: Iterable[str] = (), *, source: str = "recipe") -> Recipe:
    """A recipe from the tree that YAML holds; see `load_recipe`.

    Raises:
        RecipeError: keys, types or ranges that are not allowed.
    """
    if not isinstance(tree, dict):
        raise RecipeError(
            f"{source} holds a {type(tree).__name__}; a recipe is a mapping with sections {_keys(Recipe)}"
        )
    for override in overrides:
        tree = _with_override(tree, override)
    odd = list(_odd_values(tree))
    if odd:
        raise RecipeError(f"{source} is refused:\n" + "\n".join(f"  {line}" for line in odd))
    try:
        recipe = _Document.model_validate_json(json.dumps({"recipe": tree})).recipe
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise RecipeError(f"{source} is refused:\n" + "\n".join(f"  {line}" for line in dict.fromkeys(lines))) from None
    problems = list(_range_problems(recipe))
    if problems:
        raise RecipeError(f"{source} is refused:\n" + "\n".join(f"  {line}" for line in problems))
    return recipe


def _odd_values(value: Any, where: str = "") -> Iterator[str]:
    """Where a tree holds what is no plain text, finite number, list or mapping (YAML has dates, .nan and .inf too)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _odd_values(inner, f"{where}.{key}" if where else str(key))
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{where}: got {value}; it must be a finite number"
    elif value is not None and not isinstance(value, (str, int, float, list, dict)):
        yield f"{where}: got a {type(value).__name__}, {value}; put text in quotes"


def find_recipe(recipe: Path | str) -> Path:
    """Path of a recipe given by path or name.

    Raises:
        RecipeError: there is none; names near misses.
    """
    given = Path(recipe).expanduser()
    name = given.name if given.suffix in {".yaml", ".yml"} else f"{given.name}.yaml"
    candidates = [given] if given.suffix else []
    if len(given.parts) == 1:
        candidates += [folder / name for folder in recipe_folders()]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = sorted(recipe_names())
    hint = near_misses(name.removesuffix(".yaml"), known)
    raise RecipeError(f"no recipe {str(recipe)!r}{hint}; it is neither a file nor one of: {', '.join(known)}")


def recipe_folders() -> list[Path]:
    """Where names are looked up: ./recipes, then those that ship with compress."""
    package = Path(__file__).parent
    return [f for f in (Path("recipes"), package / "recipes", package.parent / "recipes") if f.is_dir()]


def recipe_names() -> list[str]:
    """Names of all recipes that can be found by name."""
    return sorted({path.stem for folder in recipe_folders() for path in folder.glob("*.yaml")})


def _with_override(tree: dict[str, Any], override: str) -> dict[str, Any]:
    """`tree` with one `a.b.c=value` applied; the tree itself is not changed."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {override!r} is not of the form key=value, such as qat.epochs=1")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {override!r}: the value is not YAML: {' '.join(str(error).split())}") from None
    copy: dict[str, Any] = json.loads(json.dumps(tree, default=str))
    parts = key.strip().split(".")
    here: Any = copy
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if isinstance(here, list):
            if not part.isdigit() or int(part) >= len(here):
                raise RecipeError(f"--set {override!r}: {'.'.join(parts[:i])} is a list of {len(here)}; give an index")
            index: Any = int(part)
        else:
            index = part
        if last:
            here[index] = value
        else:
            if not isinstance(here, list) and here.get(part) is None:
                here[part] = {}
            here = here[index]
            if not isinstance(here, (dict, list)):
                raise RecipeError(f"--set {override!r}: {'.'.join(parts[: i + 1])} holds a value, not a section")
    return copy


def _keys(section: type) -> str:
    return ", ".join(f.name for f in dataclasses.fields(section))


def _section(location: Sequence[str | int]) -> type | None:
    """The dataclass at a location of the tree."""
    here: Any = Recipe
    for part in location:
        if isinstance(part, int):
            continue
        if not dataclasses.is_dataclass(here) or part not in here.__dataclass_fields__:
            continue  # pydantic names a union's member on the way
        hints = get_type_hints(here)[part]
        here = next((t for t in _members(hints) if dataclasses.is_dataclass(t)), hints)
    return here if isinstance(here, type) and dataclasses.is_dataclass(here) else None


def _members(hint: Any) -> list[Any]:
    inner = [m for argument in get_args(hint) for m in _members(argument)]
    return inner or [hint]


def _explain(error: Mapping[str, Any]) -> str:
    """One line for one of pydantic's errors: where, what was got, what is allowed."""
    location = [part for part in error["loc"][1:] if not (isinstance(part, str) and part.endswith("]"))]
    where = ".".join(str(part) for part in location if not _is_union_name(part))
    got = error["input"]
    if error["type"] in {"unexpected_keyword_argument", "extra_forbidden"}:
        section = _section(location[:-1])
        names = [f.name for f in dataclasses.fields(section)] if section else []
        return f"{where}: unknown key{near_misses(str(location[-1]), names)} (allowed: {', '.join(names)})"
    if error["type"] == "dataclass_type":
        section = _section(location)
        return f"{where}: got {got!r}; expected a section with keys {_keys(section) if section else ''}"
    return f"{where}: got {got!r}; {error['msg'][0].lower()}{error['msg'][1:]}"


def _is_union_name(part: str | int) -> bool:
    return isinstance(part, str) and part in {"QuantSpec", "QATSpec", "SparsitySpec", "WeightSpec", "ActivationSpec"}


def _range_problems(recipe: Recipe) -> Iterator[str]:
    """Values of the right type that make no sense."""
    checks: list[Callable[[], object]] = [lambda: check_data_spec(recipe.data), lambda: check_train_spec(recipe.train)]
    checks.append(lambda: check_bench_spec(recipe.bench))
    if recipe.qat is not None:
        checks.append(lambda: check_train_spec(cast(QATSpec, recipe.qat)))
    checks.append(lambda: check_train_spec(recipe.finetune))
    if recipe.sparsity is not None:
        checks.append(lambda: check_sparsity_spec(cast(SparsitySpec, recipe.sparsity)))
    if recipe.quantization is not None:
        checks.append(lambda: check_quant_spec(cast(QuantSpec, recipe.quantization)))
    for check in checks:
        try:
            check()
        except CompressError as error:
            yield str(error)
    if recipe.sparsity is not None and recipe.sparsity.schedule == "gradual" and recipe.finetune.epochs == 0:
        yield (
            "sparsity.schedule 'gradual' closes its masks while finetune trains, and finetune.epochs is 0: give it "
            "epochs, or choose schedule one-shot"
        )
    folds = recipe.quantization is not None and recipe.quantization.batchnorm == "fold"
    if folds and recipe.qat is not None and recipe.qat.freeze_batchnorm_epoch is not None:
        yield (
            "qat.freeze_batchnorm_epoch is set and quantization.batchnorm is 'fold', which leaves none to freeze: "
            "set quantization.batchnorm: keep, or leave it out"
        )
    if recipe.export.opset < 19:
        yield f"export.opset is {recipe.export.opset}: it must be 19 or more (Q/DQ with half-precision scales)"
    if recipe.export.require == "int8" and recipe.quantization is None:
        yield "export.require is int8, and quantization is null: nothing would be INT8"
    if recipe.export.require == "fp16" and recipe.export.precision != "fp16":
        yield "export.require is fp16, and export.precision is fp32: engines take the types of the file"
