"""Items of a measurement, each in its own process: what dies, hangs or raises is a row with its reason."""

import faulthandler
import os
import signal
import time
from collections import deque

from analysis.sparse_kernels.isolated import run_isolated


def work(item):
    if item == "dies":
        faulthandler.disable()  # its trace would stand in the log of the tests as if one had failed
        os.kill(os.getpid(), signal.SIGSEGV)
    if item == "leaves":
        os._exit(3)
    if item == "hangs":
        time.sleep(60)
    if item == "raises":
        raise RuntimeError("an illegal\nmemory access")
    return {"pid": os.getpid()}


def run(items, **options):
    options = {"prepare": lambda: None, "limit_s": 0.5, "budget_s": 30.0} | options
    return dict(run_isolated(deque(items), options.pop("work", work), **options))


def test_bad_items_are_rows_and_do_not_touch_the_others():
    rows = run(["dies", 1, "hangs", 2, "raises", 3, "leaves", 4])
    assert rows["dies"] == {"failed": ["the process died with signal SIGSEGV"]}
    assert rows["leaves"] == {"failed": ["the process died with exit status 3"]}
    assert rows["raises"] == {"failed": ["RuntimeError: an illegal memory access"]}
    assert rows["hangs"]["failed"][0].startswith("stopped after")
    assert len({rows[i]["pid"] for i in (1, 2, 3, 4)} - {os.getpid()}) == 4


def test_a_preparation_that_fails_is_a_row():
    def refuse():
        raise OSError("no device")

    assert run(["x"], prepare=refuse) == {"x": {"failed": ["OSError: no device"]}}


def test_work_takes_turns_and_preparation_does_not(tmp_path):
    def alone(item):
        (tmp_path / "taken").touch(exist_ok=False)  # fails where another one is at work
        time.sleep(0.02)
        (tmp_path / "taken").unlink()
        return {"done": item}

    rows = run(range(8), work=alone, workers=4, limit_s=20.0)
    assert rows == {i: {"done": i} for i in range(8)}


def test_items_may_be_added_and_the_budget_ends_them():
    queue, seen = deque(["first"]), []
    for item, row in run_isolated(queue, work, prepare=lambda: None, limit_s=5.0, budget_s=30.0):
        seen.append(item)
        if item == "first":
            queue.append("second")
        assert "pid" in row
    assert seen == ["first", "second"]
    assert run([1, 2], budget_s=-1.0) == {i: {"failed": ["not run: the -1 s for all items were over"]} for i in (1, 2)}
