"""Calls that a step did not make and another will: the layers that LayerDrop left out.

A step was recorded in which some of equal layers did not run. The plan is for the step in which all
of them do, so the call of a layer that ran is put in once more: its events in the forward before
its own, those in the backward behind its own. What it got from the layer before it, the copy gets,
and gives it on. Steps in which any of the layers are left out have fewer of the same storages at
every moment.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rekindle.solve.regions.step_problem import Key, RegionCall, StepEvent, Storage


@dataclass(frozen=True, slots=True)
class Step:
    """A step as it was recorded, or with calls put in."""

    events: tuple[StepEvent, ...]
    storages: tuple[Storage, ...]
    calls: tuple[RegionCall, ...]
    held: tuple[int, ...]

    def span(self, k: int) -> tuple[range, range] | None:
        """The events of a call: from behind the region before it to its forward, and from its
        backward to the next region's."""
        kinds = [e.kind for e in self.events]
        at = [t for t, e in enumerate(self.events) if e.call == k and e.kind != "op"]
        if len(at) != 2:
            return None
        forward, backward = at
        first = forward
        while first > 0 and kinds[first - 1] == "op":
            first -= 1
        last = backward
        while last + 1 < len(kinds) and kinds[last + 1] == "op":
            last += 1
        # Of the first region the ops before it are the model's own beginning.
        if first == 0:
            first = forward
        if last == len(kinds) - 1:
            last = backward
        return range(first, forward + 1), range(backward, last + 1)


def with_call(step: Step, k: int, key: Key) -> Step:
    """The step with call `k` once more, under another key."""
    spans = step.span(k)
    if spans is None:
        return step
    before, after = spans
    num_before, num_after = len(before), len(after)
    new_k = len(step.calls)

    def moved(t: int) -> int:
        """Where an event of the given step stands in the new one."""
        if t < before.start:
            return t
        return t + num_before + (num_after if t >= after.stop else 0)

    def copied(t: int) -> int:
        return t if t in before else t + num_before + num_after

    events = list(step.events)
    again = [replace(e, call=new_k if e.call == k else e.call) for e in step.events]
    events = [
        *events[: before.start],
        *(again[t] for t in before),
        *events[before.start : after.stop],
        *(again[t] for t in after),
        *events[after.stop :],
    ]
    storages: list[Storage] = []
    copies: dict[int, int] = {}
    call = step.calls[k]
    arrived = set(call.tangents.values())
    for s, storage in enumerate(step.storages):
        born, died = storage.born, storage.died
        inside = born in before or born in after
        new_died = None if died is None else moved(died)
        if not inside and died is not None and (died in before or died in after):
            # What reached the call reaches the copy; behind the backward it goes with the copy.
            new_died = copied(died) if died in after and s not in arrived else moved(died)
        if born in after and died is not None and died not in after:
            new_died = copied(after.start)  # handed to the copy's backward
        storages.append(Storage(storage.size, moved(born), new_died))
        if inside:
            copies[s] = len(step.storages) + len(copies)
    for s in copies:
        storage = step.storages[s]
        died = storage.died
        if died is None:
            new_died = None
        elif died in before or died in after:
            new_died = copied(died)
        elif storage.born in before:
            # Read by the call itself, until its backward, or held by somebody for longer.
            new_died = max(moved(after.start), moved(died))
        else:
            new_died = moved(died)
        storages.append(Storage(storage.size, copied(storage.born), new_died))
    handed = _handed_on(step, k, after, call)
    new_call = replace(
        call,
        key=key,
        given={v: copies[s] for v, s in call.given.items() if s in copies},
        gradients={v: copies[s] for v, s in call.gradients.items() if s in copies},
        tangents={v: handed[s] for v, s in call.tangents.items() if s in handed},
    )
    held = (*step.held, *(copies[s] for s in step.held if s in copies))
    return Step(tuple(events), tuple(storages), (*step.calls, new_call), held)


def _handed_on(step: Step, k: int, after: range, call: RegionCall) -> dict[int, int]:
    """For each gradient that the call got: the one of its own that the copy gets in its place."""
    found: dict[int, int] = {}
    final = {call.gradients[v] for v in call.final if v in call.gradients}
    for tangent in call.tangents.values():
        size = step.storages[tangent].size
        for s, storage in enumerate(step.storages):
            leaves = storage.died is not None and storage.died not in after
            if storage.born in after and leaves and storage.size == size and s not in final:
                found[tangent] = s
    return found


def fullest(step: Step, paths: Sequence[str]) -> Step:
    """The step with the calls of all equal layers. `paths`: modules of the classes that ran."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        if path.rpartition(".")[2].isdigit():
            groups.setdefault(path.rpartition(".")[0], []).append(path)
    for parent, members in groups.items():
        step = _with_missing(step, parent, sorted(members, key=_place))
    return step


def _place(path: str) -> int:
    return int(path.rpartition(".")[2])


def _with_missing(step: Step, parent: str, members: Sequence[str]) -> Step:
    ran = [k for k, call in enumerate(step.calls) if group_of(call.key) == parent]
    if not ran or len({step.calls[k].path for k in ran}) < len(ran):
        return step  # none, or a loop over them: how often is not known
    missing = len(members) - len(ran)
    # The first layer may be another problem, of an input that needs no gradient; those
    # that follow are alike.
    source = ran[min(1, len(ran) - 1)]
    for _ in range(missing):
        longer = with_call(step, source, step.calls[source].key)
        if longer is step:
            return step
        step = longer
    order = [e.call for e in step.events if e.kind == "forward"]
    mine = [k for k in order if group_of(step.calls[k].key) == parent]
    calls = list(step.calls)
    for k, path in zip(mine, members, strict=False):
        calls[k] = replace(calls[k], key=(path, 0, calls[k].key[2]))
    return replace(step, calls=tuple(calls))


def group_of(key: Key) -> str | None:
    """The list of modules that a call's module is in."""
    parent, _, name = key[0].rpartition(".")
    return parent if name.isdigit() else None
