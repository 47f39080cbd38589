import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy as scipy_entropy

from compress.errors import CalibrationError
from compress.quantization.calibration.calibrate import choose_together, on_host, together
from compress.quantization.calibration.calibrators import make_calibrator
from compress.quantization.calibration.histogram import (
    BINS,
    MAX_BINS,
    Histogram,
    count_on_device,
    count_on_host,
    drawn_from,
    entropy_amax,
    mse_amax,
    percentile_amax,
    resample,
)
from tests.quantization.calibration.test_calibrators import randn

FAST = settings(max_examples=40)
CPU = torch.device("cpu")


def collected(batches, *, rows=1, max_bins=MAX_BINS):
    histogram = Histogram.empty(rows, max_bins, CPU)
    for batch in batches:
        histogram.add(batch.reshape(rows, -1))
    return histogram


def test_first_batch_is_numpys_histogram():
    x = randn(50_000)
    magnitudes, counts = x.abs().numpy(), collected([x]).counts[0]
    expected, _ = np.histogram(magnitudes.astype(np.float64), bins=BINS, range=(0, magnitudes.max()))
    assert counts[BINS:].sum() == 0
    np.testing.assert_array_equal(counts[:BINS].numpy(), expected)


@FAST
@given(st.lists(st.tuples(st.integers(1, 300), st.floats(-12, 12)), min_size=1, max_size=6))
def test_no_count_is_lost_however_far_it_widens(batches):
    data = [randn(n, seed=k) * 10**e for k, (n, e) in enumerate(batches)]
    histogram = collected(data)
    assert histogram.counts.sum() == sum(n for n, _ in batches) and histogram.counts.shape == (1, MAX_BINS)
    assert histogram.amax == torch.cat(data).abs().max()
    used = histogram.counts[0].nonzero().max() + 1
    assert (used - 1) * histogram.width <= histogram.amax <= used * histogram.width * (1 + 1e-6)


@FAST
@given(st.floats(1, 60), st.integers(0, 1000))
def test_widened_counts_are_those_of_all_data_at_the_final_width(growth, seed):
    data = [randn(500, seed=seed), randn(500, seed=seed + 1) * growth, randn(200, seed=seed + 2)]
    histogram = collected(data)
    index = (torch.cat(data).abs().double() / histogram.width.double()).floor().long()
    expected = torch.bincount(index, minlength=MAX_BINS)[:MAX_BINS]
    # a batch's own maximum may lie on the upper edge of the last bin of that moment: it is counted below the edge
    assert (histogram.counts[0] - expected).abs().sum() <= 2 * len(data)


def test_growth_keeps_the_width_until_bins_run_out():
    x = randn(1000)
    for factor, doublings in ((3.9, 0), (4.1, 1), (8.1, 2)):
        assert collected([x, x * factor]).width == x.abs().max() / BINS * 2**doublings


def test_zeros_before_the_first_value_are_counted():
    counts = collected([torch.zeros(10), torch.zeros(3), torch.tensor([0.0, 2.0, -4.0])]).counts[0]
    assert counts[[0, BINS // 2, BINS - 1]].tolist() == [14, 1, 1]


def test_counts_pass_the_range_of_float32():
    zeros = torch.zeros(1, 2**24 + 10)
    assert collected([torch.ones(1), zeros, zeros]).counts[0, 0] == 2**25 + 20


def closed(counts):
    """The last bin takes what lies at its end."""
    return torch.cat([counts[:-2], counts[-2:].sum()[None]])


@FAST
@given(st.integers(1, 400), st.sampled_from([1.0, 1e-30, 1e30]), st.integers(0, 100))
def test_device_and_host_count_alike(size, magnitude, seed):
    x = randn(size, seed=seed) * magnitude
    width = x.abs().max() / 512
    host = closed(count_on_host(x, float(width), 512))
    device = count_on_device(x[None], width[None], torch.tensor([512.0]), 600)
    torch.testing.assert_close(device[0, :512], host, rtol=0, atol=0)
    assert device[0, 512:].sum() == 0


def test_threads_count_alike():
    x = randn(2**20 + 3)
    width = float(x.abs().max() / 100)
    expected = sum(count_on_host(part, width, 100) for part in x.split(1000))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        torch.testing.assert_close(count_on_host(x, width, 100), expected, rtol=0, atol=0)
    finally:
        torch.set_num_threads(before)


def test_a_large_tensor_is_sampled_and_its_extremes_are_exact():
    x = randn(2**21 + 77).relu()
    x[12345] = 40.0
    histogram = collected([x])
    counts, width = histogram.counts[0], float(histogram.width)
    assert histogram.amax == 40.0 and counts[BINS - 1] == 1
    assert counts.sum() == x.numel()
    every = closed(count_on_host(x, width, BINS))
    assert not torch.equal(counts[:BINS], every)  # it is a sample
    share = lambda c: c.cumsum(0).double() / x.numel()  # noqa: E731
    assert (share(counts[:BINS]) - share(every)).abs().max() < 4 * 0.5 / (x.numel() / 13) ** 0.5  # binomial, 4 sigma


def test_a_sample_prefers_no_column():
    columns = torch.arange(1, 57).repeat(2**15).float()  # 56 columns of pictures, each with a value of its own
    sample = drawn_from(columns)
    counts = closed(count_on_host(sample.values, 1.0, 57) * sample.every + count_on_host(sample.rest, 1.0, 57))[1:]
    assert counts.sum() == columns.numel()
    torch.testing.assert_close(counts.double(), torch.full((56,), 2.0**15).double(), rtol=0.1, atol=0)


@pytest.mark.parametrize("size", [1000, 400_000, 2_000_003])
def test_stretches_of_a_tensor_have_its_sample(size):
    x = randn(size)
    edges = [0, 1, size // 3, size // 3 + 70, size - size // 5, size]
    parts = [drawn_from(x[a:b], start=a, total=size) for a, b in pairwise(edges)]
    whole = drawn_from(x)
    assert max(part.amax for part in parts) == whole.amax == x.abs().max()
    for name in ("values", "rest"):
        ours = torch.cat([getattr(part, name) for part in parts])
        torch.testing.assert_close(ours.sort().values, getattr(whole, name).sort().values, rtol=0, atol=0)
    assert whole.every * len(whole.values) + len(whole.rest) == size


@pytest.mark.parametrize("size", [1000, 400_000])
@pytest.mark.parametrize("growth", [(0, 1, 1), (1, 1, 1), (1, 3.7, 2), (1, 4.3, 70, 1), (1, 1, 64.5, 1e-3)])
def test_stretches_that_are_counted_early_are_those_of_whole_tensors(size, growth):
    # Each is counted while the batch before the last is the newest in the histogram, as threads may do.
    data = [randn(size, seed=k).relu() * factor for k, factor in enumerate(growth)]
    edges = [0, 1, size // 3, size // 3 + 70, size - size // 5, size]
    histogram, early = Histogram.empty(1, MAX_BINS, CPU), []
    for x in data:
        early.append([histogram.counted(drawn_from(x[a:b], start=a, total=size)) for a, b in pairwise(edges)])
        if len(early) > 1:
            histogram.add_parts(early.pop(0))
    histogram.add_parts(early.pop())
    expected = collected(data)
    torch.testing.assert_close(histogram.counts, expected.counts, rtol=0, atol=0)
    assert (histogram.amax, histogram.width) == (expected.amax, expected.width)
    magnitudes = torch.cat(data).double().numpy()
    if size == 1000:  # not sampled: numpy counts the same, but for values on the upper edges of their moments
        counts, _ = np.histogram(magnitudes, bins=np.arange(MAX_BINS + 1) * float(histogram.width))
        assert np.abs(counts - histogram.counts[0].numpy()).sum() <= 2 * len(data)


def test_counting_early_does_not_keep_the_tensor():
    x = randn(1000)
    histogram = Histogram.empty(1, MAX_BINS, CPU)
    before = [histogram.counted(drawn_from(x))]
    expected = collected([x.clone()]).counts
    x.zero_()
    histogram.add_parts(before)
    torch.testing.assert_close(histogram.counts, expected, rtol=0, atol=0)


def test_deterministic_mode_counts_alike():
    x = randn(5000)
    arguments = (x[None], (x.abs().max() / 64)[None], torch.tensor([64.0]), 64)
    expected = count_on_device(*arguments)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(count_on_device(*arguments), expected, rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [1, 2])
def test_what_is_not_finite_is_remembered_and_harms_nothing(bad, rows):
    x = randn(rows, 10)
    x[-1, 3] = bad
    histogram = collected([x, randn(rows, 10)], rows=rows)
    assert histogram.amax.isfinite().tolist() == [True] * (rows - 1) + [False]
    count_on_device(x, torch.ones(rows), torch.full((rows,), torch.nan), 8)  # indices stay in range


@FAST
@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=64), st.floats(1, 100))
def test_resampling_keeps_the_total_and_the_shape(counts, ratio):
    counts = torch.tensor([counts])
    bins = counts.shape[1]
    moved = resample(counts, torch.tensor([1.0]), torch.tensor([ratio]))
    assert moved.sum() == counts.sum() and (moved >= 0).all()
    cumulative = np.interp(
        np.arange(bins + 1) * float(torch.tensor(ratio)), np.arange(bins + 1), np.r_[0, counts[0].cumsum(0).numpy()]
    )
    np.testing.assert_allclose(np.r_[0, moved[0].cumsum(0).numpy()], cumulative, atol=0.51)


@st.composite
def histograms(draw, *, most: int = 90):
    bins = draw(st.integers(2, most))
    counts = draw(
        st.lists(st.sampled_from([0, 0, 1, 2, 7, 1000]) | st.integers(0, 10**7), min_size=bins, max_size=bins)
    )
    counts[-1] = max(1, counts[-1])
    return counts


def naive_divergences(counts: list[int], start: int, levels: int) -> dict[int, float]:
    h = [float(c) for c in counts]
    h[0] = h[1]
    result = {}
    for kept in range(start, len(h) + 1):
        reference = h[:kept]
        reference[-1] += sum(h[kept:])
        quantized = [0.0] * kept
        for level in range(levels):
            used = [k for k in range(kept) if level * kept <= k * levels < (level + 1) * kept and h[k] > 0]
            for k in used:
                quantized[k] = sum(h[m] for m in used) / len(used)
        result[kept] = float(scipy_entropy(reference, quantized)) if sum(quantized) else math.inf
    return result


@FAST
@given(histograms(), st.sampled_from([2, 4, 8, 16]), st.integers(2, 24))
def test_entropy_chooses_the_bin_of_the_definition(counts, levels, start):
    naive = naive_divergences(counts, min(start, len(counts)), levels)
    bits = levels.bit_length()  # levels = 2 ** (bits - 1), the signed case
    amax = entropy_amax(torch.tensor(counts), torch.tensor(1.0), num_bits=bits, start_bin=start)
    least = min(naive.values())
    ties, near = ([k for k, v in naive.items() if v <= least + e] for e in (1e-12, 1e-9))
    if not math.isfinite(least):
        assert amax == len(counts)
    else:  # or closer than either computation can tell
        assert int(amax) in (near if near != ties else [max(ties)])


def naive_squared_error(counts: list[int], amax: float, bound: int) -> float:
    values = [k + 0.5 for k in range(len(counts))]
    kept = [min(bound, round(value * bound / amax)) * amax / bound for value in values]
    return sum(count * (one - value) ** 2 for count, one, value in zip(counts, kept, values, strict=True))


@FAST
@given(histograms(), st.integers(2, 6), st.booleans(), st.integers(1, 20))
def test_mse_chooses_the_least_squared_error(counts, bits, unsigned, start):
    bound = 2 ** (bits - (not unsigned)) - 1
    amax = float(mse_amax(torch.tensor(counts), torch.tensor(1.0), num_bits=bits, unsigned=unsigned, start_bin=start))
    candidates = [k + 0.5 for k in range(start, len(counts))] or [len(counts) - 0.5]
    assert amax in candidates
    errors = [naive_squared_error(counts, c, bound) for c in candidates]
    assert naive_squared_error(counts, amax, bound) <= min(errors) * (1 + 1e-9)


@FAST
@given(histograms(), st.floats(0, 0.5))
def test_mse_takes_the_smallest_of_the_ranges_that_are_nearly_the_best(counts, tolerance):
    chosen = float(mse_amax(torch.tensor(counts), torch.tensor(1.0), num_bits=4, start_bin=3, tolerance=tolerance))
    errors = {k + 0.5: naive_squared_error(counts, k + 0.5, 7) for k in range(3, len(counts))}
    if errors and min(errors.values()) > 1e-6:
        limit = min(errors.values()) * (1 + tolerance)
        assert errors[chosen] <= limit * (1 + 1e-9)
        assert all(error > limit * (1 - 1e-9) for k, error in errors.items() if k < chosen)


@FAST
@given(histograms(), st.floats(0.01, 99.99))
def test_percentile_keeps_the_share_it_is_asked_for(counts, percentile):
    amax = int(percentile_amax(torch.tensor(counts), torch.tensor(1.0), percentile))
    target = sum(counts) * percentile / 100
    reached = [k for k in range(len(counts)) if sum(counts[: k + 1]) >= target * (1 - 1e-12)]
    assert amax == max(1, reached[0]) or abs(sum(counts[: amax + 1]) - target) <= 1e-9 * target


def test_percentile_of_100_keeps_everything_and_of_zeros_keeps_a_bin():
    counts = torch.tensor([10**6, 0, 0, 1])
    assert percentile_amax(counts, torch.tensor(0.5), 100) == 2.0
    assert percentile_amax(counts, torch.tensor(0.5), 50) == 0.5


@pytest.mark.parametrize("percentile", [0, -1, 100.1, math.nan])
def test_percentile_out_of_range(percentile):
    with pytest.raises(CalibrationError, match="percent"):
        percentile_amax(torch.tensor([1, 2]), torch.tensor(1.0), percentile)


@pytest.mark.parametrize("kind", ["entropy", "mse", "percentile"])
@pytest.mark.parametrize("signed", [True, False])
def test_many_choose_together_what_each_chooses_alone(kind, signed):
    group = [make_calibrator(kind, signed=signed) for _ in range(4)]
    for i, calibrator in enumerate(group):
        for _ in range(2):
            calibrator.collect((i + 1) * torch.randn(4000).relu() ** (1 + i / 3))
    alone = [calibrator.compute_amax() for calibrator in group]
    together([calibrator._counted for calibrator in group], group)
    assert [calibrator.compute_amax().item() for calibrator in group] == [amax.item() for amax in alone]
    assert len({amax.item() for amax in alone}) == 4
    group[0].collect(torch.full((4000,), 50.0))  # more data undoes the choice
    assert group[0].compute_amax() > 2 * alone[0]


def test_small_tensors_are_copied_to_the_processor_together():
    tensors = [torch.tensor(2.0), torch.tensor([1.0, math.nan, 3.0]), torch.ones(2, 2)]
    copies = on_host(tensors)
    torch.testing.assert_close(copies, tensors, rtol=0, atol=0, equal_nan=True)
    tensors[2].zero_()
    copies[0].zero_()
    assert copies[2].sum() == 4 and tensors[0] == 2 and torch.equal(copies[1][:1], torch.ones(1))
    assert on_host([]) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", ["max", "entropy", "mse", "percentile"])
def test_a_gpu_counts_and_chooses_what_the_processor_does(kind):
    batches = [torch.randn(8, 16, 33, 31).relu(), 2 * torch.randn(8, 16, 33, 31), 40 * torch.randn(8, 16, 33, 31)]
    cpu, gpu = make_calibrator(kind), make_calibrator(kind)
    for batch in batches:
        cpu.collect(batch)
        gpu.collect(batch.cuda().contiguous(memory_format=torch.channels_last))
    choose_together([gpu])
    torch.testing.assert_close(gpu.compute_amax().cpu(), cpu.compute_amax(), rtol=0, atol=0)
    if cpu.histogram is not None:
        torch.testing.assert_close(list(gpu.histogram), list(cpu.histogram), rtol=0, atol=0)
