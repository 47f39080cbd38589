"""Triton's interpreter, for the tests of kernels on machines without a GPU.

Triton decides at import whether it interprets, so checks run in processes of their own. These are forks of one that has
imported everything and computed nothing, which pytest starts at the first check.
"""

import functools
import importlib
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import pytest

IMPORTED = ("torchvision", "compress.qat_fusion", "compress.quantization.ptq.quantize", "tests.networks")


@functools.cache
def _server():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", __name__],
        env=environment,
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def interpreted(module):
    # Run its `main` under the interpreter; what it raises is said here.
    pytest.importorskip("triton", minversion="3.7", reason="older interpreters cannot loop with NumPy 2.4")
    server = _server()
    with tempfile.NamedTemporaryFile("r") as said:
        print(module, said.name, file=server.stdin, flush=True)
        assert server.stdout.readline().strip() == "0", said.read()[-3000:]


def main():
    _patch_once()
    for module in IMPORTED:
        importlib.import_module(module)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _check(*line.split())
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _check(module, said):
    status = 1
    try:
        for stream in (1, 2):
            os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND), stream)
        importlib.import_module(module).main()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _patch_once():
    # Let the interpreter change Triton's language once for a function, not in each call, a third of the time.
    from triton.runtime import interpreter

    # Without its look for overflow in each addition, a third of the time, which it reports to nobody unless it debugs.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    if hasattr(interpreter, "_LangPatchScope"):
        patch = functools.cache(interpreter._patch_lang)
        interpreter._patch_lang = lambda fn: (patch(fn), interpreter._LangPatchScope())[1]  # nothing to restore


if __name__ == "__main__":
    main()
