"""The report's part on engines, from a recorded engine through JSON to the page."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from compress.audit.engine import audit_listing
from compress.audit.files import read_engine_layers
from compress.errors import RunError
from compress.plots.stacked import draw_engines, role_bytes
from compress.plots.style import NARROW, WIDE, styled
from compress.records import EngineRow, read_run
from compress.records.files import ENGINES
from compress.report import write_report

RECORDED = Path(__file__).parent.parent / "audit" / "nvidia"


@pytest.fixture(scope="module")
def reported(run_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("engines") / "run"
    shutil.copytree(run_folder, folder)
    audits = {"ptq": "rtx_1_7_int8.log", "qat": "rtx_1_7_int8_fp16.log", "sparse-qat": "inspector_10.json"}
    rows = [
        EngineRow.of(audit_listing(read_engine_layers(RECORDED / file)), variant=variant, engine="tensorrt-rtx SM 89")
        for variant, file in audits.items()
    ]
    rows.append(EngineRow(variant="ptq", engine="openvino (f32)", unmet=("1 of 3 <INT8> operations",)))
    ENGINES.write(folder, rows)
    write_report(folder)
    return folder


def test_read_back(reported):
    first, second, sparse, last = read_run(reported).engines
    audit = audit_listing(read_engine_layers(RECORDED / "rtx_1_7_int8.log"))
    assert first.kernels == audit.kernels and len(first.layers) == audit.kernels
    assert sum(role_bytes(first).values()) == first.activation_bytes == audit.activation_bytes
    assert role_bytes(first)["requantize"] == sum(x.activation_bytes for x in audit.layers if x.role == "requantize")
    assert second.activation_bytes < first.activation_bytes
    assert (first.sparse_kernels, sparse.sparse_kernels) == ("", "1 of 2 sparse")
    assert last.layers == () and last.unmet


def test_page_and_markdown_tell_it(reported):
    page, text = ((reported / f"report.{end}").read_text(encoding="utf-8") for end in ("html", "md"))
    for text_part in ("What the engines made of it", "conv0", "correlation", "requantize", "1 of 2 sparse"):
        assert text_part in page and text_part in text
    assert "1 of 3 &lt;INT8&gt; operations" in page
    assert "What the engines move" in page


def test_figure_has_a_bar_piece_for_each_role(reported):
    engines = [engine for engine in read_run(reported).engines if engine.layers]
    with styled():
        for form in (WIDE, NARROW):
            axes = draw_engines(engines, form).axes[0]
            assert len(axes.patches) == sum(len(role_bytes(engine)) for engine in engines)
            ends = [
                sum(p.get_width() for p in axes.patches if round(p.get_y() + p.get_height() / 2) == y) for y in range(3)
            ]
            assert ends == pytest.approx([engine.activation_bytes for engine in engines])


def test_a_run_without_engines_has_no_such_part(sample):
    assert "What the engines made of it" not in (sample / "report.html").read_text(encoding="utf-8")


def test_another_file_of_that_name_is_refused(run_folder, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run_folder, folder)
    (folder / "engine_audit.json").write_text(json.dumps([{"engine": "x"}]), encoding="utf-8")
    with pytest.raises(RunError, match=r"engine_audit\.json, row 1: variant"):
        read_run(folder)
    assert asdict(audit_listing(read_engine_layers(RECORDED / "rtx_1_7_int8.log")))  # what --json prints is plain data
