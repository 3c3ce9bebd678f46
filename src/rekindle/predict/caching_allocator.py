"""What a schedule makes the CUDA caching allocator do: the blocks that it gets, and the segments
that the allocator takes from the device for them.

`memory_allocated` counts blocks, and a block may be larger than its request (see `block_sizes`);
`memory_reserved` counts segments. Both follow from the whole sequence of requests, which
`pool_events` lists; `cpp/place/caching_pool.h` has the rules and plays it. `pool_peak` plays step
after step beside the residents and on an empty pool: what parameters leave over of their segments
is too short for some requests and a little too long for others (a ResNet-18's gradients take 2 %
more beside its parameters than alone).
"""

import os
from collections.abc import Iterator, Sequence

from rekindle import _native
from rekindle.core import Problem, Schedule
from rekindle.core.schedule import Step
from rekindle.profile.block_sizes import MIB, allocator_settings, expandable_segments

_NUM_STEPS = 3  # in a row: after these, more take no further segments but in rare cases
_MOST_EVENTS = 10_000_000  # requests and releases that are played for an arena: about a second
_MOST_TRIES = 5_000
_LEAST_ARENA = 32 * MIB  # below this there is nothing to gain, and small segments weigh more


def pool_rules(expandable: bool | None = None) -> _native.PoolRules:
    """The allocator's rules as this process has set them up."""
    settings = allocator_settings()
    if expandable is None:
        expandable = expandable_segments()
    names = {
        "large_segment": "large_segment_size_mb",
        "max_split": "max_split_size_mb",
        "max_rounding": "max_non_split_rounding_mb",
    }
    sizes = {
        argument: int(settings[name]) * MIB
        for argument, name in names.items()
        if settings.get(name, "").isdecimal()
    }
    # A list of divisions by size is not modelled: what it rounds is rounded as without.
    divisions = settings.get("roundup_power2_divisions", "")
    number = int(divisions) if divisions.isdecimal() else 0
    return _native.PoolRules(expandable, divisions=number, **sizes)


def pool_peak(
    problem: Problem, schedule: Schedule, *, expandable: bool = False, num_steps: int = 2
) -> int:
    """The most that a step has allocated, by the model of the allocator, above what is resident;
    the worst of some steps in a row, since each finds the pool as the one before has left it."""
    residents = [problem.values[v].size for v in problem.resident]
    rules, events = pool_rules(expandable), pool_events(problem, schedule)
    found = (_native.replay(rules, events, held, [], num_steps) for held in ([], residents))
    return max(each.peak_allocated - each.base_allocated for each in found)


def reserved_peak(
    problem: Problem, schedule: Schedule, *, arena: Sequence[int] = (), also: Sequence[int] = ()
) -> int:
    """The segments that the allocator takes for steps that begin with an empty cache, whose
    residents leave no gaps. `also` are blocks that are there during the whole step. With an arena,
    what the step allocates itself has a pool of its own with segments of those sizes for large
    requests; what the caller makes between forward and backward has not."""
    if not arena:
        return _reserved(pool_events(problem, schedule), held=also)
    own = pool_events(problem, schedule, callers=False)
    outside = pool_events(problem, schedule, own=False)
    return _reserved(own, arena=arena) + _reserved(outside, held=also)


def best_arena(problem: Problem, schedule: Schedule) -> tuple[int, ...]:
    """Sizes of segments that serve all large requests of a step, as little as is found in all; none
    where that reserves no less than segments as they come, as where these grow and are one."""
    settings = allocator_settings()
    is_native = settings.get("backend", "native") == "native"
    if not is_native or expandable_segments() or "roundup_power2_divisions" in settings:
        return ()
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return ()
    events = pool_events(problem, schedule, callers=False)
    num_events = min(_MOST_EVENTS, _MOST_TRIES * len(events))
    arena = tuple(_native.best_arena(pool_rules(), events, num_events, 0))
    if sum(arena) < _LEAST_ARENA or _reserved(events, arena=arena) >= _reserved(events):
        return ()
    return arena


def _reserved(events: list[int], held: Sequence[int] = (), arena: Sequence[int] = ()) -> int:
    found = _native.replay(pool_rules(), events, held, arena, _NUM_STEPS)
    return int(found.peak_reserved)


def pool_events(
    problem: Problem, schedule: Schedule, *, own: bool = True, callers: bool = True
) -> list[int]:
    """What a step asks of the allocator, in order: bytes, or -k for what the k-th request got. The
    ops' own requests, and those of the caller between forward and backward."""
    events: list[int] = []
    live: dict[int, int] = {}  # copy -> the number of its request
    count = 0
    for what, (made, workspace, dead) in zip(
        schedule.steps, lifetimes(problem, schedule), strict=True
    ):
        is_loss = isinstance(what, int) and problem.ops[what].phase == "loss"
        wanted = callers if is_loss else own
        for copy, request, takes_over in made:
            # Written over: the same block, under another copy's name.
            if takes_over is not None:
                if takes_over in live:
                    live[copy] = live.pop(takes_over)
            elif request and wanted:
                count += 1
                live[copy] = count
                events.append(request)
        # Temporaries come and go while the op runs, beside its inputs and outputs.
        if workspace and wanted:
            count += 1
            events += (workspace, -count)
        events += (-live.pop(copy) for copy in dead if copy in live)
    return events


Made = tuple[int, int, int | None]  # copy, bytes, the copy whose storage it takes over
Lifetimes = tuple[list[Made], int, Sequence[int]]  # of one step: made, workspace, dying


def lifetimes(problem: Problem, schedule: Schedule) -> Iterator[Lifetimes]:
    """Per step: the copies it makes, its workspace, and the copies that die after it, by the rule
    of `core.simulate`."""
    resident = set(problem.resident)
    steps = schedule.steps
    end = len(steps)
    current: dict[int, int] = {}
    last: list[int] = []
    reads: list[dict[int, int]] = []
    makes: list[list[tuple[int, int]]] = []  # per step: copies and their values
    for step, what in enumerate(steps):
        wanted, outputs, is_loss = _uses(problem, what)
        read = {v: current[v] for v in wanted if v not in resident}
        for copy in read.values():
            last[copy] = max(last[copy], step)
        reads.append(read)
        if is_loss:
            for v in problem.held:
                if v not in resident:
                    last[current[v]] = end
        makes.append([])
        for v in outputs:
            current[v] = len(last)
            last.append(step)
            makes[-1].append((current[v], v))
    for v in problem.outputs:
        if v not in resident:
            last[current[v]] = end
    dying: list[list[int]] = [[] for _ in range(end + 1)]
    for copy, step in enumerate(last):
        dying[step].append(copy)
    for step, what in enumerate(steps):
        op = problem.ops[what] if isinstance(what, int) else None
        pairs = () if op is None else op.inplace
        source = {out: reads[step][v] for v, out in pairs if last[reads[step][v]] == step}
        made = [(copy, problem.values[v].size, source.get(v)) for copy, v in makes[step]]
        yield made, 0 if op is None else op.workspace, dying[step]


def _uses(problem: Problem, step: Step) -> tuple[Sequence[int], Sequence[int], bool]:
    """What a step reads and makes, and whether it is the loss."""
    if isinstance(step, int):
        op = problem.ops[step]
        return op.inputs, op.outputs, op.phase == "loss"
    kind, v = step
    return ((v,) if kind in ("send", "drop") else ()), ((v,) if kind == "fetch" else ()), False
