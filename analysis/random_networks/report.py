"""Adds the rows of runs to random_networks.json, and writes random_networks.md from it."""

from pathlib import Path
from typing import Any

from analysis.common.study import option, read_rows, study_options, table
from analysis.random_networks.check import LOWEST_DB, RUNTIME_DB, SAME
from compress.files import read_json, write_json, write_text

NAME = "random_networks.json"


def run_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    about = next(row for row in rows if "first_seed" in row)
    tried = {row["seed"]: row for row in rows if "seed" in row}
    failures = [
        {key: row[key] for key in ("seed", "target", "reason", "steps")} for row in tried.values() if "reason" in row
    ]
    return about | {
        "networks": len(tried),
        "exported": sum(row["exported"] for row in tried.values()),
        "cpu_seconds": round(sum(row.get("cpu_s", 0.0) for row in tried.values()), 1),
        "failures": sorted(failures, key=lambda row: int(row["seed"])),
    }


def page(results: dict[str, Any]) -> str:
    runs, findings = results["runs"], results["findings"]
    keys = ("first_seed", "networks", "exported", "operations")
    total, exported = (sum(run[key] for run in runs) for key in ("networks", "exported"))
    versions = ", ".join(sorted({run["torch"] for run in runs}))
    lines = [
        "# Random networks through quantize, export and ONNX Runtime",
        "",
        f"`python -m analysis.random_networks.run` on a CPU, torch {versions}: "
        f"{total:,} networks in {len(runs)} runs, the targets in turn; {exported:,} of them were exported and run in "
        "ONNX Runtime, with and without its optimizations.",
        "",
        f"A failure is a traceback, a refusal of a valid network, an error over {SAME} with quantizers off, less than "
        f"{LOWEST_DB} dB from float to fake quantization, or less than {RUNTIME_DB} dB from there to ONNX Runtime.",
        "",
        *table(
            ("first seed", *keys[1:3], "out of so many operations", "seconds of a core", "failures", "torch"),
            ([*(run[k] for k in keys), f"{run['cpu_seconds']:,}", len(run["failures"]), run["torch"]] for run in runs),
        ),
        "",
        *table(
            ("networks", "what went wrong", "since"),
            ([row["networks"], row["what"], row["since"]] for row in findings),
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    options = study_options(
        __doc__,
        option("rows", type=Path, nargs="*", help="files that analysis.random_networks.run wrote"),
        out="results/reliability",
    )
    results = read_json(options.out / NAME)
    runs = {run["first_seed"]: run for run in results["runs"]}
    for path in options.rows:
        added = run_of(read_rows(path))
        runs[added["first_seed"]] = added
    results["runs"] = [runs[seed] for seed in sorted(runs)]
    write_json(options.out / NAME, results)
    write_text(options.out / "random_networks.md", page(results))


if __name__ == "__main__":
    main()
