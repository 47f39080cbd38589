"""The page of the study, from its rows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from analysis.common.study import Row, listed, read_rows, report_from_file
from compress.files import write_text

_T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # of Student's distribution, two-sided, by number of values
_REFERENCE = "uniform"


def write(folder: Path) -> str:
    """Write `search_study.md` into the folder of the rows, and return it."""
    about = json.loads((folder / "about.json").read_text())
    rows = read_rows(folder / "rows.jsonl")
    lines = [
        "# Search beside uniform widths, Torch-Pruning and criteria, at equal measured latency",
        "",
        f"`{about['command']}`; {listed(about['software'])}; {listed(about['machine'])}.",
        "",
        "Latency: ONNX Runtime, one thread; the median of several loads, each timed in turn with the "
        "float network, with nothing else running. Top-1: the exported file on ONNX Runtime, all test pictures. The "
        "pictures are a JPEG copy of CIFAR-10: compare differences. Every network was fine-tuned by the same recipe. "
        "Points over uniform: against the uniform network of the same seed and of the same latency (between the two "
        "that were made, in a straight line; beyond them the nearer one), 95 % interval of Student's t.",
        *tables(rows),
        *predictions(rows),
        *failures(rows),
    ]
    return write_text(folder / "search_study.md", "\n".join(lines) + "\n").read_text()


def tables(rows: list[Row]) -> Iterable[str]:
    """Yield a table for each network, data set and bound."""
    networks = [row for row in rows if row["kind"] == "network"]
    for name in dict.fromkeys(map(_subject, networks)):
        own = [row for row in networks if _subject(row) == name]
        subject = own[0]["subject"]
        base = "dense INT8 network's" if subject["int8"] else "float network's"
        batch = subject.get("batch", 1)
        yield from ("", f"## {name}, at most {subject['bound']:g} of the {base} latency, batch {batch}", "")
        yield (
            "| method | seeds | latency, of float (all loads) | of dense | top-1 % | float % | points to float | over "
            "uniform |"
        )
        yield "|---|---|---|---|---|---|---|---|"
        for method in dict.fromkeys(row["method"] for row in own):
            some = [row for row in own if row["method"] == method]
            times = [ratio for row in some if (ratio := _latency(rows, row)) is not None]
            dense = [ratio for row in some if (ratio := _latency(rows, {**row, "method": "dense"})) is not None]
            share = f"{statistics.mean(times):.3f}" if times else "not timed"
            of_dense = f"{statistics.mean(times) / statistics.mean(dense):.3f}" if times and dense else ""
            spread = _range(rows, some)
            points = [row["top1"] - row["float_top1"] for row in some]
            over = [gain for row in some if (gain := over_uniform(rows, own, row)) is not None]
            cells = [method, len(some), share + spread, of_dense, _mean(r["top1"] for r in some)]
            cells += [_mean(r["float_top1"] for r in some), interval(points), interval(over)]
            yield f"| {' | '.join(map(str, cells))} |"


def over_uniform(rows: list[Row], networks: list[Row], row: Row) -> float | None:
    """Points of a network over uniform widths of its latency, between two of them where there are two; None = none."""
    uniform = [other for other in networks if other["method"].startswith(_REFERENCE) and _key(other) == _key(row)]
    here = _latency(rows, row)
    timed = sorted((t, other["top1"]) for other in uniform if (t := _latency(rows, other)) is not None)
    if row["method"].startswith(_REFERENCE) or here is None or not timed:
        return None
    return float(row["top1"] - np.interp(here, [time for time, _ in timed], [top1 for _, top1 in timed]))


def predictions(rows: list[Row]) -> Iterable[str]:
    """Yield the table of what each search predicted and measured."""
    searches = [row for row in rows if row["kind"] == "found" and "points" in row["facts"]]
    if searches:
        yield from ("", "## Searches", "")
        yield (
            "| search | seconds | candidates | latency of those not seen before, median error % | rank correlation | "
            "before the search, on unseen networks | rank correlation of the error | chosen |"
        )
        yield "|---|---|---|---|---|---|---|---|"
    for row in searches:
        facts = row["facts"]
        points, seen = [point for point in facts["points"] if point[0] != "float"], facts["candidates"]
        cells = [f"{_subject(row)} {row['subject']['seed']} {row['method']}", f"{row['seconds']:.0f}", len(points)]
        cells += [f"{100 * seen['median_error']:.1f}", f"{seen['spearman']:.2f}"]
        cells += [f"{100 * facts['check']['median_error']:.1f} %, {facts['check']['spearman']:.2f}"]
        cells += [f"{facts['accuracy']['distance']:.2f}", facts["chosen"]]
        yield f"| {' | '.join(map(str, cells))} |"


def failures(rows: list[Row]) -> Iterable[str]:
    """Yield what failed or was late."""
    for row in rows:
        if row["kind"] == "failure":
            yield f"- {row['subject']['network']} seed {row['subject']['seed']}, {row['method']}: {row['error'][:200]}"


def interval(values: list[float]) -> str:
    """The mean with its 95 % interval; of one value the value, of none nothing."""
    if len(values) < 2:
        return f"{values[0]:+.2f}" if values else ""
    half = _T95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):+.2f} ± {half:.2f}"


def _mean(values: Iterable[float]) -> str:
    return f"{statistics.mean(values):.2f}"


def _latency(rows: list[Row], network: Row) -> float | None:
    """Median ratio over the loads of a network at the end; None if it was not timed."""
    seen = [
        row["ratio"]
        for row in rows
        if row["kind"] == "latency" and _key(row) == _key(network) and row["method"] == network["method"]
    ]
    return statistics.median(seen) if seen else None


def _range(rows: list[Row], networks: list[Row]) -> str:
    """Least and largest ratio over all loads."""
    keys = {(_key(row), row["method"]) for row in networks}
    seen = [row["ratio"] for row in rows if row["kind"] == "latency" and (_key(row), row["method"]) in keys]
    return f" ({min(seen):.3f} to {max(seen):.3f})" if len(seen) > 1 else ""


def _key(row: Row) -> str:
    return json.dumps(row["subject"], sort_keys=True)


def _subject(row: Row) -> str:
    return f"{row['subject']['network']} on {row['subject']['data']}"


if __name__ == "__main__":
    report_from_file(__doc__, lambda path: write(path.parent))
