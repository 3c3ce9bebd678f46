"""Time limits and growth without durations, which differ between runs on a busy machine.

`JumpingClock` stands in for `time.monotonic`: at one of its readings it jumps past the time limit.
What the code does after that is counted, so that a test can say "past its limit a solver winds up
in so many function calls, and gives no native search any time" and be right on any machine.

`at_most_calls` bounds the work of a piece of code, and `count_lines` counts the lines that it
executes: at two sizes, its growth.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from rekindle import _native

# What a solver may do between two readings of the clock and after the last one within the limit, in
# function calls per op of its problem: well below a second for a few hundred ops. `hiremate` comes
# to 1,700, `twremat` to 1,900 (a tree decomposition), the others to less than 450.
CALLS_PER_OP = 4000
OVERRUN_S = 1.0  # at most, beyond the limit, for the native steps that are not to be cut short

# Where each native search takes its time limit, by position; keyword arguments are looked up too.
TIME_LIMITS = {
    "anneal": 6,
    "bound_at": 3,
    "drop_needless_runs": 3,
    "evict": 4,
    "fill_up": 5,
    "large_neighbourhood_search": 5,
    "search_policy": 7,
    "search_save_sets": 7,
    "smallest_order": 5,
    "solve_chain": 9,
    "solve_exact": 2,
}


class JumpingClock:
    """Real time until reading number `jump_at`, which is the first one past the limit (or sooner,
    if real time is up before). Use it as a context; the limit counts from its start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit_s: float, jump_at: int) -> None:
        self.limit_s, self.jump_at = limit_s, jump_at
        self.num_readings = 0
        self.expired = False
        self.num_calls_after = 0  # function calls, Python's and C's, in threads that read the clock
        self.longest_gap = 0  # function calls of the main thread between two of its readings
        self.num_readings_after = 0
        self.most_overrun_s = 0.0  # of what a native search was given: beyond the limit
        self._monkeypatch = monkeypatch
        self._real = time.monotonic
        self._ahead_s = 0.0
        self._gap = 0
        self._main = threading.get_ident()

    def __enter__(self) -> "JumpingClock":
        self._patch = self._monkeypatch.context()
        patch = self._patch.__enter__()
        self._end = self._real() + self.limit_s
        patch.setattr(time, "monotonic", self)
        for name, position in TIME_LIMITS.items():
            patch.setattr(_native, name, self._watched(getattr(_native, name), position))
        sys.setprofile(self._count)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        self._end_gap()
        self._patch.__exit__(*error)

    def __call__(self) -> float:
        self.num_readings += 1
        self.num_readings_after += self.expired
        if self.num_readings == self.jump_at:
            self._ahead_s = self.limit_s
        now = self._real() + self._ahead_s
        self.expired = self.expired or now >= self._end
        if threading.get_ident() == self._main:
            self._end_gap()
        elif sys.getprofile() is None:
            sys.setprofile(self._count)
        return now

    def assert_kept(self, num_ops: int) -> None:
        """The limit is asked for often enough, nothing long is begun after it, and no native search
        is given more time than is left."""
        assert self.longest_gap <= CALLS_PER_OP * num_ops
        assert self.num_calls_after <= CALLS_PER_OP * num_ops
        assert self.most_overrun_s <= OVERRUN_S

    def _end_gap(self) -> None:
        self.longest_gap, self._gap = max(self.longest_gap, self._gap), 0

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            self.num_calls_after += self.expired
            self._gap += threading.get_ident() == self._main

    def _watched(self, function: Callable[..., Any], position: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given_s = kwargs["time_limit_s"] if "time_limit_s" in kwargs else args[position]
            left_s = max(0.0, self._end - self._real() - self._ahead_s)
            self.most_overrun_s = max(self.most_overrun_s, given_s - left_s)
            return function(*args, **kwargs)

        return call


@contextlib.contextmanager
def at_most_calls(most: int) -> Iterator[None]:
    """Fails where what runs inside makes more function calls, Python's and C's, in this thread."""
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert num_calls <= most


def count_lines(function: Callable[[], object]) -> int:
    """The lines of Python that a call executes, in this thread."""
    num_lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal num_lines
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return num_lines
