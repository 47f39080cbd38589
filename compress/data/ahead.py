"""Batches made ahead of their use by a thread, on a GPU on a stream of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch

from compress.data.base import Batch

DEPTH = 2
"""Most finished batches that wait."""

_POLL_S = 0.1


def ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield `batches` in order, each made by a thread while those before it are used.

    The thread ends with the iterator; errors of `batches` are raised here.
    """
    ready: queue.Queue[Any] = queue.Queue(DEPTH)
    stop = threading.Event()
    thread = threading.Thread(target=_make, args=(batches, device, ready, stop), name="compress-pictures", daemon=True)
    thread.start()
    try:
        while (found := ready.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            batch, made = found
            if made is not None:
                current = torch.cuda.current_stream(device)
                current.wait_event(made)
                for tensor in batch:
                    tensor.record_stream(current)
            yield batch
    finally:
        stop.set()
        thread.join()


def _make(batches: Iterator[Batch], device: torch.device, ready: queue.Queue[Any], stop: threading.Event) -> None:
    last: Any = None
    try:
        with ExitStack() as contexts:
            side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
            if side is not None:
                contexts.enter_context(torch.cuda.device(device))
                contexts.enter_context(torch.cuda.stream(side))
            for batch in batches:
                _put(ready, (batch, None if side is None else side.record_event()), stop)
                if stop.is_set():
                    return
    except BaseException as error:
        last = error
    _put(ready, last, stop)


def _put(ready: queue.Queue[Any], found: Any, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            return ready.put(found, timeout=_POLL_S)
        except queue.Full:
            continue
