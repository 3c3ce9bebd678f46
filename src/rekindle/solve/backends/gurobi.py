"""Gurobi as a backend of `mip.solve_mip`, where gurobipy is installed and has a licence.

Optional: nothing else depends on it. The pip package alone comes with a licence for small models
only; a model that is too large for the licence goes to HiGHS (`licensed_for`).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rekindle.solve.backends.mip import INF, Enough, MIPResult, Model, OnProgress, Outcome

# A model beyond it raises only when it is optimized, so a probe of that size asks.
_SMALL = 2000  # columns and rows that the licence of the pip package allows


def licensed_for(model: Model) -> bool:
    """True if an environment starts and its licence allows a model of this size."""
    import gurobipy

    try:
        with gurobipy.Env(params={"OutputFlag": 0}) as env:
            if max(len(model.cost), len(model.row_lower)) <= _SMALL:
                return True
            with gurobipy.Model(env=env) as probe:
                probe.addMVar(_SMALL + 1)
                probe.optimize()  # raises where the licence is for small models
                return True
    except gurobipy.GurobiError:
        return False


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
    """Solves a MILP with Gurobi; arguments and result are those of `mip.solve_mip`."""
    import gurobipy
    from gurobipy import GRB

    interrupted = ended = False
    told = [INF, -INF]

    # Called in the thread that called `optimize`: no queue is needed. No exception may
    # leave it, so Ctrl-C is noted here.
    def watch(at: Any, where: int) -> None:
        nonlocal interrupted, ended
        try:
            x = None
            if where == GRB.Callback.MIPSOL:
                x = np.array(at.cbGetSolution(at.getVars()))
                told[0] = min(told[0], at.cbGet(GRB.Callback.MIPSOL_OBJ))
            elif where == GRB.Callback.MIP:
                # MIP comes often and knows the bound; only MIPSOL has the solution.
                told[1] = max(told[1], at.cbGet(GRB.Callback.MIP_OBJBND))
            else:
                return
            if enough is not None and enough(told[0], told[1]):
                ended = True
                at.terminate()
            if on_progress is not None:
                on_progress(told[0], told[1], x)
        except KeyboardInterrupt:
            interrupted = True
            at.terminate()

    with gurobipy.Env(params={"OutputFlag": 0}) as env, gurobipy.Model(env=env) as gurobi:
        _fill(gurobi, model, start)
        for name, value in (
            ("TimeLimit", max(0.01, time_limit_s)),
            ("MIPGap", rel_gap),
            ("Seed", seed % 2**31),
            ("Threads", threads),
        ):
            gurobi.setParam(name, value)
        gurobi.optimize(watch)
        outcome = {
            GRB.OPTIMAL: Outcome.OPTIMAL,
            GRB.INFEASIBLE: Outcome.INFEASIBLE,
            GRB.INF_OR_UNBD: Outcome.INFEASIBLE,
            GRB.TIME_LIMIT: Outcome.STOPPED,
            GRB.INTERRUPTED: Outcome.STOPPED,
        }.get(gurobi.Status, Outcome.ERROR)
        # gurobipy turns a Ctrl-C of its own into this status.
        interrupted |= gurobi.Status == GRB.INTERRUPTED and not ended
        # What has no solution costs more than any bound.
        bound = INF if outcome is Outcome.INFEASIBLE else float(gurobi.ObjBound)
        if gurobi.SolCount == 0:
            return MIPResult(outcome, bound=bound, interrupted=interrupted)
        x = np.array(gurobi.getAttr("X", gurobi.getVars()))
        return MIPResult(outcome, float(gurobi.ObjVal), x, bound, interrupted)


def _fill(gurobi: Any, model: Model, start: Mapping[int, float]) -> None:
    import gurobipy
    from gurobipy import GRB

    kinds = [GRB.INTEGER if whole else GRB.CONTINUOUS for whole in model.integer]
    columns = gurobi.addVars(
        len(model.cost), lb=model.lower, ub=model.upper, obj=model.cost, vtype=kinds
    )
    for r, (low, high) in enumerate(zip(model.row_lower, model.row_upper, strict=True)):
        span = slice(model.starts[r], model.starts[r + 1])
        # Two one-sided rows instead of a range: Gurobi would add a column for it.
        line = gurobipy.LinExpr(model.entries[span], [columns[c] for c in model.columns[span]])
        if low == high:
            gurobi.addLConstr(line, GRB.EQUAL, low)
            continue
        if low > -INF:
            gurobi.addLConstr(line, GRB.GREATER_EQUAL, low)
        if high < INF:
            gurobi.addLConstr(line, GRB.LESS_EQUAL, high)
    for column, value in start.items():
        columns[column].Start = value
