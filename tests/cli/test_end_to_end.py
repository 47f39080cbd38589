"""`bench --end-to-end` as a user calls it, on a small network with files of its own. No time is judged."""

import json

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import compress
from compress import DataSpec, load_data
from compress.cli.app import app
from compress.data.preprocessing import Preprocessing
from compress.errors import DataError, RunError
from compress.measure.end_to_end import STAGES, EndToEnd
from compress.pipeline.steps.end_to_end import _evaluation_pictures
from compress.plots.stacked import draw_end_to_end
from compress.plots.style import NARROW, WIDE, styled, to_png


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An ONNX file that names its preprocessing, and a folder of pictures."""
    folder = tmp_path_factory.mktemp("end_to_end")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 7)).eval()
    preprocessing = Preprocessing(image_size=16)
    path = compress.export_onnx(model, torch.randn(2, 3, 16, 16), folder / "net.onnx", preprocessing=preprocessing)
    (folder / "pictures" / "deep").mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (24, 30, 3), dtype=np.uint8)
    for name in ("a.jpg", "deep/b.PNG"):
        Image.fromarray(pixels).save(folder / "pictures" / name)
    return path, folder / "pictures"


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments), "--seconds", "0.01"])


def test_json_and_figure(made, tmp_path):
    path, pictures = made
    figure = tmp_path / "bars.png"
    result = bench(
        path,
        "--end-to-end",
        "--images",
        pictures,
        "--engine",
        "onnxruntime",
        "--batch-size",
        1,
        "--batch-size",
        3,
        "--figure",
        figure,
        "--json",
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    rows = document["results"]
    assert [row["batch_size"] for row in rows] == [1, 3] and document["figure"] == str(figure)
    for row in rows:
        assert tuple(row["stage_ms"]) == STAGES and row["label"].startswith("net: onnxruntime")
        assert sum(row["stage_ms"].values()) == pytest.approx(row["total_ms"])
        assert "JPEG or PNG" in row["method"] and "CPU" in row["method"]
    with Image.open(figure) as image:
        assert image.width > 1000


def test_table_and_what_is_not_here(made):
    path, pictures = made
    result = bench(path, "--end-to-end", "--images", pictures, "--engine", "onnxruntime", "--engine", "tensorrt")
    assert result.exit_code == 0, result.output
    assert "unavailable tensorrt" in result.output and "engine's share" in result.output


@pytest.mark.parametrize(
    ("error", "message", "more"),
    [
        (DataError, "holds no pictures", ["--end-to-end"]),
        (DataError, "no folder", ["--end-to-end", "--images", "nowhere"]),
        (RunError, "go with --end-to-end", ["--images", "."]),
        (RunError, "go with --end-to-end", ["--device", "cuda"]),
    ],
)
def test_refusals(made, error, message, more):
    result = bench(made[0], *more)
    assert isinstance(result.exception, error) and message in str(result.exception)


def test_a_folder_without_pictures_and_a_file_without_preprocessing(made, tmp_path):
    path, pictures = made
    empty = bench(path, "--end-to-end", "--images", tmp_path)
    assert isinstance(empty.exception, DataError) and "holds no JPEG or PNG" in str(empty.exception)
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.save(model, tmp_path / "silent.onnx")
    silent = bench(tmp_path / "silent.onnx", "--end-to-end", "--images", pictures, "--engine", "onnxruntime")
    assert "does not say how its input is made" in str(silent.exception)


@pytest.mark.parametrize("name", ["digits", "shapes"])
def test_pixels_of_built_in_data_are_what_evaluation_reads(name):
    split = load_data(DataSpec(name=name, image_size=32, val_images=8)).val
    pictures = _evaluation_pictures(split, 3)
    assert (
        len(pictures) == 3 and {p.dtype.name for p in pictures} == {"uint8"} and {p.shape[2] for p in pictures} == {3}
    )
    images, _ = split.load([0, 1, 2], epoch=None, device=torch.device("cpu"))
    if pictures[0].shape[0] == 32:
        again = torch.stack([torch.from_numpy(p.copy()).permute(2, 0, 1) for p in pictures]).float().div(255)
        torch.testing.assert_close(split.preprocessing.normalize(again), images, atol=0.01, rtol=0)


def test_bars_are_as_long_as_the_stages():
    stages = [{"decode": 3.0, "preprocess": 2.0, "engine": 4.0, "postprocess": 0.5}, {"preprocess": 1.0, "engine": 9.0}]
    results = [
        EndToEnd(label=f"ptq: given {i}", batch_size=1 + i, device="cpu", stage_ms=ms, p50_ms=9.0, runs=1, method="")
        for i, ms in enumerate(stages)
    ]
    with styled():
        for form in (WIDE, NARROW):
            axes = draw_end_to_end(results, form).axes[0]
            assert [patch.get_width() for patch in axes.patches] == [3.0, 2.0, 4.0, 0.5, 0.5, 4.5]  # a picture
            assert [patch.get_x() for patch in axes.patches] == [0.0, 3.0, 5.0, 9.0, 0.0, 0.5]
        assert to_png(draw_end_to_end(results, WIDE)).startswith(b"\x89PNG")
