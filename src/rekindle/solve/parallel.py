"""Independent jobs on all cores.

In threads: HiGHS and the native core leave Python's lock while they work, and that is where the
time goes. Ctrl-C reaches the main thread alone; `run_all` passes it on, and whoever waits for HiGHS
in a job asks `interrupted`. What a job reports of its own progress concerns a part of the problem,
so nobody listens.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, ContextVar
from typing import TypeVar

T = TypeVar("T")

# A context variable and not an argument: between `run_all` and the solve that has to stop lie
# option makers, which a user may have written and which know nothing of threads.
_stop: ContextVar[threading.Event | None] = ContextVar("stop", default=None)


def interrupted() -> bool:
    """Whether the caller is a job that is to end as if Ctrl-C had been pressed."""
    stop = _stop.get()
    return stop is not None and stop.is_set()


def num_cores() -> int:
    """The cores that this process may use."""
    # Of this process: in a container or under taskset that is less than `os.cpu_count()`.
    return len(os.sched_getaffinity(0))


def run_all(jobs: Sequence[Callable[[], T]], num_workers: int) -> list[T]:
    """The jobs' results, in their order. On Ctrl-C, or where a job fails, those that run are asked
    to end and waited for, the others are not begun."""
    stop = threading.Event()

    def run(job: Callable[[], T]) -> T:
        _stop.set(stop)
        return job()

    # An empty context, here as in the threads: nobody is to hear the progress of a part, whose
    # costs and bounds are of another problem.
    if num_workers < 2 or len(jobs) < 2:
        return [Context().run(run, job) for job in jobs]
    with ThreadPoolExecutor(min(num_workers, len(jobs))) as pool:
        futures = [pool.submit(Context().run, run, job) for job in jobs]
        try:
            return [future.result() for future in futures]
        # BaseException, for KeyboardInterrupt. `stop` is set before the pool is left, which waits
        # for jobs that would else run to their time limit.
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
