# The command `search` from a recipe to a chosen network, its report, and the refusal of what cannot be done.

import json

import pytest

from compress import load_recipe
from compress.errors import RunError, SearchError
from compress.pipeline.studies.search import search_run, search_worker
from compress.recipe.tree import parse_recipe
from compress.search import models
from tests.exact import open_session

TREE = {
    "model": {"name": "tests.networks:narrow"},
    "data": {"name": "digits", "image_size": 16, "batch_size": 128, "train_images": 256, "val_images": 128},
    "train": {"epochs": 1},
    "finetune": {"epochs": 1},
    "qat": None,
    "bench": {"runs": 5},
    "search": {
        "widths": [0.5],
        "multiple": 8,
        "formats": ["int8"],
        "images": 64,
        "reconstruction_steps": 2,
        "networks": 1,
        "trials": 2,
        "attempts": 1,
    },
}


@pytest.fixture(scope="module")
def searched(tmp_path_factory, whole_figures):
    folder = tmp_path_factory.mktemp("search")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    patch.setattr(models, "_LOADS", 1)
    try:
        with whole_figures():
            found = search_run(parse_recipe(TREE, source="here"), folder / "run", engine="openvino", max_drop=100.0)
        yield found
    finally:
        patch.undo()


def test_every_point_was_measured_and_none_is_slower_than_a_better_one(searched):
    rows = [(p.figures.ratio, p.figures.distance) for p in searched.front.front]
    assert rows == sorted(rows)
    assert [d for _, d in rows] == sorted((d for _, d in rows), reverse=True)
    assert all(p.figures.ms > 0 for p in searched.front.points)
    assert searched.front.points[0].label == "float"


def test_the_chosen_network_is_int8_and_as_narrow_as_its_configuration(searched):
    folder = searched.chosen.folder
    assert json.loads((searched.folder / "front.json").read_text())["chosen"]["folder"] == folder
    file = searched.folder / searched.chosen.file
    assert open_session(file).get_inputs()[0].shape[1:] == [3, 16, 16]
    recipe = load_recipe(searched.folder / f"{folder}.yaml")
    assert recipe.quantization is not None
    assert recipe.model.options["configuration"] == dict(searched.point.configuration)


def test_the_report_says_what_each_layer_got(searched):
    page = (searched.folder / "report.html").read_text()
    assert "int8" in page
    assert page.count('<g class="mark"><title>') == 2 * len(searched.front.points)
    assert searched.advice.split(":")[0] in page.replace("&#39;", "'")
    assert (searched.folder / "figures" / "front.png").read_bytes()[:4] == b"\x89PNG"


def test_a_worker_joins_the_search_and_finds_it_done(searched):
    front = search_worker(searched.folder, engine="openvino")
    assert {p.label for p in front.points} == {p.label for p in searched.front.points}
    with pytest.raises(SearchError, match="another network, space or engine"):
        search_worker(searched.folder, engine="onnxruntime")


def test_requests_are_refused_before_any_work(tmp_path):
    nothing = {"search": {"widths": [], "formats": ["float"], "blocks": False}}
    for changes, bound, message in (
        ({}, {}, "search takes a bound"),
        ({}, {"latency": 0.0}, "above 0 and below 1"),
        (nothing, {"latency": 0.5}, "the space is empty"),
    ):
        with pytest.raises(SearchError, match=message):
            search_run(parse_recipe({**TREE, **changes}, source="here"), tmp_path / "none", engine="openvino", **bound)
    assert not (tmp_path / "none").exists()
    with pytest.raises(RunError):
        search_worker(tmp_path / "none", engine="openvino")
