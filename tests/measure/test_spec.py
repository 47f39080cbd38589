"""Values that the bench section of a recipe may hold."""

import pytest

from compress import BenchSpec
from compress.errors import RecipeError
from compress.measure.spec import check_bench_spec


def test_defaults_and_every_engine_pass():
    check_bench_spec(BenchSpec())
    check_bench_spec(BenchSpec(engines=("tensorrt", "tensorrt-rtx", "torch"), batch_sizes=(8,), threads=2, warmup=0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engines": ("openvno",)}, "did you mean 'openvino'"),
        ({"engines": ("openvino", "openvino")}, "bench.engines"),
        ({"batch_sizes": (1, 0)}, "bench.batch_sizes"),
        ({"batch_sizes": (2, 2)}, "numbers that differ"),
        ({"warmup": -1}, "bench.warmup is -1"),
        ({"runs": 0}, "bench.runs is 0"),
        ({"seconds": 0.0}, "bench.seconds is 0.0"),
        ({"seconds": float("nan")}, "bench.seconds is nan"),
        ({"threads": 0}, "bench.threads is 0"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(RecipeError, match=message):
        check_bench_spec(BenchSpec(**changes))
