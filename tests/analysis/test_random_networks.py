"""Random networks keep their results through quantization and export, by the float network and ONNX Runtime."""

import pytest

from analysis.random_networks import check
from analysis.random_networks.check import TARGETS, failure_of
from analysis.random_networks.network import OPERATIONS, Step, steps_of


@pytest.mark.parametrize("first", range(0, 150, 25))
def test_random_networks_keep_their_results(first):
    failures = {
        seed: (failure, steps_of(seed))
        for seed in range(first, first + 25)
        if (failure := failure_of(steps_of(seed), TARGETS[seed % 3], export=seed == first))
    }
    assert not failures


def test_the_check_sees_a_wrong_result(monkeypatch):
    """A network that is quantized with a range a thousand times too small is a failure."""

    def coarse(*args, **options):
        qmodel = real(*args, **options)
        for _, quantizer in check.quantizers(qmodel):
            quantizer.set_amax(quantizer.amax / 1000)
        return qmodel

    real = check.quantize
    steps = (Step("conv bn relu", 1), Step("residual", 2))
    assert not failure_of(steps, "openvino", export=False)
    monkeypatch.setattr(check, "quantize", coarse)
    assert "dB" in failure_of(steps, "openvino", export=False)


def test_every_operation_is_drawn():
    drawn = {step.name for seed in range(2000) for step in steps_of(seed)}
    assert drawn == set(OPERATIONS)
