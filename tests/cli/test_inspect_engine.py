"""`inspect engine` on recorded engines, as a user calls it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from compress.cli.app import app
from compress.errors import AuditError, EngineError

RECORDED = Path(__file__).parent.parent / "audit" / "nvidia"
runner = CliRunner()


def test_json():
    result = runner.invoke(
        app, ["inspect", "engine", str(RECORDED / "rtx_1_7_int8.log"), "--device", "rtx4090", "--json"]
    )
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["totals"]["activation_bytes"] == 16 * 14 * 14 * 29
    assert {finding["kind"] for finding in document["findings"]} == {"float output", "requantize", "add", "fp32"}
    assert len(document["int8_choices"]) == 2 and len(document["roofline"]["rows"]) == document["totals"]["kernels"]


@pytest.mark.parametrize("name", ["rtx_1_7_int8.log", "inspector_10.json", "inspector_11.json"])
def test_table(name, capsys):
    result = runner.invoke(app, ["inspect", "engine", str(RECORDED / name)])
    assert result.exit_code == 0, result.output


def test_refusals(tmp_path):
    unknown = runner.invoke(app, ["inspect", "engine", str(RECORDED / "inspector_10.json"), "--device", "rtx4091"])
    assert "rtx4090" in str(unknown.exception) and unknown.output == ""
    (tmp_path / "m.onnx").write_bytes(b"")
    model = runner.invoke(app, ["inspect", "engine", str(tmp_path / "m.onnx")])
    assert isinstance(model.exception, EngineError) and "not an ONNX model, or a truncated one" in str(model.exception)
    assert isinstance(runner.invoke(app, ["inspect", "engine", str(tmp_path / "no.engine")]).exception, AuditError)
    both = runner.invoke(app, ["inspect", "engine", str(RECORDED / "inspector_10.json"), "--recipe", "resnet18"])
    assert both.exit_code == 2 and "No such option" in both.output
