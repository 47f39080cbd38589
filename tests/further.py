"""Cases of a parametrized test that `make release` runs and `make test` does not."""

from collections.abc import Iterable
from typing import Any

import pytest


def further(cases: Iterable[Any], kept: Iterable[Any]) -> list[Any]:
    # Mark the cases that are not among `kept`: another case holds the same mechanism.
    kept = list(kept)
    return [case if case in kept else pytest.param(*_values(case), marks=pytest.mark.release) for case in cases]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)
