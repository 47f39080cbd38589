import json
import shutil
from pathlib import Path

import pytest

from compress.report.document import write_report
from tests.report.sample import metric, write_sample

HOSTILE = '</svg><script>alert("x")</script>|`a`*b*_c_[d](http://evil.example/)$x^2$&amp;\\<!-- ${{y}} \u202e'


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory) -> Path:
    # A whole run folder without a report. Not to be written into.
    return write_sample(tmp_path_factory.mktemp("run") / "resnet50")


@pytest.fixture(scope="session")
def sample(run_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("reported") / "resnet50"
    shutil.copytree(run_folder, folder)
    write_report(folder)
    return folder


@pytest.fixture(scope="session")
def hostile(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    rows = []
    for variant, ms in (("float", 10.0), (HOSTILE, 4.0)):
        more = {"method": HOSTILE}
        rows.append(metric("top1", variant, HOSTILE, 90.0, "%", **more))
        rows.append(metric("p50_ms", variant, HOSTILE, ms, "ms", batch_size=1, **more))
        rows.append(metric("file_bytes", variant, "", 100 * ms, "bytes", **more))
    rows.append(metric("top1", "float", "tensorrt", None, "%", status="unavailable", reason=HOSTILE))
    names = [HOSTILE, f"layer.{HOSTILE}", "line\nbreak\x00\x1b[31m", "plain"]
    layers = [
        {"name": name, "kind": HOSTILE, "weight_elements": 10, "float_weight_bytes": 40, "quantized_weight_bytes": 14}
        | {"weight_sqnr_db": 30.0 + i, "activation_sqnr_db": 20.0 + i}
        for i, name in enumerate(names)
    ]
    histograms = [{"name": name, "counts": [9, 3, 0, 1], "bin_edges": [0, 4], "amax": 2.5} for name in names]
    box = {"title": HOSTILE, "detail": HOSTILE, "kind": "int8"}
    block = {"block": HOSTILE, "target": HOSTILE, "boxes": {HOSTILE: box, "b": box}, "edges": [[HOSTILE, "b"]]}
    audit = [{"variant": HOSTILE, "name": HOSTILE, "op_type": HOSTILE, "int8": False, "reason": HOSTILE}]
    for file, value in {
        "metrics": rows,
        "layers": layers,
        "histograms": histograms,
        "block": block,
        "audit": audit,
        "notes": [HOSTILE],
        "environment": {HOSTILE: [HOSTILE, {HOSTILE: HOSTILE}]},
    }.items():
        (folder / f"{file}.json").write_text(json.dumps(value), encoding="utf-8")
    (folder / "recipe.yaml").write_text(f"model:\n  name: '{HOSTILE}'\n# ````\n# {HOSTILE}\n", encoding="utf-8")
    cell = '"' + HOSTILE.replace('"', '""') + '"'
    (folder / "placement.csv").write_text(
        f"tensor,layer,decision,quantizer,num_bits,axis,signed,rule,reason\n{cell},{cell},float,,,,,{cell},{cell}\n"
        f"{cell},{cell},quantize,{cell},8,0,True,{cell},{cell}\n",
        encoding="utf-8",
    )
    write_report(folder)
    return folder
