"""HiGHS: a relaxation that can grow, and the MIP of `mip.solve_mip`.

- `GrowingLP` solves the relaxation and takes further rows (and solves again from the old basis).
- `solve_mip` solves a MIP that can be watched and stopped (`mip.MIPSolver`).

The solve runs in a second thread so that Ctrl-C reaches Python at once; HiGHS is then asked to stop
and what it has is returned with `interrupted` set.

Known limits: HiGHS looks at its time limit between large steps only, so a solve may be left alone
(`_run`); it then goes on using a core until it notices.
"""

import atexit
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rekindle.solve.backends.mip import (
    INF,
    Enough,
    Floats,
    LPResult,
    MIPResult,
    Model,
    OnProgress,
    Outcome,
)
from rekindle.solve.parallel import interrupted as jobs_interrupted

_GRACE_S = 0.5  # past the time limit, until a solve is left alone

_left_alone: list[threading.Event] = []


@atexit.register
def _wait_for_those_left_alone() -> None:
    """A solve must not call back into an interpreter that is gone; it ends within seconds."""
    for done in _left_alone:
        done.wait(30.0)


class GrowingLP:
    """The relaxation of a model (integrality left out), with rows added between solves."""

    def __init__(self, model: Model) -> None:
        self._highs = _highs_of(model, relaxed=True)

    def add_row(
        self, lower: float, upper: float, columns: NDArray[np.int32], entries: Floats
    ) -> None:
        self._highs.addRow(lower, upper, len(columns), columns, entries)

    def solve(self, time_limit_s: float) -> LPResult:
        import highspy

        highs = self._highs
        # The limit counts from the first solve of the object.
        highs.setOptionValue("time_limit", highs.getRunTime() + max(0.01, time_limit_s))
        interrupted = _run(highs, lambda: None, threading.Event(), time_limit_s)
        if interrupted is None:
            return LPResult(Outcome.STOPPED)
        status = highs.getModelStatus()
        if status == highspy.HighsModelStatus.kOptimal:
            solution = highs.getSolution()
            return LPResult(
                Outcome.OPTIMAL,
                highs.getInfo().objective_function_value,
                np.array(solution.col_value),
                np.array(solution.col_dual),
                interrupted,
            )
        return LPResult(_outcome(status), interrupted=interrupted)


def solve_mip(
    model: Model,
    *,
    time_limit_s: float,
    start: Mapping[int, float],
    seed: int,
    rel_gap: float,
    threads: int,
    on_progress: OnProgress | None,
    enough: Enough | None,
) -> MIPResult:
    """`mip.MIPSolver` by HiGHS."""
    highs = _highs_of(model, relaxed=False)
    for name, value in (
        ("time_limit", max(0.01, time_limit_s)),
        ("mip_rel_gap", rel_gap),
        ("random_seed", seed % 2**31),
        ("threads", threads),
    ):
        highs.setOptionValue(name, value)
    if start:
        # A start may name some of the columns: HiGHS completes it by a MIP of its own, with the
        # named integers fixed.
        columns = np.fromiter(start.keys(), dtype=np.int32, count=len(start))
        values = np.fromiter(start.values(), dtype=np.float64, count=len(start))
        highs.setSolution(len(start), columns, values)
    return _watched_mip(highs, on_progress, enough, time_limit_s)


def _watched_mip(
    highs: Any,
    on_progress: OnProgress | None,
    enough: Enough | None,
    time_limit_s: float,
) -> MIPResult:
    # Callbacks run in threads of HiGHS. They only note what is new; `deliver` tells it in the
    # caller's thread, where progress is listened to and schedules are simulated.
    news: queue.SimpleQueue[tuple[float, float, Floats | None]] = queue.SimpleQueue()
    stop = threading.Event()
    told = [INF, -INF]

    def tell(event: Any) -> None:
        out = event.data_out
        objective, bound = float(out.mip_primal_bound), float(out.mip_dual_bound)
        if enough is not None and enough(objective, bound):
            stop.set()
        # This callback comes far more often than anything is new.
        if objective < told[0] or bound > told[1]:
            told[:] = [min(objective, told[0]), max(bound, told[1])]
            news.put((told[0], told[1], None))

    def found(event: Any) -> None:
        # A copy: the array is valid during the callback alone.
        x = np.array(event.data_out.mip_solution)
        told[0] = min(told[0], float(event.data_out.objective_function_value))
        news.put((told[0], told[1], x))

    def deliver() -> None:
        while on_progress is not None and not news.empty():
            on_progress(*news.get())

    highs.cbMipInterrupt.subscribe(tell)
    highs.cbMipImprovingSolution.subscribe(found)
    interrupted = _run(highs, deliver, stop, time_limit_s)
    if interrupted is None:  # what it had found was delivered
        return MIPResult(Outcome.STOPPED, bound=told[1])
    return _mip_result(highs, interrupted)


def _mip_result(highs: Any, interrupted: bool) -> MIPResult:
    import highspy

    outcome = _outcome(highs.getModelStatus())
    info = highs.getInfo()
    bound = INF if outcome is Outcome.INFEASIBLE else float(info.mip_dual_bound)
    # No solution, or one that is not feasible within the tolerances: its numbers mean nothing.
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return MIPResult(outcome, bound=bound, interrupted=interrupted)
    x = np.array(highs.getSolution().col_value)
    return MIPResult(outcome, float(info.objective_function_value), x, bound, interrupted)


def _run(
    highs: Any, deliver: Callable[[], None], stop: threading.Event, time_limit_s: float
) -> bool | None:
    """Runs HiGHS in a thread until it ends or `stop` is set; True if Ctrl-C came meanwhile (here,
    or where this is one of several jobs: `parallel`).

    HiGHS looks at its time limit only now and then, on some models seconds late. Past the limit it
    is asked to stop, and if it does not it is left to end by itself: None.
    """
    deadline = time.monotonic() + max(0.01, time_limit_s)

    def check(event: Any) -> None:
        if stop.is_set():
            event.data_in.user_interrupt = True

    failure: list[BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            highs.run()
            # The worker threads of HiGHS belong to the thread that ran it.
            highs.resetGlobalScheduler(False)
        except BaseException as error:  # carried into the caller's thread
            failure.append(error)
        finally:
            done.set()

    for callback in (highs.cbSimplexInterrupt, highs.cbIpmInterrupt, highs.cbMipInterrupt):
        callback.subscribe(check)
    # A daemon: a solve that was left alone does not keep the process from ending.
    thread = threading.Thread(target=work, daemon=True)
    interrupted = False
    thread.start()
    while True:
        try:
            # Not `join`: where Ctrl-C interrupts it, Python 3.11 takes the thread for ended.
            while not done.wait(0.05):
                deliver()
                if jobs_interrupted():
                    interrupted = True
                    stop.set()
                late = time.monotonic() - deadline
                if late > 0.0:
                    stop.set()
                if late > _GRACE_S:
                    _left_alone.append(done)
                    return None
            break
        except KeyboardInterrupt:
            interrupted = True
            stop.set()
    # They hold the queue and the model of a solve that is over.
    highs.clearCallbacks()
    if failure:
        raise failure[0]
    deliver()
    return interrupted


def _highs_of(model: Model, *, relaxed: bool) -> Any:
    import highspy

    # As arrays, all rows in one call.
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(model.cost), len(model.row_lower)
    lp.col_cost_ = np.array(model.cost, dtype=np.float64)
    lp.col_lower_ = np.array(model.lower, dtype=np.float64)
    lp.col_upper_ = np.array(model.upper, dtype=np.float64)
    lp.row_lower_ = np.array(model.row_lower, dtype=np.float64)
    lp.row_upper_ = np.array(model.row_upper, dtype=np.float64)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(model.starts, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(model.columns, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(model.entries, dtype=np.float64)
    if not relaxed:
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[whole] for whole in model.integer]
    highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    highs.setOptionValue("output_flag", False)
    highs.passModel(lp)
    return highs


def _outcome(status: Any) -> Outcome:
    import highspy

    kinds = highspy.HighsModelStatus
    if status == kinds.kOptimal:
        return Outcome.OPTIMAL
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return Outcome.INFEASIBLE
    if status in (
        kinds.kTimeLimit,
        kinds.kIterationLimit,
        kinds.kInterrupt,
        kinds.kSolutionLimit,
        kinds.kObjectiveBound,
        kinds.kObjectiveTarget,
    ):
        return Outcome.STOPPED
    return Outcome.ERROR
