"""The page of the study, from the rows of its stages."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from analysis.common.study import Row, listed, read_rows, report_from_file
from analysis.search_study.files import FOUND, JUDGED, TIMES, TUNED
from analysis.search_study.subjects import CRITERIA, UNIFORM
from compress.files import write_text
from compress.search.latency_model import rank_correlation

_T95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}  # of Student's distribution, two-sided, by number of values
_ENGINES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
_METHOD = """\
Latency: one thread; the median of several loads, each timed in turn with the float network, with nothing else running.
Uniform widths are in multiples of 8 channels, of 4 in groups of fewer than 32; "uniform of 16" in multiples of 16,
which both engines compute at a time on this processor. The searches had multiples of 8, too.
Top-1: the exported file on the same engine, all 10,000 test pictures, or where the page says so the float32 network in
torch as its training ended (of INT8 networks before they are INT8). The pictures of CIFAR-10 are a JPEG copy: compare
differences. Every network was fine-tuned by the same recipe, from the float network's own weights. Points over uniform:
against the uniform network of the same seed and of the same latency (of those that no faster one beats, in a straight
line between two of them; beyond them the nearer one), 95 % interval of Student's t."""

_NOT_TIMED = """
The files were not yet timed together: the latencies are those of the finding, where each network was timed in turn with
the float network alone and two processes worked side by side; they differ by some percent from one network to the next.
"""


def write(folder: Path) -> str:
    """Write `search_study.md` into the folder of the rows, and return it."""
    found, networks = read_rows(folder / FOUND), fine_tuned(folder)
    finally_timed = read_rows(folder / TIMES)
    times = finally_timed or [row for row in found if "ratio" in row]
    lines = [
        "# Search beside uniform widths, Torch-Pruning and criteria, at equal measured latency",
        "",
        *_about(folder),
        "",
        _METHOD,
        *(() if finally_timed else (_NOT_TIMED,)),
        *tables(networks, times),
        *criteria(found, times),
        *accuracies(found, networks),
        *predictions(found),
        *failures(found),
    ]
    return write_text(folder / "search_study.md", "\n".join(lines) + "\n").read_text()


def fine_tuned(folder: Path) -> list[Row]:
    """A row for each network that was fine-tuned; `judged` where its file was judged on the engine."""
    judged = {_name(row): {**row, "judged": True} for row in read_rows(folder / JUDGED)}
    return [{**row, "judged": False, **judged.get(_name(row), {})} for row in read_rows(folder / TUNED)]


def _about(folder: Path) -> Iterable[str]:
    for path in sorted(folder.glob("about-*.json")):
        about = json.loads(path.read_text())
        yield f"- `{about['command']}`; {listed(about['software'])}; {listed(about['machine'])}."


def tables(networks: list[Row], times: list[Row]) -> Iterable[str]:
    """Yield a table for each network, data set and bound."""
    for name in dict.fromkeys(map(_title, networks)):
        own = [row for row in networks if _title(row) == name]
        yield from ("", f"## {name}", "")
        yield (
            "| method | seeds | latency, of float (all loads) | of dense | top-1 % | judged in | float % | points to "
            "float | over uniform |"
        )
        yield "|---|---|---|---|---|---|---|---|---|"
        for method in dict.fromkeys(row["method"] for row in own):
            some = [row for row in own if row["method"] == method]
            ratios = [ratio for row in some if (ratio := latency(times, row)) is not None]
            dense = [ratio for row in some if (ratio := latency(times, {**row, "method": "dense"})) is not None]
            share = f"{statistics.mean(ratios):.3f}" if ratios else "not timed"
            of_dense = f"{statistics.mean(ratios) / statistics.mean(dense):.3f}" if ratios and dense else ""
            points = [row["top1"] - row["float_top1"] for row in some]
            over = [gain for row in some if (gain := over_uniform(times, own, row)) is not None]
            cells = [method, len(some), share + _range(times, some), of_dense, _mean(r["top1"] for r in some)]
            cells += ["engine" if all(row["judged"] for row in some) else "torch"]
            cells += [_mean(r["float_top1"] for r in some), interval(points), interval(over)]
            yield f"| {' | '.join(map(str, cells))} |"


def over_uniform(times: list[Row], networks: list[Row], row: Row) -> float | None:
    """Points of a network over uniform widths of its latency, between two of them where there are two; None = none.

    Uniform networks that a faster one of them beats do not count.
    """
    uniform = [other for other in networks if other["method"].startswith(UNIFORM) and _key(other) == _key(row)]
    here = latency(times, row)
    every = sorted((t, other["top1"]) for other in uniform if (t := latency(times, other)) is not None)
    timed = [(t, top1) for t, top1 in every if all(top1 > other for u, other in every if u < t)]
    if row["method"].startswith(UNIFORM) or here is None or not timed:
        return None
    return float(row["top1"] - np.interp(here, [time for time, _ in timed], [top1 for _, top1 in timed]))


def accuracies(found: list[Row], networks: list[Row]) -> Iterable[str]:
    """Yield how well the error before fine-tuning ranks networks by their accuracy after it."""
    errors = {_name(row): row["facts"]["distance"] for row in found if "facts" in row}
    yield from ("", "## Does the error before fine-tuning say which network is better after it?", "")
    yield "| network | networks made smaller | rank correlation of error and points lost |"
    yield "|---|---|---|"
    for key in dict.fromkeys(map(_key, networks)):
        rows = [r for r in networks if _key(r) == key and r["method"] != "dense" and _name(r) in errors]
        lost = rank_correlation([errors[_name(r)] for r in rows], [-r["top1"] for r in rows])
        if len(rows) > 2:
            yield f"| {_title(rows[0])}, seed {rows[0]['subject']['seed']} | {len(rows)} | {lost:.2f} |"


def criteria(found: list[Row], times: list[Row]) -> Iterable[str]:
    """Yield the table of criteria at one bound of latency, before the fine-tuning."""
    rows = [row for row in found if row["method"] in CRITERIA and "facts" in row]
    if rows:
        yield from ("", "## Criteria by which channels are removed, before fine-tuning", "")
        yield "| network | criterion | latency, of float (all loads) | error of the outputs |"
        yield "|---|---|---|---|"
    for row in sorted(rows, key=lambda row: float(row["facts"]["distance"])):
        ratio = latency(times, row)
        share = "not timed" if ratio is None else f"{ratio:.3f}{_range(times, [row])}"
        yield f"| {_short(row)} | {row['method']} | {share} | {row['facts']['distance']:.3f} |"


def predictions(found: list[Row]) -> Iterable[str]:
    """Yield the table of what each search predicted and measured."""
    searches = [row for row in found if "points" in row.get("facts", {})]
    if searches:
        yield from ("", "## Searches", "")
        yield (
            "| search | seconds | candidates | latency, each predicted without its own time: median error % | rank "
            "correlation (95 % interval) | rank correlation of the error | chosen |"
        )
        yield "|---|---|---|---|---|---|---|"
    for row in searches:
        facts = row["facts"]
        seen = facts["candidates"]
        cells = [f"{_short(row)} {row['subject']['seed']} {row['method']}", f"{row['seconds']:.0f}", seen["count"]]
        low, high = seen["interval"]
        cells += [f"{100 * seen['median_error']:.1f}", f"{seen['spearman']:.2f} ({low:.2f} to {high:.2f})"]
        cells += [f"{facts['accuracy']['distance']:.2f}", facts["chosen"]]
        yield f"| {' | '.join(map(str, cells))} |"


def failures(found: list[Row]) -> Iterable[str]:
    """Yield which methods have no network within the bound, and why."""
    failed = [row for row in found if "error" in row]
    if failed:
        yield from ("", "## No network", "")
    for row in failed:
        yield f"- {_short(row)} seed {row['subject']['seed']}, {row['method']}: {row['error'][:200]}"


def interval(values: list[float]) -> str:
    """The mean with its 95 % interval; of one value the value, of none nothing."""
    if len(values) < 2:
        return f"{values[0]:+.2f}" if values else ""
    half = _T95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):+.2f} ± {half:.2f}"


def latency(times: list[Row], network: Row) -> float | None:
    """Median ratio over the loads of a network; None if it was not timed."""
    seen = [row["ratio"] for row in times if _name(row) == _name(network)]
    return statistics.median(seen) if seen else None


def _mean(values: Iterable[float]) -> str:
    return f"{statistics.mean(values):.2f}"


def _range(times: list[Row], networks: list[Row]) -> str:
    """Least and largest ratio over all loads."""
    names = {_name(row) for row in networks}
    seen = [row["ratio"] for row in times if _name(row) in names]
    return f" ({min(seen):.3f} to {max(seen):.3f})" if len(seen) > 1 else ""


def _key(row: Row) -> str:
    return json.dumps(row["subject"], sort_keys=True)


def _name(row: Row) -> str:
    return f"{_key(row)} {row['method']}"


def _short(row: Row) -> str:
    return f"{row['subject']['network']} on {row['subject']['data']}"


def _title(row: Row) -> str:
    subject = row["subject"]
    base = "dense INT8 network's" if subject["int8"] else "float network's"
    engine = _ENGINES[subject["engine"]]
    return f"{_short(row)}, at most {subject['bound']:g} of the {base} latency, {engine}, batch {subject['batch']}"


if __name__ == "__main__":
    report_from_file(__doc__, lambda path: write(path.parent))
