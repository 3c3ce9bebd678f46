"""Progress of a running solver on stderr: one live line on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rekindle.cli import printing
from rekindle.core import Problem
from rekindle.solve import Progress, listen

PLAIN_INTERVAL_S = 1.0  # a log file should not fill up, and CI logs have no carriage return


@contextmanager
def show_progress(problem: Problem, *, quiet: bool = False) -> Iterator[None]:
    """Inside this context, solvers report their progress to the user."""
    if quiet:
        yield
    elif sys.stderr.isatty():
        with _live(problem):
            yield
    else:
        with _plain(problem):
            yield


@contextmanager
def _live(problem: Problem) -> Iterator[None]:
    # Imported here: rich takes longer to load than a small problem to solve.
    from rich.console import Console
    from rich.markup import escape

    status = Console(stderr=True).status("solving")
    with status, listen(lambda progress: status.update(escape(_line(problem, progress)))):
        yield


@contextmanager
def _plain(problem: Problem) -> Iterator[None]:
    last_s = time.monotonic()

    def say(progress: Progress) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= PLAIN_INTERVAL_S:
            last_s = time.monotonic()
            print(_line(problem, progress), file=sys.stderr, flush=True)

    with listen(say):
        yield


def _line(problem: Problem, progress: Progress) -> str:
    parts = [f"{progress.solver} {progress.elapsed_s:.1f} s"]
    if progress.cost is not None:
        parts.append(f"cost {printing.cost(problem, progress.cost)}")
    if progress.bound is not None:
        parts.append(f"bound {printing.cost(problem, int(progress.bound))}")
        if progress.cost is not None and progress.bound > 0:
            gap = max(0.0, progress.cost / progress.bound - 1)
            parts.append(f"gap {printing.percent(gap)}")
    if progress.text:
        parts.append(progress.text)
    return ", ".join(parts)
