"""The schedules under which a managed module is compared with eager."""

import random
from collections.abc import Callable

from rekindle.core import Problem, Schedule, check_schedule, keep_all
from rekindle.solve.baselines import Floor, segmented

Scheduler = Callable[[Problem], Schedule]


def sqrt(problem: Problem) -> Schedule:
    """Segments of about equal bytes, the square root of the forward ops in number."""
    loss = problem.loss_op
    forward = len(problem.ops) if loss is None else loss
    return Schedule(tuple(segmented(problem, max(2, round(forward**0.5)))))


def floor(problem: Problem) -> Schedule:
    """The smallest peak of the greedy walk, with a length that a test can run."""
    solution = Floor(max_length_factor=4).solve(problem, 0, time_limit_s=20.0, seed=0)
    return solution.schedule or solution.smallest or keep_all(problem)


def thrice(problem: Problem, seed: int = 0) -> Schedule:
    """A random valid schedule: ops in a random order that the data allows, every op that may run
    again three times, at random places after its first run."""
    source = random.Random(seed)
    order = random_order(problem, source)
    place: list[list[tuple[float, int]]] = [[] for _ in order]
    for position, op_id in enumerate(order):
        place[position].append((0.0, op_id))
        if not problem.ops[op_id].once:
            for _ in range(2):
                later = source.randrange(position, len(order))
                place[later].append((source.uniform(0.1, 1.0), op_id))
    # Within one place the repeats keep their random order: their inputs are all there already.
    steps = [op_id for at in place for _, op_id in sorted(at)]
    schedule = Schedule(tuple(steps))
    check_schedule(problem, schedule)
    return schedule


def random_order(problem: Problem, source: random.Random) -> list[int]:
    """A random topological order of all ops."""
    producer, readers = problem.producer, problem.readers
    waits = [len({producer[v] for v in op.inputs if producer[v] >= 0}) for op in problem.ops]
    ready = [i for i, count in enumerate(waits) if count == 0]
    order = []
    while ready:
        last = source.randrange(len(ready))
        ready[last], ready[-1] = ready[-1], ready[last]
        op_id = ready.pop()
        order.append(op_id)
        for after in {r for v in problem.ops[op_id].outputs for r in readers[v]}:
            waits[after] -= 1
            if waits[after] == 0:
                ready.append(after)
    assert len(order) == len(problem.ops)
    return order


SCHEDULES: dict[str, Scheduler] = {
    "keep-all": keep_all,
    "sqrt": sqrt,
    "floor": floor,
    "thrice": thrice,
}
