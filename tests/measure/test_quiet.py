"""Whether times can be compared: intervals beside scipy's, and machines that are busy by counters that are made up."""

import multiprocessing
import os
import resource
import time
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import binom

from compress import measure_latency
from compress.measure.latency import CpuTime, cpu_time, disturbance, first_quiet, judge, paired_interval
from tests.measure.fakes import GivenEngine

TIMES = st.floats(0.01, 100.0)
PAIRS = st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=60)


@given(PAIRS)
def test_a_paired_interval_is_that_of_the_sign_test(pairs):
    """Its ends are the k-th ratios from either side, k the 2.5 % quantile of scipy's binomial; else the outermost."""
    turns, reference = zip(*pairs, strict=True)
    ratios = np.sort(np.array(turns) / np.array(reference))
    k = max(int(binom.ppf(0.025, len(ratios), 0.5)), 1)
    assert paired_interval(turns, reference) == (ratios[k - 1], ratios[len(ratios) - k])


@given(PAIRS)
def test_a_paired_interval_holds_the_median_and_turns_over_with_its_pairs(pairs):
    turns, reference = zip(*pairs, strict=True)
    low, high = paired_interval(turns, reference)
    assert low <= np.median(np.divide(turns, reference)) <= high
    assert paired_interval(reference, turns) == pytest.approx((1 / high, 1 / low))


@pytest.mark.parametrize("count", [6, 10, 25])
def test_a_paired_interval_holds_the_true_ratio_in_at_least_95_of_100_measurements(count):
    """Bursts of load shift both times of a turn; the true ratio is 2. What is asked leaves 3 standard errors."""
    generator, held, repeats = np.random.default_rng(0), 0, 2000
    for _ in range(repeats):
        load = generator.pareto(1.5, count) + 1
        noise = generator.lognormal(0, 0.3, (2, count))
        low, high = paired_interval(2 * load * noise[0], load * noise[1])
        held += low <= 2 <= high
    assert held / repeats >= 0.95 - 3 * (0.95 * 0.05 / repeats) ** 0.5


def counters(seconds, *, own=0.0, others=0.0, stolen=0.0):
    """Readings at the start and the end of so many seconds; the start is none that is zero."""
    before = CpuTime(wall=50.0, busy=1e4, own=300.0, stolen=7.0)
    return before, CpuTime(wall=50 + seconds, busy=1e4 + own + others, own=300 + own, stolen=7 + stolen)


@given(st.integers(1, 64), st.floats(0.5, 100), st.floats(0, 1))
def test_load_of_ones_own_is_no_disturbance(cores, seconds, share):
    assert disturbance(*counters(seconds, own=share * cores * seconds), cores=cores, usable=cores) == ""


@given(st.integers(1, 64), st.floats(0.5, 100), st.floats(0, 1))
def test_others_count_by_the_share_that_they_take_of_what_a_process_may_use(cores, seconds, share):
    assume(abs(share - 0.15) > 1e-6)
    said = disturbance(*counters(seconds, others=share * cores * seconds), cores=cores, usable=cores)
    assert bool(said) == (share > 0.15)
    assert not said or said.startswith("the machine was busy (other processes used")


def test_others_on_processors_that_a_process_may_not_use_do_not_disturb_it():
    busy = counters(10, others=5 * 10)
    assert disturbance(*busy, cores=8, usable=2) == ""  # 8 - 5 are left for 2
    assert disturbance(*busy, cores=8, usable=4) != ""


@pytest.mark.parametrize(("stolen", "busy"), [(0.0, False), (0.04, False), (0.06, True), (0.5, True)])
def test_time_that_a_hypervisor_keeps_counts_of_all_processors(stolen, busy):
    said = disturbance(*counters(10, stolen=stolen * 10 * 4), cores=4, usable=4)
    assert bool(said) is busy and (not busy or f"hypervisor kept {stolen:.0%}" in said)


def test_nothing_is_said_where_nothing_is_known():
    before, after = counters(10, others=1e3)
    short = counters(0.1, others=1e3)  # the counters move in steps of 10 ms
    assert [disturbance(*pair, cores=1, usable=1) for pair in ((None, after), (before, None), short)] == [""] * 3


@given(st.integers(6, 40), st.integers(0, 2**32 - 1))
def test_load_that_shifts_whole_turns_leaves_a_comparison_as_it_is(count, seed):
    load = np.random.default_rng(seed).uniform(1, 10, count)
    turns = {"float": 2 * load, "int8": load, "other": 3 * load}
    assert judge(turns, {name: 1.2 * float(np.median(row)) for name, row in turns.items()}) == dict.fromkeys(turns, "")


def test_the_one_that_moved_beside_both_others_is_named():
    moved = [1.0, 3.0] * 10
    turns = {"a": [2.0] * 20, "b": [5.0] * 20, "c": moved}
    found = judge(turns, {"a": 2.0, "b": 5.0, "c": 2.0})
    assert [name for name, why in found.items() if why] == ["c"] and "moved by 3.0x" in found["c"]
    pair = judge({"a": [2.0] * 20, "c": moved}, {"a": 2.0, "c": 2.0})
    assert all("moved by 3.0x" in why for why in pair.values())  # of two, either may be the one


@given(st.floats(1.0, 4.0))
def test_single_runs_that_were_interrupted_for_long_are_told_by_the_mean(tail):
    assume(abs(tail - 1.5) > 1e-6)
    found = judge({"a": [1.0] * 9, "b": [1.0] * 9}, {"a": 1.0, "b": tail})
    assert found["a"] == "" and bool(found["b"]) == (tail > 1.5)


def test_a_disturbance_concerns_all_of_them_and_one_alone_is_compared_with_nothing():
    assert judge({"a": [1.0], "b": [1.0]}, {"a": 1.0, "b": 1.0}, "why") == {"a": "why", "b": "why"}
    assert judge({"a": [1.0, 9.0, 1.0]}, {"a": 1.0}) == {"a": ""}


def spin():
    while time.process_time() < 0.3:
        pass


@pytest.mark.skipif(cpu_time() is None, reason="the system has no such counters")
def test_counters_hold_what_the_kernel_says_of_this_process_and_its_children():
    """The oracle is getrusage; the counters of the machine move in steps of 10 ms."""

    def used():
        both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(one.ru_utime + one.ru_stime for one in both)

    before, at_first = cpu_time(), used()
    children = [multiprocessing.get_context("fork").Process(target=spin) for _ in range(2)]
    for process in children:
        process.start()
    for process in children:
        process.join()
    after, spent = cpu_time(), used() - at_first
    assert spent > 0.5 and after.own - before.own == pytest.approx(spent, abs=0.1)
    assert after.busy - before.busy > spent - 0.2 and after.wall > before.wall


def test_latencies_carry_what_was_said_and_are_measured_again_within_a_bound(monkeypatch):
    """The hypervisor keeps half of the time in the first two measurements, and nothing afterwards."""
    cores, reads, steal = os.cpu_count() or 1, [0], [0.0]

    def read():
        reads[0] += 1
        steal[0] += 5.0 * cores if reads[0] in (2, 4) else 0.0
        return CpuTime(wall=10.0 * reads[0], busy=0.0, own=0.0, stolen=steal[0])

    monkeypatch.setattr("compress.measure.latency.cpu_time", read)

    engines = [GivenEngine(lambda x: x, label=name) for name in "AB"]
    measure = partial(measure_latency, engines, warmup=0, runs=1)
    busy = first_quiet(measure)
    assert reads[0] == 4 and all("its hypervisor kept 50%" in row.unquiet for row in busy)
    assert [row.unquiet for row in first_quiet(measure)] == ["", ""] and reads[0] == 6
