"""The process in which CP-SAT runs: builds a `RetentionModel` per job and solves it.

ortools and highspy each bring a `libhighs.so.1` of another version; a process can load only one of
the two packages (seen with ortools 9.15 and highspy 1.15, in either order). So CP-SAT gets its own
process, which `cpsat` starts and talks to in lines of JSON:

    in    a job (see `cpsat.Job`), or {"stop": true} while one runs
    out   {"schedule": [...]} for each better solution, then {"done": {...}} or {"error": "..."}

It ends when its input closes, or when no job has come for a while.
"""

import json
import math
import queue
import sys
import threading
import time
import traceback
from typing import Any, TextIO

from rekindle.core import Problem, Schedule, keep_all, simulate
from rekindle.core.files import problem_from_record
from rekindle.solve.staged.retention_model import RetentionModel
from rekindle.solve.staged.staged_space import Stages

IDLE_S = 60.0


def main() -> None:
    """Reads jobs from stdin and writes replies to stdout, until it is idle for too long."""
    replies = sys.stdout
    sys.stdout = sys.stderr  # nothing else may write among the replies
    lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, lines), daemon=True).start()
    while True:
        try:
            job = lines.get(timeout=IDLE_S)
        except queue.Empty:
            return
        if job is None:
            return
        if "stop" in job:
            continue  # it came after the end of its job
        try:
            _solve(job, lines, replies)
        except Exception:  # told to the parent, which raises it
            _reply(replies, {"error": traceback.format_exc(limit=-3)})


def _listen(source: TextIO, lines: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
    for line in source:
        lines.put(json.loads(line))
    lines.put(None)


def _reply(replies: TextIO, record: dict[str, Any]) -> None:
    replies.write(json.dumps(record) + "\n")
    replies.flush()


def _solve(
    job: dict[str, Any], lines: "queue.SimpleQueue[dict[str, Any] | None]", replies: TextIO
) -> None:
    from ortools.sat.python import cp_model

    deadline = time.monotonic() + job["time_limit_s"]
    model = _model(job, problem_from_record(job["problem"]))
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.max_time_in_seconds = max(0.01, deadline - time.monotonic())
    parameters.num_workers = job["workers"]
    # With several workers CP-SAT is repeatable only if they take turns.
    parameters.interleave_search = job["repeatable"] and job["workers"] > 1
    parameters.random_seed = job["seed"] % 2**31

    class Tell(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            _reply(replies, {"schedule": model.schedule(self.value).ops})

    status: list[Any] = []

    def work() -> None:
        status.append(solver.solve(model.cp, Tell()))

    # In a thread, so that this one can hear "stop" meanwhile.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.02)
        if not lines.empty():
            message = lines.get()
            solver.stop_search()
            if message is None:  # the parent is gone
                return
    # INFEASIBLE is a proof too: there is no schedule with so few runs within the cap.
    proven = bool(status) and status[0] in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    bound = 0
    if status and status[0] in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
        # The objective is in whole cost units, so what lies above one is the next one.
        bound = max(0, math.ceil(solver.best_objective_bound - 1e-6)) * model.cost_unit
    done = {"proven": proven and model.exact, "bound": bound}
    _reply(replies, {"done": done})


def _model(job: dict[str, Any], problem: Problem) -> RetentionModel:
    model = RetentionModel(
        Stages.of(problem, job["budget"], cap=job["cap"]),
        job["max_runs"],
        job["keep_order"],
        job["precedence"],
    )
    if job["phase"] == 1:
        model.minimize_peak(simulate(problem, keep_all(problem)).peak)
    else:
        model.minimize_cost()
    if job["hint"] is not None:
        model.hint(Schedule(tuple(job["hint"])))
    return model
