"""Brute force over the staged space, judged by `simulate` alone, and random problems for it.

The space: stage t runs a subset of the ops 0 .. t-1 in listed order, then op t for the first time;
ops that must stand once do; an op that makes a held value does not run again after the loss.
"""

import random
from collections.abc import Callable

from rekindle.core import Op, Problem, Schedule, Value, check_problem, simulate
from rekindle.solve.base import without_dead_ops


def random_problem(seed: int, max_ops: int = 8) -> Problem:
    """Small problems with every feature of the format; dead ops removed."""
    rng = random.Random(seed)
    num_ops = rng.randint(3, max_ops)
    training = rng.random() < 0.5
    loss = num_ops // 2 if training else None
    values = [Value("x", 5)]
    ops: list[Op] = []
    for i in range(num_ops):
        past = list(range(len(values)))
        inputs = rng.sample(past, min(len(past), rng.choice((1, 1, 2, 2, 3))))
        if i and 0 in inputs and len(inputs) > 1:
            inputs.remove(0)
        if loss is not None and i == num_ops - 1:
            inputs = [len(values) - 1, *(v for v in inputs if v != len(values) - 1)]
        outputs = []
        for _ in range(rng.choice((1, 1, 1, 2))):
            outputs.append(len(values))
            values.append(Value(f"v{len(values)}", rng.choice((0, 1, 2, 3, 5, 8))))
        inplace = ()
        pairs = [
            (v, out) for v in inputs for out in outputs if v and values[v].size == values[out].size
        ]
        if pairs and rng.random() < 0.5:
            inplace = (rng.choice(pairs),)
        ops.append(
            Op(
                name=f"op{i}",
                cost=rng.choice((0, 1, 2, 3, 7)),
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                workspace=rng.choice((0, 0, 0, 2)),
                recomputable=rng.random() > 0.1,
                inplace=inplace,
                phase=None if loss is None else _phase(i, loss),
            )
        )
    read = {v for op in ops for v in op.inputs}
    finals = [v for v in range(1, len(values)) if v not in read]
    held: tuple[int, ...] = ()
    if loss is not None and rng.random() < 0.5:
        held = tuple(v for v in ops[loss].inputs if v)[:1]
    outputs = sorted({finals[-1], *(v for v in range(1, len(values)) if rng.random() < 0.1)})
    problem, _ = without_dead_ops(
        Problem(tuple(values), tuple(ops), resident=(0,), outputs=tuple(outputs), held=held)
    )
    check_problem(problem)
    return problem


def _phase(i: int, loss: int) -> str:
    return "forward" if i < loss else "loss" if i == loss else "backward"


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
