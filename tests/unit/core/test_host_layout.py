"""Where values lie in host memory: apart from each other while they are there."""

from random import Random

from support.random_transfers import random_transfer_problem, random_transfer_schedule

from rekindle.core import host_layout
from rekindle.core.schedule import Step


def spans(steps: tuple[Step, ...]) -> list[tuple[int, int]]:
    """Per send: its step, and the step of the value's release, or the end."""
    found: list[tuple[int, int]] = []
    newest: dict[int, int] = {}
    for t, step in enumerate(steps):
        if isinstance(step, int):
            continue
        kind, v = step
        if kind == "send":
            newest[v] = len(found)
            found.append((t, len(steps)))
        elif kind == "release":
            found[newest[v]] = (found[newest[v]][0], t)
    return found


def test_no_two_values_share_a_byte() -> None:
    shared = 0
    for seed in range(400):
        rng = Random(seed)
        problem = random_transfer_problem(rng, rng.randint(2, 14))
        steps = random_transfer_schedule(problem, rng).steps
        sizes = [v.size for v in problem.values]
        layout = host_layout(steps, sizes)
        there = spans(steps)
        assert len(layout.slots) == len(there)
        for i, (a, b) in enumerate(zip(layout.slots, there, strict=True)):
            assert (a.num_bytes, a.offset >= 0) == (sizes[a.value_id], True)
            assert a.offset + a.num_bytes <= layout.num_bytes
            for c, d in list(zip(layout.slots, there, strict=True))[i + 1 :]:
                apart = a.offset + a.num_bytes <= c.offset or c.offset + c.num_bytes <= a.offset
                empty = not a.num_bytes or not c.num_bytes
                assert apart or empty or b[1] < d[0] or d[1] < b[0]
                shared += not apart and not empty
    assert shared > 50


def test_nothing_is_lost_where_nothing_is_released() -> None:
    """Then, and where one value is there at a time, the piece is as large as what is there."""
    for seed in range(200):
        rng = Random(seed)
        problem = random_transfer_problem(rng, rng.randint(2, 14))
        steps = random_transfer_schedule(problem, rng).steps
        if any(not isinstance(s, int) and s[0] == "release" for s in steps):
            continue
        sizes = [v.size for v in problem.values]
        sent = [s[1] for s in steps if not isinstance(s, int) and s[0] == "send"]
        assert host_layout(steps, sizes).num_bytes == sum(sizes[v] for v in sent)


def test_slots_of_steps() -> None:
    steps = (0, ("send", 4), ("drop", 4), 1, ("fetch", 4), ("release", 4), ("send", 4), 2)
    layout = host_layout(steps, [0, 0, 0, 0, 7])
    assert layout.slot_of_step == (-1, 0, 0, -1, 0, 0, 1, -1)
    assert [(s.offset, s.num_bytes) for s in layout.slots] == [(0, 7), (0, 7)]
    assert layout.num_bytes == 7
