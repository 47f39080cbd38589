# The structure of the package, read from its source: imports, sizes of files and functions, and a few house rules.
#
# An import inside a function needs a comment, on its line or on the line above, that begins with one of two words and
# says the reason: `# optional: ...` for a dependency that may be missing, `# lazy: ...` for one that most uses can do
# without. Modules of compress itself are imported lazily by the command line alone.

import ast
import graphlib
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "compress"
# From the ground up; a part imports from lower layers only.
LAYERS = [
    {"errors", "variants", "version"},
    {"support"},
    {"files"},
    {"kernels"},
    {"graph"},
    {"onnx_graph"},
    {"quantization", "sparsity", "receptive", "roofline_model", "data", "detection"},
    {"models", "qat_fusion"},
    {"tasks"},
    {"export"},
    {"engines"},
    {"audit", "onnx_ptq"},
    {"measure"},
    {"training"},
    {"search"},
    {"recipe"},
    {"records"},
    {"plots"},
    {"report"},
    {"pipeline"},
    {"cli"},
    {"__init__"},
    {"__main__"},
]
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}
LONGEST_FUNCTION = 60
# Parts that may import parts of compress inside functions.
LAZY = {"cli", "__init__"}


@dataclass(frozen=True)
class Import:
    # One import statement.
    #
    # modules: what it names; `from a import b` names a.b where that is a module, else a.
    # line: its number.
    # inside: True inside a function.
    # reason: True if a comment gives a reason for it.
    modules: tuple[str, ...]
    line: int
    inside: bool
    reason: str


# Every module of the package by name.
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
SOURCES = [path for folder in ("compress", "analysis", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(node: ast.AST, inside: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, inside
        yield from statements(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))


@cache
def imports(module: str) -> tuple[Import, ...]:
    lines = FILES[module].read_text().splitlines()
    found = []
    for node, inside in statements(parsed(FILES[module])):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert not node.level, f"{module}:{node.lineno} imports relatively"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in FILES else str(node.module) for name in inner]
        around = lines[node.lineno - 2 : node.end_lineno]
        comments = [line.partition("#")[2].strip() for line in around if "#" in line]
        reason = next((c for c in comments if re.match(r"(optional|lazy): .{10}", c)), "")
        found.append(Import(tuple(dict.fromkeys(names)), node.lineno, inside, reason))
    return tuple(found)


def edges(module: str) -> set[str]:
    return {name for item in imports(module) for name in item.modules if name in FILES} - {module}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(parsed(path)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)))


def test_no_circle_between_files():
    graphlib.TopologicalSorter({module: edges(module) for module in FILES}).prepare()


def test_imports_point_down():
    assert {part(module) for module in FILES} == set(RANK), "each part is in one layer"
    upward = [
        f"{module} imports {other}, which is not in a lower layer"
        for module in FILES
        for other in edges(module)
        if RANK[part(other)] >= RANK[part(module)] and part(other) not in {part(module), "version"}
    ]
    assert not upward, "\n".join(upward)


def test_imports_inside_functions_have_a_reason():
    wrong = []
    for module in FILES:
        for item in imports(module):
            own = any(name in FILES for name in item.modules)
            where = f"{FILES[module].relative_to(ROOT)}:{item.line}"
            if item.inside and not item.reason:
                wrong.append(f"{where}: an import in a function without `# optional: ...` or `# lazy: ...`")
            elif item.inside and own and part(module) not in LAZY and not item.reason.startswith("optional"):
                wrong.append(f"{where}: lazy, of compress")
    assert not wrong, "\n".join(wrong)


def test_kernels_compute_on_tensors_alone():
    for module in [module for module in FILES if part(module) == "kernels"]:
        names = {name for item in imports(module) for name in item.modules}
        used = {ast.unparse(node) for node in ast.walk(parsed(FILES[module])) if isinstance(node, ast.Attribute)}
        assert not {name for name in names if name.startswith(("torch.fx", "torch.nn.modules"))}, module
        assert not used & {"nn.Module", "torch.nn.Module", "torch.fx", "fx.Node", "fx.Graph", "fx.GraphModule"}, module


def test_functions_are_small():
    large = []
    for path in SOURCES:
        where, lines = path.relative_to(ROOT), path.read_text().splitlines()
        for function in functions(path):
            own = lines[function.lineno - 1 : function.end_lineno]
            # Each parameter of a kernel, and each that it passes on, is a line of its own, which does not count.
            kernel = any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list)
            length = sum(not (kernel and re.fullmatch(r" +[\w.]+(: tl.constexpr)?,", line)) for line in own)
            if length > LONGEST_FUNCTION:
                large.append(f"{where}: {function.name} has {length} lines: split it at about {LONGEST_FUNCTION}")
    assert not large, "\n".join(large)


def test_every_package_says_what_it_is_for():
    for folder in sorted({path.parent for path in PACKAGE.rglob("__init__.py")} - {PACKAGE}):
        text = (folder / "README.md").read_text()
        assert text.startswith("# "), f"{folder}: a title"
        assert 10 <= len(text.splitlines()) <= 30, (
            f"{folder}: ten to thirty lines: purpose, entry point, what may not be put here"
        )


def test_packages_ship(tmp_path):
    # The wheel holds every module and data file of the package, and the recipes.
    for folder in ("compress", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path)
    command = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
    built = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / built.stdout.split()[-1]) as wheel:
        shipped = set(wheel.namelist())
    files = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    files = {name for name in files if not name.endswith("README.md")}
    recipes = {f"compress/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert not (files | recipes) - shipped


def test_nothing_prints_below_the_command_line():
    for module, path in FILES.items():
        if part(module) == "cli":
            continue
        calls = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.Call)]
        assert not [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"], path


def test_user_input_is_not_asserted_on():
    # Asserts narrow types for the type checker; none carries a message for a user.
    for path in FILES.values():
        for node in ast.walk(parsed(path)):
            assert not (isinstance(node, ast.Assert) and node.msg is not None), f"{path}:{node.lineno}"
