"""The order of runs, what is counted, and how figures follow from times. No time itself is judged."""

import gc
import time

import numpy as np
import pytest
import torch

from compress import TorchEngine, build_engine, measure_latency
from compress.errors import EngineError
from compress.measure.latency import RUNS_PER_TURN, Latency, latency_ratio
from tests.engines.models import classifier
from tests.measure.fakes import GivenEngine, Listener


def trio(calls, function=lambda x: x):
    return [GivenEngine(function, label=label, calls=calls) for label in "ABC"]


def test_turns_rotate_and_begin_with_a_run_that_is_not_timed():
    calls = []
    results = measure_latency(trio(calls), batch_size=2, warmup=3, runs=2 * RUNS_PER_TURN + 2, seconds=60)
    order = "".join(label for label, _ in calls)
    full, last = 1 + RUNS_PER_TURN, 1 + 2
    assert order == (
        "AAABBBCCC" + "".join(label * full for label in "ABC" + "BCA") + "".join(label * last for label in "CAB")
    )
    assert [result.label for result in results] == ["A", "B", "C"]
    assert {result.runs for result in results} == {12}
    assert {len(result.turns_ms) for result in results} == {3}
    assert {result.batch_size for result in results} == {2}


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
    """A clock that moves only while an engine runs, by known amounts."""
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
    assert result.turns_ms == pytest.approx((3.0, 6.0))
    assert result.runs == 8


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
    assert arrays[0].shape == (3, 4)
    assert arrays[0].dtype == np.float32
    assert arrays[0].std() > 0
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
    return Latency(
        label="x",
        batch_size=batch_size,
        p50_ms=1,
        p90_ms=1,
        p99_ms=1,
        mean_ms=1,
        images_per_s=1,
        runs=1,
        float_precision="f32",
        turns_ms=turns_ms,
    )


def test_the_ratio_is_taken_round_by_round():
    # The second round ran under load: both took ten times as long, which leaves the ratio alone.
    assert latency_ratio(row(2, 20, 2.2), row(1, 10, 1)) == pytest.approx(2)
    with pytest.raises(EngineError, match="not measured in turn"):
        latency_ratio(row(1, 2), row(1))
    with pytest.raises(EngineError, match="not measured in turn"):
        latency_ratio(row(1), row(1, batch_size=2))
