"""The time that each change of a network costs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from compress.engines import build_engine
from compress.measure.latency import first_quiet, latency_ratio, measure_latency
from compress.support.progress import NoProgress, Progress

MENDED = "mended"


@dataclass(frozen=True, kw_only=True)
class Price:
    """The time of a network beside that of the mended one.

    Attributes:
        label: `float`, `as specified`, `mended`, or `without` a change.
        ratio: of the mended network's time to this one's; above 1 the changes cost time.
        unquiet: why the two times are not to be compared; "" = they are.
    """

    label: str
    p50_ms: float
    ratio: float
    unquiet: str = ""


def measure_prices(
    files: Mapping[str, Path],
    *,
    engine: str,
    batch_size: int = 1,
    seconds: float = 3.0,
    progress: Progress | None = None,
) -> tuple[Price, ...]:
    """Time networks in turn.

    Args:
        files: ONNX files by label; one of them is `mended`.
        engine: that runs them.
        batch_size: images of one run.
        seconds: for each network, at most.
        progress: is advanced by every round.

    Raises:
        EngineError: a network that the engine cannot take.
    """
    with ExitStack() as stack:
        engines = {
            label: stack.enter_context(build_engine(path, engine, batch_size=batch_size))
            for label, path in files.items()
        }
        timed = first_quiet(
            partial(
                measure_latency,
                engines,
                batch_size=batch_size,
                runs=200,
                seconds=seconds,
                progress=progress or NoProgress(),
            )
        )
    mended = next(row for row in timed if row.label == MENDED)
    return tuple(
        Price(
            label=row.label,
            p50_ms=row.p50_ms,
            ratio=latency_ratio(mended, row),
            unquiet=mended.unquiet or row.unquiet,
        )
        for row in timed
    )
