"""Engines and signals: a process that has freed OpenVINO's models still survives a signal with a handler."""

import ctypes
import subprocess
import sys

import pytest

from compress import build_engine
from tests.engines.models import classifier

PROGRAM = """
import signal, subprocess, sys
from compress.engines import build_engine

signal.signal(signal.SIGCHLD, lambda *_: None)
engines = [build_engine(sys.argv[1], "openvino") for _ in range(2)]
while engines:
    engines.pop(0)
subprocess.run(["true"], check=True)
print("alive")
"""


def signal_stack():
    """Return this thread's stack from sigaltstack(2) as bytes: pointer, flags and size."""
    stack = ctypes.create_string_buffer(24)
    ctypes.CDLL(None).sigaltstack(None, stack)
    return stack.raw


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="alternate signal stacks are looked at on Linux only")
def test_models_freed_in_the_order_of_their_making_leave_no_dead_stack(tmp_path):
    path = classifier(tmp_path / "m.onnx")
    before = signal_stack()
    engines = [build_engine(path, "openvino") for _ in range(2)]
    assert signal_stack() == before
    while engines:
        engines.pop(0)
        assert signal_stack() == before


def test_a_signal_after_that_kills_nobody(tmp_path):
    path = classifier(tmp_path / "m.onnx")
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "alive")
