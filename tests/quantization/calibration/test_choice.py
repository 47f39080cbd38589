import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy as scipy_entropy

from compress.errors import CalibrationError
from compress.quantization.calibration.calibrate import choose_together, on_host, together
from compress.quantization.calibration.calibrators import make_calibrator
from compress.quantization.calibration.histogram import (
    entropy_amax,
    mse_amax,
    percentile_amax,
)

FAST = settings(max_examples=40)


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
    chosen = int(amax)
    least = min(naive.values())
    ties = [k for k, v in naive.items() if v <= least + 1e-12]
    near = [k for k, v in naive.items() if v <= least + 1e-9]
    if not math.isfinite(least):
        assert chosen == len(counts)
    elif near == ties:
        assert chosen == max(ties)
    else:  # closer than either computation can tell
        assert chosen in near


def naive_squared_error(counts: list[int], amax: float, bound: int) -> float:
    total = 0.0
    for k, count in enumerate(counts):
        value = k + 0.5
        integer = min(bound, round(value * bound / amax))
        total += count * (integer * amax / bound - value) ** 2
    return total


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
