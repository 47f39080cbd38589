"""Run folders of earlier versions are read, reported, exported and gone on with; see formats/README.md."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from compress import run
from compress.pipeline.again import export_again, variants_in
from compress.pipeline.folder import recipe_of
from compress.records import read_run
from compress.report.write import write_report
from tests.pipeline.inject import digests

FOLDERS = sorted(path for path in (Path(__file__).parent / "formats").iterdir() if path.is_dir())


@pytest.fixture(params=FOLDERS, ids=lambda path: path.name)
def folder(request, tmp_path):
    return Path(shutil.copytree(request.param, tmp_path / "run"))


def test_it_is_read_and_reported(folder):
    data = read_run(folder)
    values = {(metric.name, metric.variant): metric.value for metric in data.metrics if metric.value is not None}
    assert {variant for _, variant in values} >= {"float", "ptq"}
    _, page = write_report(folder)
    assert "PTQ" in page.read_text()


def test_it_goes_on_and_its_weights_stay_what_they_were(folder):
    before = digests(folder)
    assert set(before) == {"float.safetensors", "ptq.safetensors"}
    (folder / "ptq.onnx").unlink()
    run(recipe_of(folder), "ptq", folder, resume=True, device="cpu")
    assert digests(folder) == before
    assert (folder / "ptq.onnx").is_file()  # removed, and written again


def test_its_weights_compute_what_its_file_does(folder):
    """The file that ONNX's reference evaluator runs is the fixture's own; the weights are loaded and exported today."""
    assert [variant.value for variant in variants_in(folder)] == ["float", "ptq"]
    x = np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)
    (expected,) = ReferenceEvaluator(str(folder / "ptq.onnx")).run(None, {"input": x})
    path = export_again(folder, variant="ptq", out=folder / "again.onnx")
    (got,) = ReferenceEvaluator(str(path)).run(None, {"input": x})
    np.testing.assert_allclose(got, expected, atol=1e-5)
