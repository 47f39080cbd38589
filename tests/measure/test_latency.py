# The order of runs, what is counted, and how figures follow from times. No time itself is judged.

import gc
import json
import multiprocessing
import os
import platform
import resource
import time
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import binom

from compress import QuantSpec, TorchEngine, build_engine, export_onnx, measure_accuracy, measure_latency, quantize
from compress.errors import EngineError
from compress.measure.latency import (
    RUNS_PER_TURN,
    CpuTime,
    Latency,
    cpu_time,
    disturbance,
    first_quiet,
    judge,
    latency_ratio,
    measure_engine_layers,
    paired_interval,
)
from compress.measure.machine import describe_machine
from tests.engines.models import classifier
from tests.measure.fakes import GivenEngine, Listener
from tests.networks import network


def trio(calls, function=lambda x: x):
    return [GivenEngine(function, label=label, calls=calls) for label in "ABC"]


def test_turns_rotate_and_begin_with_a_run_that_is_not_timed():
    calls = []
    results = measure_latency(trio(calls), batch_size=2, warmup=3, runs=2 * RUNS_PER_TURN + 2, seconds=60)
    full, last = 1 + RUNS_PER_TURN, 1 + 2
    assert "".join(label for label, _ in calls) == (
        "AAABBBCCC" + "".join(label * full for label in "ABC" + "BCA") + "".join(label * last for label in "CAB")
    )
    rows = [(result.label, result.runs, len(result.turns_ms), result.batch_size) for result in results]
    assert rows == [("A", 12, 3, 2), ("B", 12, 3, 2), ("C", 12, 3, 2)]


def test_the_time_limit_ends_with_a_whole_round():
    calls = []
    slow = trio(calls, lambda x: time.sleep(0.002) or x)
    results = measure_latency(slow, warmup=0, runs=10**6, seconds=0.03)
    assert len({result.runs for result in results}) == 1
    assert RUNS_PER_TURN <= results[0].runs < 10**3
    assert len(calls) == 3 * (results[0].runs + len(results[0].turns_ms))


def test_one_round_is_always_measured():
    (result,) = measure_latency([GivenEngine(lambda x: time.sleep(0.002) or x)], warmup=0, runs=50, seconds=1e-9)
    assert result.runs == RUNS_PER_TURN


def test_figures_follow_from_the_times(monkeypatch):
    # A clock that moves only while an engine runs, by known amounts.
    durations = iter([9.0, 1.0, 2.0, 3.0, 4.0, 10.0, 9.0, 5.0, 6.0, 7.0])
    now = [0.0]

    def run(x):
        now[0] += next(durations) * 1e-3
        return x

    monkeypatch.setattr(time, "perf_counter_ns", lambda: round(now[0] * 1e9))
    (result,) = measure_latency([GivenEngine(run)], batch_size=4, warmup=0, runs=8, seconds=60)
    times = [1.0, 2.0, 3.0, 4.0, 10.0, 5.0, 6.0, 7.0]  # without the first of each turn
    for name, q in (("p50_ms", 50), ("p90_ms", 90), ("p99_ms", 99)):
        assert getattr(result, name) == pytest.approx(np.percentile(times, q))
    assert result.mean_ms == pytest.approx(np.mean(times))
    assert result.images_per_s == pytest.approx(4 / (np.mean(times) / 1000))
    assert result.turns_ms == pytest.approx((3.0, 6.0)) and result.runs == 8


def test_garbage_is_collected_outside_of_the_timing_only():
    states = []
    measure_latency([GivenEngine(lambda x: states.append(gc.isenabled()) or x)], warmup=1, runs=3)
    assert states == [True, False, False, False, False]
    assert gc.isenabled()

    def fail(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure_latency([GivenEngine(fail)], warmup=0)
    assert gc.isenabled()


def test_inputs_are_equal_for_all_and_repeatable():
    first, second = [], []
    measure_latency(trio(first), batch_size=3, warmup=0, runs=1)
    measure_latency(trio(second), batch_size=3, warmup=0, runs=1)
    arrays = [array for _, array in first + second]
    assert (arrays[0].shape, arrays[0].dtype) == ((3, 4), np.float32) and arrays[0].std() > 0
    assert all(np.array_equal(array, arrays[0]) for array in arrays)
    integers = GivenEngine(lambda x: x, dtype="int64")
    measure_latency([integers], warmup=0, runs=1)
    assert integers.calls[0][1].dtype == np.int64
    given = np.ones((1, 4), np.float32)
    measure_latency({"mine": integers}, inputs={"input": given}, warmup=0, runs=1)
    assert integers.calls[-1][1] is given


def test_real_engines_side_by_side(tmp_path):
    path = classifier(tmp_path / "m.onnx")
    head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5))
    engines = [build_engine(path, "openvino", batch_size=2, precision="f32"), build_engine(path, "onnxruntime")]
    bar = Listener()
    results = measure_latency([*engines, TorchEngine(head, (3, 8, 8))], batch_size=2, warmup=1, runs=7, progress=bar)
    assert [result.label for result in results] == ["openvino (f32)", "onnxruntime", "torch (cpu)"]
    assert [result.float_precision for result in results] == ["f32"] * 3
    assert all(0 < result.p50_ms <= result.p90_ms <= result.p99_ms for result in results)
    assert (bar.total, bar.advanced, bar.finished) == (2, 2, True)


def test_refusals(tmp_path):
    one = GivenEngine(lambda x: x)
    with pytest.raises(EngineError, match="two engines have one label"):
        measure_latency([one, GivenEngine(lambda x: x)])
    assert len(measure_latency({"a": one, "b": one}, runs=1)) == 2
    with pytest.raises(EngineError, match="give a list of engines"):
        measure_latency(one)
    for wrong, words in (("a.onnx", r"a\.onnx is no engine"), (torch.nn.Identity(), "a Identity is no engine")):
        with pytest.raises(EngineError, match=words):
            measure_latency([wrong])
        with pytest.raises(EngineError, match=words):
            measure_accuracy(wrong, [])
    with pytest.raises(EngineError, match="no engine to measure"):
        measure_latency([])
    for name, value in (("batch_size", 0), ("warmup", -1), ("runs", 0), ("seconds", 0), ("seconds", float("nan"))):
        with pytest.raises(EngineError, match=f"{name} is {value}"):
            measure_latency([one], **{name: value})
    with pytest.raises(EngineError, match="batch_size is 3 but input 'input' takes"):
        measure_latency([GivenEngine(lambda x: x, shape=(2, 4))], batch_size=3)
    with pytest.raises(EngineError, match="takes .any, any.: say how large its open sides are"):
        measure_latency([GivenEngine(lambda x: x, shape=(-1, -1))])
    seen = []
    measure_latency([GivenEngine(lambda x: seen.append(x.shape) or x, shape=(-1, 3, -1, -1))], sides=(4, 6), runs=1)
    assert set(seen) == {(1, 3, 4, 6)}
    for shape in ((-1, 3, 4, 6), (-1, 4, 6, 3)):
        fixed = GivenEngine(lambda x: x, shape=shape)
        assert len(measure_latency([fixed], sides=(4, 6), runs=1)) == 1
        with pytest.raises(EngineError, match="is fixed to .* and 6 x 4 is asked for"):
            measure_latency([fixed], sides=(6, 4))
    with pytest.raises(EngineError, match="holds 2 images"):
        measure_latency([one], inputs={"input": np.zeros((2, 4), np.float32)})


def row(*turns_ms: float, batch_size: int = 1) -> Latency:
    numbers = dict.fromkeys(("p50_ms", "p90_ms", "p99_ms", "mean_ms", "images_per_s", "runs"), 1)
    return Latency(label="x", batch_size=batch_size, float_precision="f32", turns_ms=turns_ms, **numbers)


def test_the_ratio_is_taken_round_by_round():
    # The second round ran under load: both took ten times as long, which leaves the ratio alone.
    assert latency_ratio(row(2, 20, 2.2), row(1, 10, 1)) == pytest.approx(2)
    with pytest.raises(EngineError, match="not measured in turn"):
        latency_ratio(row(1, 2), row(1))
    with pytest.raises(EngineError, match="not measured in turn"):
        latency_ratio(row(1), row(1, batch_size=2))


# Whether times can be compared: intervals beside scipy's, and machines that are busy by counters that are made up.

TIMES = st.floats(0.01, 100.0)
PAIRS = st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=60)


@given(PAIRS)
def test_a_paired_interval_is_that_of_the_sign_test(pairs):
    # Its ends are the k-th ratios from either side, k the 2.5 % quantile of scipy's binomial; else the outermost.
    turns, reference = zip(*pairs, strict=True)
    ratios = np.sort(np.array(turns) / np.array(reference))
    k = max(int(binom.ppf(0.025, len(ratios), 0.5)), 1)
    assert paired_interval(turns, reference) == (ratios[k - 1], ratios[len(ratios) - k])


def counters(seconds, *, own=0.0, others=0.0, stolen=0.0):
    # Readings at the start and the end of so many seconds; the start is none that is zero.
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
    short, shorter = counters(0.1, others=0.03), counters(0.04, others=1)  # the counters move in steps of 10 ms
    pairs = ((None, after), (before, None), short, shorter)
    assert [disturbance(*pair, cores=1, usable=1) for pair in pairs] == [""] * 4
    assert disturbance(*counters(0.1, others=0.05), cores=1, usable=1)


@given(st.integers(6, 40), st.integers(0, 2**32 - 1))
def test_load_that_shifts_whole_turns_leaves_a_comparison_as_it_is(count, seed):
    load = np.random.default_rng(seed).uniform(1, 10, count)
    turns = {"float": 2 * load, "int8": load, "other": 3 * load}
    assert judge(turns, {name: 1.2 * float(np.median(row)) for name, row in turns.items()}) == dict.fromkeys(turns, "")


def test_the_one_that_moved_beside_both_others_is_named():
    moved = [1.0, 3.0] * 10
    found = judge({"a": [2.0] * 20, "b": [5.0] * 20, "c": moved}, {"a": 2.0, "b": 5.0, "c": 2.0})
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
    # The oracle is getrusage; the counters of the machine move in steps of 10 ms.
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
    # The hypervisor keeps half of the time in the first two measurements, and nothing afterwards.
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


# Layer times: every layer is found in the engine, and the sum is that of the engine's own profile.

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
        assert list(row.ms) == LAYERS and "f32" in row.label
        assert min(*row.ms.values(), row.rest_ms) > 0, row  # the rest is the max pool, at the least


def test_times_are_the_engines_own(files):
    with build_engine(files["int8"], "openvino", batch_size=2, profile="yes") as engine:
        engine.run({"input": torch.zeros(2, 3, 32, 32).numpy()})
        times = engine.layer_times_ms()
        assert set(times) <= {layer.name for layer in engine.runtime_layers()}
        assert all(ms > 0 for ms in times.values()) and len(times) >= len(LAYERS)


def test_engines_that_do_not_tell_are_refused(files):
    for name in ("openvino", "onnxruntime"):
        with build_engine(files["float"], name) as engine, pytest.raises(EngineError, match="profile='yes'"):
            engine.layer_times_ms()
    with pytest.raises(EngineError, match="runs"):
        measure_engine_layers(files, LAYERS, runs=0)


# The machine at hand, against what other sources say of it.


def test_it_is_this_machine():
    machine = describe_machine()
    assert (machine.python, machine.cores) == (platform.python_version(), os.cpu_count())
    assert 0 < machine.usable_cores <= machine.cores
    assert machine.cpu and platform.system() in machine.system
    versions = {name: metadata.version(name) for name in ("torch", "onnx", "onnxruntime", "openvino")}
    assert machine.versions.items() >= versions.items()
    assert len(machine.gpus) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="only Linux lists its instruction sets in a file")
def test_instruction_sets_are_torchs():
    isa = describe_machine().isa
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in {"AVX2", "AVX512"}:
        assert {"AVX2": "avx2", "AVX512": "avx512f"}[capability] in isa
    total_kib = int(Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0])
    assert describe_machine().memory_bytes == total_kib * 1024


def test_it_goes_into_json():
    row = describe_machine().to_dict()
    assert json.loads(json.dumps(row)) == row
