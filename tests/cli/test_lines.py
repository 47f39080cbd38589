"""Progress as lines: what is written, and that silence does not last."""

import time

import pytest

from compress.cli.lines import LineProgress


def label(fields):
    return f"loss {fields['loss']:.2f}" if fields else ""


@pytest.fixture
def lines():
    return []


def texts(lines):
    return [line.split(" ", 1)[1] for line in lines]


def test_a_phase_has_a_line_at_its_beginning_and_its_end(lines):
    with LineProgress(lines.append, label) as progress:
        progress.start("calibrate", 2)
        progress.advance("calibrate", loss=0.5)
        progress.advance("calibrate")
        progress.note("train: epoch 1")
        progress.start("adaround", 0)
    assert texts(lines) == [
        "calibrate: 0 of 2",
        "calibrate: 2 of 2 after 0 s, loss 0.50",
        "train: epoch 1",
        "adaround: begins",
        "adaround: 0 after 0 s",
    ]


def test_an_error_leaves_an_open_phase_without_an_end(lines):
    with pytest.raises(ValueError), LineProgress(lines.append, label) as progress:
        progress.start("train", 5)
        raise ValueError
    assert texts(lines) == ["train: 0 of 5"]


def test_long_work_is_not_silent(lines):
    with LineProgress(lines.append, label, every=0.05) as progress:
        progress.start("export", 3)
        waits_until = time.monotonic() + 10
        while len(lines) < 3 and time.monotonic() < waits_until:
            time.sleep(0.01)
    assert len(lines) >= 4 and texts(lines)[1].startswith("export: 0 of 3 after")
