import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from compress import ActivationSpec, QuantSpec, export_onnx, quantize
from compress.errors import CalibrationError
from compress.onnx_ptq.quantize import quantize_onnx_file
from compress.quantization.calibration.calibrators import CALIBRATORS, make_calibrator
from compress.quantization.numerics import scale_from_amax
from tests.exact import compute
from tests.networks import Net
from tests.onnx_ptq.files import export

NAMES = list(CALIBRATORS)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def collected(name, *batches, **options):
    calibrator = make_calibrator(name, **options)
    for batch in batches:
        calibrator.collect(batch)
    return calibrator


def amax_of(name, *batches, **options):
    return collected(name, *batches, **options).compute_amax()


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_range(name):
    x = randn(3, 8, 10, 10)
    whole, channels = amax_of(name, x), amax_of(name, x, axis=1)
    assert (whole.shape, whole.dtype, channels.shape) == ((), torch.float32, (8,))
    assert 0.5 * x.abs().max() < whole <= x.abs().max()
    largest = x.abs().amax((0, 2, 3))
    assert (channels <= largest).all() and (channels > 0.3 * largest).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_channels_are_calibrated_as_tensors_of_their_own(name, axis):
    x = randn(4, 5, 6) * torch.logspace(-3, 3, 6)
    alone = torch.stack([amax_of(name, channel) for channel in x.unbind(axis)])
    torch.testing.assert_close(amax_of(name, x, axis=axis), alone, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["entropy", "mse"])
def test_unsigned_has_the_levels_of_one_more_bit(name):
    x = randn(100_000).relu()
    unsigned = amax_of(name, x, signed=False, num_bits=3)
    assert unsigned == amax_of(name, x, signed=True, num_bits=4)
    assert unsigned > amax_of(name, x, signed=True, num_bits=3)


def test_percentile_is_taken_from_the_option():
    x = torch.linspace(0, 1, 100_001)
    for percentile in (50.0, 90.0, 99.0):
        assert amax_of("percentile", x, percentile=percentile) == pytest.approx(percentile / 100, abs=1 / 2048)


@pytest.mark.parametrize("name", NAMES)
def test_batches_may_change_shape_and_be_empty(name):
    x = randn(600)
    parts = (x[:256].reshape(1, 4, 8, 8), torch.empty(0, 4, 8, 8), x[256:].reshape(2, 172))
    assert parts[0].abs().max() < x.abs().max()  # so that the second batch widens the range
    assert amax_of(name, *parts) == pytest.approx(float(amax_of(name, x)), rel=0.2)
    assert amax_of("max", *parts) == x.abs().max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_counts_as_float32(name, dtype):
    x = randn(2, 3, 20, 20).to(dtype)
    for axis in (None, 1):
        torch.testing.assert_close(amax_of(name, x, axis=axis), amax_of(name, x.float(), axis=axis), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_layout_in_memory_does_not_matter(name):
    x = randn(2, 8, 6, 5)
    for other in (x.to(memory_format=torch.channels_last), x.transpose(1, 3).contiguous().transpose(1, 3)):
        assert not other.is_contiguous()
        for axis in (None, 1):
            assert torch.equal(amax_of(name, other, axis=axis), amax_of(name, x, axis=axis))
    strided = randn(2, 16, 6, 5)[:, ::2]
    assert torch.equal(amax_of(name, strided), amax_of(name, strided.contiguous()))


@pytest.mark.parametrize("name", NAMES)
def test_scalars_and_gradients(name):
    assert amax_of(name, torch.tensor(-2.0)) == pytest.approx(2.0, rel=1 / 1024)
    weight = nn.Parameter(randn(4, 9))
    assert not amax_of(name, weight, axis=0).requires_grad and weight.grad is None
    with torch.inference_mode():
        x = randn(5, 5)
    assert amax_of(name, x) > 0


@pytest.mark.parametrize("name", NAMES)
def test_reset_forgets(name):
    calibrator = collected(name, randn(3, 50) * 100, axis=0)
    calibrator.reset()
    with pytest.raises(CalibrationError, match="nothing was collected"):
        calibrator.compute_amax()
    calibrator.collect(randn(5, 50))  # another number of channels is fine now
    assert torch.equal(calibrator.compute_amax(), amax_of(name, randn(5, 50), axis=0))


@pytest.mark.parametrize("name", NAMES)
def test_compute_amax_changes_nothing(name):
    calibrator = collected(name, randn(500))
    first = calibrator.compute_amax()
    assert torch.equal(first, calibrator.compute_amax())
    first.fill_(-1)
    assert calibrator.compute_amax() > 0
    calibrator.collect(randn(500, seed=1))
    assert torch.equal(calibrator.compute_amax(), amax_of(name, randn(500), randn(500, seed=1)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("axis", [None, 0])
def test_not_finite_is_refused_whenever_it_came(name, bad, axis):
    good, broken = randn(3, 40), randn(3, 40)
    broken[1, 7] = bad
    for batches in ((broken,), (good, broken), (broken, good)):
        with pytest.raises(CalibrationError, match="NaN or Inf"):
            amax_of(name, *batches, axis=axis)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("axis", [None, 0])
def test_only_zeros_are_refused(name, axis):
    for x in (torch.zeros(3, 40), torch.full((3, 40), 1e-40)):
        with pytest.raises(CalibrationError, match="zero"):
            amax_of(name, x, x, axis=axis)
        assert collected(name, x, axis=axis).only_zeros  # so that a network is quantized around the tensor


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_refused(name):
    for batches in ((), (torch.empty(0, 3, 8, 8),)):
        with pytest.raises(CalibrationError, match="nothing was collected"):
            amax_of(name, *batches)


@pytest.mark.parametrize("name", NAMES)
def test_a_channel_of_zeros_takes_the_largest_amax(name):
    x = randn(4, 300) * torch.tensor([[1.0], [0.0], [3.0], [1e-42]])
    amax = amax_of(name, x, axis=0)
    assert amax[1] == amax[3] == amax[2] == amax.max()
    assert torch.equal(amax[[0, 2]], amax_of(name, x[[0, 2]], axis=0))


@pytest.mark.parametrize("name", NAMES)
def test_channels_and_axes_that_do_not_fit(name):
    with pytest.raises(CalibrationError, match=r"5 channels.*before it 3"):
        amax_of(name, randn(3, 8), randn(5, 8), axis=0)
    with pytest.raises(CalibrationError, match="axis is 2"):
        amax_of(name, randn(3, 8), axis=2)


@pytest.mark.parametrize("name", ["percentile", "entropy", "mse"])
def test_histogram_for_reports(name):
    x = randn(5000)
    counts, edges = collected(name, x[:100], x).histogram
    assert counts.sum() == 5100 and len(edges) == len(counts) + 1
    assert edges[0] == 0 and edges[-2] < x.abs().max() <= edges[-1]
    counts, edges = collected(name, x.reshape(5, 1000), axis=0).histogram
    assert counts.sum(1).tolist() == [1000] * 5 and edges.shape == (5, counts.shape[1] + 1)
    assert make_calibrator("max").histogram is make_calibrator(name).histogram is None


@pytest.mark.parametrize("name", NAMES)
def test_survives_copies(name):
    calibrator = collected(name, randn(500))
    for twin in (copy.deepcopy(calibrator), pickle.loads(pickle.dumps(calibrator))):
        assert torch.equal(twin.compute_amax(), calibrator.compute_amax())
        twin.collect(randn(500) * 10)
        assert twin.compute_amax() > calibrator.compute_amax()


@pytest.mark.parametrize("name", ["max", "entropy"])
def test_under_torch_compile(name):
    def run(net, x):
        y = x * 2
        net.calibrator.collect(y)
        return y + 1

    x = randn(4, 100)
    calibrator = make_calibrator(name)
    compiled = torch.compile(Net(run, calibrator=calibrator), backend="eager")
    for scale in (1, 3, 30):
        torch.testing.assert_close(compiled(x * scale), x * scale * 2 + 1)
    assert torch.equal(calibrator.compute_amax(), amax_of(name, x * 2, x * 6, x * 60))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "entropie"}, "'entropie', did you mean 'entropy'"),
        ({"name": "max", "num_bits": 1}, "num_bits is 1"),
        ({"name": "mse", "num_bits": 16}, "num_bits is 16"),
        ({"name": "max", "num_bits": 17}, "num_bits is 17"),
        ({"name": "percentile", "percentile": 0.0}, "percentile is 0"),
    ],
)
def test_options_that_cannot_be(options, words):
    with pytest.raises(CalibrationError, match=words):
        make_calibrator(**options)


# Averages of tensors without a mean: the files of a network that centres its images run in ONNX Runtime.

SPEC = QuantSpec(target="onnxruntime", activations=ActivationSpec(calibrator="max"))
# Values that the average is taken of.
PLACES = 14 * 14


def centred(offset):
    def run(net, x):
        x = net.stem(x)
        x = x - x.mean((2, 3), keepdim=True)
        x = x if net.offset is None else x + net.offset
        return net.last(x * torch.sigmoid(net.gate(nn.functional.adaptive_avg_pool2d(x, 1))))

    return Net(run, stem=nn.Conv2d(3, 4, 3), gate=nn.Conv2d(4, 4, 1), last=nn.Conv2d(4, 2, 1), offset=offset)


def from_model(model, x, path):
    qmodel = quantize(model, x, [x], spec=SPEC)
    return export_onnx(qmodel, x, path), qmodel.placement, qmodel.report.calibration.amax


def from_file(model, x, path):
    done = quantize_onnx_file(export(model, path.with_name("float.onnx")), [x], spec=SPEC, out=path)
    return done.path, done.placement, done.calibration.amax


WAYS = (from_model, from_file)


@pytest.mark.parametrize("offset", [None, 0.0])
@pytest.mark.parametrize("way", WAYS)
def test_a_file_with_an_average_of_zero_runs(tmp_path, way, offset):
    model, x = centred(offset).eval(), torch.randn(4, 3, 16, 16)
    got, expected = compute(way(model, x, tmp_path / "m.onnx")[0], x.numpy()), model(x).detach().numpy()
    assert np.abs(got - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize("way", WAYS)
def test_steps_of_an_average_are_no_finer_than_its_values_and_others_stay(tmp_path, way):
    scales = {}
    for offset in (None, 1.0):
        _, placement, amax = way(centred(offset).eval(), torch.randn(4, 3, 16, 16), tmp_path / "m.onnx")
        scale = {site.name: float(scale_from_amax(amax[site.name], site.format)) for site in placement.activations}
        reads = {tensor: consumer for site in placement.activations for tensor, consumer in site.edges}
        of_tensor = {tensor: scale[site.name] for site in placement.activations for tensor, _ in site.edges}
        (before,) = [t for t, c in reads.items() if "adaptive_avg_pool" in c or "GlobalAveragePool" in c]
        scales[offset] = (of_tensor[reads[before]], of_tensor[before] / PLACES)
    assert scales[None][0] == pytest.approx(scales[None][1])
    assert scales[1.0][0] > scales[1.0][1]
