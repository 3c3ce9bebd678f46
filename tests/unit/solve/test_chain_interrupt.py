"""Ctrl-C during a chain program gives the best so far."""

import os
import signal
import threading
import time

import pytest

from rekindle.core import keep_all, simulate
from rekindle.core.generate import chain
from rekindle.solve import find_solver, run_solver


@pytest.mark.parametrize(("name", "length"), [("rotor", 390), ("rotor-floating", 79)])
def test_ctrl_c_gives_the_best_so_far(name: str, length: int) -> None:
    problem = chain(length)
    budget = int(0.6 * simulate(problem, keep_all(problem)).peak)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    start = time.monotonic()
    timer.start()
    solution = run_solver(find_solver(name), problem, budget, time_limit_s=60)
    timer.join()
    assert solution.stopped_by == "interrupt"
    assert time.monotonic() - start < 10
    if solution.schedule is not None:
        assert simulate(problem, solution.schedule).peak <= budget
