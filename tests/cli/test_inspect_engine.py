"""`inspect engine` on recorded engines, as a user calls it."""

import json
from pathlib import Path

import onnx
import pytest
from typer.testing import CliRunner

from compress.cli.app import app
from compress.errors import AuditError, EngineError
from tests.engines.cuda.qdq import Builder

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


def test_a_file_with_open_sides_is_audited_at_a_size(tmp_path):
    b = Builder((1, 16, 8, 8))
    path = b.save(tmp_path / "m.onnx", b.conv(b.quantize("input"), 32))
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        for i, name in ((0, "batch"), (2, "height"), (3, "width")):
            value.type.tensor_type.shape.dim[i].dim_param = name
    onnx.save(model, path)
    refused = runner.invoke(app, ["inspect", "engine", str(path)])
    assert isinstance(refused.exception, EngineError) and "--size" in str(refused.exception)
    result = runner.invoke(app, ["inspect", "engine", str(path), "--size", "10x12", "--json"])
    assert result.exit_code == 0, result.output
    (conv,) = [layer for layer in json.loads(result.stdout)["layers"] if layer["operation"] == "conv"]
    assert conv["macs"] == 32 * 16 * 9 * 10 * 12
    built = runner.invoke(app, ["inspect", "engine", str(RECORDED / "inspector_10.json"), "--size", "320"])
    assert isinstance(built.exception, AuditError) and "a built engine has its own" in str(built.exception)


def test_refusals(tmp_path):
    unknown = runner.invoke(app, ["inspect", "engine", str(RECORDED / "inspector_10.json"), "--device", "rtx4091"])
    assert "rtx4090" in str(unknown.exception) and unknown.output == ""
    (tmp_path / "m.onnx").write_bytes(b"")
    model = runner.invoke(app, ["inspect", "engine", str(tmp_path / "m.onnx")])
    assert isinstance(model.exception, EngineError) and "not an ONNX model, or a truncated one" in str(model.exception)
    assert isinstance(runner.invoke(app, ["inspect", "engine", str(tmp_path / "no.engine")]).exception, AuditError)
    both = runner.invoke(app, ["inspect", "engine", str(RECORDED / "inspector_10.json"), "--recipe", "resnet18"])
    assert both.exit_code == 2 and "No such option" in both.output
