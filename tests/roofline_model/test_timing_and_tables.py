"""Times of nodes, and text tables."""

import pytest
import torch

from compress import roofline
from compress.errors import RooflineError
from compress.roofline_model import (
    ceilings_text,
    devices_text,
    measure_ceilings,
    measure_torch_times,
    rows_text,
    summary_text,
    what_if,
    what_if_text,
)
from compress.roofline_model.tables import quantity, table
from tests.roofline_model.networks import Residual, WithOpaque


def cells(text):
    """Return the cells of the Markdown tables in a text."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1, "columns are aligned"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_times_name_every_row_of_the_roofline():
    model, x = Residual(), torch.randn(2, 4, 8, 8)
    times = measure_torch_times(model, x, repeats=2, warmup=1)
    result = roofline(model, x, device="t4", precision="fp32")
    assert list(times) == [row.name for row in result.rows]
    assert all(ms > 0 for ms in times.values())
    timed = result.with_times(times)
    assert timed.measured_ms == pytest.approx(sum(times.values()))
    fused = roofline(model, x, device="t4", precision="fp32", fused=True).with_times(times)
    assert fused.measured_ms == pytest.approx(sum(times.values()))


def test_times_leave_no_gradient_and_no_mode_behind():
    model = Residual().train()
    measure_torch_times(model, torch.randn(1, 4, 8, 8), repeats=1, warmup=0)
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(RooflineError, match="repeats must be 1 or more"):
        measure_torch_times(model, torch.randn(1, 4, 8, 8), repeats=0)


def test_rows_table_holds_the_rows():
    result = roofline(Residual(), torch.randn(2, 4, 8, 8), device="t4", precision="fp32")
    head, _, *body = cells(rows_text(result, top=None))
    assert [line[0] for line in body] == [row.name for row in result.rows]
    assert len(cells(rows_text(result, top=3))) == 5
    times = {row.name: 2 * row.least_time_ms for row in result.rows}
    head, _, *body = cells(rows_text(result.with_times(times)))
    assert head[-1] == "of roof"
    assert {line[-1] for line in body} == {"50%"}


def test_unknown_layers_are_said():
    result = roofline(WithOpaque(), torch.randn(1, 3, 8, 8), device="t4", precision="fp32")
    assert "unknown and not included: odd" in summary_text(result)
    assert [line[2] for line in cells(rows_text(result))[2:]].count("unknown") == 1


def test_other_tables():
    scenarios = what_if(Residual(), torch.randn(1, 4, 8, 8), device="t4", batch_sizes=(4,))
    body = cells(what_if_text(scenarios))[2:]
    assert [line[0] for line in body] == [s.name for s in scenarios]
    assert "no peak for int8-2:4" in what_if_text(scenarios)
    names = [line[0] for line in cells(devices_text())[2:]]
    assert "h200" in names and "orin-nano-8gb" in names
    text = ceilings_text(measure_ceilings(sizes=(16,), copy_bytes=(2**12,), rounds=1, budget_s=0.0))
    assert {"copy", "fp32", "int8"} <= {line[0] for line in cells(text)}


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 B"), (12.3456, "12.3 B"), (999.0, "999 B"), (1e3, "1 kB"), (4.8e12, "4.8 TB"), (1.979e15, "1.98 PB")],
)
def test_quantities_have_three_figures(value, text):
    assert quantity(value, "B") == text
    assert quantity(None, "B") == "unknown"


def test_empty_table_is_a_table():
    assert table(["a", "b"], []).splitlines() == ["| a   | b   |", "|-----|-----|"]
