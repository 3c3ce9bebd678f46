"""A hierarchy with options: from the bottom up, each distinct part gets ways to run it.

Every option maker that applies runs on every part (HiRemate, Sec. 3.2.1), and H-ILP over the part's
children and their options, for a few budgets for the peak and for what is saved. The best few, far
apart, are kept (`options.select`, N_o). Parts of one height do not depend on each other: they are
worked on in parallel (Sec. 3.3).
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from rekindle.core import Problem, keep_all, simulate
from rekindle.partition.layer_graph import Group, Layers
from rekindle.partition.parts import Form, Part, cut_part
from rekindle.solve.hierarchy.hierarchy_level import Child, Level, Plan, lower_plan
from rekindle.solve.hierarchy.level_milp import LevelModel
from rekindle.solve.hierarchy.option_makers import keep_everything, kept_by_all
from rekindle.solve.hierarchy.options import Option, OptionMaker, bare, measure, select
from rekindle.solve.parallel import run_all


@dataclass(frozen=True, slots=True)
class Recipe:
    """How options are made."""

    makers: tuple[OptionMaker, ...]
    ilp_budgets: tuple[tuple[float, float], ...]  # of the keep-all peak, of what keep-all saves
    max_options: int  # N_o, per layer of a level
    ilp_time_s: float  # per program
    rel_gap: float
    num_workers: int = 1


class Tree:
    """The hierarchy with options: children of a level, each distinct part solved once."""

    def __init__(
        self, options: Recipe, problem: Problem, layers: Layers, seed: int, deadline: float
    ) -> None:
        self.options = options
        self.problem = problem
        self.layers = layers
        self.seed = seed
        self.deadline = deadline
        self.known: dict[Form, tuple[Option, ...]] = {}
        self.parts: dict[tuple[int, ...], Part] = {}  # by their layers
        self.num_programs = 0
        self.cut_short = False  # whether there was less time for something than it asked for

    def left_s(self) -> float:
        left = self.deadline - time.monotonic()
        self.cut_short = self.cut_short or left <= 0
        return max(0.0, left)

    def children(self, groups: Sequence[Group]) -> tuple[Child, ...]:
        """The groups as layers of a level. What has no options yet gets them, the lowest parts
        first; those of one height are independent."""
        # By form, not by group: equal parts are made once, wherever they stand.
        missing: dict[Form, Group] = {}
        stack = list(reversed(groups))
        while stack:
            group = stack.pop()
            form = self._part(group).form
            # Of equal parts the one of the least height, so that it is made before any above it.
            if form in self.known or (form in missing and missing[form].depth <= group.depth):
                continue
            missing[form] = group
            stack.extend(reversed(group.children))
        # A part needs the options of its children, which are less high: so one wave for each
        # height.
        for height in sorted({group.depth for group in missing.values()}):
            wave = {form: group for form, group in missing.items() if group.depth == height}
            jobs = [partial(self._make, group) for group in wave.values()]
            made = run_all(jobs, self.options.num_workers)
            self.known.update(zip(wave, map(tuple, made), strict=True))
        return tuple(self._child(group) for group in groups)

    def _child(self, group: Group) -> Child:
        part = self._part(group)
        return Child(part, self.known[part.form], bare(part))

    def _part(self, group: Group) -> Part:
        if group.layers not in self.parts:
            self.parts[group.layers] = cut_part(self.problem, self.layers, group.layers)
        return self.parts[group.layers]

    def _make(self, group: Group) -> list[Option]:
        part = self._part(group)
        if not group.children:
            # A single op with its backward: there is nothing to choose but to run both.
            return keep_everything(part, 0.0)
        children = tuple(self._child(c) for c in group.children)
        options: list[Option] = []
        for maker in self.options.makers:
            # A fifth of what is left for each, so that a slow maker leaves the others something.
            options += maker(part, 0.2 * self.left_s())
        options += self.by_hilp(part, children)
        return select(options or keep_everything(part, 0.0), self.options.max_options)

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
        # One model for all budgets. Corrections are left out: the option is measured afterwards,
        # and the larger model would take longer than it is worth here.
        model = LevelModel(level, min(peak for peak, _ in budgets), corrections=False)
        plans: list[tuple[int, int, Plan]] = []
        # From small to large, so that the plan for a smaller budget is a start for a larger one.
        for peak, save in sorted(budgets):
            limit = min(self.options.ilp_time_s, 0.2 * self.left_s())
            if limit <= 0:
                break
            self.num_programs += 1
            plan, _ = model.solve(
                peak,
                save,
                time_limit_s=limit,
                rel_gap=self.options.rel_gap,
                seed=self.seed,
                start=_within(plans, peak, save),
            )
            if model.stopped and limit < self.options.ilp_time_s:
                self.cut_short = True
            if plan is not None:
                plans.append((peak, save, plan))
                forward, backward = lower_plan(level, plan)
                found.append(
                    measure(part, [local[i] for i in forward], [local[i] for i in backward])
                )
        return found


def _within(plans: Iterable[tuple[int, int, Plan]], peak: int, save: int) -> Plan | None:
    """The cheapest plan for budgets that are no larger: the start for these."""
    fitting = [plan for p, s, plan in plans if p <= peak and s <= save]
    return min(fitting, key=lambda plan: plan.cost, default=None)


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
    # What is resident is always there: for a level it does not exist.
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
