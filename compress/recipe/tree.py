"""A recipe: its file, found by path or name and over those of its base, its typed tree, and all its keys."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import yaml

from compress.data import DATASETS, DataSpec, data_contradictions
from compress.errors import RecipeError, near_misses
from compress.export import ExportSpec
from compress.files import expand_user
from compress.measure import BenchSpec, bench_contradictions
from compress.models import ModelSpec
from compress.quantization import QuantSpec, WeightSpec, quant_contradictions
from compress.search import SearchSpec, search_contradictions
from compress.sparsity import SparsitySpec, sparsity_contradictions
from compress.support.imports import is_import_path
from compress.support.limits import RECIPE_BYTES
from compress.support.safe_yaml import load_yaml
from compress.support.validation import keys_of, members, parse, range_words, switched
from compress.tasks import TaskName, task_contradictions
from compress.training import FinetuneSpec, QATSpec, TrainSpec, task_specific, train_contradictions


def read_recipe(recipe: Path | str) -> tuple[Path, Any]:
    """Path and tree of a recipe, over those of its `base`."""
    path = find_recipe(recipe)
    tree = _extended(_read(path), path, ())
    if tree is None:
        raise RecipeError(
            f"{path} is empty; a recipe names at least its model, such as `model: {{name: resnet18}}`. "
            f"`recipes --keys` lists all keys, `recipes resnet50` shows a whole recipe"
        )
    return path, tree


def find_recipe(recipe: Path | str) -> Path:
    given = expand_user(recipe)
    name = given.name if given.suffix in {".yaml", ".yml"} else f"{given.name}.yaml"
    candidates = [given] if given.suffix else []
    if len(given.parts) == 1:
        candidates += [folder / name for folder in recipe_folders()]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = sorted(recipe_names())
    hint = near_misses(name.removesuffix(".yaml"), known)
    raise RecipeError(f"no recipe {str(recipe)!r}{hint} (neither a file nor one of: {', '.join(known)})")


def recipe_folders() -> list[Path]:
    package = Path(__file__).parents[1]
    return [f for f in (Path("recipes"), package / "recipes", package.parent / "recipes") if f.is_dir()]


def recipe_names() -> list[str]:
    return sorted({path.stem for folder in recipe_folders() for path in folder.glob("*.yaml")})


def _read(path: Path) -> object:
    try:
        with path.open("rb") as file:
            return load_yaml(file.read(RECIPE_BYTES + 1).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path} is no recipe, which is YAML in UTF-8: {error}; a file with a network stands in one as its model, "
            "such as model: {name: net.onnx}"
        ) from None
    except ValueError as error:
        raise RecipeError(f"{path} is refused: {error}") from None


def _extended(tree: object, path: Path, extending: tuple[Path, ...]) -> object:
    if not isinstance(tree, dict) or "base" not in tree:
        return tree
    chain = (*extending, path.resolve())
    name = tree["base"]
    if not isinstance(name, str):
        raise RecipeError(f"{path}: base is {name!r}; it must be the path or the name of a recipe")
    beside = path.parent / name
    base = beside if beside.is_file() else find_recipe(name)
    if base.resolve() in chain:
        raise RecipeError(f"{path}: base is {name!r}, which extends this recipe itself; remove one of the two keys")
    below = _extended(_read(base), base, chain)
    if not isinstance(below, dict):
        raise RecipeError(f"{base} holds a {type(below).__name__}; a recipe is a mapping, such as model: {{...}}")
    return _merged(below, {key: value for key, value in tree.items() if key != "base"})


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Section by section; lists are replaced."""
    merged = dict(below)
    for key, value in above.items():
        known = merged.get(key)
        merged[key] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged


# Keys that digests leave out at their default: those of older run folders and files are from before these keys.
_ADDED = (
    *(("data", key) for key in ("max_pixels", "interpolation", "resize", "other_classes", "scale", "noise")),
    ("export", "nms"),
)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """From a model to an engine.

    Attributes:
        task: what the network learns: `classification`, `segmentation` (a class for each pixel), `detection` (boxes),
            `restoration` (super-resolution or denoising: an image of values from 0 to 1), or `own` (anything else, such
            as depth, keypoints or several labels, with one's own loss and metric).
        loss: `cross_entropy`; for segmentation also `dice` or `cross_entropy+dice`; for detection `detector`, the
            detector's own; for restoration `l1` or `l2`; or `package.module:function`, a function of (outputs, targets)
            that returns the mean loss of a batch; null = the first of the task's.
        metric: `package.module:name`, a function of (outputs, targets) that returns a number, or a class with
            `update(outputs, targets)` and `compute()`, such as those of torchmetrics; null = the task's own.
        decode: of detection, `package.module:function`, a function from the network's output tensors to "boxes" (n, 4),
            "scores" and "labels" of each image; null = that of torchvision's detector. It stays outside the network.
        model: the network and its weights.
        data: the images of training, calibration and evaluation.
        train: training of the float baseline; 0 epochs takes the model's weights as they are.
        quantization: None = the network stays float.
        qat: quantization-aware training; None = post-training quantization only.
        sparsity: None = dense.
        finetune: training after weights were taken away, before any quantization.
        export: the ONNX file.
        bench: timing of the exported files on engines.
        search: space and effort of `search`.
        teacher: a network, trained already, that training with `distill` learns from; null = the float network.

    Examples:
        >>> recipe = compress.load_recipe("quickstart", ["qat.epochs=1"])
        >>> recipe.model.name, recipe.qat.epochs
        ('resnet18', 1)
    """

    task: TaskName = "classification"
    loss: str | None = None
    metric: str | None = None
    decode: str | None = None
    model: ModelSpec = dataclasses.field(default_factory=ModelSpec)
    data: DataSpec = dataclasses.field(default_factory=DataSpec)
    train: TrainSpec = dataclasses.field(default_factory=TrainSpec)
    quantization: QuantSpec | None = dataclasses.field(default_factory=QuantSpec)
    qat: QATSpec | None = dataclasses.field(default_factory=QATSpec)
    sparsity: SparsitySpec | None = None
    finetune: FinetuneSpec = dataclasses.field(default_factory=FinetuneSpec)
    export: ExportSpec = dataclasses.field(default_factory=ExportSpec)
    bench: BenchSpec = dataclasses.field(default_factory=BenchSpec)
    search: SearchSpec = dataclasses.field(default_factory=SearchSpec)
    teacher: ModelSpec | None = None

    def to_yaml(self) -> str:
        """Return the whole recipe, defaults included, as YAML that `load_recipe` reads back to an equal recipe."""
        return yaml.safe_dump(_plain(self), sort_keys=False, width=100, allow_unicode=True)

    def digest(self) -> str:
        """Return sixteen hex digits that differ between recipes that differ."""
        tree, default = _plain(self), _plain(Recipe())
        for section, key in _ADDED:
            if tree[section][key] == default[section][key]:
                del tree[section][key]
        if self.quantization is not None:
            quantization = tree["quantization"]
            for key in ("smooth", "bias_correction"):
                if quantization[key] == "auto":  # the default was null, which a torch model takes "auto" as
                    quantization[key] = None
            bits = "auto" if 7 in map(WeightSpec().bits_for, self.quantization.targets) else 8  # the default was 8
            for weights in (owner["weights"] for owner in (quantization, *quantization["rules"]) if owner["weights"]):
                if weights["num_bits"] == "auto":
                    weights["num_bits"] = bits
            for rule in quantization["rules"]:
                for key in ("reason", "channel_scales"):
                    if not rule[key]:
                        del rule[key]
        return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]


def _plain(recipe: Recipe) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(recipe)))


def load_recipe(recipe: Path | str, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        recipe: a path; or a name (`resnet50`, `resnet50.yaml`) in ./recipes or among those that ship with compress. Its
            key `base` names another recipe, whose keys it changes: a path relative to its own folder, or a name.
        overrides: `section.key=value` each, the value in YAML; an index reaches into a list (`rules.0.enable=false`).

    Raises:
        RecipeError: no such recipe, not YAML, or keys, types or ranges that are not allowed (all of them are listed).

    Examples:
        >>> recipe = compress.load_recipe("quickstart", ["data.batch_size=16", "qat=null"])
        >>> recipe.data.batch_size, recipe.qat
        (16, None)
    """
    path, tree = read_recipe(recipe)
    return parse_recipe(tree, overrides, source=str(path))


def parse_recipe(tree: Any, overrides: Iterable[str] = (), *, source: str = "recipe") -> Recipe:
    if not isinstance(tree, dict):
        raise RecipeError(
            f"{source} holds a {type(tree).__name__}; a recipe is a mapping with sections {keys_of(Recipe)}"
        )
    for override in overrides:
        tree = _with_override(tree, override)
    odd = list(_odd_values(tree))
    if odd:
        raise RecipeError(f"{source} is refused:\n" + "\n".join(f"  {line}" for line in odd))
    recipe, lines = parse(Recipe, switched(Recipe, tree))
    if recipe is not None:
        lines = list(_contradictions(recipe))
    if recipe is None or lines:
        raise RecipeError(f"{source} is refused:\n" + "\n".join(f"  {line}" for line in lines))
    return recipe


def _odd_values(value: Any, where: str = "") -> Iterator[str]:
    """Yield values that are no text, finite number, list or mapping, as YAML's dates."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from _odd_values(inner, f"{where}.{key}" if where else str(key))
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{where}: got {value}; it must be a finite number"
    elif value is not None and not isinstance(value, (str, int, float, list, dict)):
        yield f"{where}: got a {type(value).__name__}, {value}; put text in quotes"


def _with_override(tree: dict[str, Any], override: str) -> dict[str, Any]:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {override!r} is not of the form key=value, such as qat.epochs=1")
    try:
        value = load_yaml(text)
    except ValueError as error:
        raise RecipeError(f"--set {override!r:.200}: the value is refused: {error}") from None
    copy: dict[str, Any] = json.loads(json.dumps(tree, default=str))
    parts = key.strip().split(".")
    here: Any = copy
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if isinstance(here, list):
            if not part.isdecimal() or int(part) >= len(here):
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


_RULES: dict[str, Callable[[Any], Iterable[str]]] = {
    "data": data_contradictions,
    "train": train_contradictions,
    "quantization": quant_contradictions,
    "qat": train_contradictions,
    "sparsity": sparsity_contradictions,
    "finetune": train_contradictions,
    "bench": bench_contradictions,
    "search": search_contradictions,
}


def _contradictions(recipe: Recipe) -> Iterator[str]:
    for section, rules in _RULES.items():
        spec = getattr(recipe, section)
        if spec is not None:
            yield from rules(spec)
    yield from task_contradictions(recipe.task, recipe.loss, recipe.metric, recipe.decode)
    for section in ("train", "qat", "finetune"):
        if (training := getattr(recipe, section)) is not None:
            yield from task_specific(training, section, recipe.task)
    yield from _data_of_another_task(recipe)
    if recipe.teacher is not None and recipe.teacher.weights is None and not is_import_path(recipe.teacher.name):
        yield "teacher.weights is null: a teacher must be trained; name its weights, or a function that loads them"
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
    if recipe.export.nms and (recipe.task != "detection" or recipe.decode is not None):
        why = f"the task is {recipe.task}" if recipe.task != "detection" else "decode is a function of Python"
        yield f"export.nms is true, and {why}: only the decoding of torchvision's detectors can be put into a file"
    if recipe.export.require == "int8" and recipe.quantization is None:
        yield "export.require is int8, and quantization is null: nothing would be INT8"
    if recipe.export.require == "fp16" and recipe.export.precision != "fp16":
        yield "export.require is fp16, and export.precision is fp32: engines take the types of the file"


# Tasks of the built-in data sets that are not for classification.
MADE_FOR = {"masks": "segmentation", "voc": "detection", "coco": "detection", "degraded": "restoration"}


def _data_of_another_task(recipe: Recipe) -> Iterator[str]:
    """Yield a line if the built-in data set has targets of another task, or none to learn from."""
    if recipe.data.name == "images" and recipe.data.num_classes is None:
        yield "data.num_classes is missing: images without classes need the number of the network's outputs"
    if recipe.data.name == "images" and (recipe.train.epochs or recipe.metric is not None):
        key = "train.epochs is not 0" if recipe.train.epochs else "metric is set"
        yield (
            f"data.name is images, whose classes the float network says, and {key}: set train.epochs: 0 and "
            "model.weights, and leave metric out; or give data with classes (folder)"
        )
    made_for = MADE_FOR.get(recipe.data.name, "classification")
    if recipe.data.name in DATASETS and recipe.task not in (made_for, "own"):
        yield f"data.name {recipe.data.name} has targets of {made_for}, and task is {recipe.task}: change one"


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
    return tuple(_keys_of(Recipe, ""))


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
        inner = next((m for m in _members(hints[field.name]) if dataclasses.is_dataclass(m)), None)
        if inner is not None:
            path = f"{section}.{field.name}{'[]' if get_origin(hints[field.name]) is tuple else ''}"
            nested.append((inner, path.removeprefix(".")))
        yield RecipeKey(
            section=section,
            name=field.name,
            kind=_kind(declared[field.name]),
            default=_default(field),
            about=texts[field.name],
        )
    for inner, path in nested:
        # The keys of a teacher are those of `model`, the weights and activations of a rule those of the section.
        if path != "teacher" and not path.startswith("quantization.rules[]."):
            yield from _keys_of(inner, path)


def _members(hint: Any) -> list[Any]:
    return [member for argument in get_args(hint) for member in _members(argument)] or [hint]


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
