import dataclasses
import re
from pathlib import Path
from typing import get_args

import pytest
import yaml

from compress import Recipe, load_recipe
from compress.errors import RecipeError
from compress.quantization import ActivationCalibrator
from compress.recipe.tree import parse_recipe, recipe_keys, recipe_keys_markdown, recipe_names


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_survives_being_written(name, tmp_path):
    recipe = load_recipe(name)
    (tmp_path / "r.yaml").write_text(recipe.to_yaml())
    again = load_recipe(tmp_path / "r.yaml")
    assert again == recipe and again.digest() == recipe.digest()


def test_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_recipe("resnet50.yaml") == load_recipe("resnet50")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "resnet50.yaml").write_text("data: {image_size: 32}")
    assert load_recipe("resnet50.yaml").data.image_size == 32  # one's own comes before the shipped one


def test_overrides():
    recipe = load_recipe("resnet50", ["qat.epochs=1", "train.lr=1e-3", "bench.engines=[openvino]", "sparsity=null"])
    assert recipe.qat.epochs == 1 and recipe.train.lr == 1e-3 and recipe.bench.engines == ("openvino",)
    assert load_recipe("resnet50", ["quantization.rules.0.enable=false"]).quantization.rules[0].enable is False
    assert parse_recipe({}, ["quantization.weights.num_bits=4"]).quantization.weights.num_bits == 4
    assert load_recipe("resnet50", ["qat=null"]).qat is None


def test_new_keys_leave_the_digests_of_older_run_folders_as_they_are():
    ranges = {"activations": {"calibrator": "mse"}}  # the default of then, which a run folder holds
    older = parse_recipe({"quantization": ranges})
    assert older.digest() == "c205689f299e9417"  # of 2026-11-22, from before data.max_pixels and export.nms
    ruled = {"quantization": {**ranges, "smooth": None, "rules": [{"match": "fc", "enable": False}]}}
    assert parse_recipe(ruled).digest() == "6fb5dd4ab1ba54f7"  # of 2026-11-26, from before rules[].reason
    boxes = {"task": "detection", "data": {"name": "coco", "root": "bccd"}}
    assert parse_recipe(boxes | {"export": {"nms": True}}).digest() != parse_recipe(boxes).digest()
    assert parse_recipe({"data": {"max_pixels": 5}}).digest() != Recipe().digest()


def test_digest_tells_recipes_apart():
    one = Recipe()
    assert one.digest() == Recipe().digest()
    assert one.digest() != dataclasses.replace(one, train=dataclasses.replace(one.train, lr=0.1)).digest()


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"quantisation": {}}, "quantisation: unknown key, did you mean 'quantization'"),
        ({"train": {"epoch": 3}}, "train.epoch: unknown key, did you mean 'epochs'"),
        ({"quantization": {"activatons": {}}}, "quantization.activatons: unknown key, did you mean 'activations'"),
        ({"quantization": {"weights": {"bits": 8}}}, "quantization.weights.bits: unknown key.*num_bits"),
        ({"quantization": {"rules": [{"match": "fc", "enabel": True}]}}, "rules.0.enabel: unknown key.*'enable'"),
        ({"train": {"epochs": "eight"}}, "train.epochs is 'eight': it must be a whole number, 0 to"),
        ({"train": {"epochs": 1.5}}, "train.epochs is 1.5: it must be a whole number"),
        ({"train": {"lr": "0.1"}}, "train.lr is '0.1': it must be a number, above 0"),
        ({"train": {"lr": -1}}, "train.lr is -1"),
        ({"train": 3}, "train: got 3; expected a section with keys epochs"),
        ({"data": {"name": "digit"}}, "data.name is 'digit', did you mean 'digits'.*digits, shapes, folder"),
        ({"data": {"image_size": 0}}, "data.image_size is 0"),
        ({"quantization": {"target": "tensort"}}, "quantization.target is 'tensort', did you mean 'tensorrt'"),
        ({"quantization": {"weights": {"num_bits": 17}}}, "num_bits is 17: it must be 2 to 8"),
        ({"quantization": {"activations": {"percentile": 0}}}, "percentile is 0"),
        ({"quantization": {"activations": {"num_bits": 17}}}, "num_bits is 17: it must be 2 to 16"),
        ({"quantization": {"activations": {"num_bits": 16}}}, "16 for target tensorrt: TensorRT's Q/DQ.*enable: false"),
        (
            {"quantization": {"target": "openvino", "rules": [{"match": "fc", "activations": {"num_bits": 9}}]}},
            "rules.0.activations.num_bits is 9 for target openvino: OpenVINO .*in float",
        ),
        (
            {"quantization": {"target": "litert", "activations": {"num_bits": 16, "calibrator": "mse"}}},
            "calibrator is mse with 16 bits: a step is narrower",
        ),
        ({"bench": {"batch_sizes": [0]}}, "bench.batch_sizes"),
        ({"export": {"opset": 13}}, "export.opset is 13"),
        ([], "holds a list; a recipe .*sections task, .*model, data"),
        ({"task": "segmentation"}, "data.name digits has targets of classification"),
        ({"loss": "dice"}, "loss is 'dice'"),
        ({"teacher": {"name": "resnet101"}}, "teacher.weights is null"),
        ({"metric": "accuracy"}, "metric is 'accuracy'"),
        ({"export": {"nms": True}}, "export.nms is true, and the task is classification"),
        ({"task": "detection", "decode": "a.b:c", "export": {"nms": True}}, "decode is a function of Python"),
    ],
)
def test_refusals_say_where_what_and_what_is_allowed(tree, text):
    with pytest.raises(RecipeError, match=text):
        parse_recipe(tree)


def test_all_problems_are_told_at_once():
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"train": {"epoch": 3, "lr": "x"}, "modle": {}})
    assert all(text in str(caught.value) for text in ("train.epoch", "train.lr", "modle"))


@pytest.mark.parametrize("override", ["epochs", "=3", "train.epochs.deep=1", "quantization.rules.7.enable=true"])
def test_bad_overrides(override):
    with pytest.raises(RecipeError, match="--set"):
        load_recipe("resnet50", [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {epochs: 3", "not YAML"),
        ("train: {epochs: 3}\ntrain: {epochs: 4}\n", "'train' occurs twice"),
        ("model: !!python/object/apply:os.system ['true']", "not YAML"),
    ],
)
def test_broken_and_doubled(text, message, tmp_path):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "r.yaml")


def test_a_file_that_is_no_text_is_told_where_it_belongs(tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"\x08\x09\xfc\x01")
    with pytest.raises(RecipeError, match=r"net\.onnx is no recipe, which is YAML.*model: \{name: net\.onnx\}"):
        load_recipe(tmp_path / "net.onnx")


def test_two_of_four_needs_no_quotes(tmp_path):
    # YAML 1.1 reads 2:4 as 124, to the base of 60.
    (tmp_path / "r.yaml").write_text("sparsity: {pattern: 2:4}\n")
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.sparsity.pattern == "2:4"
    assert load_recipe("resnet50", ["sparsity.pattern=1:4"]).sparsity.pattern == "1:4"
    (tmp_path / "again.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "again.yaml") == recipe


@pytest.mark.parametrize(
    ("text", "value"), [("1e-3", 1e-3), ("2.5E-4", 2.5e-4), (".5", 0.5), ("3.", 3.0), ("1", 1.0), ("0.1", 0.1)]
)
def test_numbers_as_people_write_them(text, value):
    assert load_recipe("resnet50", [f"train.lr={text}"]).train.lr == value


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("train: {lr: .nan}", "train.lr: got nan; it must be a finite number"),
        ("model: {name: 2020-01-01}", "model.name: got a date, 2020-01-01; put text in quotes"),
        ("quantization: {rules: [{match: 2020-01-01}]}", "quantization.rules.0.match: got a date"),
        ("data: {mean: [.inf, 0, 0]}", "data.mean.0: got inf"),
    ],
)
def test_values_that_only_yaml_knows_are_named(text, line, tmp_path):
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "r.yaml")
    assert line in str(caught.value)


def test_a_recipe_extends_another(tmp_path):
    (tmp_path / "below.yaml").write_text("base: resnet50\ntrain: {epochs: 3}\nbench: {batch_sizes: [2]}\n")
    (tmp_path / "above.yaml").write_text("base: below.yaml\ntrain: {lr: 0.5}\nquantization: null\n")
    got, root = load_recipe(tmp_path / "above.yaml"), load_recipe("resnet50")
    assert got.train == dataclasses.replace(root.train, epochs=3, lr=0.5)
    assert (got.quantization, got.bench.batch_sizes, got.data) == (None, (2,), root.data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: loop.yaml", "extends this recipe itself"),
        ("base: 3", "base is 3"),
        ("base: resnet5", "no recipe 'resnet5'"),
    ],
)
def test_a_base_that_cannot_be(tmp_path, text, message):
    (tmp_path / "loop.yaml").write_text(text + "\n")
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "loop.yaml")


# The reference of recipe keys: complete, in step with recipes/README.md, and true of what the recipe takes.

KEYS = recipe_keys()
PAGE = Path(__file__).parent.parent / "recipes" / "README.md"


def test_page_is_in_step():
    text = PAGE.read_text(encoding="utf-8")
    assert text == recipe_keys_markdown(), "python -m compress recipes --keys > recipes/README.md"


def test_every_key_is_explained():
    assert not [key for key in KEYS if not key.about or "None" in key.about]
    assert len({(key.section, key.name) for key in KEYS}) == len(KEYS)


def leaves(value, path=""):
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        name = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(inner):
            yield from leaves(inner, name)
        else:
            yield name


def test_every_key_of_a_recipe_is_listed():
    listed = {f"{key.section}.{key.name}".removeprefix(".") for key in KEYS}
    for name in leaves(Recipe()):
        section, _, key = name.partition(".")
        shared = section in {"qat", "finetune"} and f"train.{key}" in listed
        assert name in listed or shared, name


@pytest.mark.parametrize("key", [k for k in KEYS if k.section and "[]" not in k.section and k.default])
def test_defaults_are_the_recipes_own(key):
    tree = {}
    here = tree
    for part in key.section.split("."):
        here = here.setdefault(part, {})
    plain = parse_recipe(tree)  # a section whose default is null is present now
    here[key.name] = yaml.safe_load(key.default)
    assert parse_recipe(tree) == plain


def test_choices_are_named():
    (calibrator,) = [k for k in KEYS if k.section == "quantization.activations" and k.name == "calibrator"]
    assert calibrator.kind == " or ".join(f"`{name}`" for name in get_args(ActivationCalibrator))


def test_a_section_alone_is_a_part_of_the_page():
    page = PAGE.read_text(encoding="utf-8")
    for section, inner in (("qat", ["qat"]), ("sparsity", ["sparsity", "sparsity.rules[]"])):
        text = recipe_keys_markdown(section)
        assert text in page and re.findall(r"^## (.+)", text, flags=re.MULTILINE) == inner
    with pytest.raises(RecipeError, match="'quantisation' is no section of a recipe, did you mean 'quantization'"):
        recipe_keys_markdown("quantisation")
