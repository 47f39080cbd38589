"""Write rtx_forms.md from rtx_forms.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

from analysis.common.study import Row, report_from_file
from compress.audit.findings import unknown_part
from compress.files import write_text
from compress.pipeline.studies.explore import FormResult, best

COLUMNS = ("form", "MB an image", "kernels", "weights MB", "8-bit macs", "least ms", "agreement", "SQNR dB")


def write(path: Path) -> None:
    """Write the page beside the JSON file."""
    document = json.loads(path.read_text())
    results = [FormResult(**{**row, "overrides": tuple(row["overrides"])}) for row in document["rows"]]
    write_text(path.with_suffix(".md"), markdown(document, results))


def markdown(document: Row, results: list[FormResult]) -> str:
    """Return a table for each compute capability, the best forms, and the forms' overrides."""
    size, version = document["image_size"], document["tensorrt_rtx"]
    lines = [
        f"# {document['model']}, {size} px: forms of export as TensorRT-RTX {version} builds them",
        "",
        f"`{document['command']}`; no GPU: engines are built for the compute capability and audited by the verbose "
        "build log. MB an image: activations that all kernels read and write, once for each kernel. Least ms: for a "
        f"batch of {document['batch_size']} under the roofs of {document['device']}, a bound and no measurement. "
        "Agreement and SQNR: the ONNX file in ONNX Runtime beside the float network, "
        f"{document.get('images', 32)} images, random weights.",
    ]
    for sm in dict.fromkeys(result.sm for result in results):
        lines += ["", f"## SM {sm}", "", f"| {' | '.join(COLUMNS)} |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
        rows = [result for result in results if result.sm == sm]
        lines += [_row(result) for result in sorted(rows, key=lambda r: (bool(r.error), r.activation_bytes))]
        peers = document["peers_mb_at_sm_89"] if sm == 89 and document["model"] == "resnet50" else {}
        lines += [f"| {peer} | {mb:.1f} | | | | | | |" for peer, mb in peers.items()]
    lines += ["", "## Best forms", "", *_verdict(results, document["device"])]
    overrides = dict.fromkeys((r.form, r.overrides) for r in results)
    lines += ["", "## The forms", "", "| form | overrides of the recipe |", "|---|---|"]
    lines += [f"| {form} | {_overrides(given)} |" for form, given in overrides]
    return "\n".join(lines) + "\n"


def _row(result: FormResult) -> str:
    if result.error:
        why = re.sub(r"^.*?Error Code \d+: ", "", " ".join(result.error.split())).replace("|", "/")
        return f"| {result.form} | not built: {why.partition('. In ')[0][:140]} | | | | | | |"
    cells = (
        f"{result.activation_bytes / 1e6:.1f}{unknown_part(result.unknown_sizes)}",
        str(result.kernels),
        f"{result.weight_bytes / 1e6:.1f}",
        f"{result.int8_share:.0%}",
        "" if result.least_ms is None else f"{result.least_ms:.3f}",
        "" if result.agreement is None else f"{result.agreement:.1%}",
        "" if result.sqnr_db is None else f"{result.sqnr_db:.1f}",
    )
    return f"| {result.form} | {' | '.join(cells)} |"


def _overrides(given: tuple[str, ...]) -> str:
    return " ".join(f"`{text if len(text) < 80 else text[:77] + '...'}`" for text in given) or "none"


def _verdict(results: list[FormResult], device: str) -> list[str]:
    lines = []
    if not any(result.int8_share >= 0.5 for result in results):
        return ["No form is finished that computes in 8 bits."]
    fewest, eight = best(results, least_agreement=0.0), best(results, least_agreement=0.0, int8=True)
    for sm, form in fewest.items():
        timed = [r for r in results if r.sm == sm and r.least_ms is not None and not r.error]
        quick = min(timed, key=lambda r: r.least_ms or 0.0)
        lines.append(
            f"- SM {sm}: fewest bytes {form.form} ({form.activation_bytes / 1e6:.1f} MB); of the INT8 forms "
            f"{eight[sm].form} ({eight[sm].activation_bytes / 1e6:.1f} MB); lowest bound on time under the roofs of "
            f"{device} {quick.form} ({quick.least_ms:.3f} ms)"
        )
    return lines


if __name__ == "__main__":
    report_from_file(__doc__, write)
