"""How planning tells how far it is: a listener for the current context, or nobody.

Solvers report what they have; the stages around them say what begins and what is done.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search has come."""

    solver: str  # "" where it is not a solver that reports
    elapsed_s: float
    cost: int | None = None  # of the best schedule within the budget so far
    bound: float | None = None  # proven lower bound so far
    text: str = ""
    is_milestone: bool = False  # to be said also where most reports are left out


Listener = Callable[[Progress], None]
# A context variable and not an argument: progress crosses solvers that call solvers, and two plans
# that are made in two threads at once each hear their own.
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listen(callback: Listener) -> Iterator[None]:
    """Inside, `callback` hears every report of the solvers that run in this context."""
    token = _listener.set(callback)
    try:
        yield
    finally:
        _listener.reset(token)


def current_listener() -> Listener | None:
    """Who hears the reports of this context."""
    return _listener.get()


def report(progress: Progress) -> None:
    """For solvers: tells the listener, if there is one."""
    callback = _listener.get()
    if callback is not None:
        callback(progress)


def milestone(text: str) -> None:
    """For stages: tells what begins or is done."""
    report(Progress("", 0.0, text=text, is_milestone=True))
