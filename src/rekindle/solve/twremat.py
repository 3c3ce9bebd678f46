"""`twremat`: rematerialization along balanced separators of a tree decomposition.

Kumar, Purohit, Svitkina, Vee, Wang: Efficient Rematerialization for Deep Networks (NeurIPS 2019).
The graph here is that of the ops (an op with several outputs is one vertex; u - v is an edge if v
reads what u makes), so multi-output ops need no special care.

1. `partition.treewidth.eliminate`: a tree decomposition by min-fill elimination.
2. `partition.treewidth.separator_tree`: its bags as a balanced recursion tree (centroids), each bag
   less the vertices of the bags above it. What leaves the subtree of a bag goes to bags above it
   only.
3. `Recursion`: the recomputing sequence. R(t, need): for each vertex v of bag t that need depends
   on, in topological order, have the subtrees compute what v reads from them, compute v, forget
   what they computed; then have the subtrees compute the rest of need. Equal calls give equal
   sequences and are expanded once.
4. `_native.fill_up` (cpp/greedy/fill_up.cpp): replay the sequence under a memory limit, keeping
   what it would free while there is room, and leave out the runs whose results are still there.
   What goes first is what is cheapest per byte to bring back with all that is missing for it.

Several limits at and below the budget, several depths of the recursion and three ways to value a
kept value are tried, and the best simulated schedule wins: the result is not monotone in any of
them. Run-once ops run at their first place in the sequence and their outputs stay from there on.

Known limits. The length of the sequence grows as n^(log width): the recursion is cut at the depth
where it stays under `max_length` (below the cut, subtrees are computed whole, in listed order), and
a rest of the graph with a degree beyond `max_width` becomes one bag. On graphs without small
separators (random layered ones, say) little is left of the method and tight budgets are reported
infeasible. Reordering beyond what the recursion does is not tried. In-place savings are not used
to fill up, only counted.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from rekindle import _native
from rekindle.core import Problem, Schedule, Solution, keep_all, simulate
from rekindle.partition.treewidth import Node, OpGraph, bits, eliminate, separator_tree
from rekindle.solve.base import best_solution
from rekindle.solve.progress import Progress, report

# What a kept value is worth. All are tried, since none is best on every graph.
KEEPS = (
    _native.Keep.chain_per_byte_time,
    _native.Keep.chain_per_byte,
    _native.Keep.cost_per_byte,
)


@dataclass(frozen=True, slots=True)
class TWRemat:
    """Divide and conquer along a tree decomposition."""

    max_length: int = 100_000  # steps of a recomputing sequence
    max_width: int = 60
    num_limits: int = 12
    lowest_limit: float = 0.7  # of the budget
    rounds: int = 6
    wide: int = 10  # beyond this width a failure is put down to the graph

    name: ClassVar[str] = "twremat"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        return None

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        # `warm_start` is left unused: the sequences come from the graph, nothing is improved.
        search = _Search(self, problem, budget, time.monotonic() + time_limit_s)
        stopped_by = ""
        try:
            search.run()
        except KeyboardInterrupt:
            stopped_by = "interrupt"
        if time.monotonic() > search.deadline:
            stopped_by = stopped_by or "time limit"
        bound = sum(op.cost for op in problem.ops)
        solution = best_solution(
            problem,
            budget,
            search.found,
            solver=self.name,
            bound=bound,
            stopped_by=stopped_by,
            notes=tuple(search.notes),
        )
        if solution.schedule is None and search.width > self.wide:
            reason = (
                f"the tree decomposition has width {search.width}; this method needs small "
                f"separators (width {self.wide} or less) to reach tight budgets"
            )
            solution = replace(solution, message=f"{solution.message}: {reason}")
        return solution


class _Search:
    """One solve: the sequences, and the fill-ups that were tried."""

    def __init__(self, options: TWRemat, problem: Problem, budget: int, deadline: float) -> None:
        self.options = options
        self.problem = problem
        self.budget = budget
        self.start = time.monotonic()
        self.deadline = deadline
        self.found: list[Sequence[int]] = [keep_all(problem).ops]
        self.best_cost: int | None = None
        self.notes: list[str] = []
        self.width = 0

    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def run(self) -> None:
        if simulate(self.problem, keep_all(self.problem)).peak <= self.budget:
            return
        options = self.options
        found = recomputing_sequences(
            self.problem, options.max_length, options.max_width, self.deadline
        )
        self.width = found.width
        self.notes.append(f"width {found.width}, recursion cut at depth {found.depth}")
        for sequence in found.sequences:
            if self.left_s() == 0:
                return
            self._fill(sequence)

    def _fill(self, sequence: Sequence[int]) -> None:
        options = self.options
        steps = list(sequence)
        spread = max(1, options.num_limits - 1)
        for keep in KEEPS:
            for k in range(options.num_limits):
                # Closer together near the budget, where the best one mostly is.
                share = 1 - (1 - options.lowest_limit) * (k / spread) ** 2
                limit = int(self.budget * share)
                ops = _native.fill_up(
                    self.problem.native, steps, limit, keep, options.rounds, self.left_s()
                )
                self._take(ops)
                if self.left_s() == 0:
                    return

    def _take(self, ops: list[int]) -> None:
        trace = simulate(self.problem, Schedule(tuple(ops)))
        self.found.append(ops)
        if trace.peak > self.budget:
            return
        if self.best_cost is None or trace.cost < self.best_cost:
            self.best_cost = trace.cost
            elapsed = time.monotonic() - self.start
            report(Progress(TWRemat.name, elapsed, cost=trace.cost))


@dataclass(frozen=True, slots=True)
class Sequences:
    """Recomputing sequences of a graph, the one with the most recomputation first. They do not
    depend on sizes, costs or a budget."""

    sequences: tuple[list[int], ...]
    width: int
    depth: int


def recomputing_sequences(
    problem: Problem, max_length: int, max_width: int, deadline: float = float("inf")
) -> Sequences:
    """By the deepest recursion that stays within the length, and by two shallower ones."""
    graph = OpGraph.of(problem)
    bags, width = eliminate(graph, max_width, deadline)
    recursion = Recursion(graph, separator_tree(bags, len(graph.inputs)))
    # The length is found without building anything, so the depth can be tried from the top.
    depth = recursion.height
    while depth > 0 and recursion.length(graph.targets, depth, max_length) > max_length:
        depth -= 1
    # Less recursion needs more memory and costs less; with a limit on memory in the fill-up, which
    # of them ends cheaper is not known before.
    depths = sorted({depth, max(0, depth - 2), depth // 2}, reverse=True)
    return Sequences(tuple(recursion.sequence(graph.targets, d) for d in depths), width, depth)


class Recursion:
    """R(t, need) over the separator tree; nodes at `depth` or below it are computed whole."""

    def __init__(self, graph: OpGraph, nodes: list[Node]) -> None:
        self.graph = graph
        self.nodes = nodes
        self.height = max(node.depth for node in nodes)
        self.position: list[dict[int, int]] = []  # per node: vertex -> which child holds it
        for node in nodes:
            held: dict[int, int] = {}
            for child in node.children:
                held.update(dict.fromkeys(nodes[child].span, child))
            self.position.append(held)
        self._reach: dict[tuple[int, bool], dict[int, int]] = {}
        self._lengths: dict[tuple[int, tuple[int, ...], int], int] = {}

    def _reached(self, t: int, whole: bool) -> dict[int, int]:
        """Per vertex of the span of t: which of t's own vertices (all of the span, if whole) it
        depends on, itself included, by paths inside the span. What is outside is there anyway."""
        cached = self._reach.get((t, whole))
        if cached is not None:
            return cached
        node = self.nodes[t]
        # Sets of own vertices as bits of one number: a union is one instruction per 64 of them.
        own = {v: 1 << k for k, v in enumerate(node.span if whole else node.own)}
        reach: dict[int, int] = {}
        for v in node.span:
            mask = own.get(v, 0)
            for u in self.graph.inputs[v]:
                mask |= reach.get(u, 0)
            reach[v] = mask
        self._reach[(t, whole)] = reach
        return reach

    def _wanted(self, t: int, need: tuple[int, ...], whole: bool) -> list[int]:
        reach = self._reached(t, whole)
        mask = 0
        for v in need:
            mask |= reach[v]
        vertices = self.nodes[t].span if whole else self.nodes[t].own
        return [vertices[k] for k in bits(mask)]

    def _calls(self, t: int, need: tuple[int, ...]) -> list[tuple[int, tuple[int, ...]]]:
        """What R(t, need) does, in order: (child, its need), or (-1, (vertex,)) to run it."""
        held = self.position[t]

        def split(vertices: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
            parts: dict[int, list[int]] = {}
            for u in vertices:
                child = held.get(u)
                if child is not None:
                    parts.setdefault(child, []).append(u)
            return [(child, tuple(part)) for child, part in sorted(parts.items())]

        # A fixed order of the children, so that equal calls give equal sequences and one expansion
        # serves all of them.
        calls: list[tuple[int, tuple[int, ...]]] = []
        for v in self._wanted(t, need, whole=False):
            calls.extend(split(self.graph.inputs[v]))
            calls.append((-1, (v,)))
        calls.extend(split(need))
        return calls

    def _whole(self, t: int, depth: int) -> bool:
        return self.nodes[t].depth >= depth or not self.nodes[t].children

    def length(self, need: tuple[int, ...], depth: int, cap: int) -> int:
        """The number of steps of the sequence; where it is beyond the cap, something beyond it."""

        def count(t: int, need: tuple[int, ...]) -> int:
            key = (t, need, depth)
            known = self._lengths.get(key)
            if known is not None:
                return known
            if self._whole(t, depth):
                total = len(self._wanted(t, need, whole=True))
            else:
                total = 0
                for child, part in self._calls(t, need):
                    total += 1 if child < 0 else count(child, part)
                    if total > cap:
                        break
            # Where the cap was passed this is only a lower bound, which is all that is asked for.
            self._lengths[key] = total
            return total

        return count(0, need)

    def sequence(self, need: tuple[int, ...], depth: int) -> list[int]:
        known: dict[tuple[int, tuple[int, ...]], list[int]] = {}

        # Recursion in Python is safe here: its depth is that of the separator tree, the logarithm
        # of the number of ops.
        def expand(t: int, need: tuple[int, ...]) -> list[int]:
            key = (t, need)
            if key in known:
                return known[key]
            if self._whole(t, depth):
                steps = self._wanted(t, need, whole=True)
            else:
                steps = []
                for child, part in self._calls(t, need):
                    steps.extend(part if child < 0 else expand(child, part))
            known[key] = steps
            return steps

        return expand(0, need)
