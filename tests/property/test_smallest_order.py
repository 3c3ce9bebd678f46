"""The search over sets of ops: the smallest peak of all orders, against every order there is."""

from random import Random

import pytest

from rekindle import _native
from rekindle.core import Problem, Schedule, keep_all, simulate
from rekindle.core.generate import random_problem, transformer
from rekindle.solve.base import without_dead_ops


def every_order(problem: Problem, ran: tuple[int, ...] = ()):
    """All valid orders with every op once."""
    if len(ran) == len(problem.ops):
        yield ran
        return
    made = {v for i in ran for v in problem.ops[i].outputs} | set(problem.resident)
    for i, op in enumerate(problem.ops):
        if i not in ran and made.issuperset(op.inputs):
            yield from every_order(problem, (*ran, i))


def smallest_by_sets(problem: Problem) -> int:
    """The smallest peak of all orders, over all closed sets of ops and with no rule to leave any
    out: after the set, a value is there that will be read, or that stays."""
    stays = set(problem.outputs) | set(problem.held)
    readers: dict[int, int] = dict.fromkeys(range(len(problem.values)), 0)
    for i, op in enumerate(problem.ops):
        for v in op.inputs:
            readers[v] |= 1 << i
    size = [0 if v in problem.resident else value.size for v, value in enumerate(problem.values)]

    def live(ran: int, v: int) -> bool:
        return v in stays or bool(readers[v] & ~ran)

    best = {0: 0}  # ran -> smallest peak so far
    for _ in problem.ops:
        longer: dict[int, int] = {}
        for ran, so_far in best.items():
            made = {v for i, op in enumerate(problem.ops) if ran >> i & 1 for v in op.outputs}
            there = {v for v in made if live(ran, v)}
            memory = sum(size[v] for v in there)
            for i, op in enumerate(problem.ops):
                if ran >> i & 1 or not made.issuperset(set(op.inputs) - set(problem.resident)):
                    continue
                saved = sum(size[b] for a, b in op.inplace if not live(ran | 1 << i, a))
                step = memory + sum(size[v] for v in op.outputs) + op.workspace - saved
                reached = max(so_far, step)
                longer[ran | 1 << i] = min(reached, longer.get(ran | 1 << i, reached))
        best = longer
    return min(best.values())


def peak(problem: Problem, order) -> int:
    return simulate(problem, Schedule(tuple(order))).peak


def search(problem: Problem, budget: int = 0, max_width: int = 4096, max_sets: int = 10**6):
    start = list(keep_all(problem).ops)
    order, at_least, _, _ = _native.smallest_order(
        problem.native, start, budget, max_width, max_sets, 60.0
    )
    assert sorted(order) == start
    return peak(problem, order), at_least


@pytest.mark.parametrize("seed", range(150))
def test_against_every_order(seed):
    rng = Random(seed)
    problem = random_problem(
        rng, rng.randint(1, 7), inplace=0.5, multi_output=0.4, workspace=0.3, dead=0.1
    )
    smallest = min(peak(problem, order) for order in every_order(problem))
    assert search(problem) == (smallest, smallest)
    assert search(problem, budget=smallest)[0] == smallest


@pytest.mark.parametrize("seed", range(60))
def test_the_rules_lose_nothing(seed):
    rng = Random(500 + seed)
    problem = random_problem(rng, rng.randint(8, 12), inplace=0.4, workspace=0.3, once=0.0)
    smallest = smallest_by_sets(problem)
    assert search(problem) == (smallest, smallest)


@pytest.mark.parametrize("seed", range(30))
def test_a_narrow_search_claims_nothing_false(seed):
    problem, _ = without_dead_ops(random_problem(seed, 30, inplace=0.3))
    best, at_least = search(problem)
    narrow, claimed = search(problem, max_width=16, max_sets=200)
    assert claimed <= best
    assert at_least <= best <= narrow


def test_an_order_within_the_budget_is_enough():
    problem = transformer(3)
    whole = peak(problem, keep_all(problem).ops)
    assert search(problem, budget=whole)[0] == whole


def test_the_start_must_run_every_op_once():
    problem = transformer(1)
    with pytest.raises(ValueError, match="every op once"):
        _native.smallest_order(problem.native, [0, 0], 1, 16, 10, 1.0)
