"""The page of `analysis.onnx_in.peers`: a row for each file, and the differences to the peers, paired over pictures."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from analysis.common.study import Row, listed, report_from_file, table
from compress.files import write_text

OURS = {"openvino": "compress, target openvino", "onnxruntime": "compress, target onnxruntime"}
TITLES = {"openvino": "OpenVINO", "onnxruntime": "ONNX Runtime"}
FLOAT = "float"
# Milliseconds by build of an engine, and by turn.
Turns = list[list[float]]


def report(file: Path) -> Path:
    return write_text(file.with_suffix(".md"), markdown(json.loads(file.read_text())))


def markdown(document: Row) -> str:
    machine, rows = document["machine"], document["rows"]
    plain = {row["network"]: row for row in rows if row["method"] == FLOAT}
    builds = len(rows[0]["openvino"]["turns_ms"])
    text = (
        f"`{document['command']}` on {machine['cpu']}, load {machine['load_average']:.1f}; "
        f"{listed(document['software'])}. {document['calibration']} pictures calibrate, {document['evaluated']} are "
        "evaluated, all from ImageNet's training split: compare methods only. Each tool with its defaults; seconds are "
        "the best of three (ModelOpt: one; float: a plain pass over the same pictures), and in brackets over that "
        "pass; points are differences to the float file on "
        f"the same engine, with a 95 % interval over pictures. Time: batch 1, {document['threads']} thread, in turn, "
        f"as a ratio to the float file in f32, geometric mean over {builds} builds of each engine."
    )
    measured = ("top-1 %", "points", "agrees %", "SQNR dB", "time")
    columns = ["network", "method", "seconds", *(f"{title}: {c}" for title in TITLES.values() for c in measured)]
    title = "# Files quantized by compress, ONNX Runtime's quantizer, NNCF and ModelOpt"
    lines = [title, "", text, "", *table(columns, (_cells(row, plain[row["network"]]) for row in rows))]
    note = (
        "The file that compress makes for the engine minus that of the peer, on the same pictures, with 95 % intervals "
        "of the paired difference: an interval that holds 0 shows no difference. Seconds: of compress over the peer. "
        "Time: of compress over the peer, median over the turns of a build and geometric mean over builds, with "
        "a 95 % interval by a bootstrap over builds: one that holds 1 shows no difference. No calibration is faster "
        f"than a pass over the pictures: the plain one takes {_floors(rows)} of the fastest peer's seconds."
    )
    columns = ["network", "engine", "peer", "top-1, points", "agreement, points", "SQNR, dB", "seconds", "time"]
    lines += ["", "## compress against each peer", "", note, "", *table(columns, _differences(rows))]
    return "\n".join(lines) + "\n"


def _floors(rows: list[Row]) -> str:
    found = []
    for plain in (row for row in rows if row["method"] == FLOAT):
        peers = [
            row for row in rows if row["network"] == plain["network"] and row["method"] not in {FLOAT, *OURS.values()}
        ]
        fastest = min(row["seconds"] for row in peers)
        found.append(f"{plain['seconds'] / fastest:.2f} ({plain['network'].partition(',')[0]})")
    return ", ".join(found)


def _labelled(row: Row) -> bool:
    return "random" not in row["network"]


def _cells(row: Row, reference: Row) -> list[str]:
    cells = [row["network"], row["method"], f"{row['seconds']} ({row['seconds'] / reference['seconds']:.1f})"]
    for engine in TITLES:
        found = row.get(engine)
        if found is None:
            cells += [""] * 5
            continue
        points = paired(found["right"], reference[engine]["right"])
        cells += [str(found["top1"]), points] if _labelled(row) else ["", ""]
        cells += [str(found[key]) for key in ("agreement", "sqnr_db", "ratio_to_float")]
    return cells


def _differences(rows: list[Row]) -> Iterator[list[str]]:
    for engine, method in OURS.items():
        for own in (row for row in rows if row["method"] == method):
            ours = own[engine]
            for peer in rows:
                apart = peer["network"] != own["network"] or peer["method"] in {FLOAT, *OURS.values()}
                if apart or engine not in peer:
                    continue
                theirs = peer[engine]
                yield [
                    own["network"],
                    TITLES[engine],
                    peer["method"],
                    paired(ours["right"], theirs["right"]) if _labelled(own) else "",
                    paired(ours["same"], theirs["same"]) if "same" in ours else "",
                    f"{ours['sqnr_db'] - theirs['sqnr_db']:+.1f}",
                    f"{own['seconds'] / peer['seconds']:.2f}",
                    in_turn(ours["turns_ms"], theirs["turns_ms"]),
                ]


def paired(ours: list[int], theirs: list[int]) -> str:
    difference = 100 * (np.array(ours, float) - np.array(theirs, float))
    return f"{difference.mean():+.2f} ± {1.96 * difference.std() / np.sqrt(len(difference)):.2f}"


def ratio(ours: Turns, theirs: Turns) -> float:
    return float(np.exp(_log_ratios(ours, theirs).mean()))


def in_turn(ours: Turns, theirs: Turns) -> str:
    logs = _log_ratios(ours, theirs)
    resampled = np.random.default_rng(0).choice(logs, (2000, len(logs))).mean(1)
    low, high = np.exp(np.quantile(resampled, (0.025, 0.975)))
    return f"{ratio(ours, theirs):.3f} ({low:.3f} to {high:.3f})"


def _log_ratios(ours: Turns, theirs: Turns) -> NDArray[np.float64]:
    return np.log([np.median(np.divide(mine, other)) for mine, other in zip(ours, theirs, strict=True)])


if __name__ == "__main__":
    report_from_file(__doc__, report)
