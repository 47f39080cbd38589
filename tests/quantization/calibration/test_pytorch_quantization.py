# Equal to pytorch-quantization 2.1.3, and where not, by how much and why.
#
# Its loops take seconds for 2048 bins, so most comparisons of entropy and mse use fewer. Where the first batch holds
# the largest value, counts and amax are the same. Known differences: - A later batch with a larger value: its bins are
# stretched by up to 1 / bins when rounding adds an edge; tolerance 2 bins. - percentile exactly on a count: its
# cumulative sum is rounded, so it may take the next bin in use; 100: 1 bin. - mse: its errors are float32, so among
# nearly equal ones it may take another; ours is never worse in float64. - entropy with nothing below the first
# threshold (constant, or all values away from zero): its divergence is NaN there, which its argmin takes for the least;
# see `test_entropy_of_values_away_from_zero`.

import numpy as np
import pytest
import torch

from compress.quantization.calibration.calibrators import make_calibrator
from compress.quantization.calibration.histogram import BINS, as_rows, entropy_amax, mse_amax, row_amax

calib = pytest.importorskip("pytorch_quantization.calib", reason="install the extra pytorch-quantization")
from pytorch_quantization.calib import histogram as theirs  # noqa: E402

generator = torch.Generator().manual_seed(0)
NORMAL = torch.randn(40_000, generator=generator)
DATA = {
    "normal": NORMAL,
    "relu": NORMAL.relu(),
    "one-sided": torch.rand(40_000, generator=generator),
    "negative": -torch.rand(3_000, generator=generator).square(),
    "heavy-tailed": NORMAL.exp() ** 1.5,
    "tiny": NORMAL[:7],
    "tiny magnitudes": NORMAL[:2000] * 1e-20,
    "few values": (NORMAL * 20).round() / 20,
    "two values": torch.tensor([0.2, 0.0, 1.0, 1.0]),
    "constant": torch.full((50,), 0.7),
    "one": torch.tensor([3.0]),
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    # Their mse moves its counts to a GPU without asking; here it stays.
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)


def pair(name, *batches, unsigned=False, num_bits=8, **options):
    their = calib.HistogramCalibrator(num_bits, None, unsigned)
    our = make_calibrator(name, num_bits=num_bits, signed=not unsigned, **options)
    for batch in batches:
        their.collect(batch.clone())
        our.collect(batch)
    return their, our


@pytest.mark.parametrize("data", DATA)
def test_counts(data):
    their, our = pair("entropy", DATA[data])
    counts, edges = our.histogram
    np.testing.assert_array_equal(counts.numpy(), their._calib_hist.long().numpy())
    np.testing.assert_allclose(edges.numpy(), their._calib_bin_edges.numpy(), rtol=1e-6)


def counted(data, bins=200):
    x = DATA[data].abs()
    return torch.histc(x, bins, 0, float(x.max())).long(), np.linspace(0, float(x.max()), bins + 1, dtype=np.float32)


@pytest.mark.parametrize("data", ["relu", "heavy-tailed"])
def test_entropy_from_tensor_to_amax(data):
    their, our = pair("entropy", DATA[data])
    torch.testing.assert_close(our.compute_amax(), their.compute_amax("entropy"), rtol=1e-6, atol=0)


@pytest.mark.parametrize("data", [name for name in DATA if name not in ("constant", "one")])
@pytest.mark.parametrize(("num_bits", "unsigned"), [(8, False), (8, True), (5, False)])
def test_entropy(data, num_bits, unsigned):
    counts, edges = counted(data)
    expected = theirs._compute_amax_entropy(counts.numpy().copy(), edges, num_bits, unsigned)
    ours = entropy_amax(counts, torch.tensor(edges[1]), num_bits=num_bits, unsigned=unsigned)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("percentile", [99.9912, 98.7653, 63.7123])  # never exactly on a count
def test_percentile(data, percentile):
    x = DATA[data]
    their, our = pair("percentile", x, percentile=percentile)
    expected = float(their.compute_amax("percentile", percentile=percentile))
    if expected == 0:  # their amax 0 is a scale of 0: ours is a bin
        expected = float(x.abs().max()) / BINS
    assert float(our.compute_amax()) == pytest.approx(expected, rel=1e-6)


def check_mse(counts, edges, ours, expected, bound, *, tolerance=0.0):
    # Both are centres of bins; theirs is as good as ours within rounding, and ours as theirs within a tolerance.
    bins = [round(float(amax / edges[1]) - 0.5) for amax in (ours, expected)]
    error_ours, error_theirs = (squared_error(counts.numpy(), k, bound) for k in bins)
    exact = 1e-12 * float(counts.sum()) * len(counts) ** 2
    rounding = 1e-4 * error_ours + exact  # of float32 sums
    assert error_ours <= error_theirs * (1 + tolerance) + (exact if tolerance else 1e-3 * exact)
    assert error_theirs <= error_ours + rounding
    assert float(ours) == pytest.approx(float((bins[0] + 0.5) * edges[1]), rel=1e-6)


# What `mse` may lose by preferring small ranges, as a share of the squared error.
NEAR = 1e-4


def squared_error(counts, candidate, bound):
    centers = np.arange(len(counts)) + 0.5
    scale = (candidate + 0.5) / bound
    return float(((np.minimum(np.round(centers / scale), bound) * scale - centers) ** 2 * counts).sum())


@pytest.mark.parametrize(
    "data", [name for name in DATA if name != "tiny magnitudes"]
)  # their scales are 0 below 2**-24
@pytest.mark.parametrize(("num_bits", "unsigned"), [(8, False), (8, True), (4, False)])
def test_mse(data, num_bits, unsigned):
    counts, edges = counted(data)
    expected = theirs._compute_amax_mse(counts.numpy(), edges, num_bits, unsigned)
    ours = mse_amax(counts, torch.tensor(edges[1]), num_bits=num_bits, unsigned=unsigned)
    check_mse(counts, torch.from_numpy(edges), ours, expected, 2 ** (num_bits - (not unsigned)) - 1)


def test_mse_from_tensor_to_amax():
    their, our = pair("mse", DATA["heavy-tailed"])
    check_mse(*our.histogram, our.compute_amax(), their.compute_amax("mse"), 127, tolerance=NEAR)


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_max(axis):
    x = NORMAL[:600].reshape(4, 5, 30)
    their = calib.MaxCalibrator(8, axis, False)
    our = make_calibrator("max", axis=axis)
    for batch in (x, x * 2, x - 1):
        their.collect(batch)
        our.collect(batch)
    assert torch.equal(our.compute_amax(), their.compute_amax().squeeze())


@pytest.mark.parametrize("growth", [1.0, 1.37, 2.5])
def test_later_batches(growth):
    batches = [NORMAL[:20_000], NORMAL[20_000:] * growth, NORMAL[:100] * 0.1]
    their, our = pair("percentile", *batches)
    width = float(our.histogram[1][1])
    assert width == pytest.approx(float(their._calib_bin_edges[1]), rel=1e-6)
    assert our.histogram[0].sum() == their._calib_hist.sum()
    for percentile in (50.0, 99.0, 99.99):
        their, our = pair("percentile", *batches, percentile=percentile)
        expected = their.compute_amax("percentile", percentile=percentile)
        assert abs(our.compute_amax() - expected) <= 2.001 * width
    cumulative = our.histogram[0].cumsum(0).numpy()
    expected = their._calib_hist.cumsum(0).numpy()
    size = min(len(cumulative), len(expected))
    within_two = np.interp(np.arange(size) + 2, np.arange(size), expected[:size])
    before_two = np.interp(np.arange(size) - 2, np.arange(size), expected[:size])
    assert ((cumulative[:size] <= within_two) & (cumulative[:size] >= before_two)).all()


@pytest.mark.parametrize("data", ["constant", "one", "away from zero"])
def test_entropy_of_values_away_from_zero(data):
    if data == "away from zero":
        counts, edges = torch.histc(1 + NORMAL.sigmoid(), 400, 0, 2).long(), np.linspace(0, 2, 401)
    else:
        counts, edges = counted(data)
    lowest = edges[int(counts.nonzero()[0])]
    expected = theirs._compute_amax_entropy(counts.numpy().copy(), edges, 8, False)
    assert float(expected) == pytest.approx(float(lowest), rel=1e-6)  # theirs clips every value there is
    ours = entropy_amax(counts, torch.tensor(float(edges[1])))
    assert ours > lowest * 1.001
    if data != "away from zero":
        assert ours == pytest.approx(float(edges[-1]), rel=1e-6)  # one bin from theirs


def test_weights_per_channel():
    # Their calibrate_weights: a histogram and a choice for each output channel, by numpy.
    from pytorch_quantization import nn as quant_nn

    layer = quant_nn.QuantConv2d(6, 2, 5)
    with torch.no_grad():
        layer.weight.copy_(NORMAL[:300].reshape(2, 6, 5, 5))
    for method in ("percentile", "mse"):
        theirs.calibrate_weights(layer, method=method, perchannel=True, percentile=99.0)
        expected = layer.weight_quantizer.amax.flatten()
        our = make_calibrator(method, axis=0, percentile=99.0)
        our.collect(layer.weight)
        amax = our.compute_amax()
        if method == "percentile":
            torch.testing.assert_close(amax, expected, rtol=1e-6, atol=0)
        else:
            for row, (counts, edges) in enumerate(zip(*our.histogram, strict=True)):
                check_mse(counts, edges, amax[row], expected[row], 127, tolerance=NEAR)
    theirs.calibrate_weights(layer, method="max", perchannel=True)
    ours = row_amax(as_rows(layer.weight, 0))
    torch.testing.assert_close(ours, layer.weight_quantizer.amax.flatten(), rtol=0, atol=0)
