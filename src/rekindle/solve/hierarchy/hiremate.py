"""`hiremate`: hierarchical rematerialization (Gusak et al., ICML 2025).

1. `partition.layer_graph` sees the training step as layers, `partition.hierarchy` (H-Partition)
   groups them into a tree of small convex groups.
2. From the bottom up, each distinct group (`partition.parts`) gets options: ways to run its forward
   and its backward (`options`). Every option maker that applies runs on every group (Sec. 3.2.1):
   `keep_everything`, H-TWRemat, rotor and annealing (`option_makers`, which ignore the partition
   below) and H-ILP over the group's children and their options (`level_milp`), for a grid of
   budgets for the peak and for what is saved. At the bottom, where a layer is an op with its
   backward, H-ILP is rk-Checkmate over such pairs; rk-Checkmate over single ops (`ByCheckmate`) is
   no default here: it takes most of the time and its options are rarely chosen. The best few, far
   apart, are kept (`options.select`, N_o). Independent groups are worked on in parallel (`tree`).
3. At the top, H-ILP with the whole budget. Its plan is lowered to op ids, dead runs fall away, and
   the simulator decides; `_Top.take` then keeps what still fits. As in the paper, the
   methods that are not hierarchical run on the whole graph beside it (`whole_graph`): TW-Remat, and
   rk-Rotor where the graph is a chain of blocks. In the end a little annealing from the best
   schedules, and from those slightly above the budget, which it repairs (`_Top.polish`).

The model of memory never counts less than the simulator does, so a plan within the budget is a
schedule within the budget; being larger, budgets somewhat above the real one are tried as well.

Known limits: those of `level_milp` (no forward run is repeated before the loss at one level), and
H-ILP's optimum is over the options it is given.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rekindle import _native
from rekindle.core import Problem, Schedule, Solution, keep_all, simulate
from rekindle.core.simulate import run_native
from rekindle.partition.hierarchy import HPartition
from rekindle.partition.layer_graph import (
    Group,
    Partitioner,
    layer_graph,
    read_layers,
    reason_without_phases,
)
from rekindle.solve.base import best_solution
from rekindle.solve.hierarchy.hierarchy_level import Level, Plan, lower_plan
from rekindle.solve.hierarchy.level_milp import LevelModel
from rekindle.solve.hierarchy.option_makers import ByFastSA, ByRotor, ByTWRemat, keep_everything
from rekindle.solve.hierarchy.options import OptionMaker
from rekindle.solve.hierarchy.tree import Recipe, Tree, top_level
from rekindle.solve.hierarchy.whole_graph import WholeMethod, whole_by_rotor, whole_by_twremat
from rekindle.solve.parallel import num_cores
from rekindle.solve.progress import Progress, report

POLISH_MOVES_PER_OP = 1000


@dataclass(frozen=True, slots=True)
class HiRemate:
    """Hierarchical rematerialization; its fields are the recipe."""

    partitioner: Partitioner = field(default_factory=HPartition)
    makers: tuple[OptionMaker, ...] = (keep_everything, ByTWRemat(), ByRotor(), ByFastSA())
    ilp_budgets: tuple[tuple[float, float], ...] = ((1.0, 0.6), (1.0, 0.3), (0.7, 0.5), (0.7, 0.2))
    # More of them make better plans, and programs that take longer.
    max_options: int = 8  # N_o, per layer of a level
    ilp_time_s: float = 3.0  # per program below the top
    rel_gap: float = 0.005
    whole: tuple[WholeMethod, ...] = (whole_by_twremat, whole_by_rotor)  # beside H-ILP at the top
    top_time_s: float = 15.0  # per program at the top
    max_flat: int = 26  # a graph of so few layers is solved without a hierarchy too
    polish_moves: int = 500_000  # of annealing from the best schedules, at most
    threads: int = 0  # 0: all cores

    name: ClassVar[str] = "hiremate"
    requires: ClassVar[tuple[str, ...]] = ("highspy",)
    exact: ClassVar[bool] = False

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            makers=self.makers,
            ilp_budgets=self.ilp_budgets,
            max_options=self.max_options,
            ilp_time_s=self.ilp_time_s,
            rel_gap=self.rel_gap,
            num_workers=self.num_workers,
        )

    @property
    def num_workers(self) -> int:
        return self.threads or num_cores()

    def accepts(self, problem: Problem) -> str | None:
        return reason_without_phases(problem)

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        # Steps that cannot be cut short (reading, building a program) need some of the time.
        top = _Top(self, problem, budget, time.monotonic() + 0.92 * time_limit_s, seed)
        if warm_start is not None:
            top.take(warm_start.ops)
        try:
            top.run()
        except KeyboardInterrupt:
            top.stopped_by = "interrupt"
        return best_solution(
            problem,
            budget,
            top.found,
            solver=self.name,
            bound=sum(op.cost for op in problem.ops),
            stopped_by=top.stopped_by,
            notes=tuple(top.notes),
        )


class _Top:
    """One solve: the hierarchy, the program at the top, and the schedules found."""

    def __init__(
        self, options: HiRemate, problem: Problem, budget: int, deadline: float, seed: int
    ) -> None:
        self.options = options
        self.problem = problem
        self.budget = budget
        self.deadline = deadline
        self.seed = seed
        self.start = time.monotonic()
        self.found: list[Sequence[int]] = [keep_all(problem).ops]
        self.best_cost: int | None = None
        self.notes: list[str] = []
        self.stopped_by = ""

    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def run(self) -> None:
        problem = self.problem
        if run_native(problem, keep_all(problem)).peak <= self.budget:
            return
        for method in self.options.whole:
            ends = time.monotonic() + 0.2 * self.left_s()
            for ops in method(problem, self.budget, 0.2 * self.left_s(), self.options.makers):
                self.take(ops)
            self.limited(time.monotonic() >= ends)
        # The methods for the whole graph have gone first: their schedules are there if time runs
        # out in the hierarchy.
        layers = read_layers(problem)
        group = self.options.partitioner.partition(layer_graph(problem, layers))
        # The options below get 70 % of what is left; the program at the top needs the rest.
        ends = self.deadline - 0.3 * self.left_s()
        tree = Tree(self.options.recipe, problem, layers, self.seed, ends)
        children = tree.children(group.children or (group,))
        self.note_sizes(group, tree)
        self.solve_top(top_level(problem, children))
        # A flat program sees schedules that no hierarchy has, and for few layers it is small
        # enough.
        if group.depth > 1 and len(layers.layers) <= self.options.max_flat:
            flat = tree.children([Group((j,)) for j in range(len(layers.layers))])
            self.solve_top(top_level(problem, flat))
        self.polish()
        self.limited(tree.cut_short or self.left_s() == 0)

    def limited(self, by_time: bool) -> None:
        """Notes that a step had less time than it would have taken."""
        if by_time:
            self.stopped_by = "time limit"

    def note_sizes(self, group: Group, tree: Tree) -> None:
        groups = list(group.walk())
        largest = max((len(g.children) for g in groups), default=1)
        elapsed = time.monotonic() - self.start
        self.notes.append(
            f"{group.depth} levels, {len(groups)} groups, {len(tree.known)} distinct parts, at "
            f"most {largest} nodes in a group, {tree.num_programs} programs, {elapsed:.1f} s to "
            "the top"
        )

    def solve_top(self, level: Level) -> None:
        plan: Plan | None = None
        # Built once: a larger budget changes right-hand sides alone.
        model = LevelModel(level, self.budget)
        for stretch in (1.0, 1.05, 1.12):
            share = min(self.options.top_time_s, 0.4 * self.left_s())
            if share <= 0.01:
                self.limited(True)
                return
            answer, _ = model.solve(
                max(self.budget, int(self.budget * stretch)),  # a float has 53 bits
                time_limit_s=share,
                rel_gap=self.options.rel_gap,
                seed=self.seed,
                start=plan,
            )
            self.limited(model.stopped and share < self.options.top_time_s)
            if answer is None:
                continue
            plan = answer
            self.take(self.lower(level, plan))

    def polish(self) -> None:
        """A little annealing, too cold to leave what was found: single runs of the best schedules
        are moved and dropped, and what is slightly above the budget is brought below it."""
        moves = min(self.options.polish_moves, POLISH_MOVES_PER_OP * len(self.problem.ops))
        # Two that fit and two that need up to a tenth more: to repair those may end cheaper.
        starts = self.best(self.budget, 2) + self.best(int(1.1 * self.budget), 2)
        starts = list(dict.fromkeys(starts))
        if not starts or not moves or self.left_s() == 0:
            return
        results, ended = _native.anneal(
            self.problem.native,
            starts,
            self.budget,
            _native.Objective.area,
            seeds=[self.seed * 1000 + k for k in range(len(starts))],
            max_moves=moves,
            time_limit_s=0.5 * self.left_s(),
            num_threads=self.options.num_workers,
            hot=0.3,
        )
        for result in results:
            self.add(result.best if result.within else result.smallest)
        if ended == "interrupt":
            raise KeyboardInterrupt
        self.limited(ended == "time limit")

    def best(self, limit: int, count: int) -> list[tuple[int, ...]]:
        """The cheapest schedules found whose peak is within the limit."""
        ranked = []
        for ops in dict.fromkeys(map(tuple, self.found)):
            trace = run_native(self.problem, Schedule(ops))
            if trace.peak <= limit:
                ranked.append((sum(self.problem.ops[i].cost for i in ops), ops))
        return [ops for _, ops in sorted(ranked)[:count]]

    def lower(self, level: Level, plan: Plan) -> list[int]:
        forward, backward = lower_plan(level, plan)
        loss = self.problem.loss_op
        # At the top the loss is no layer of its own.
        return [*forward, *([] if loss is None else [loss]), *backward]

    def take(self, ops: Sequence[int]) -> None:
        """Adds the schedule, cleaned, and what becomes of it where there is room to spare."""
        native = self.problem.native
        # H-ILP counts a re-run with all of its outputs; runs whose outputs nothing reads go here.
        clean = _native.drop_dead_runs(native, list(ops))
        for keep in (_native.Keep.chain_per_byte_time, _native.Keep.chain_per_byte):
            filled = _native.fill_up(native, clean, self.budget, keep, 6, self.left_s())
            self.add(_native.drop_needless_runs(native, filled, self.budget, 0.1 * self.left_s()))
        self.add(clean)

    def add(self, ops: Sequence[int]) -> None:
        trace = simulate(self.problem, Schedule(tuple(ops)))
        self.found.append(ops)
        if trace.peak <= self.budget and (self.best_cost is None or trace.cost < self.best_cost):
            self.best_cost = trace.cost
            elapsed = time.monotonic() - self.start
            report(Progress(HiRemate.name, elapsed, cost=trace.cost))
