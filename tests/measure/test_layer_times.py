"""Layer times: every layer is found in the engine, and the sum is that of the engine's own profile."""

import pytest
import torch

from compress import QuantSpec, build_engine, export_onnx, quantize
from compress.errors import EngineError
from compress.measure.layer_times import measure_engine_layers
from tests.networks import network

LAYERS = ["conv1", "block1.conv1", "block1.conv2", "block2.conv1", "block2.conv2", "block2.downsample.0", "fc"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("times")
    model, x = network(), torch.randn(4, 3, 32, 32)
    qmodel = quantize(model, x[:2], [x], spec=QuantSpec(target="openvino"))
    return {
        "float": export_onnx(model, x[:2], folder / "float.onnx"),
        "int8": export_onnx(qmodel, x[:2], folder / "int8.onnx"),
    }


def test_every_layer_takes_time_in_both_forms(files):
    times = measure_engine_layers(files, LAYERS, batch_size=8, precision="f32", runs=5, warmup=1)
    for row in times.values():
        assert list(row.ms) == LAYERS
        assert all(ms > 0 for ms in row.ms.values()), row
        assert row.rest_ms > 0  # the max pool, at the least
        assert "f32" in row.label


def test_times_are_the_engines_own(files):
    with build_engine(files["int8"], "openvino", batch_size=2, profile="yes") as engine:
        engine.run({"input": torch.zeros(2, 3, 32, 32).numpy()})
        times = engine.layer_times_ms()
        assert set(times) <= {layer.name for layer in engine.runtime_layers()}
        assert all(ms > 0 for ms in times.values()) and len(times) >= len(LAYERS)


def test_engines_that_do_not_tell_are_refused(files):
    with build_engine(files["float"], "openvino") as engine, pytest.raises(EngineError, match="profile='yes'"):
        engine.layer_times_ms()
    with build_engine(files["float"], "onnxruntime") as engine, pytest.raises(EngineError, match="profile='yes'"):
        engine.layer_times_ms()
    with pytest.raises(EngineError, match="runs"):
        measure_engine_layers(files, LAYERS, runs=0)
