import json
import signal
import sys
from typing import NamedTuple

import pytest

from compress.cli import main
from tests.figures import whole_figures as whole_figures


class Ended(NamedTuple):
    # How a command ended; each property asserts that it ended so.
    returncode: int
    stdout: str
    stderr: str

    @property
    def shown(self):
        assert self.returncode == 0, self.stderr
        return self.stdout

    @property
    def document(self):
        return json.loads(self.shown)

    @property
    def refused(self):
        assert self.returncode == 2 and "Traceback" not in self.stderr
        return " ".join(self.stderr.split())


@pytest.fixture
def compress(monkeypatch, capsys):
    # The result of `python -m compress`, without a process.
    def call(*arguments, cwd=None):
        handler = signal.getsignal(signal.SIGINT)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "argv", ["compress", *map(str, arguments)])
            if cwd is not None:
                patched.chdir(cwd)
            with pytest.raises(SystemExit) as ended:
                main()
        signal.signal(signal.SIGINT, handler)
        return Ended(ended.value.code or 0, *capsys.readouterr())

    return call
