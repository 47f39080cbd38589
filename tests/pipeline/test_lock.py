"""Two hosts on one folder, a lock that a dead one has left, and file systems without locks."""

import errno
import fcntl
import os
import socket

import pytest

from compress.errors import RunError
from compress.pipeline.folder import open_run
from compress.pipeline.lock import lock_folder
from compress.recipe.tree import parse_recipe

RECIPE = parse_recipe({})


@pytest.fixture
def without_locks(monkeypatch):
    """A file system that has none, as some network file systems answer."""

    def none(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)


def opened(path, **options):
    return open_run(path, RECIPE, "ptq", resume=True, **options)


def test_a_folder_that_another_host_holds_names_the_host_and_the_way_out(tmp_path):
    opened(tmp_path).release()
    with (tmp_path / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("process 7 on elsewhere")
        held.flush()
        with pytest.raises(RunError, match=r"at work in .*\(process 7 on elsewhere\).*host is dead.*remove .*\.lock "):
            opened(tmp_path)
        (tmp_path / ".lock").unlink()
        opened(tmp_path).release()


def test_without_locks_a_file_keeps_the_others_out(tmp_path, without_locks):
    first = opened(tmp_path)
    assert (tmp_path / ".owner").read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(RunError, match=rf"another process is at work in .*\(process {os.getpid()} on "):
        opened(tmp_path)
    first.release()
    first.release()
    assert not (tmp_path / ".owner").exists()
    opened(tmp_path).release()


def test_a_lock_that_nobody_refers_to_is_released(tmp_path, without_locks):
    lock = lock_folder(tmp_path)
    assert (tmp_path / ".owner").exists()
    del lock
    assert not (tmp_path / ".owner").exists()


@pytest.mark.parametrize(
    ("holder", "message"),
    [
        (f"process {2**22 + 5} on {socket.gethostname()}", r"not there any more .*has left its lock.*remove .*\.owner"),
        ("process 7 on elsewhere", r"at work in .*\(process 7 on elsewhere\).*host is dead.*remove .*\.owner "),
        ("", r"another process is at work in [^(]*: wait"),
    ],
)
def test_a_lock_that_was_left_behind_is_taken_by_removing_it(tmp_path, without_locks, holder, message):
    opened(tmp_path).release()
    state = (tmp_path / "state.json").read_bytes() if (tmp_path / "state.json").exists() else None
    (tmp_path / ".owner").write_text(holder)
    with pytest.raises(RunError, match=message):
        opened(tmp_path)
    assert (tmp_path / ".owner").read_text() == holder
    assert state is None or (tmp_path / "state.json").read_bytes() == state
    (tmp_path / ".owner").unlink()
    opened(tmp_path).release()


def test_a_forked_process_does_not_release_the_lock(tmp_path, without_locks):
    lock = lock_folder(tmp_path)
    child = os.fork()
    if not child:
        lock.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / ".owner").exists()
    lock.close()
