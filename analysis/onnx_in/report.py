"""The page of the study: a row for each file, refusals grouped by their reason."""

import json
import re
from collections import defaultdict
from typing import Any

from analysis.common.study import Row, listed, report_from_file, table
from compress.files import write_text


def markdown(document: dict[str, Any]) -> str:
    rows = document["rows"]
    quantized = [row for row in rows if row["status"] == "quantized"]
    machine = document["machine"]
    text = (
        f"`{document['command']}` on {machine['cpu']}; {listed(document['software'])}. Random weights, smooth random "
        "pictures; SQNR is that of the first output of the quantized file against the float file on ONNX Runtime, on "
        "pictures that were not calibrated with."
    )
    refused, failed = (sum(row["status"] == status for row in rows) for status in ("refused", "failed"))
    counts = f"{len(quantized)} of {len(rows)} quantized, {refused} refused with a sentence, {failed} failed."
    columns = ("origin", "network", "opset", "target", "INT8 layers", "quantizers", "SQNR dB", "s")
    lines = ["# ONNX files that can be quantized", "", text, "", counts, ""]
    keys = ("origin", "name", "opset", "target", "int8_layers", "quantizers", "sqnr_db", "seconds")
    shown = (row | {"int8_layers": f"{row['int8_layers']} of {row['layers']}"} for row in quantized)
    ordered = sorted(shown, key=lambda r: (r["origin"], r["name"], r["target"]))
    lines += table(columns, ([row[key] for key in keys] for row in ordered))
    return "\n".join([*lines, "", *_refusals(rows)]) + "\n"


def _refusals(rows: list[Row]) -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for row in rows:
        if row["status"] != "quantized":
            text = re.sub(r"\S*/\S+/\S*", "", row["reason"]).replace(row["name"], "FILE").strip()
            text = re.sub(r"has opset \d+;", "has opset N;", text)
            reasons[row["status"], text].append(row["name"])
    lines = ["| | reason | files |", "|---|---|---|"]
    for (status, text), names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        shown = ", ".join(sorted(set(names))[:4])
        lines.append(f"| {status} | {text} | {len(set(names))}: {shown}{', ...' if len(set(names)) > 4 else ''} |")
    return lines if reasons else []


if __name__ == "__main__":
    report_from_file(__doc__, lambda file: write_text(file.with_suffix(".md"), markdown(json.loads(file.read_text()))))
