"""ResNet-50 as fp16, INT8 and 2:4 INT8 on the cuda engine: accuracy against the GPU's time.

    python -m analysis.gpu_tradeoff.run

Runs the recipe `resnet50-sparse` from training to its report, and writes gpu_tradeoff.json.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import compress
from analysis.common.study import BudgetSpentError, Row, command_line, gpu_software, study_parser, time_limit
from compress.files import write_json
from compress.measure.metric import Metric
from compress.records.files import METRICS

NAMES = ("top1", "gpu_p50_ms", "gpu_with_transfers_p50_ms", "images_per_s", "sqnr_db", "file_bytes")


def main() -> None:
    """Run the recipe, and keep the figures of its networks."""
    parser = study_parser(__doc__, out="results/h100")
    parser.add_argument("--recipe", default="resnet50-sparse")
    parser.add_argument("--pixels", type=int, default=128)
    parser.add_argument("--batch", type=int, default=128, help="images of a timed batch")
    parser.add_argument("--engine", default="cuda")
    parser.add_argument("--budget-s", type=float, default=1e6, help="seconds after which the run is ended")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further keys of the recipe")
    parser.add_argument("--folder", type=Path, help="run folder, which is kept; a temporary one without it")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    keys = [
        f"data.image_size={arguments.pixels}", f"bench.engines=[{arguments.engine}]", "bench.seconds=1.5",
        f"bench.batch_sizes=[{arguments.batch}]", *arguments.set,
    ]  # fmt: skip
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary) / "run"
        with suppress(BudgetSpentError), time_limit(arguments.budget_s):
            compress.run(compress.load_recipe(arguments.recipe, overrides=keys), "prune", out=folder)
        rows = figures(METRICS.read(folder) or (), arguments.batch)
    report: Row = {
        "command": command_line(), "machine": gpu_software("triton"), "pixels": arguments.pixels, "rows": rows,
        "seconds": round(time.monotonic() - begin),
    }  # fmt: skip
    write_json(arguments.out / "gpu_tradeoff.json", report)
    for row in rows:
        print(row, flush=True)


def figures(metrics: Sequence[Metric], batch: int) -> list[Row]:
    """Return a row for each network and engine, with what was measured of it."""
    found: dict[tuple[str, str], Row] = {}
    for metric in metrics:
        if metric.name in NAMES and metric.value is not None and metric.batch_size in (None, batch):
            row = found.setdefault((metric.variant, metric.engine), {})
            row[metric.name] = metric.value
    return [{"variant": v, "engine": e, **row} for (v, e), row in found.items()]


if __name__ == "__main__":
    main()
