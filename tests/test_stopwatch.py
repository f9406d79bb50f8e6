"""Times by a clock that the test turns."""

import pytest

from svgen.stopwatch import LEAST_ROUNDS, MOST_ROUNDS, Stopwatch, ratio, rounds_within, summary


class Clock:
    """Time passes only when something is done."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def work(self, seconds):
        self.now += seconds


def test_preparing_is_not_timed_and_the_first_round_does_not_count():
    clock, order = Clock(), []
    costs = {"dense": iter([50.0, 4.0, 5.0, 9.0]), "sparse": iter([50.0, 2.0, 2.0, 3.0])}

    def variant(name):
        def prepare():
            clock.work(1.0)

            def ready():
                order.append(name)
                clock.work(next(costs[name]))

            return ready

        return prepare

    watch = Stopwatch(0.0, clock=clock)
    watch.repeat({name: variant(name) for name in costs}, 1.0)
    assert order == ["dense", "sparse"] * 4
    assert watch.seconds == {"dense": [4.0, 5.0, 9.0], "sparse": [2.0, 2.0, 3.0]}


def test_rounds_fill_a_share_of_the_time_left():
    clock = Clock()
    watch = Stopwatch(100.0, clock=clock)
    clock.work(20.0)
    watch.repeat({"one": lambda: lambda: clock.work(2.0)}, 0.25)  # 20 s: a warm one, then nine
    assert len(watch.seconds["one"]) == 9
    assert watch.left_s == 60.0


@pytest.mark.parametrize(
    ("left", "one", "done", "more"),
    [
        (0.0, 1.0, 1, LEAST_ROUNDS - 1),
        (-5.0, 1.0, 0, LEAST_ROUNDS),
        (10.0, 3.0, 1, 3),
        (1e9, 1.0, 1, MOST_ROUNDS - 1),
        (1.0, 0.0, 1, MOST_ROUNDS - 1),
    ],
)
def test_rounds_keep_within_their_bounds(left, one, done, more):
    assert rounds_within(left, one, done=done) == more


def test_compiling_is_apart_and_says_whether_it_was_cached():
    clock, hits = Clock(), [0]
    watch = Stopwatch(10.0, clock=clock, hits=lambda: hits[0])

    def compile_it(seconds, found):
        clock.work(seconds)
        hits[0] += found
        return "program"

    assert watch.compile("cold", lambda: compile_it(7.0, 0)) == "program"
    watch.compile("warm", lambda: compile_it(0.5, 1))
    assert (watch.compiling["cold"].seconds, watch.compiling["cold"].cached) == (7.0, False)
    assert (watch.compiling["warm"].seconds, watch.compiling["warm"].cached) == (0.5, True)
    assert watch.seconds == {}


def test_summary_is_the_median_with_its_spread():
    wanted = {"median_ms": 3000.0, "least_ms": 1000.0, "most_ms": 9000.0, "n": 4}
    assert summary([9.0, 1.0, 2.0, 4.0]) == wanted


def test_ratio_is_taken_round_by_round():
    """The machine became twice as slow; the ratio of medians, 3 / 4, would say something else."""
    found = ratio([1.0, 3.0, 4.0], [2.0, 4.0, 8.0])
    assert found == {"median": 0.5, "least": 0.5, "most": 0.75, "n": 3}
    assert ratio([1.0], [0.0]) == {}
