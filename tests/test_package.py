import ast
import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml

import compress
from compress.variants import Variant
from compress.version import DISTRIBUTION

ROOT = Path(__file__).parent.parent


def test_all_is_sorted_and_whole():
    names = compress.__all__
    assert names == sorted(names)
    assert all(hasattr(compress, name) for name in names)


def test_type_checkers_see_the_same_names_as_the_interpreter():
    tree = ast.parse((ROOT / "compress" / "__init__.pyi").read_text())
    assert {alias.asname for node in tree.body for alias in node.names} == set(compress.__all__)
    assert set(dir(compress)) >= set(compress.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'quantise'"):
        _ = compress.quantise


def test_functions_are_not_replaced_by_packages():
    import compress.search.search

    assert all(not isinstance(getattr(compress, name), ModuleType) for name in compress.__all__)


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import compress", {"torch", "numpy", "typer", "rich"}),
        ("import compress; compress.QuantSpec", {"matplotlib", "sklearn", "onnx", "onnxruntime", "openvino", "typer"}),
    ],
)
def test_a_name_loads_no_more_than_it_needs(statement, absent):
    # In a process of its own; interrupts must be handled as they were before.
    lines = (
        "import signal, sys",
        "before = signal.getsignal(signal.SIGINT)",
        statement,
        "assert signal.getsignal(signal.SIGINT) is before",
        "print(*sys.modules)",
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, env=environment, check=True
    )
    loaded = set(done.stdout.split())
    assert "compress" in loaded and not loaded & absent


def test_version_is_the_changelogs_newest():
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == compress.__version__


def test_every_public_function_and_class_says_what_it_does():
    for name in compress.__all__:
        if not name.startswith("__"):
            assert getattr(compress, name).__doc__, name


def test_every_hint_to_install_names_this_distribution():
    # `compress` in the registry is another project: nobody may be sent there.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION and "compress" not in project["scripts"]
    texts = [*(ROOT / "compress").rglob("*.py"), *(ROOT / "compress").rglob("*.md"), ROOT / "README.md"]
    found = {name for path in texts for name in re.findall(r"pip install [^\n]*?'?([\w-]+)\[", path.read_text())}
    assert found <= {DISTRIBUTION}
    extras = {name for path in texts for name in re.findall(r"install_hint\([\"'](\w[\w-]*)[\"']\)", path.read_text())}
    assert extras <= set(project["optional-dependencies"])


def test_the_dockerfile_copies_what_the_wheel_is_built_from():
    # No daemon is needed to see a file that is not there, an extra that is not declared, or another program's name.
    text = (ROOT / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    copied = {name for line in re.findall(r"^COPY (.+) \S+$", text, flags=re.MULTILINE) for name in line.split()}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE", "constraints.txt", "compress", "recipes"} == copied
    assert all((ROOT / name).exists() for name in copied)
    assert set(re.findall(r'^ENTRYPOINT \["(.+?)"\]$', text, flags=re.MULTILINE)) == set(project["scripts"])
    extras = {name for found in re.findall(r"EXTRAS=\[(.+?)\]", text) for name in found.split(",")}
    assert extras and extras <= set(project["optional-dependencies"])
    first = re.search(r"^FROM python:(\d+\.\d+)-slim$", text, flags=re.MULTILINE)
    assert first and f"Programming Language :: Python :: {first[1]}" in project["classifiers"]
    assert re.search(r"^USER (?!root)\w+$", text, flags=re.MULTILINE), "the program does not run as root"


def test_the_recipe_for_conda_is_the_project_s():
    recipe = yaml.safe_load((ROOT / "conda" / "meta.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert str(recipe["package"]["version"]) == compress.__version__
    assert recipe["build"]["entry_points"] == [f"{name} = {place}" for name, place in project["scripts"].items()]
    names = {"torch": "pytorch", "matplotlib": "matplotlib-base"}  # of conda-forge
    wanted = [re.fullmatch(r"([\w-]+)(.*)", text).groups() for text in project["dependencies"]]
    expected = {f"{names.get(name, name.lower())} {least}" for name, least in wanted}
    assert set(recipe["requirements"]["run"]) == expected | {f"python {project['requires-python']}"}
    assert recipe["about"]["summary"] == project["description"]


# The names and the properties that files and reports rely on.


def test_names_are_those_of_the_files_that_older_runs_wrote():
    assert [str(v) for v in Variant] == ["float", "ptq", "qat", "sparse", "sparse-ptq", "sparse-qat"]
    assert Variant.SPARSE_QAT.weights_file == "sparse-qat.safetensors"
    assert Variant.FLOAT.onnx_file == "float.onnx"


@pytest.mark.parametrize(
    ("variant", "sparse", "quantized", "start"),
    [
        ("float", False, False, None),
        ("ptq", False, True, None),
        ("qat", False, True, "ptq"),
        ("sparse", True, False, None),
        ("sparse-ptq", True, True, None),
        ("sparse-qat", True, True, "sparse-ptq"),
    ],
)
def test_properties(variant, sparse, quantized, start):
    found = Variant(variant)
    assert (found.is_sparse, found.is_quantized, found.trained_from) == (sparse, quantized, start)


def test_a_foreign_name_is_no_variant():
    assert Variant.named("sparse_model") is None
    assert Variant.named("qat") is Variant.QAT


@pytest.mark.parametrize(
    "room", ["data", "export", "measure", "models", "quantization", "search", "sparsity", "tasks", "training"]
)
def test_a_section_of_a_recipe_is_found_under_its_former_name(room):
    assert importlib.import_module(f"compress.{room}.spec") is importlib.import_module(f"compress.{room}")
