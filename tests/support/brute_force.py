"""Optima over ALL valid schedules of tiny problems (about 8 ops), any order, any repeats.

Shortest paths over what is in memory. A state holds the kept values, the run-once ops that have
run, and the held values whose held copy is still the newest. A move frees one value, at no cost,
or runs an op; it may then free inputs of in-place pairs at that very step, which saves their
bytes. Freeing is a choice here, while `simulate` frees after the last use: the best choice frees
exactly then, so the optima are the same.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from rekindle.core import Op, Problem, Schedule

State = tuple[frozenset[int], frozenset[int], frozenset[int]]


@dataclass(frozen=True)
class Optimum:
    cost: int
    peak: int
    schedule: Schedule


def cheapest(problem: Problem, budget: int) -> Optimum | None:
    """The cheapest schedule within the budget; None if there is none (a proof)."""
    return _search(problem, budget, by_peak=False)


def smallest_peak(problem: Problem) -> Optimum:
    """A schedule with the smallest peak of all."""
    found = _search(problem, None, by_peak=True)
    assert found is not None
    return found


def _search(problem: Problem, budget: int | None, *, by_peak: bool) -> Optimum | None:
    start: State = (frozenset(), frozenset(), frozenset())
    best: dict[State, tuple[int, int]] = {start: (0, 0)}
    # Entries: (key, number of the entry, state, cost, peak, steps as a linked list).
    queue: list[tuple[tuple[int, int], int, State, int, int, object]] = [
        ((0, 0), 0, start, 0, 0, None)
    ]
    count = 0
    while queue:
        key, _, state, cost, peak, steps = heapq.heappop(queue)
        if key > best[state]:
            continue
        if _done(problem, state):
            return Optimum(cost, peak, Schedule(_unwind(steps)))
        for op_id, memory, after in _moves(problem, state):
            if budget is not None and memory > budget:
                continue
            new_cost = cost + (problem.ops[op_id].cost if op_id >= 0 else 0)
            new_peak = max(peak, memory)
            new_key = (new_peak, new_cost) if by_peak else (new_cost, new_peak)
            if after not in best or new_key < best[after]:
                best[after] = new_key
                count += 1
                path = steps if op_id < 0 else (steps, op_id)
                heapq.heappush(queue, (new_key, count, after, new_cost, new_peak, path))
    return None


def _unwind(steps: object) -> tuple[int, ...]:
    ops = []
    while steps is not None:
        steps, op_id = steps  # type: ignore[misc]
        ops.append(op_id)
    return tuple(reversed(ops))


def _done(problem: Problem, state: State) -> bool:
    kept, ran, _ = state
    wanted = set(problem.outputs) - set(problem.resident)
    return kept >= wanted and all(i in ran for i, op in enumerate(problem.ops) if op.once)


def _moves(problem: Problem, state: State) -> Iterator[tuple[int, int, State]]:
    """(op or -1 for freeing, memory at the step, state after it)."""
    kept, ran, newest_held = state
    for v in kept - newest_held:
        yield -1, 0, (kept - {v}, ran, newest_held)
    resident = set(problem.resident)
    for op_id, op in enumerate(problem.ops):
        if (op.once and op_id in ran) or not kept | resident >= set(op.inputs):
            continue
        lives_on = newest_held
        if op.phase == "loss":
            lives_on = newest_held | (set(problem.held) - resident)
        consumable = [pair for pair in op.inplace if pair[0] not in lives_on]
        for size in range(len(consumable) + 1):
            for pairs in combinations(consumable, size):
                yield _run(problem, op_id, op, state, lives_on, pairs)


def _run(
    problem: Problem,
    op_id: int,
    op: Op,
    state: State,
    lives_on: frozenset[int],
    pairs: tuple[tuple[int, int], ...],
) -> tuple[int, int, State]:
    kept, ran, _ = state
    sizes = [value.size for value in problem.values]
    # An older copy of an output is gone before this step, unless it is held.
    present = kept | set(op.outputs)
    loss_ran = problem.loss_op is not None and problem.loss_op in ran | {op_id}
    hidden = set()  # held copies that are no longer the newest of their value
    if loss_ran:
        held = set(problem.held) - set(problem.resident)
        hidden = held - (lives_on - set(op.outputs))
    memory = sum(sizes[v] for v in present) + sum(sizes[v] for v in hidden) + op.workspace
    memory -= sum(sizes[target] for _, target in pairs)
    after = (
        frozenset(present - {source for source, _ in pairs}),
        ran | {op_id} if op.once else ran,
        frozenset(lives_on - set(op.outputs)),
    )
    return op_id, memory, after
