"""Write transformers.md from transformers.jsonl."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from analysis.common.study import Row, listed, newest_rows, report_from_file
from analysis.transformers_sweep.networks import networks
from compress.files import write_text

LEGEND = (
    "W and A: quantizers of weights and of activations. SQNR in dB over four images that were not used for "
    "calibration, of the tensor by which networks are compared (logits, depth, features): of fake quantization to the "
    "float network; of the exported file to fake quantization, node by node as it is written (file) and with ONNX "
    "Runtime's integer kernels (runtime), whose requantization rounds otherwise. Moved: of fake quantization to itself "
    "with pixels moved by 1e-5, which shows the effect of rounding alone. A network goes through if its file is at "
    "least at 40 dB, or at most 3 dB below that of rounding, and at 20 dB with integer kernels. "
    "Where a detector of two stages has to leave out one of several places with the same score, torch and ONNX Runtime "
    "choose others of them, and the networks are compared by the scores of all places. "
    "Every network also took a step of quantization-aware training with finite gradients."
)


def write(log: Path) -> None:
    """Write the page beside the log: the networks that do not go through first."""
    rows = newest_rows(log, "network")
    order = [name for name in networks() if name in rows]
    counted = Counter(row["status"] for row in rows.values())
    lines = [
        "# Networks of transformers: quantization, training, export, parity",
        "",
        f"`python -m analysis.transformers_sweep.run`, target `onnxruntime`, small configurations, random weights. "
        f"{len(rows)} of {len(networks())} networks done: "
        f"{', '.join(f'{count} {status}' for status, count in counted.most_common())}.",
        "",
        *(
            f"- {count} on {where}."
            for where, count in Counter(
                f"{row['machine']['cpu']}, one thread, {listed(row['machine']['versions'])}" for row in rows.values()
            ).items()
        ),
        "",
        LEGEND,
        "",
        "| network | task | W | A | SQNR to float | file | runtime | moved | remark |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
        *(_line(name, rows[name]) for name in sorted(order, key=lambda name: rows[name]["status"] == "ok")),
        "",
    ]
    write_text(log.with_suffix(".md"), "\n".join(lines))


def _line(name: str, row: Row) -> str:
    keys = ("task", "weights", "activations", "sqnr_float_db", "sqnr_file_db", "sqnr_engine_db", "sqnr_moved_db")
    cells = [str(row.get(key, "")) for key in keys]
    remarks = [] if row["status"] == "ok" else [f"**{row['status']}**, {row.get('stage', '')}: {row['error']}"]
    remarks += [f"kept whole: {leaf}" for leaf in row.get("leaves", ())[:1]]
    remarks += ["a selection of equal scores, compared before it"] if row.get("tied") else []
    remarks += (
        ["training its graph leaves out a part of the network's own training (auxiliary outputs, dropped layers)"]
        if row.get("training")
        else []
    )
    return f"| {name} | {' | '.join(cells)} | {'; '.join(remarks).replace('|', '/')} |"


if __name__ == "__main__":
    report_from_file(__doc__, write)
