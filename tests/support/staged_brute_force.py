"""Brute force over the staged space, judged by `simulate` alone.

The space: stage t runs a subset of the ops 0 .. t-1 in listed order, then op t for the first time;
ops that must stand once do; an op that makes a held value does not run again after the loss.
"""

from collections.abc import Callable

from rekindle.core import Problem, Schedule, keep_all, simulate
from rekindle.core.generate import random_problem
from rekindle.solve.base import trivial_floor, without_dead_ops


def small_problem(seed: int, num_ops: int) -> Problem:
    """Every feature of the format in a few ops, as a solver gets it: dead ops removed."""
    problem, _ = without_dead_ops(
        random_problem(seed, num_ops, max_size=8, max_cost=7, inplace=0.4, multi_output=0.3)
    )
    return problem


def budget_between(problem: Problem, part: float) -> int:
    """Between the smallest conceivable peak and that of keep-all."""
    low, high = trivial_floor(problem), simulate(problem, keep_all(problem)).peak
    return max(1, low + int(part * (high - low)))


def cheapest_by_force(
    problem: Problem, fits: Callable[[Schedule], bool], below: int | None = None
) -> int | None:
    """The smallest cost of a staged schedule that fits; with `below`, of those that cost less."""
    num_ops, loss = len(problem.ops), problem.loss_op
    places = [
        (t, i)
        for t in range(num_ops)
        for i in range(t)
        if not problem.ops[i].once
        and not (loss is not None and t > loss and set(problem.held) & set(problem.ops[i].outputs))
    ]
    total = sum(op.cost for op in problem.ops)
    best = below
    found = None

    def walk(place: int, chosen: list[tuple[int, int]], cost: int) -> None:
        nonlocal best, found
        if best is not None and cost >= best:
            return
        if place == len(places):
            again = set(chosen)
            steps = [i for t in range(num_ops) for i in range(t + 1) if i == t or (t, i) in again]
            schedule = Schedule(tuple(steps))
            if fits(schedule):
                assert simulate(problem, schedule).cost == cost
                best = found = cost
            return
        walk(place + 1, chosen, cost)
        t, i = places[place]
        chosen.append((t, i))
        walk(place + 1, chosen, cost + problem.ops[i].cost)
        chosen.pop()

    walk(0, [], total)
    return found
