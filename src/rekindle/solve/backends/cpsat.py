"""CP-SAT in a process of its own (`cpsat_worker` says why): jobs out, schedules in.

One worker is kept for the next job; it ends by itself when none comes for a while, and with this
process. Ctrl-C reaches the caller at once, and a worker that does not answer is killed, so a time
limit holds whatever CP-SAT does.
"""

import atexit
import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from rekindle.core import Problem, Schedule
from rekindle.core.files import problem_record
from rekindle.errors import RekindleError
from rekindle.solve.deadline import TimeLeft

_GRACE_S = 0.7  # after the time limit, until the worker is killed
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from rekindle.solve.backends.cpsat_worker import main; main()"
)


class WorkerFailed(RekindleError):
    """The process that runs CP-SAT ended or answered with an error."""


@dataclass(frozen=True, slots=True)
class Job:
    """One model to solve; see `moccasin` for the meaning of its fields."""

    problem: Problem
    budget: int
    cap: int
    phase: Literal[1, 2]
    hint: tuple[int, ...] | None
    max_runs: tuple[int, ...]  # per op
    keep_order: bool
    precedence: str
    workers: int
    repeatable: bool
    seed: int

    def record(self, time_limit_s: float) -> dict[str, Any]:
        record: dict[str, Any] = {
            part.name: getattr(self, part.name) for part in fields(self) if part.name != "problem"
        }
        return record | {"problem": problem_record(self.problem), "time_limit_s": time_limit_s}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a search of CP-SAT ended."""

    proven: bool = False  # the objective is optimal, or there is no solution; nothing was rounded
    bound: int = 0  # of phase 2: no schedule of the model has a smaller extra cost
    ended: bool = False  # by `hear`
    interrupted: bool = False


def solve_retention(job: Job, time_limit_s: float, hear: Callable[[Schedule], bool]) -> Outcome:
    """Solves the job; `hear` gets each schedule and ends the search by answering True."""
    time_left = TimeLeft(time_limit_s)
    # Starting Python and importing ortools takes a second, so a process is kept for the next job.
    worker = _Worker.take()
    ended = interrupted = False
    # The worker has the limit too and ends by itself; this is for one that does not answer.
    last_call = TimeLeft(time_limit_s * 1.05 + _GRACE_S)
    try:
        worker.send(job.record(time_left()))
        while True:
            try:
                reply = worker.reply(min(0.5, last_call()))
                if reply is not None and "done" in reply:
                    break
                if reply is not None and hear(Schedule(tuple(reply["schedule"]))) and not ended:
                    ended = True
                    worker.send({"stop": True})
                if last_call() <= 0:
                    worker.close()
                    return Outcome(ended=ended, interrupted=interrupted)
            except KeyboardInterrupt:
                interrupted = True
                worker.send({"stop": True})
                last_call = TimeLeft(min(last_call(), _GRACE_S))
    except BaseException:
        worker.close()
        raise
    _Worker.keep(worker)
    return Outcome(reply["done"]["proven"], reply["done"]["bound"], ended, interrupted)


class _Worker:
    """The process, and a thread that reads its replies."""

    _idle: "list[_Worker]" = []  # noqa: RUF012 - the one that is kept for the next job
    _lock = threading.Lock()

    def __init__(self) -> None:
        # The package of this process, installed or not: the worker must be of the same release.
        root = str(Path(__file__).parents[3])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a Ctrl-C in the terminal is for this process alone
        )
        self._replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # closed while it is read
            for line in self._process.stdout:
                self._replies.put(line)
        self._replies.put(None)

    def send(self, record: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(record) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerFailed("the process that runs CP-SAT has ended") from error

    def reply(self, timeout_s: float) -> dict[str, Any] | None:
        """The next reply, or None if none came in time."""
        try:
            line = self._replies.get(timeout=max(0.001, timeout_s))
        except queue.Empty:
            return None
        if line is None:
            raise WorkerFailed("the process that runs CP-SAT has ended")
        record: dict[str, Any] = json.loads(line)
        if "error" in record:
            raise WorkerFailed(record["error"])
        return record

    def close(self) -> None:
        process = self._process
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    @classmethod
    def take(cls) -> "_Worker":
        """The one that is kept, if it still runs, or a new one."""
        with cls._lock:
            worker = cls._idle.pop() if cls._idle else None
        # It may have ended by itself meanwhile, after a minute without a job.
        if worker is not None and worker._process.poll() is None:
            return worker
        if worker is not None:
            worker.close()
        return cls()

    @classmethod
    def keep(cls, worker: "_Worker") -> None:
        with cls._lock:
            if not cls._idle:
                cls._idle.append(worker)
                return
        worker.close()

    @classmethod
    def close_idle(cls) -> None:
        with cls._lock:
            workers, cls._idle = cls._idle, []
        for worker in workers:
            worker.close()


# Not left to the end of its input: it would outlive this process for a while.
atexit.register(_Worker.close_idle)
