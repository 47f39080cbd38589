"""Processes of their own, each a fork of one that has imported torch and compress and computed nothing.

A new Python takes seconds to import them, and a process that has run autograd, engines and compilers is no place to
fork from: after that, a child cannot train.
"""

import multiprocessing
import os
import socket

import torch

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torchvision", "compress.cli.run", "compress.search.search", "tests.pipeline.inject"])


def start(output, call, *arguments, **environment):
    # Begin `call(*arguments)`, a function of a module; what it says is written to the file `output`.
    process = CONTEXT.Process(target=_run, args=(str(output), environment, call, arguments), daemon=True)
    process.start()
    return process


def _run(output, environment, call, arguments):
    os.environ.update(environment)
    torch.set_num_threads(1)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    call(*arguments)


def two_places():
    # The environments of two processes that find each other, as torchrun makes them.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **common} for rank in range(2)]


def finish(output, *processes):
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes), output.read_text()[-3000:]
