"""Independent jobs: order, failure, Ctrl-C, and who hears of their progress."""

import threading
import time

import pytest

from rekindle.solve.parallel import interrupted, run_all
from rekindle.solve.progress import Progress, listen, report


@pytest.mark.parametrize("num_workers", [1, 3])
def test_results_come_in_the_order_of_the_jobs(num_workers):
    def job(k: int) -> int:
        time.sleep(0.01 * (5 - k))
        return k

    assert run_all([lambda k=k: job(k) for k in range(5)], num_workers) == list(range(5))


def test_jobs_run_side_by_side():
    both = threading.Barrier(2, timeout=10)
    assert len(run_all([both.wait, both.wait], 2)) == 2


def test_a_failure_ends_the_others():
    begun = []

    def fail() -> None:
        raise ValueError("no")

    def wait() -> None:
        begun.append(1)
        while not interrupted():
            time.sleep(0.01)

    with pytest.raises(ValueError, match="no"):
        run_all([fail, wait, wait, wait], 2)
    assert len(begun) <= 2
    assert not interrupted()


def test_ctrl_c_reaches_the_jobs(ctrl_c_after):
    ended = []

    def wait() -> None:
        while not interrupted():
            time.sleep(0.01)
        ended.append(1)

    ctrl_c_after(0.2)
    with pytest.raises(KeyboardInterrupt):
        run_all([wait, wait], 2)
    assert len(ended) == 2


@pytest.mark.parametrize("num_workers", [1, 2])
def test_nobody_hears_of_the_progress_of_a_part(num_workers):
    heard: list[Progress] = []
    with listen(heard.append):
        run_all([lambda: report(Progress("part", 0.0))] * 2, num_workers)
        assert not heard
        report(Progress("whole", 0.0))
    assert len(heard) == 1
