"""Write calibration_speed.md from calibration_speed.json."""

import json
import statistics
from pathlib import Path

from analysis.common.study import Row, listed, report_from_file
from compress.files import write_text

PLAIN = "plain forward"
# Seconds `collect_s` and `compute_s`, or `total_s`; `others`: share of the processors that other processes used.
Timing = dict[str, float]


def total(run: Timing) -> float:
    return sum(value for name, value in run.items() if name.endswith("_s"))


def median(values: list[float], spec: str) -> str:
    return format(statistics.median(values), spec) if values else ""


def line(title: str, timings: list[Timing], plain: list[float]) -> str:
    passes = [run["collect_s"] for run in timings if "collect_s" in run]
    cells = (
        title,
        median(passes, ".2f"),
        median([a / b for a, b in zip(passes, plain, strict=False)], ".2f"),
        median([run["compute_s"] for run in timings if "compute_s" in run], ".3f"),
        median([total(run) for run in timings], ".2f"),
        " ".join(f"{total(run):.2f}" for run in timings),
    )
    return f"| {' | '.join(cells)} |"


def markdown(result: Row) -> str:
    runs, where = result["runs"], result["machine"]
    others = [run["others"] for timings in runs.values() for run in timings]
    plain = [run["collect_s"] for run in runs[PLAIN]]
    lines = [
        "# Calibration of ResNet-50: time",
        "",
        f"`{result['command']}` on {where['threads']} threads of {where['cpu']}; Python {where['python']}, "
        f"{listed(where['versions'])}. 32 images at 224 px in 4 batches, random weights, 54 tensors. Variants in turn, "
        f"medians of {result['rounds']} rounds, ratios within a round; pytorch-quantization's entropy ran once. While "
        f"a run was timed, other processes took {statistics.median(others):.1%} of the processors in the median and "
        f"{max(others):.1%} at most; {result['discarded_runs']} runs were repeated because it was more than "
        f"{result['tolerated_share_of_others']:.0%}.",
        "",
        "| variant | pass, s | pass / plain forward | choosing amax, s | together, s | each round, s |",
        "|---|---|---|---|---|---|",
        *(line(title, timings, plain) for title, timings in runs.items()),
        "",
        *(f"Not measured: {tool} ({reason})." for tool, reason in result["missing"].items()),
        *(
            f"Same amax as pytorch-quantization, {name}: {found['same']} of {found['tensors']} tensors; the largest "
            f"relative difference is {found['largest_relative_difference']:.1e}.  "
            for name, found in result["same_amax"].items()
        ),
    ]
    return "\n".join(lines) + "\n"


def write(file: Path) -> None:
    write_text(file.with_suffix(".md"), markdown(json.loads(file.read_text())))


if __name__ == "__main__":
    report_from_file(__doc__, write)
