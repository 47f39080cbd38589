"""The command line in this process."""

import signal
import sys
from types import SimpleNamespace

import pytest

from compress.cli import main


@pytest.fixture
def compress(monkeypatch, capsys):
    """What a process of `python -m compress` does, without one."""

    def call(*arguments, cwd=None):
        handler = signal.getsignal(signal.SIGINT)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", ["compress", *arguments])
            if cwd is not None:
                patched.chdir(cwd)
            with pytest.raises(SystemExit) as ended:
                main()
        signal.signal(signal.SIGINT, handler)
        told = capsys.readouterr()
        return SimpleNamespace(returncode=ended.value.code or 0, stdout=told.out, stderr=told.err)

    return call
