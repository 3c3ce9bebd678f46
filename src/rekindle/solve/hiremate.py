"""`hiremate`: hierarchical rematerialization (Gusak et al., ICML 2025).

1. `partition.base` sees the training step as layers, `partition.hierarchy` (H-Partition) groups
   them into a tree of small convex groups.
2. From the bottom up, each distinct group (`partition.repeated`) gets options: ways to run its
   forward and its backward (`options`). Every option maker that applies runs on every group
   (Sec. 3.2.1): `keep_everything`, `ByTWRemat` (ignores the partition below) and `Tree.by_hilp`
   (H-ILP over the group's children and their options, `hilp`), over a grid of budgets for the peak
   and for what is saved. The best few, far apart, are kept (`options.select`, N_o).
3. At the top, H-ILP with the whole budget. Its plan is lowered to op ids, dead runs fall away, and
   the simulator decides; `_Top.take` then keeps what there is still room for. As in the paper, the
   methods that are not hierarchical run on the whole graph beside it: TW-Remat, and rk-Rotor where
   the graph is a chain of blocks.

The model of memory never counts less than the simulator does, so a plan within the budget is a
schedule within the budget; being larger, budgets somewhat above the real one are tried as well.

Known limits: those of `hilp` (no forward run is repeated before the loss at one level), and H-ILP's
optimum is over the options it is given.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from rekindle import _native
from rekindle.core import Problem, Schedule, Solution, keep_all, simulate
from rekindle.core.simulate import run_native
from rekindle.partition.base import (
    Group,
    Layers,
    Partitioner,
    layer_graph,
    read_layers,
    reason_without_phases,
)
from rekindle.partition.hierarchy import HPartition
from rekindle.partition.repeated import Form, Part, cut_part
from rekindle.partition.separators import find_rows
from rekindle.solve.base import answer
from rekindle.solve.chain_program import Rule
from rekindle.solve.hilp import LevelModel
from rekindle.solve.level import Child, Level, Plan, lower_plan
from rekindle.solve.makers import ByTWRemat, keep_everything, kept_by_all, with_loss_workspace
from rekindle.solve.options import Option, OptionMaker, bare, measure, select
from rekindle.solve.progress import Progress, report
from rekindle.solve.rockmate import Blocks
from rekindle.solve.rotor import solve_on_chain
from rekindle.solve.twremat import recomputing_sequences

# A method for the whole graph: problem, budget, seconds, option makers -> schedules.
WholeMethod = Callable[[Problem, int, float, tuple[OptionMaker, ...]], list[Sequence[int]]]


def whole_by_twremat(
    problem: Problem, budget: int, time_limit_s: float, makers: tuple[OptionMaker, ...]
) -> list[Sequence[int]]:
    """TW-Remat (H-TWRemat of the paper), and the greedy walk, with ever less room at the loss:
    a schedule that keeps less across it than the budget allows is often cheaper in the end."""
    deadline = time.monotonic() + time_limit_s
    order = list(range(len(problem.ops)))
    found: list[Sequence[int]] = []
    rooms: list[Problem] = []
    num_rooms = 8
    for k in range(num_rooms):
        tight = problem
        if problem.loss_op is not None:
            own = problem.ops[problem.loss_op].workspace
            tight = with_loss_workspace(problem, own + budget * k // (num_rooms + 1))
        rooms.append(tight)
    for tight in rooms:  # the walk first: it is the quickest to have something
        left = max(0.0, deadline - time.monotonic())
        walk_fits, ops = _native.evict(tight.native, order, budget, 40 * len(order), left)
        found += [ops] if walk_fits else []
    if time.monotonic() > deadline:
        return _cheapest(problem, budget, found)
    sequences = recomputing_sequences(problem, 100_000, 60, deadline).sequences
    keeps = (_native.Keep.chain_per_byte_time, _native.Keep.chain_per_byte)
    for tight, sequence, keep in itertools.product(rooms, sequences, keeps):
        for share in (1.0, 0.95, 0.88, 0.8):
            left = deadline - time.monotonic()
            if left <= 0:
                return _cheapest(problem, budget, found)
            limit = int(budget * share)
            found.append(_native.fill_up(tight.native, sequence, limit, keep, 6, left))
    return _cheapest(problem, budget, found)


def _cheapest(
    problem: Problem, budget: int, found: Iterable[Sequence[int]], count: int = 4
) -> list[Sequence[int]]:
    """The cheapest few within the budget, and the one with the smallest peak."""
    ranked: list[tuple[bool, int, int, int, Sequence[int]]] = []
    for ops in found:
        trace = simulate(problem, Schedule(tuple(ops)))
        ranked.append((trace.peak > budget, trace.cost, trace.peak, len(ranked), ops))
    fitting = [entry[-1] for entry in sorted(e for e in ranked if not e[0])[:count]]
    smallest = min(ranked, key=lambda e: e[2], default=None)
    return [*fitting, *([smallest[-1]] if smallest is not None else [])]


def whole_by_rotor(
    problem: Problem, budget: int, time_limit_s: float, makers: tuple[OptionMaker, ...]
) -> list[Sequence[int]]:
    """rk-Rotor over the chain of 1-separators, where there is one: blocks that save all, then
    with the makers' options as well."""
    deadline = time.monotonic() + time_limit_s
    rows = find_rows(problem, 400)
    if isinstance(rows, str):
        return []
    blocks = Blocks(problem, rows)
    found: list[Sequence[int]] = []
    for round_ends in (deadline - 0.6 * time_limit_s, deadline):
        solution = solve_on_chain(
            problem,
            blocks.chain(),
            budget,
            Rule.persistent,
            name=HiRemate.name,
            slots=500,
            prune=True,
            deadline=round_ends,
        )
        found += [s.ops for s in (solution.schedule, solution.smallest) if s is not None]
        if not blocks.options:
            blocks.make_options(makers, deadline - 0.3 * time_limit_s)
    return found


@dataclass(frozen=True, slots=True)
class HiRemate:
    partitioner: Partitioner = field(default_factory=HPartition)
    makers: tuple[OptionMaker, ...] = (keep_everything, ByTWRemat())
    ilp_budgets: tuple[tuple[float, float], ...] = ((1.0, 0.6), (1.0, 0.3), (0.7, 0.5), (0.7, 0.2))
    max_options: int = 8  # N_o, per layer of a level
    ilp_time_s: float = 3.0  # per program below the top
    rel_gap: float = 0.005
    whole: tuple[WholeMethod, ...] = (whole_by_twremat, whole_by_rotor)  # beside H-ILP at the top
    top_time_s: float = 15.0  # per program at the top
    max_flat: int = 26  # a graph of so few layers is solved without a hierarchy too

    name: ClassVar[str] = "hiremate"
    requires: ClassVar[tuple[str, ...]] = ("highspy",)
    exact: ClassVar[bool] = False

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
        return answer(
            problem,
            budget,
            top.found,
            solver=self.name,
            bound=sum(op.cost for op in problem.ops),
            stopped_by=top.stopped_by,
            notes=tuple(top.notes),
        )


class Tree:
    """The hierarchy with options: children of a level, each distinct part solved once."""

    def __init__(
        self, options: HiRemate, problem: Problem, layers: Layers, seed: int, deadline: float
    ) -> None:
        self.options = options
        self.problem = problem
        self.layers = layers
        self.seed = seed
        self.deadline = deadline
        self.known: dict[Form, tuple[Option, ...]] = {}
        self.num_programs = 0

    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def child(self, group: Group) -> Child:
        part = cut_part(self.problem, self.layers, group.layers)
        if part.form not in self.known:
            self.known[part.form] = tuple(self._make(group, part))
        return Child(part, self.known[part.form], bare(part))

    def _make(self, group: Group, part: Part) -> list[Option]:
        if not group.children:
            return keep_everything(part, 0.0)
        children = tuple(self.child(c) for c in group.children)
        options: list[Option] = []
        for maker in self.options.makers:
            options += maker(part, 0.2 * self.left_s())
        options += self.by_hilp(part, children)
        return select(options, self.options.max_options)

    def by_hilp(self, part: Part, children: tuple[Child, ...]) -> list[Option]:
        ids = part.values
        made = {ids[v]: value.size for v, value in enumerate(part.problem.values)}
        level = Level(
            children=children,
            size={v: made[v] for v in _made_by(children)},
            loss_reads=frozenset(ids[v] for v in part.forward_out),
            final=frozenset(ids[v] for v in part.problem.outputs),
        )
        local = {i: k for k, i in enumerate(part.ops)}
        highest = simulate(part.problem, keep_all(part.problem)).peak
        kept = kept_by_all(part)
        found: list[Option] = []
        budgets = [(int(highest * p), int(kept * q)) for p, q in self.options.ilp_budgets]
        if not budgets or self.left_s() == 0:
            return []
        model = LevelModel(level, min(peak for peak, _ in budgets), corrections=False)
        for peak, save in budgets:
            limit = min(self.options.ilp_time_s, 0.2 * self.left_s())
            if limit <= 0:
                break
            self.num_programs += 1
            plan, _ = model.solve(
                peak, save, time_limit_s=limit, rel_gap=self.options.rel_gap, seed=self.seed
            )
            if plan is not None:
                forward, backward = lower_plan(level, plan)
                found.append(
                    measure(part, [local[i] for i in forward], [local[i] for i in backward])
                )
        return found


def _made_by(children: Iterable[Child]) -> set[int]:
    """The values that leave some child."""
    made: set[int] = set()
    for child in children:
        part = child.part
        loss = part.problem.loss_op
        assert loss is not None
        made.update(part.values[v] for v in part.forward_out)
        made.update(part.values[v] for v in part.problem.outputs)
    return made


def top_level(problem: Problem, children: tuple[Child, ...]) -> Level:
    """The level that the whole problem is."""
    loss = problem.loss_op
    made = _made_by(children)
    op = problem.ops[loss] if loss is not None else None
    if op is not None:
        made.update(op.outputs)
    resident = set(problem.resident)
    return Level(
        children=children,
        size={v: problem.values[v].size for v in made},
        loss_reads=frozenset(v for v in op.inputs if v not in resident) if op else frozenset(),
        loss_makes=frozenset(op.outputs) if op else frozenset(),
        loss_workspace=op.workspace if op else 0,
        final=frozenset(v for v in problem.outputs if v not in resident),
        held=frozenset(v for v in problem.held if v not in resident),
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
            for ops in method(problem, self.budget, 0.2 * self.left_s(), self.options.makers):
                self.take(ops)
        layers = read_layers(problem)
        group = self.options.partitioner.partition(layer_graph(problem, layers))
        tree = Tree(self.options, problem, layers, self.seed, self.deadline - 0.3 * self.left_s())
        children = tuple(tree.child(c) for c in (group.children or (group,)))
        self.note_sizes(group, tree)
        self.solve_top(top_level(problem, children))
        if group.depth > 1 and len(layers.layers) <= self.options.max_flat:
            flat = tuple(tree.child(Group((j,))) for j in range(len(layers.layers)))
            self.solve_top(top_level(problem, flat))
        if self.left_s() == 0:
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
        model = LevelModel(level, self.budget)
        for stretch in (1.0, 1.05, 1.12):
            share = min(self.options.top_time_s, 0.4 * self.left_s())
            if share <= 0.01:
                return
            answer, _ = model.solve(
                max(self.budget, int(self.budget * stretch)),  # a float has 53 bits
                time_limit_s=share,
                rel_gap=self.options.rel_gap,
                seed=self.seed,
                start=plan,
            )
            if answer is None:
                continue
            plan = answer
            self.take(self.lower(level, plan))

    def lower(self, level: Level, plan: Plan) -> list[int]:
        forward, backward = lower_plan(level, plan)
        loss = self.problem.loss_op
        return [*forward, *([] if loss is None else [loss]), *backward]

    def take(self, ops: Sequence[int]) -> None:
        """Adds the schedule, cleaned, and what becomes of it where there is room to spare."""
        native = self.problem.native
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
