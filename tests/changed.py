"""Prints the tests of what changed since a branch point, for `make check`: of the same name, or of the same room."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def tests_of(changed: str) -> list[str]:
    # Return the tests of a changed file of the repository; none where it is no Python file or has gone.
    path = Path(changed)
    if path.suffix != ".py" or not (ROOT / path).exists():
        return []
    if path.parts[0] == "tests":
        return [changed] if path.name.startswith("test_") else []
    if path.parts[0] == "analysis":
        return ["tests/analysis/test_studies.py"]
    if path.parts[0] != "compress":
        return []
    room = Path("tests", *path.parts[1:-1])
    own = room / f"test_{path.stem}.py"
    while not (ROOT / own).is_file() and room != Path("tests"):
        named = sorted((ROOT / room).glob(f"test_*{path.stem}*.py"))
        own = named[0].relative_to(ROOT) if named else (room if (ROOT / room).is_dir() else own)
        if (ROOT / own).exists():
            return [str(own)]
        room = room.parent
    return [str(own)] if (ROOT / own).is_file() else []


def main(base: str) -> None:
    git = ["git", "-C", str(ROOT)]
    asked = [
        ["diff", "--name-only", f"{base}...HEAD"],
        ["diff", "--name-only", "HEAD"],
        ["ls-files", "-o", "--exclude-standard"],
    ]
    changed = [
        line
        for words in asked
        for line in subprocess.run([*git, *words], capture_output=True, text=True).stdout.split("\n")
    ]
    found = {test for name in changed if name for test in tests_of(name)} | {"tests/test_architecture.py"}
    print("\n".join(sorted(found)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "main")
