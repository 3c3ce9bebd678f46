"""Exports: replayed, they give the simulator's memory back."""

import json
import pickle
import pickletools
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from support.report_problems import layered, solved

from rekindle.core import keep_all
from rekindle.core.generate import random_problem, random_schedule
from rekindle.report import account
from rekindle.report.exports import chrome_trace, memory_snapshot, snapshot_bytes


def replayed(snapshot):
    """The peak of an allocator's history; addresses are unique while they live."""
    (events,) = snapshot["device_traces"]
    live: dict[int, int] = {}
    total = peak = 0
    for event in events:
        if event["action"] == "alloc":
            for at, size in live.items():
                assert event["addr"] >= at + size or event["addr"] + event["size"] <= at
            live[event["addr"]] = event["size"]
            total += event["size"]
        elif event["action"] == "free_completed":
            assert live.pop(event["addr"]) == event["size"]
            total -= event["size"]
        peak = max(peak, total)
    return peak, live


@given(st.integers(0, 2**32), st.integers(1, 12))
def test_the_snapshot_replays_to_the_peak(seed, num_ops):
    rng = Random(seed)
    problem = random_problem(rng, num_ops, inplace=0.5, workspace=0.4)
    found = account(problem, random_schedule(problem, rng, repeats=0.4))
    snapshot = memory_snapshot(found)
    peak, left = replayed(snapshot)
    assert peak == found.trace.peak
    (segment,) = snapshot["segments"]
    at, active = segment["address"], {}
    for block in segment["blocks"]:
        assert block["address"] == at
        if block["state"] == "active_allocated":
            active[at] = block["requested_size"]
        at += block["size"]
    assert at == segment["address"] + segment["total_size"]
    assert active == left


def test_the_pickle_holds_plain_data_alone():
    """memory_viz reads protocols 2 to 4 of lists, dicts, texts and numbers; nothing is called."""
    content = snapshot_bytes(solved(layered(), 0.6))
    names = {opcode.name for opcode, _, _ in pickletools.genops(content)}
    assert not names & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "INST", "OBJ"}
    assert pickle.loads(content)["device_traces"]
    names |= {opcode.name for opcode, _, _ in pickletools.genops(content)}
    # What the reader of memory_viz has in its table.
    assert names <= {
        "PROTO", "FRAME", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "MEMOIZE", "MARK", "BINGET",
        "LONG_BINGET", "SHORT_BINUNICODE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1",
        "TUPLE2", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "NEWFALSE", "NEWTRUE", "STOP",
    }  # fmt: skip


def test_categories_are_left_out_where_none_is_unknown():
    """memory_viz fails on a snapshot with other categories alone."""
    with_workspace = memory_snapshot(solved(layered(), 0.6))["device_traces"][0]
    assert "unknown" in {event["category"] for event in with_workspace}
    problem = random_problem(1, 6, workspace=0.0)
    (events,) = memory_snapshot(account(problem, keep_all(problem)))["device_traces"]
    assert events
    assert not [event for event in events if "category" in event]


def test_the_trace_has_a_slice_per_step_and_counters():
    found = solved(layered(), 0.6)
    trace = json.loads(json.dumps(chrome_trace(found)))
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    totals = [e for e in trace["traceEvents"] if e["name"] == "memory (bytes)"]
    counters = [e for e in trace["traceEvents"] if e["name"] == "of it (bytes)"]
    assert {e["ph"] for e in (*totals, *counters)} == {"C"}
    assert len(slices) == len(counters) == len(found.schedule)
    assert [e["args"]["all"] for e in totals] == list(found.trace.memory)
    assert 0 not in {e["tid"] for e in slices}  # which Perfetto takes for nobody's
    assert max(sum(e["args"].values()) for e in counters) == found.trace.peak
    assert [sum(e["args"].values()) for e in counters] == list(found.trace.memory)
    ends: dict[int, float] = {}
    for event in slices:
        assert event["ts"] >= ends.get(event["tid"], 0) - 1e-6
        ends[event["tid"]] = event["ts"] + event["dur"]
    assert abs(max(ends.values()) - found.trace.cost / 1000) < 1e-6
    again = [e for e in slices if e["cat"] == "recompute"]
    assert len(again) == found.trace.num_recomputed
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {"forward", "backward", "recompute"}
