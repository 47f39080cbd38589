import copy
import pickle

import pytest
import torch

from compress import Quantizer
from compress.errors import CalibrationError
from compress.quantization.numerics import QuantFormat


def ready(amax=2.0):
    quantizer = Quantizer(QuantFormat(), name="layer")
    quantizer.set_amax(torch.tensor(amax))
    return quantizer


def test_refuses_to_run_without_ranges():
    with pytest.raises(CalibrationError, match="layer has no ranges"):
        Quantizer(QuantFormat(), name="layer")(torch.randn(3))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_refuses_scales_that_are_none(bad):
    with pytest.raises(CalibrationError, match="layer: amax is"):
        Quantizer(QuantFormat(), name="layer").set_amax(torch.tensor(bad))
    with pytest.raises(CalibrationError, match="1 of 3 channels"):
        Quantizer(QuantFormat(axis=0), channels=3, name="layer").set_amax(torch.tensor([1.0, bad, 2.0]))


def test_refuses_another_shape():
    with pytest.raises(CalibrationError, match=r"\(2,\), expected \(\)"):
        Quantizer(QuantFormat(), name="layer").set_amax(torch.ones(2))


def test_grid():
    out = ready(2.0)(torch.linspace(-3, 3, 1001))
    assert out.unique().numel() <= 256
    assert out.max() == 2.0
    torch.testing.assert_close(out.min(), torch.tensor(-2.0 * 128 / 127))


def test_off_is_the_identity():
    quantizer, x = ready(), torch.randn(5)
    quantizer.enabled = False
    assert quantizer(x) is x


def test_copies_pickles_and_loads():
    quantizer, x = ready(1.5), torch.randn(50)
    fresh = Quantizer(QuantFormat())
    fresh.load_state_dict(quantizer.state_dict())
    for twin in (copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer)), fresh):
        assert torch.equal(twin(x), quantizer(x))


def test_loading_an_uncalibrated_state_leaves_it_uncalibrated():
    fresh = Quantizer(QuantFormat(), name="layer")
    fresh.load_state_dict(Quantizer(QuantFormat()).state_dict())
    with pytest.raises(CalibrationError):
        fresh(torch.ones(1))
