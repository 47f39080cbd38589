"""A disk that is full, and a folder that may not be written to, for real: by the system's limits and permissions."""

import os
import resource
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from compress.pipeline.run import open_run
from compress.recipe.tree import parse_recipe

NOBODY = 65534


@contextmanager
def room_for(size):
    # A disk on which no file can have more bytes.
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


@contextmanager
def read_only():
    # A folder with the file `older` and the run `run`, in which nothing can be written.
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / "folder"
        open_run(folder / "run", parse_recipe({}), "ptq", resume=False).release()
        (folder / "older").write_text("older")
        Path(base).chmod(0o755)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = contents(folder)
        try:
            with another_user():
                yield folder
            assert contents(folder) == before
        finally:
            for path in (folder, folder / "run"):
                path.chmod(0o755)


@contextmanager
def another_user():
    # Be one while the block runs, because root may write everywhere; nothing changes for who is not root.
    if os.geteuid():
        yield
        return
    try:
        os.seteuid(NOBODY)
    except OSError as error:
        pytest.skip(f"no other user to be: {error}")
    try:
        yield
    finally:
        os.seteuid(0)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
