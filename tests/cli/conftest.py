import signal
import sys
from types import SimpleNamespace

import pytest

from compress.cli import main
from tests.figures import whole_figures as whole_figures


@pytest.fixture
def compress(monkeypatch, capsys):
    # The result of `python -m compress`, without a process.
    def call(*arguments, cwd=None):
        handler = signal.getsignal(signal.SIGINT)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", ["compress", *arguments])
            if cwd is not None:
                patched.chdir(cwd)
            with pytest.raises(SystemExit) as ended:
                main()
        signal.signal(signal.SIGINT, handler)
        captured = capsys.readouterr()
        return SimpleNamespace(returncode=ended.value.code or 0, stdout=captured.out, stderr=captured.err)

    return call
