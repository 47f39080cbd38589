"""What a terminal of 80 columns shows: names and times in one piece, sentences as lines."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from compress.cli import console, doctor


@pytest.fixture
def shown(monkeypatch):
    """What is printed on such a terminal."""
    file = io.StringIO()
    terminal = Console(file=file, width=80, force_terminal=True, color_system=None, markup=False, emoji=False)
    for module in (console, doctor):
        monkeypatch.setattr(module, "OUT", terminal)
    return file


def test_doctor_breaks_no_name(shown):
    doctor.doctor()
    lines = shown.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    text = " ".join(" ".join(lines).split())
    assert all(name in text for name in ("onnxruntime", "tensorrt-lean", "CPUExecutionProvider"))
    assert "cuda: " in text and text.count("What to do: ") >= 3


def test_sentences_of_a_wide_table_are_lines_below_it(shown):
    reason = "a convolution computes in INT8 when its input and weight are quantized"
    rows = [(f"layer{i}.0.downsample.0", f"layer{i}.conv1", "int8", "conv input", reason) for i in range(6)]
    console.print_table(
        "placement", ("tensor", "asked by", "decision", "rule", "reason"), [*rows, ("x", "", "", "", "")]
    )
    lines = shown.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    text = " ".join(" ".join(lines).split())
    assert all(row[0] in text for row in rows)
    assert text.count(reason) == 1 and "layer2.0.downsample.0 and 3 more: a convolution" in text


def test_numbers_that_do_not_fit_are_left_out_and_named(shown):
    """The table of a run: engine, batch and variant were squeezed to nothing."""
    titles = ("engine", "batch", "variant", "top-1", "p50 ms", "speed-up", "p99 ms", "images/s", "file", "of float")
    rows = [("openvino (bf16)", "1", "ptq", "98.66", "0.226", "2.55x", "0.31", "4400", "11.2 MB", "0.251")]
    console.print_table("run", titles, rows, numbers=titles[3:])
    lines = shown.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    text = shown.getvalue()
    assert all(cell in text for cell in rows[0][:6]) and lines[-1].startswith("not shown in 80 columns: ")
    left = lines[-1].partition(": ")[2].split(", ")
    assert left == list(titles[-len(left) :]) and not any(title in text.splitlines()[2] for title in left)


def test_a_table_that_fits_is_a_table(shown):
    console.print_table("t", ("a", "b", "c"), [("x", "y", "z" * 50)])
    assert "│ x │ y │ " + "z" * 50 in shown.getvalue()


@pytest.mark.parametrize(("width", "times"), [(80, 1), (140, 2)])
def test_a_bar_shows_its_time_and_its_figures_whole(width, times):
    file = io.StringIO()
    terminal = Console(file=file, width=width, force_terminal=True, color_system=None)
    with Progress(*console.bar_columns(width), console=terminal, auto_refresh=False) as bars:
        listener = console.BarProgress(bars)
        listener.start("accuracy: torch (fake quantization)", 8)
        listener.start("train: evaluate", 63)
        listener.advance("train: evaluate", 21, loss=1.191, accuracy=0.615, images_per_s=640)
        bars.refresh()
    last = [line for line in file.getvalue().splitlines() if "21/63" in line][-1]
    assert "loss 1.191  accuracy 61.5%  images/s 640" in last
    assert last.count(":") == 1 + 2 * times and "…" not in last  # h:mm:ss, or -:--:--


def test_a_line_above_the_bars_breaks_between_words():
    file = io.StringIO()
    terminal = Console(file=file, width=80, force_terminal=True, color_system=None)
    said = "train: epoch 3 of 3, loss 0.1636, top-1 99.11 %, 25 images/s, 55 s, 1 % of it waiting for pictures"
    console.BarProgress(Progress(console=terminal)).note(said)
    lines = file.getvalue().splitlines()
    assert " ".join(line.rstrip() for line in lines) == said and all(len(line) <= 80 for line in lines)
