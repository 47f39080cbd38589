"""Nested phases as one share."""

from hypothesis import given
from hypothesis import strategies as st

from compress.engines.tensorrt.builder import UNITS, BuildProgress, PhaseMeter


def test_a_phase_fills_a_part_of_the_step_that_it_runs_in():
    meter = PhaseMeter()
    meter.start("all", None, 4)
    meter.step("all", 0)
    assert meter.share() == 1 / 4
    meter.start("inner", "all", 2)
    meter.step("inner", 0)
    assert meter.share() == 1 / 4 + 1 / 8
    meter.start("innermost", "inner", 5)
    meter.step("innermost", 1)
    assert abs(meter.share() - (1 / 4 + (1 / 2 + 2 / 5 / 2) / 4)) < 1e-12
    for name in ("innermost", "inner", "all"):
        meter.finish(name)
    assert meter.share() == 1


def test_a_phase_inside_itself_is_no_endless_loop():
    meter = PhaseMeter()
    meter.start("a", None, 2)
    meter.start("b", "a", 2)
    meter.start("a", "b", 2)
    meter.step("a", 0)
    assert meter.share() == 1 / 2


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd"), st.integers(0, 5)), max_size=30))
def test_the_share_never_falls_nor_passes_one(events):
    meter, before = PhaseMeter(), 0.0
    meter.start("a", None, 3)
    for name, parent, number in events:
        if number == 5:
            meter.finish(name)
        elif number % 2 and name != "a":
            meter.start(name, parent, number)
        else:
            meter.step(name, number)
        assert before <= meter.share() <= 1
        before = meter.share()


def test_the_bar_moves_in_whole_units_and_ends_full_only_where_the_build_succeeds():
    class Recorder:
        def __init__(self):
            self.units, self.ended = 0, False

        def start(self, task, total, *, done=0):
            assert total == UNITS

        def advance(self, task, amount=1, **fields):
            self.units += amount

        def finish(self, task):
            self.ended = True

    for whole, expected in ((True, UNITS), (False, 50)):
        listener = Recorder()
        bar = BuildProgress(listener, "build")
        bar.meter.start("all", None, 2)
        bar.meter.step("all", 0)
        bar.update()
        bar.update()
        bar.finish(whole=whole)
        assert (listener.units, listener.ended) == (expected, True)
