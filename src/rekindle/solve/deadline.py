"""A deadline that is asked for the seconds left."""

import time


class OutOfTime(Exception):
    """The time limit was reached inside a step that has nothing to show yet."""


class TimeLeft:
    """Starts when it is made; calling it gives the seconds left, never below 0."""

    # `time.monotonic`, since the time of day is set back and forth while a search runs. It is
    # looked up at each reading and not bound once, so that a test can put its own clock there.
    __slots__ = ("_end", "_start")

    def __init__(self, time_limit_s: float) -> None:
        self._start = time.monotonic()
        self._end = self._start + time_limit_s

    def __call__(self) -> float:
        return max(0.0, self._end - time.monotonic())

    def check(self) -> None:
        # For steps that are long and cannot return half of what they build: a model of millions of
        # entries is given up in the middle, and the caller keeps the best schedule so far.
        if self() <= 0:
            raise OutOfTime

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start
