"""Exports that other tools open: a memory snapshot for PyTorch's memory_viz, a Chrome trace.

The snapshot is what `torch.cuda.memory._dump_snapshot` would have written for this step: one
allocation and one free per copy, with the op as the innermost frame and its module as the file. It
is a pickle because memory_viz reads nothing else; it holds plain lists, dicts, texts and numbers,
and nothing here ever reads one. The trace has a track each for forward, backward and
recompute (overlapping slices on one track are not shown well), and counters for the memory.
"""

import pickle
from typing import Any

from rekindle.core import Problem
from rekindle.report.account import FETCHED, KINDS, TEMPORARY, Account
from rekindle.report.module_paths import shown
from rekindle.report.timeline import call_of, lane_names, lane_of, stacks

_PROTOCOL = 4  # the newest that memory_viz reads
_FIRST_ADDRESS = 0x7F00_0000_0000  # as a driver hands them out, so that readers take them alike
_ROUND = 512
# Tracks are numbered from here: Perfetto takes thread 0 for nobody's, and thread 1 of process 1 for
# its main one.
_FIRST_TRACK = 2


def memory_snapshot(account: Account) -> dict[str, Any]:
    """The step as an allocator's history. Sizes are the problem's; a copy that takes the place of
    a dying one is a free and an allocation at the same address."""
    problem, schedule = account.problem, account.schedule
    dies: dict[int, list[int]] = {}
    made: dict[int, list[int]] = {}
    for k, copy in enumerate(account.copies):
        made.setdefault(copy.first, []).append(k)
        dies.setdefault(copy.last, []).append(k)
    space = _Space()
    events: list[dict[str, Any]] = []
    address: dict[int, int] = {}
    clock_ns = 0  # of the simulated step: ops one after the other

    def add(action: str, at: int, size: int, frames: list[dict[str, Any]], kind: int) -> None:
        events.append(
            {
                "action": action,
                "addr": at,
                "size": size,
                "stream": 0,
                "time_us": clock_ns // 1000,
                "frames": frames,
                "category": KINDS[kind] if kind != TEMPORARY else "unknown",
            }
        )

    def free(k: int, frames: list[dict[str, Any]]) -> None:
        size = problem.values[account.copies[k].value_id].size
        # Tokens have no address, and what an in-place op wrote over has given its own up already.
        if k in address:
            # The caching allocator's two events of a free: asked for, and done on the stream.
            for action in ("free_requested", "free_completed"):
                add(action, address[k], size, frames, account.kinds[k])
            space.give(address.pop(k), size)

    for step, op_id in enumerate(account.op_of_step):
        runs = isinstance(schedule.steps[step], int)
        frames = _frames(account, op_id, account.run_before[step])
        # Frees before it what the op writes over, so that the total is the simulator's.
        over = sum(problem.values[account.copies[k].value_id].size for k in account.dying[step])
        early = _written_over(account, step, dies) if over else ()
        for k in early:
            free(k, frames)
        for k in made.get(step, ()):
            size = problem.values[account.copies[k].value_id].size
            if size:
                address[k] = space.take(size)
                add("alloc", address[k], size, frames, account.kinds[k])
        workspace = problem.ops[op_id].workspace if runs else 0
        if workspace:
            at = space.take(workspace)
            add("alloc", at, workspace, frames, TEMPORARY)
        # Workspace lives while the op runs: from here to the op's end.
        clock_ns = account.starts[step + 1]
        if workspace:
            for action in ("free_requested", "free_completed"):
                add(action, at, workspace, frames, TEMPORARY)
            space.give(at, workspace)
        for k in dies.get(step, ()):
            free(k, frames)
    _drop_categories(events)
    return {
        "device_traces": [events],
        "segments": [_segment(account, space.end, address)],
        "external_annotations": [],
        "allocator_settings": {},
    }


def _drop_categories(events: list[dict[str, Any]]) -> None:
    """memory_viz fails on categories of which none is "unknown" (a slip of the pen in it)."""
    if not any(event["category"] == "unknown" for event in events):
        for event in events:
            del event["category"]


def snapshot_bytes(account: Account) -> bytes:
    """The memory snapshot as PyTorch's viewer reads it: a pickle of plain lists and dicts."""
    return pickle.dumps(memory_snapshot(account), protocol=_PROTOCOL)


def _written_over(account: Account, step: int, dies: dict[int, list[int]]) -> tuple[int, ...]:
    """The copies whose storage this step takes over: dying inputs of its in-place pairs."""
    op = account.problem.ops[account.op_of_step[step]]
    taken = {account.copies[k].value_id for k in account.dying[step]}
    sources = {i for i, o in op.inplace if o in taken}
    return tuple(k for k in dies.get(step, ()) if account.copies[k].value_id in sources)


def _frames(account: Account, op_id: int, run_before: bool) -> list[dict[str, Any]]:
    place = account.places[op_id]
    phase = account.problem.ops[op_id].phase or ""
    lane_name = f"{phase}, recompute" if run_before else phase
    return [
        {"filename": shown(place.module), "line": op_id, "name": place.call},
        {"filename": account.problem.name or "model", "line": 0, "name": lane_name or "step"},
    ]


def _segment(account: Account, end: int, address: dict[int, int]) -> dict[str, Any]:
    """One stretch of memory with what is still alive at the end; the rest of it is free."""
    blocks: list[dict[str, Any]] = []
    # In the order of addresses, without holes: the viewer draws a segment block after block.
    at = _FIRST_ADDRESS

    def block(size: int, requested: int, state: str, frames: list[dict[str, Any]]) -> None:
        blocks.append(
            {"address": at, "size": size, "requested_size": requested, "state": state,
             "frames": frames}
        )  # fmt: skip

    for k, start in sorted(address.items(), key=lambda item: item[1]):
        copy = account.copies[k]
        size = account.problem.values[copy.value_id].size
        if start > at:
            block(start - at, 0, "inactive", [])
            at = start
        op_id = account.op_of_step[copy.first]
        rounded = _rounded(size)
        block(rounded, size, "active_allocated", _frames(account, op_id, False))
        at += rounded
    if end > at:
        block(end - at, 0, "inactive", [])
    live = sum(b["requested_size"] for b in blocks)
    return {
        "device": 0,
        "address": _FIRST_ADDRESS,
        "total_size": end - _FIRST_ADDRESS,
        "allocated_size": live,
        "active_size": live,
        "requested_size": live,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": blocks,
    }


class _Space:
    """Addresses for storages: unique while they live, used again afterwards."""

    def __init__(self) -> None:
        self.end = _FIRST_ADDRESS
        self._free: dict[int, list[int]] = {}

    def take(self, size: int) -> int:
        # By exact size, newest first, as a caching allocator does: the picture looks familiar.
        free = self._free.get(_rounded(size))
        if free:
            return free.pop()
        at = self.end
        self.end += _rounded(size)
        return at

    def give(self, at: int, size: int) -> None:
        self._free.setdefault(_rounded(size), []).append(at)


def _rounded(size: int) -> int:
    return -(-size // _ROUND) * _ROUND


def chrome_trace(account: Account) -> dict[str, Any]:
    """Trace events for ui.perfetto.dev and chrome://tracing; times in microseconds."""
    problem, trace = account.problem, account.trace
    scale = _per_microsecond(problem)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name",
         "args": {"name": problem.name or "training step"}},
    ]  # fmt: skip
    names = lane_names(account)
    for tid, name in enumerate(names, _FIRST_TRACK):
        events.append(
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": name}}
        )
        events.append(
            {"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index",
             "args": {"sort_index": tid}}
        )  # fmt: skip
    by_kind = stacks(account, len(KINDS), account.kinds, [TEMPORARY] * len(account.schedule))
    kinds = [k for k in range(len(KINDS)) if k != FETCHED or account.schedule.transfers]
    for step, op_id in enumerate(account.op_of_step):
        place, track = account.places[op_id], lane_of(account, step)
        begin, end = _span(account, step)  # whole numbers, so that no step drifts
        at = account.starts[step] / scale
        events.append(
            {"ph": "X", "pid": 1, "tid": _FIRST_TRACK + track, "ts": begin / scale,
             "dur": (end - begin) / scale, "name": call_of(account, step), "cat": names[track],
             "args": {"module": shown(place.module), "step": step, "op": op_id,
                      "memory": trace.memory[step]}}
        )  # fmt: skip
        events.append(
            {"ph": "C", "pid": 1, "name": f"memory ({problem.size_unit})", "ts": at,
             "args": {"all": trace.memory[step]}}
        )  # fmt: skip
        events.append(
            {"ph": "C", "pid": 1, "name": f"of it ({problem.size_unit})", "ts": at,
             "args": {KINDS[k]: by_kind[k][step] for k in kinds}}
        )  # fmt: skip
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {key: value for key, value in account.record().items() if value is not None},
    }


def _span(account: Account, step: int) -> tuple[int, int]:
    """When a step runs, in the problem's cost unit: on its own lane where it is a transfer."""
    lanes = account.trace.lanes
    if lanes is None:
        return account.starts[step], account.starts[step + 1]
    return lanes.start[step], lanes.finish[step]


def _per_microsecond(problem: Problem) -> float:
    """Costs per microsecond; a cost without a unit of time stands as one microsecond."""
    return 1000.0 if problem.cost_unit == "ns" else 1.0
