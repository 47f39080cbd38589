"""The page of the study of criteria: a table by seed, and how well the error before fine-tuning ranks the networks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from analysis.common.study import Row, listed, read_rows
from compress.files import write_text
from compress.search.latency_model import rank_correlation, rank_interval

ROWS, OURS = "criteria.jsonl", "search"
_NAMES = {
    OURS: "search: latency won for error added",
    "uniform": "uniform widths, channels by Taylor",
    "random": "channels drawn at random",
    "dense": "the whole network, fine-tuned alike",
}


def write(out: Path) -> Path:
    """Write `criteria.md` beside the rows."""
    rows, about = read_rows(out / ROWS), json.loads((out / "about-criteria.json").read_text())
    lines = [
        "# Criteria by which channels are removed, after fine-tuning, at equal predicted latency",
        "",
        f"`{about['command']}`; {listed(about['software'])}; {listed(about['machine'])}.",
        "",
    ]
    for seed in dict.fromkeys(row["seed"] for row in rows):
        lines += list(_seed([row for row in rows if row["seed"] == seed]))
    return write_text(out / "criteria.md", "\n".join(lines))


def _seed(rows: Sequence[Row]) -> Iterator[str]:
    one = rows[0]
    epochs = "epoch" if one["epochs"] == 1 else "epochs"
    yield f"## {one['network']}, seed {one['seed']}, at most {one['bound']:g} of the float network's predicted latency"
    yield ""
    yield (
        f"Float: {one['float_top1']:.2f} % after {one['float_epochs']} epochs of {one['train_images']:,} pictures; "
        f"every network was fine-tuned for {one['epochs']} {epochs} of them with the float network as teacher. Top-1 "
        f"of {one['pictures']:,} test pictures in float32, with the half width of its 95 % interval; beside the search "
        "the difference on the same pictures, paired."
    )
    yield from _table("removed by", sorted(_criteria(rows), key=lambda row: -row["after"]))
    tried = [row for row in rows if row["method"].startswith("tried")]
    if tried:
        yield "Networks that the search tried on the way, of several latencies:"
        yield from _table("network", sorted(tried, key=lambda row: -row["predicted"]))
    equal = [row for row in _criteria(rows) if row["method"] != "dense"]
    yield from _ranks("networks of equal latency", equal, {"distance": "the measured error of the outputs"})
    sums = {"distance": "the measured error", "predicted_distance": "the accuracy model's sum"}
    yield from _ranks("networks that the search tried", tried, sums)
    yield ""


def _table(first: str, rows: Sequence[Row]) -> Iterator[str]:
    columns = ("predicted latency", "MACs", "error of the outputs", "top-1 % before", "top-1 % after", "beside search")
    yield ""
    yield f"| {' | '.join((first, *columns))} |"
    yield f"|---|{'---|' * len(columns)}"
    yield from map(_line, rows)
    yield ""


def _criteria(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if not row["method"].startswith("tried")]


def _line(row: Row) -> str:
    half = 1.96 * math.sqrt(row["after"] * (100 - row["after"]) / row["pictures"])
    beside = row["over"].get(OURS)
    return (
        f"| {_NAMES.get(row['method'], row['method'])} | {row['predicted']:.3f} | {row['macs']:.3f} | "
        f"{row['distance']:.3f} | {row['before']:.2f} | {row['after']:.2f} ± {half:.2f} | "
        f"{'' if beside is None else f'{beside[0]:+.2f} ± {beside[1]:.2f}'} |"
    )


def _ranks(what: str, rows: Sequence[Row], keys: dict[str, str]) -> Iterator[str]:
    """A line for each rank correlation of an error before fine-tuning and the points lost after it."""
    for key, name in keys.items():
        rank = rank_correlation([row[key] for row in rows], [-row["after"] for row in rows])
        if math.isfinite(rank):
            low, high = rank_interval(rank, len(rows))
            between = f" (95 % interval {low:.2f} to {high:.2f})" if math.isfinite(low) else ""
            yield f"- Rank correlation of {name} and the points lost after it, {len(rows)} {what}: {rank:.2f}{between}."
