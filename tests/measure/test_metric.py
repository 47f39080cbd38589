import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.errors import RunError
from compress.measure.metric import METRIC_NAMES, Metric

ROW = {"name": "top1", "variant": "qat", "engine": "openvino (f32)", "value": 98.5, "unit": "%"}

values = st.one_of(st.floats(allow_nan=False), st.integers(-(10**9), 10**9))


@settings(max_examples=60)
@given(value=values, name=st.sampled_from(METRIC_NAMES), batch=st.none() | st.integers(1, 4096), text=st.text())
def test_strict_json_and_back_keeps_everything(value, name, batch, text):
    metric = Metric(name=name, variant=text, engine=text, value=value, unit="x", batch_size=batch, method=text)
    line = json.dumps(metric.to_dict(), allow_nan=False)
    assert Metric.from_dict(json.loads(line)) == metric


def test_unavailable_goes_through_json():
    metric = Metric(
        name="p50_ms",
        variant="float",
        engine="tensorrt",
        value=None,
        unit="ms",
        status="unavailable",
        reason="not installed",
    )
    assert Metric.from_dict(json.loads(json.dumps(metric.to_dict()))) == metric


def test_keys_of_the_file():
    assert list(Metric.from_dict(ROW).to_dict()) == [
        "name",
        "variant",
        "engine",
        "batch_size",
        "value",
        "unit",
        "method",
        "status",
        "reason",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "done"}, "complete, partial, unavailable"),
        ({"value": None}, "None goes with 'unavailable'"),
        ({"status": "unavailable", "reason": "x"}, "None goes with 'unavailable'"),
        ({"status": "partial"}, "needs a reason"),
        ({"value": None, "status": "unavailable"}, "needs a reason"),
        ({"value": math.nan}, "NaN"),
        ({"batch_size": 0}, "1 or more"),
        ({"batch_size": 1.5}, "integer or null"),
        ({"batch_size": True}, "integer or null"),
        ({"value": "98"}, "number"),
        ({"value": True}, "number"),
        ({"variant": 3}, "text"),
        ({"reasons": "x"}, "did you mean 'reason'"),
    ],
)
def test_refuses_what_contradicts_itself(change, message):
    with pytest.raises(RunError, match=message):
        Metric.from_dict(ROW | change)


@pytest.mark.parametrize("key", ROW)
def test_names_a_missing_key(key):
    with pytest.raises(RunError, match=f"missing {key}"):
        Metric.from_dict({k: v for k, v in ROW.items() if k != key})
