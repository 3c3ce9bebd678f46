"""Which ops are free in the next neighbourhood of a schedule (`neighbourhood`).

Half of them are near an op that runs again, by their first runs or in the graph; the others are
where memory could come from instead: near another op, or the ops that run again at large cost. What
a free op reads and what is made more than once has to be free too, so it is taken in.
"""

import random
from collections.abc import Sequence

from rekindle.core import Problem


def choose_free(
    problem: Problem, schedule: Sequence[int], num_ops: int, rng: random.Random
) -> set[int]:
    """About `num_ops` ops, some of which run again; empty where none does."""
    counts = [0] * len(problem.ops)
    order: list[int] = []  # of first runs
    for i in schedule:
        if not counts[i]:
            order.append(i)
        counts[i] += 1
    again = [i for i in order if counts[i] > 1]
    if not again:
        return set()
    place = {i: k for k, i in enumerate(order)}
    weights = [1 + problem.ops[i].cost for i in again]
    first = rng.choices(again, weights)[0]
    kind = rng.randrange(3)
    if kind == 0:  # two stretches
        second = rng.choice(order)
        found = _stretch(order, place[first], num_ops // 2)
        found |= _stretch(order, place[second], num_ops // 2)
    elif kind == 1:  # around it in the graph
        found = _around(problem, first, num_ops, rng)
    else:  # single ops of both kinds
        kept = [i for i in order if counts[i] == 1 and not problem.ops[i].once]
        found = {first, *rng.choices(again, weights, k=num_ops // 3)}
        found |= set(rng.sample(kept, min(len(kept), num_ops // 2)))
    return _closed(problem, counts, found, 2 * num_ops)


def _stretch(order: Sequence[int], middle: int, length: int) -> set[int]:
    begin = max(0, min(middle - length // 2, len(order) - length))
    return set(order[begin : begin + length])


def _around(problem: Problem, op: int, num_ops: int, rng: random.Random) -> set[int]:
    found, edge = {op}, [op]
    while edge and len(found) < num_ops:
        i = edge.pop(rng.randrange(len(edge)))
        near = [problem.producer[v] for v in problem.ops[i].inputs]
        near += [j for v in problem.ops[i].outputs for j in problem.readers[v]]
        new = [j for j in near if j >= 0 and j not in found and not problem.ops[j].once]
        found.update(new)
        edge += new
    return found


def _closed(problem: Problem, counts: Sequence[int], found: set[int], most: int) -> set[int]:
    """With the makers, more than once, of what they read; as far as there is room."""
    todo = sorted(found)
    while todo and len(found) < most:
        for v in problem.ops[todo.pop()].inputs:
            by = problem.producer[v]
            if by >= 0 and counts[by] > 1 and by not in found:
                found.add(by)
                todo.append(by)
    return found
