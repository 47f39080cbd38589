# The documentation: it builds without a warning, every link resolves, and its Python runs as it stands.

import contextlib
import io
import json
import re
import tomllib
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest
import yaml
from PIL import Image

import compress
from tests.further import further

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(path for path in (ROOT / "README.md", *DOCS.glob("*.md")) if "```python" in path.read_text())


def test_the_site_builds_with_every_warning_as_an_error(tmp_path):
    config = pytest.importorskip("mkdocs.config", reason="the extra `docs` is not installed")
    from mkdocs.commands.build import build

    build(config.load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True))
    assert {path.stem for path in DOCS.glob("*.md")} <= {
        path.parent.name or "index" for path in tmp_path.rglob("*.html")
    } | {"index"}
    text = (tmp_path / "site" / "api" / "index.html").read_text()
    assert "Fold BatchNorm, insert quantizers" in text  # the docstring of compress.quantize
    assert (tmp_path / "site" / "results" / "overview.png").stat().st_size > 0  # a figure from outside docs/
    benchmarks = (tmp_path / "site" / "benchmarks" / "index.html").read_text()
    assert 'src="../results/overview.png"' in benchmarks and 'href="../../results' not in benchmarks
    assert '<html lang="zh"' in (tmp_path / "site" / "zh" / "qdq" / "index.html").read_text()
    for page in (tmp_path / "site").rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^":#?/][^":#?]*)["#?]', page.read_text()):
            assert (page.parent / link).exists(), f"{page}: {link}"


def test_screenshots_are_of_this_version():
    # `python docs/screens.py RUN` makes them.
    figures = sorted((DOCS / "figures").glob("screen_*.png"))
    assert len(figures) == 3
    assert {Image.open(figure).info.get("compress") for figure in figures} == {compress.__version__}


def test_the_page_of_the_library_lists_every_public_name():
    listed = re.findall(r"^::: (\S+)\.(\w+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE)
    assert {name: home for home, name in listed} == compress._HOMES
    assert len(listed) == len(compress._HOMES)


def test_the_page_of_the_library_says_which_names_are_experimental():
    sections = re.split(r"^## ", (DOCS / "api.md").read_text(), flags=re.MULTILINE)
    marked = "".join(text for text in sections if "(experimental)" in text.splitlines()[0])
    named = set(re.findall(r"^::: \S+\.(\w+)$", marked, flags=re.MULTILINE))
    assert named and named == compress._EXPERIMENTAL


# Names whose example takes long or needs an extra: it is shown, and these tests run the function.
ELSEWHERE = {
    "build_tensorrt": "tests/engines/tensorrt",
    "export_coreml": "tests/onnx_ptq/test_pt2e.py",
    "export_executorch": "tests/onnx_ptq/test_pt2e.py",
    "from_pytorch_quantization": "tests/quantization/test_from_pytorch_quantization.py",
    "run": "tests/pipeline/test_run.py",
    "search": "tests/search/test_models.py",
    "SearchSpec": "tests/search/test_models.py",
    "Front": "tests/search/test_models.py",
}


def test_every_public_name_has_an_example_that_runs():
    # In its docstring: pytest runs these as doctests (`--doctest-modules`, conftest.py).
    examples = {
        name: [line for line in (getattr(compress, name).__doc__ or "").splitlines() if line.strip().startswith(">>>")]
        for name in compress._HOMES
    }
    assert not [name for name, lines in examples.items() if not lines]
    skipped = {name for name, lines in examples.items() if any("+SKIP" in line for line in lines)}
    assert skipped == set(ELSEWHERE)
    assert all((ROOT / test).exists() for test in ELSEWHERE.values())
    assert (
        "--doctest-modules"
        in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    )


@pytest.mark.parametrize(
    ("page", "block"),
    [
        (page, block)
        for page in (ROOT / "README.md", *DOCS.glob("*.md"))
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), flags=re.DOTALL)
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else "",
)
def test_a_recipe_of_a_page_is_taken(page, block, tmp_path):
    # Whole recipes and single sections alike: every key has a default.
    (tmp_path / "recipe.yaml").write_text(block)
    recipe = compress.load_recipe(tmp_path / "recipe.yaml")
    assert all(getattr(recipe, key) is not None for key in yaml.safe_load(block) if key != "base")


def test_fenced_blocks_are_python_recipes_or_commands():
    # A block of another language would be run by no test.
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        assert set(re.findall(r"^```(\w+)", page.read_text(), flags=re.MULTILINE)) <= {"python", "yaml"}, page


@pytest.mark.parametrize("page", further(PAGES, [p for p in PAGES if p.stem != "sparsity"]), ids=lambda path: path.stem)
def test_python_of_a_page_runs(page, tmp_path, monkeypatch):
    # In order, in one namespace and an empty folder.
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(compile(block, page.name, "exec"), names)


def test_the_page_of_the_demo_is_of_its_metrics():
    # A page of an older run beside newer figures would contradict the tables.
    rows = json.loads((ROOT / "results" / "demo" / "metrics.json").read_text())
    page = (ROOT / "results" / "demo" / "report.html").read_text()
    times = [row["value"] for row in rows if row["name"] == "p50_ms" and row["value"] is not None]
    assert len(times) >= 9
    assert all(f"{value:.3g}" in page for value in times)


def test_the_readme_is_short_and_its_table_has_a_link_for_each_yes():
    for name in ("README.md", "README.zh-CN.md"):
        text = (ROOT / name).read_text("utf-8")
        assert len(text.splitlines()) <= 90 and not re.search(r"\| (yes|是) \|", text)


def test_long_pages_have_a_table_of_contents():
    # The theme makes one of the headings where there are several; two screens show about 60 lines of 160 characters.
    for page in (*DOCS.glob("*.md"), *DOCS.glob("zh/*.md")):
        text = page.read_text("utf-8")
        lines = sum(1 + len(line) // 160 for line in text.splitlines())
        assert lines <= 60 or len(re.findall(r"^## ", text, flags=re.MULTILINE)) > 1, f"{page.name}: {lines} lines"


def test_links_of_the_readme_and_the_pages_lead_somewhere():
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"


# The notebooks run, and their stored outputs are what their cells print and draw today.

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


def words(text):
    # The text without its numbers, which depend on the machine.
    return re.sub(r"\s+", " ", re.sub(r"-?\d+(\.\d+)?", "#", text)).strip()


# The others train and export as the examples do, which run too.
@pytest.mark.parametrize("path", further(NOTEBOOKS, NOTEBOOKS[2:]), ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_outputs_are_todays(path, tmp_path, monkeypatch):
    # In order, in one namespace and an empty folder, without a Jupyter server, which the tests do not need.
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
