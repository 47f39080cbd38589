"""The notebooks run, and their stored outputs are what their cells print and draw today."""

import contextlib
import io
import json
import re
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def words(text):
    """The text without its numbers, which depend on the machine."""
    return re.sub(r"\s+", " ", re.sub(r"-?\d+(\.\d+)?", "#", text)).strip()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_outputs_are_todays(path, tmp_path, monkeypatch):
    """In order, in one namespace and an empty folder, without a Jupyter server, which the tests do not need."""
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    plt.close("all")
    names = {}
    for i, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{path.name}, cell {i}", "exec"), names)
        stored = "".join("".join(out["text"]) for out in cell["outputs"] if out["output_type"] == "stream")
        assert words(printed.getvalue()) == words(stored), f"cell {i}: `make notebooks` writes the outputs again"
        pictures = [out for out in cell["outputs"] if "image/png" in out.get("data", {})]
        assert len(pictures) == len(plt.get_fignums())
        assert {out["output_type"] for out in cell["outputs"]} <= {"stream", "display_data"}
        plt.close("all")


def test_notebooks_are_linked():
    assert len(NOTEBOOKS) == 3
    for page in ("examples/README.md", "docs/index.md"):
        text = (ROOT / page).read_text()
        assert all(path.name in text for path in NOTEBOOKS), page
