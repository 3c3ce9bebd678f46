"""How cheap can RL4 at 70 % be? A lower bound from two moments at once, by linear programming.

    python benchmarks/auto/moments.py                                  # writes moments.json
    python benchmarks/auto/moments.py --instance RL3 --budget 0.7 --moments 316

The bound of `auto` (cpp/bound/bound.h) looks at one moment, the first run of one op. Here moments
are the first runs of ops i_1, ..., i_m, each an ancestor of the next, so that their order is known
whatever the schedule; they cut it into intervals 0, ..., m. For every schedule within the budget,
with 0/1 values, of op j, value v, interval q and moment k (which opens interval k):

    r[j,q]  j runs in q              x[j,k]  j runs before k           sum of r[j,q] >= 1
    s[v,k]  a copy of v lives at k   y[j,k]  j runs at k or after

    r[j,q] <= r[p,q] + s[v,q]               what j reads is made (by p) in q or lives as q begins
    s[v,k] <= s[v,k-1] + r[p,k-1]
    x[j,k] <= x[p,k], x[j,k] <= sum of r[j,q<k], x[j,k] <= x[j,k+1] <= x[j,k] + r[j,k]
    x[j,k] + y[j,k] >= 1, r[j,k] <= y[j,k], y[j,k+1] <= y[j,k] <= sum of r[j,q>=k]
    s[v,k] >= y[j,k] - y[p,k]               read after k: it lives at k, or is made after
    sum of size[v] s[v,k] <= budget - what i_k makes and its workspace; what i_k reads lives at k

The linear relaxation bounds the cost of every schedule from below. The figure does not rest on the
tolerances of the LP solver: its dual prices are taken as mere numbers, and what they prove is added
up here (`proven`). As a check of the model, the schedule that `auto` finds is put in (`broken`).
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import highspy
import numpy as np

from rekindle.core import Problem, Schedule, keep_all, read_problem, simulate
from rekindle.core.disk import write_json
from rekindle.solve import find_solver, run_solver

HERE = Path(__file__).resolve().parent
INSTANCES = HERE.parent.parent / "tests" / "instances"


class Model:
    """min cost x, rows `low <= A x`, lower <= x <= upper."""

    def __init__(self, problem: Problem, budget: int, moments: list[int]) -> None:
        assert not any(op.inplace for op in problem.ops), "in-place pairs are not modelled"
        assert problem.loss_op is None, "held values are not modelled"
        self.problem, self.budget, self.moments = problem, budget, moments
        self.m, self.n, self.num_values = len(moments), len(problem.ops), len(problem.values)
        m, n = self.m, self.n
        self.r0, self.x0 = 0, n * (m + 1)
        self.y0 = self.x0 + n * m
        self.s0 = self.y0 + n * m
        size = self.s0 + self.num_values * m
        self.cost, self.lower, self.upper = np.zeros(size), np.zeros(size), np.ones(size)
        self.low: list[float] = []
        self.entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        for j in range(n):
            self.cost[self.r(j, 0) : self.r(j, m) + 1] = problem.ops[j].cost
        self.pin()
        for j in range(n):
            self.of_op(j)
        for k in range(1, m + 1):
            self.of_memory(k)
        rows, columns, values = self.entries
        self.rows, self.columns = np.array(rows), np.array(columns)
        self.values, self.lows = np.array(values), np.array(self.low)

    def r(self, j: int, q: int) -> int:
        return self.r0 + j * (self.m + 1) + q

    def x(self, j: int, k: int) -> int:
        return self.x0 + j * self.m + k - 1

    def y(self, j: int, k: int) -> int:
        return self.y0 + j * self.m + k - 1

    def s(self, v: int, k: int) -> int:
        return self.s0 + v * self.m + k - 1

    def row(self, low: float, *entries: tuple[int, float]) -> None:
        for column, value in entries:
            self.entries[0].append(len(self.low))
            self.entries[1].append(column)
            self.entries[2].append(value)
        self.low.append(low)

    def inputs(self, j: int) -> list[tuple[int, int]]:
        """What op j reads, and what makes it."""
        producer = self.problem.producer
        return [(v, producer[v]) for v in self.problem.ops[j].inputs if producer[v] >= 0]

    def pin(self) -> None:
        """What holds at each moment by its definition."""
        for k, i in enumerate(self.moments, 1):
            before = ancestors(self.problem, i)
            assert k == 1 or self.moments[k - 2] in before, "each moment leads to the next"
            for j in before:
                self.lower[self.x(j, k)] = 1
            self.upper[self.x(i, k)] = 0
            self.upper[[self.r(i, q) for q in range(k)]] = 0
            self.lower[self.r(i, k)] = 1
            for v, _ in self.inputs(i):
                self.lower[self.s(v, k)] = 1
            for v in self.problem.ops[i].outputs:
                self.upper[self.s(v, k)] = 0

    def of_op(self, j: int) -> None:
        m, r, x, y, s = self.m, self.r, self.x, self.y, self.s
        self.row(1, *((r(j, q), 1) for q in range(m + 1)))
        for q in range(m + 1):
            for v, p in self.inputs(j):
                self.row(0, (r(p, q), 1), (r(j, q), -1), *([(s(v, q), 1)] if q else []))
        for k in range(1, m + 1):
            self.row(0, (x(j, k), -1), *((r(j, q), 1) for q in range(k)))
            self.row(0, (y(j, k), -1), *((r(j, q), 1) for q in range(k, m + 1)))
            self.row(1, (x(j, k), 1), (y(j, k), 1))
            self.row(0, (y(j, k), 1), (r(j, k), -1))
            if k < m:
                self.row(0, (x(j, k + 1), 1), (x(j, k), -1))
                self.row(0, (x(j, k), 1), (r(j, k), 1), (x(j, k + 1), -1))
                self.row(0, (y(j, k), 1), (y(j, k + 1), -1))
            for v, p in self.inputs(j):
                self.row(0, (x(p, k), 1), (x(j, k), -1))
                self.row(0, (s(v, k), 1), (y(p, k), 1), (y(j, k), -1))
            for v in self.problem.ops[j].outputs:
                earlier = [(s(v, k - 1), 1)] if k > 1 else []
                self.row(0, (s(v, k), -1), (r(j, k - 1), 1), *earlier)
                if v in self.problem.outputs:
                    self.row(1, (s(v, k), 1), (y(j, k), 1))

    def of_memory(self, k: int) -> None:
        op = self.problem.ops[self.moments[k - 1]]
        sizes = [value.size for value in self.problem.values]
        room = self.budget - op.workspace - sum(sizes[v] for v in op.outputs)
        made = [v for v in range(self.num_values) if self.problem.producer[v] >= 0]
        # In units of the budget, so that all numbers of the program are of one magnitude.
        entries = ((self.s(v, k), -sizes[v] / self.budget) for v in made)
        self.row(-room / self.budget, *entries)

    def solve(self) -> np.ndarray:
        """The dual prices of the rows."""
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(self.lows)
        lp.col_cost_ = self.cost / self.cost.sum() * 100
        lp.col_lower_, lp.col_upper_ = self.lower, self.upper
        lp.row_lower_, lp.row_upper_ = self.lows, np.full(len(self.lows), highspy.kHighsInf)
        order = np.argsort(self.columns, kind="stable")
        lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        lp.a_matrix_.start_ = np.searchsorted(self.columns[order], np.arange(len(self.cost) + 1))
        lp.a_matrix_.index_, lp.a_matrix_.value_ = self.rows[order], self.values[order]
        highs = highspy.Highs()
        for option, value in (("output_flag", False), ("threads", 1), ("solver", "ipm")):
            highs.setOptionValue(option, value)
        highs.passModel(lp)
        highs.run()
        return np.array(highs.getSolution().row_dual) * self.cost.sum() / 100

    def proven(self, prices: np.ndarray) -> float:
        """What any prices >= 0 of the rows prove: each variable at its better end."""
        prices = np.maximum(prices, 0)
        reduced = self.cost.copy()
        np.subtract.at(reduced, self.columns, prices[self.rows] * self.values)
        ends = np.minimum(reduced * self.lower, reduced * self.upper)
        return math.fsum(prices * self.lows) + math.fsum(ends)

    def broken(self, schedule: Schedule) -> int:
        """How many rows and limits the schedule, as a point of this space, breaks."""
        at = [schedule.ops.index(i) for i in self.moments]
        point = np.zeros(len(self.cost))
        for t, j in enumerate(schedule.ops):
            point[self.r(j, sum(t >= a for a in at))] = 1
            for k, a in enumerate(at, 1):
                point[self.x(j, k) if t < a else self.y(j, k)] = 1
        copies: dict[int, list[int]] = {}  # value: where it is made, where it is last read
        lives = []
        for t, j in enumerate(schedule.ops):
            for v, _ in self.inputs(j):
                copies[v][1] = t
            for v in self.problem.ops[j].outputs:
                copies[v] = [t, t]
                lives.append((v, copies[v]))
        for v in self.problem.outputs:
            copies[v][1] = len(schedule.ops)
        for v, (first, last) in lives:
            for k, a in enumerate(at, 1):
                if first < a <= last:
                    point[self.s(v, k)] = 1
        sums = np.zeros(len(self.lows))
        np.add.at(sums, self.rows, point[self.columns] * self.values)
        limits = (point < self.lower) | (point > self.upper)
        return int((sums < self.lows - 1e-9).sum() + limits.sum())


def ancestors(problem: Problem, op: int) -> set[int]:
    found: set[int] = set()
    todo = [op]
    while todo:
        for v in problem.ops[todo.pop()].inputs:
            p = problem.producer[v]
            if p >= 0 and p not in found:
                found.add(p)
                todo.append(p)
    return found


def run(instance: str, share: float, moments: list[int]) -> dict[str, Any]:
    problem = read_problem(INSTANCES / f"{instance}.json")
    base = simulate(problem, keep_all(problem))
    budget = int(share * base.peak)
    model = Model(problem, budget, moments)
    bound = model.proven(model.solve())
    record: dict[str, Any] = {"instance": instance, "budget": share, "moments": moments}
    record["bound"] = round(100 * bound / base.cost - 100, 3)
    found = run_solver(find_solver("auto"), problem, budget, time_limit_s=5).schedule
    if found is not None:
        record["auto_5s"] = round(100 * simulate(problem, found).cost / base.cost - 100, 3)
        record["broken"] = model.broken(found)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--instance", default="RL4")
    parser.add_argument("--budget", type=float, default=0.7)
    parser.add_argument("--moments", default="744,767", help="ops, each an ancestor of the next")
    parser.add_argument("--out", type=Path, default=HERE / "moments.json")
    args = parser.parse_args()
    moments = [int(i) for i in args.moments.split(",")]
    record = run(args.instance, args.budget, moments)
    print(json.dumps(record))
    records = json.loads(args.out.read_text())["records"] if args.out.exists() else []
    key = ("instance", "budget", "moments")
    records = [r for r in records if any(r[k] != record[k] for k in key)]
    write_json(args.out, {"records": [*records, record]})


if __name__ == "__main__":
    main()
