"""What a user sees while a plan is made: one live line on a terminal, and lines for a log.

`rekindle.plan` logs at INFO and shows a live line where stderr is a terminal; the command line
shows the same line, or prints lines where stderr is a file. All hear the same reports
(`solve.progress`).
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from rekindle.core import Problem
from rekindle.report import format
from rekindle.solve.progress import Listener, Progress, current_listener, listen

LOG_INTERVAL_S = 5.0  # between two lines about one search, in the log of a training run
PLAIN_INTERVAL_S = 1.0  # on the command line, where somebody waits
STEP = Problem((), ())  # the problem does not exist yet; its units are ns and bytes, the defaults
log = logging.getLogger("rekindle")


@contextmanager
def planning_shown() -> Iterator[None]:
    """Inside, planning in Python is logged and, on a terminal, shown. Who listens already (the
    command line, or an outer plan) goes on hearing all of it and shows it in its own way."""
    outer = current_listener()
    heard = [] if outer is None else [outer]
    if log.isEnabledFor(logging.INFO):
        heard.append(lines(log.info, STEP, LOG_INTERVAL_S))
    with _live_line() if outer is None and is_for_a_person() else nullcontext() as status:
        if status is not None:
            heard.append(_on(status, STEP))
        if not heard:
            yield
            return
        with listen(lambda progress: _tell_all(heard, progress)):
            yield


@contextmanager
def shown_on_stderr(problem: Problem = STEP, *, quiet: bool = False) -> Iterator[None]:
    """The same for a command: a live line on a terminal, printed lines elsewhere."""
    if quiet:
        yield
    elif sys.stderr.isatty():
        with _live_line() as status, listen(_on(status, problem)):
            yield
    else:
        with listen(lines(_print, problem, PLAIN_INTERVAL_S)):
            yield


def is_for_a_person() -> bool:
    """Whether stderr is a terminal that somebody looks at: no test, and one rank of several."""
    if "PYTEST_VERSION" in os.environ or os.environ.get("RANK", "0") != "0":
        return False
    return sys.stderr is not None and sys.stderr.isatty()


def lines(say: Callable[[str], Any], problem: Problem, interval_s: float) -> Listener:
    """Says milestones, and of what lies between them one line per interval."""
    last_s = time.monotonic()

    def hear(progress: Progress) -> None:
        nonlocal last_s
        if progress.is_milestone or time.monotonic() - last_s >= interval_s:
            last_s = time.monotonic()
            say(line(problem, progress))

    return hear


def line(problem: Problem, progress: Progress) -> str:
    """One report as text."""
    parts = [f"{progress.solver} {progress.elapsed_s:.1f} s"] if progress.solver else []
    if progress.cost is not None:
        parts.append(f"cost {format.cost(problem, progress.cost)}")
    if progress.bound is not None:
        parts.append(f"bound {format.cost(problem, int(progress.bound))}")
        if progress.cost is not None and progress.bound > 0:
            parts.append(f"gap {format.percent(max(0.0, progress.cost / progress.bound - 1))}")
    if progress.text:
        parts.append(progress.text)
    return ", ".join(parts)


def _tell_all(heard: list[Listener], progress: Progress) -> None:
    for hear in heard:
        hear(progress)


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _live_line() -> Iterator[Any]:
    # Imported here: rich takes longer to load than a small problem to solve.
    from rich.console import Console

    with Console(stderr=True).status("planning") as status:
        yield status


def _on(status: Any, problem: Problem) -> Listener:
    from rich.markup import escape

    return lambda progress: status.update(escape(f"rekindle: {line(problem, progress)}"))
