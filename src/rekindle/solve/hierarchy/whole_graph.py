"""Methods for the whole graph that `hiremate` runs beside its hierarchy (HiRemate, Sec. 3.2.1: the
solvers that are not hierarchical ignore the partition): TW-Remat, and rk-Rotor on chains of blocks.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence

from rekindle import _native
from rekindle.core import Problem, Schedule, simulate
from rekindle.partition.separators import find_rows
from rekindle.solve.chains.chain_dp import Rule
from rekindle.solve.chains.chain_search import solve_on_chain
from rekindle.solve.hierarchy.option_makers import with_loss_workspace
from rekindle.solve.hierarchy.options import OptionMaker
from rekindle.solve.hierarchy.rockmate import Blocks
from rekindle.solve.parallel import num_cores
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
    # Workspace of the loss op stands for room that is not to be used across it.
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
    # The count in each entry makes the order total, so that schedules are not compared.
    fitting = [entry[-1] for entry in sorted(e for e in ranked if not e[0])[:count]]
    smallest = min(ranked, key=lambda e: e[2], default=None)
    return [*fitting, *([smallest[-1]] if smallest is not None else [])]


def whole_by_rotor(
    problem: Problem, budget: int, time_limit_s: float, makers: tuple[OptionMaker, ...]
) -> list[Sequence[int]]:
    """rk-Rotor over the chain of 1-separators, where there is one: blocks that save all, then
    with the makers' options as well."""
    deadline = time.monotonic() + time_limit_s
    # As many blocks as `Rockmate.max_blocks`.
    rows = find_rows(problem, 400)
    if isinstance(rows, str):
        return []
    blocks = Blocks(problem, rows)
    found: list[Sequence[int]] = []
    # First with blocks that save all, which takes little time and gives something to return.
    for round_ends in (deadline - 0.6 * time_limit_s, deadline):
        solution = solve_on_chain(
            problem,
            blocks.chain(),
            budget,
            Rule.persistent,
            name="hiremate",
            slots=500,
            prune=True,
            deadline=round_ends,
        )
        found += [s.ops for s in (solution.schedule, solution.smallest) if s is not None]
        if not blocks.options:
            blocks.make_options(makers, deadline - 0.3 * time_limit_s, num_cores())
    return found
