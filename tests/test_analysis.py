"""Studies stay runnable: every module is imported, and every study has its page and its row in the index."""

import importlib
import re
from pathlib import Path

import pytest

ANALYSIS = Path(__file__).parent.parent / "analysis"
OPTIONAL = {"fvcore", "nncf", "modelopt", "pytorch_quantization", "timm", "triton", "tensorrt_rtx", "cosmic_ray"}
MODULES = sorted(f"analysis.{p.parent.name}.{p.stem}" for p in ANALYSIS.glob("*/*.py"))
STUDIES = sorted(p.parent.name for p in ANALYSIS.glob("*/run.py"))


@pytest.mark.parametrize("module", MODULES)
def test_a_study_can_be_imported(module):
    """A name that compress no longer has would otherwise show only when the study is run again."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")


@pytest.mark.parametrize("study", STUDIES)
def test_a_study_has_a_page_with_its_command_and_a_row_in_the_index(study):
    page = (ANALYSIS / study / "README.md").read_text()
    assert f"python -m analysis.{study}.run" in page
    assert f"]({study}/README.md)" in (ANALYSIS / "README.md").read_text()


@pytest.mark.parametrize("page", [ANALYSIS / "README.md", *sorted(ANALYSIS.glob("*/README.md"))], ids=str)
def test_links_of_a_page_exist(page):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing
