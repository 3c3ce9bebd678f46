"""What docs/internals/regions.md says of memory, as plainly as possible and slow: the bytes that
are there while a step in regions runs, moment by moment. Nothing is shared with `StepProblem`,
which says the same as a problem, nor with the simulator.

What an opaque op or the loss makes lives from its event to the last event that it was seen at. What
a region makes lives by the simulator's rule inside of the region's own forward and backward; of its
outputs, the copy that was given out lives until the event that it was last seen at as well.
"""

from collections.abc import Callable, Sequence

from rekindle.core import Problem
from rekindle.solve.regions import RegionCall, RegionOption, StepEvent, Storage

Moment = tuple[int, int]  # event, and step within it


def peak_of(
    events: Sequence[StepEvent],
    storages: Sequence[Storage],
    calls: Sequence[RegionCall],
    options: Sequence[RegionOption],
    held: Sequence[int],
) -> int:
    """The most bytes at any moment."""
    moments: list[tuple[Moment, int, int]] = []  # with the op of a region that runs, and its call
    for t, event in enumerate(events):
        steps: Sequence[int] = ()
        if event.kind == "forward":
            steps = options[event.call].forward
        elif event.kind == "backward":
            steps = options[event.call].backward
            moments.append(((t, -1), -1, -1))  # the gradients have arrived
        for n, i in enumerate(steps):
            moments.append(((t, n), i, event.call))
        moments.append(((t, len(steps)), -1, -1))
    spans: list[tuple[Moment, Moment, int]] = []
    end = (len(events), 0)
    by_region = {s for c in calls for s in (*c.given.values(), *c.gradients.values())}
    tangent_of = {s: k for k, c in enumerate(calls) for s in c.tangents.values()}
    at = {(e.call, e.kind): t for t, e in enumerate(events) if e.call >= 0}

    def until(s: int) -> Moment:
        died = storages[s].died
        if died is None or s in held:
            return end
        k = tangent_of.get(s)
        if k is not None and died == at.get((k, "backward")):
            return (died, _last_read(calls[k], options[k], s))  # the region is done with it
        return (died, 10**9)

    for s, storage in enumerate(storages):
        if s not in by_region:
            first = (storage.born, 10**9 if events[storage.born].call >= 0 else -1)
            spans.append((first, until(s), storage.size))
    saved: dict[Moment, int] = {}
    for k, call in enumerate(calls):
        spans += _copies(call, options[k], at[k, "forward"], at[k, "backward"], until, end, saved)
    peak = 0
    for moment, i, k in moments:
        place = (moment[0], 10**9) if i < 0 and moment[1] >= 0 else moment
        bytes_ = sum(size for first, last, size in spans if first <= place <= last)
        if i >= 0:
            bytes_ += calls[k].problem.ops[i].workspace - saved.get(moment, 0)
        peak = max(peak, bytes_)
    return peak


def _last_read(call: RegionCall, option: RegionOption, s: int) -> int:
    values = {v for v, storage in call.tangents.items() if storage == s}
    reads = [n for n, i in enumerate(option.backward) if values & set(call.problem.ops[i].inputs)]
    return max(reads, default=-1)


def _copies(
    call: RegionCall,
    option: RegionOption,
    forward_at: int,
    backward_at: int,
    until: Callable[[int], Moment],
    end: Moment,
    saved: dict[Moment, int],
) -> list[tuple[Moment, Moment, int]]:
    problem: Problem = call.problem
    loss = problem.loss_op
    assert loss is not None
    steps = [((forward_at, n), i) for n, i in enumerate(option.forward)]
    steps += [((backward_at, n), i) for n, i in enumerate(option.backward)]
    spans: list[list] = []
    newest: dict[int, int] = {}
    reads: list[tuple[Moment, dict[int, int], int]] = []
    handed: dict[int, int] = {}
    begun = False
    for moment, i in steps:
        if moment[0] == backward_at and not begun:
            handed, begun = dict(newest), True
            # A gradient that does not arrive is zeros, made as the backward begins.
            for v in problem.ops[loss].outputs:
                if v not in call.tangents:
                    newest[v] = len(spans)
                    spans.append([(backward_at, -1), (backward_at, -1), problem.values[v].size])
        op = problem.ops[i]
        for v in op.inputs:
            if v in newest:
                spans[newest[v]][1] = max(spans[newest[v]][1], moment)
        reads.append((moment, {v: newest[v] for v, _ in op.inplace if v in newest}, i))
        for v in op.outputs:
            newest[v] = len(spans)
            spans.append([moment, moment, problem.values[v].size])
    handed = handed or dict(newest)
    _live_on(call, (forward_at, backward_at), spans, (handed, newest), until, end)
    for moment, copies, i in reads:
        for v, _ in problem.ops[i].inplace:
            if v in copies and spans[copies[v]][1] == moment:
                saved[moment] = saved.get(moment, 0) + problem.values[v].size
    return [tuple(span) for span in spans]


def _live_on(
    call: RegionCall,
    at: tuple[int, int],
    spans: list[list],
    copies: tuple[dict[int, int], dict[int, int]],
    until: Callable[[int], Moment],
    end: Moment,
) -> None:
    """What others read of the copies that were given out, and of the last ones."""
    problem, (forward_at, backward_at), (handed, newest) = call.problem, at, copies
    done, results = (forward_at, 10**9), (backward_at, 10**9)
    # The loss of the region reads what it gives out, and what orders its effects.
    for v in problem.ops[problem.loss_op].inputs:
        if v in handed:
            spans[handed[v]][1] = max(spans[handed[v]][1], done)
    for v, s in call.given.items():
        last = until(s)
        if last[0] != backward_at:
            spans[handed[v]][1] = max(spans[handed[v]][1], last)
    for v in problem.outputs:
        if v in newest:
            last = results
            if v in call.gradients:
                last = max(last, until(call.gradients[v]))
            spans[newest[v]][1] = max(spans[newest[v]][1], end if v in call.final else last)
