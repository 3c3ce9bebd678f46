"""How a running solver tells what it has: a listener for the current context, or nobody."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a search, as a listener hears of it."""

    solver: str
    elapsed_s: float
    cost: int | None = None  # of the best schedule within the budget so far
    bound: float | None = None  # proven lower bound so far
    text: str = ""


# A context variable and not an argument: progress crosses solvers that call solvers, and two plans
# that are made in two threads at once each hear their own.
_listener: ContextVar[Callable[[Progress], None] | None] = ContextVar("listener", default=None)


@contextmanager
def listen(callback: Callable[[Progress], None]) -> Iterator[None]:
    """Inside, `callback` hears every report of the solvers that run in this context."""
    token = _listener.set(callback)
    try:
        yield
    finally:
        _listener.reset(token)


def report(progress: Progress) -> None:
    """For solvers: tells the listener, if there is one."""
    callback = _listener.get()
    if callback is not None:
        callback(progress)
