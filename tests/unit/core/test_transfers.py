"""Problems with a link to the host, and schedules that move values: numbers by hand, files, and one
sentence for everything that is refused."""

import json
from dataclasses import replace

import pytest

from rekindle.core import (
    HostLink,
    Op,
    Problem,
    Schedule,
    Transfer,
    Value,
    check_problem,
    check_schedule,
    copies,
    keep_all,
    parse_rate,
    problem_hash,
    read_problem,
    read_schedule,
    schedule_of,
    simulate,
    write_problem,
    write_schedule,
)
from rekindle.core.disk import read_json, write_json
from rekindle.core.files import problem_from_record, problem_record
from rekindle.errors import FileError, InvalidBudget, InvalidProblem, InvalidSchedule

# 100 bytes take 100 ns and 10 of latency to the host, and 50 and 10 back.
LINK = HostLink(to_host=10**9, from_host=2 * 10**9, latency=10, least=50)
PROBLEM = Problem(
    values=(Value("w", 100), Value("x", 100), Value("y", 100), Value("g", 40), Value("gw", 60)),
    ops=(
        Op("f", 30, (0,), (1,), phase="forward"),
        Op("relu", 20, (1,), (2,), inplace=((1, 2),), phase="forward"),
        Op("loss", 500, (2,), (3,), phase="loss"),
        Op("f.backward", 40, (3, 1), (4,), phase="backward"),
    ),
    resident=(0,),
    outputs=(4,),
    name="small",
    transfers=LINK,
)
MOVED = schedule_of((0, ("send", 1), 1, ("drop", 1), 2, ("fetch", 1), 3, ("release", 1)))


def test_numbers_by_hand():
    trace = simulate(PROBLEM, MOVED)
    # The last reader of x is its drop, so that relu does not write over it.
    assert trace.memory == (100, 100, 200, 200, 140, 140, 200, 60)
    assert trace.host_memory == (0, 100, 100, 100, 100, 100, 100, 100)
    assert (trace.peak, trace.peak_step, trace.host_peak) == (200, 2, 100)
    lanes = trace.lanes
    assert lanes.start == (0, 30, 30, 50, 140, 640, 700, 140)
    assert lanes.finish == (30, 140, 50, 140, 640, 700, 740, 700)
    assert (lanes.compute, lanes.to_host, lanes.from_host) == (740, 700, 700)
    assert trace.cost == 740
    assert simulate(PROBLEM, keep_all(PROBLEM)).cost == 590
    assert [c.value_id for c in copies(PROBLEM, MOVED)] == [1, 2, 3, 1, 4]


def test_the_serial_objective_adds_up_all_that_runs():
    serial = replace(PROBLEM, transfers=replace(LINK, serial=True))
    assert simulate(serial, MOVED).cost == 590 + 110 + 60
    again = (0, ("send", 1), ("release", 1), ("send", 1), 1, ("drop", 1), 2, ("fetch", 1), 3)
    assert simulate(serial, schedule_of(again)).cost == 590 + 110 + 60  # the first send alone


def test_an_early_fetch_is_hidden():
    early = schedule_of((0, ("send", 1), 1, ("drop", 1), ("fetch", 1), 2, 3))
    trace = simulate(PROBLEM, early)
    assert (trace.cost, trace.peak) == (680, 240)


def test_steps_and_their_parts():
    assert MOVED.ops == (0, 1, 2, 3)
    assert MOVED.transfers[1] == Transfer("drop", 1, 2)
    assert schedule_of(MOVED.steps) == MOVED
    assert (len(MOVED), len(MOVED.steps)) == (8, 8)
    assert keep_all(PROBLEM).steps == keep_all(PROBLEM).ops


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ((("send", 1), 0, 1, 2, 3), r"step 0 is a send of value 1 \('x'\), which is not on the de"),
        ((0, ("send", 0), 1, 2, 3), r"step 1 is a send of value 0 \('w'\), which is resident"),
        ((0, 1, 2, ("send", 3), 3), "of 40 bytes; values smaller than 50 bytes are never moved"),
        ((0, ("send", 9), 1, 2, 3), "step 1 moves value 9, and the problem has values 0 to 4"),
        ((0, ("send", -1), 1, 2, 3), "step 1 moves value -1, and the problem has values 0 to 4"),
        ((0, ("send", 1), ("send", 1), 1, 2, 3), "step 2 is a send .* on the host already"),
        ((0, ("drop", 1), 1, 2, 3), "step 1 is a drop .* was not sent"),
        ((0, ("fetch", 1), 1, 2, 3), "step 1 is a fetch .* not on the host"),
        ((0, ("release", 1), 1, 2, 3), "step 1 is a release .* not on the host"),
        ((0, ("send", 1), 1, 2, 3), r"value 1 \('x'\) was sent and is never dropped"),
        ((0, ("send", 1), 0, ("drop", 1), 1, 2, 3), r"step 2 makes value 1 \('x'\) again before"),
        ((0, ("send", 1), ("fetch", 1), 1, 2, 3), r"step 2 makes value 1 \('x'\) again before"),
        ((0, ("send", 1), ("drop", 1), ("fetch", 1), 0, 1, 2, 3), "step 3 fetches .*no op reads"),
        ((0, ("send", 1), ("drop", 1), 1, 2, 3), "step 3 runs op 1 .*not on the device: produce"),
        ((0, 1, 2, 3, ("send", 4), ("drop", 4)), "output value 4 .* is not on the device at the "),
        ((0, ("move", 1), 1, 2, 3), "step 1 is a 'move'; a transfer is one of send, drop, fetch"),
        ((0, ("send", "x"), 1, 2, 3), "step 1 moves value x, and the problem has values 0 to 4"),
        ((0, ("send", 2**40), 1, 2, 3), f"step 1 moves value {2**40}"),
        ((0, ("send", 1), ("drop", 1), ("fetch", 1), 8, 1), "step 4 names op 8"),
    ],
)
def test_refused_steps(steps, sentence):
    with pytest.raises(InvalidSchedule, match=sentence) as caught:
        check_schedule(PROBLEM, schedule_of(steps))
    assert "\n" not in str(caught.value)


def test_refused_places_and_links():
    late = Schedule(MOVED.ops, (Transfer("send", 1, 5),))
    early = Schedule(MOVED.ops, (Transfer("send", 1, 2), Transfer("drop", 1, 1)))
    for schedule in (late, early):
        with pytest.raises(InvalidSchedule, match="must be listed in execution order"):
            simulate(PROBLEM, schedule)
    with pytest.raises(InvalidSchedule, match="places of the transfers"):
        simulate(PROBLEM, Schedule(MOVED.ops, (Transfer("send", 1, -1),)))
    with pytest.raises(InvalidSchedule, match="the problem has no transfers"):
        simulate(replace(PROBLEM, transfers=None), MOVED)
    tight = replace(PROBLEM, transfers=replace(LINK, host_budget=99))
    with pytest.raises(InvalidSchedule, match="step 1 needs 100 bytes in host memory, and its b"):
        simulate(tight, MOVED)
    assert simulate(replace(PROBLEM, transfers=replace(LINK, host_budget=100)), MOVED).peak == 200


def test_times_stay_below_their_limit():
    """The product of bytes and 10^9 needs more than 64 bits, and so may a transfer's time."""
    large = replace(PROBLEM, values=tuple(replace(v, size=2**58) for v in PROBLEM.values))
    check_problem(large)
    trace = simulate(large, MOVED)
    assert trace.lanes.finish[1] == 30 + 10 + 2**58
    slow = replace(large, transfers=replace(LINK, to_host=1))
    with pytest.raises(InvalidSchedule, match="step 1 ends 2\\^62 ns or more"):
        simulate(slow, MOVED)
    costs = tuple(replace(op, cost=2**60 - 1) for op in PROBLEM.ops[:3])
    long = replace(PROBLEM, ops=(*costs, replace(PROBLEM.ops[3], cost=2**60 - 100)))
    with pytest.raises(InvalidSchedule, match="step 6 ends 2\\^62 ns or more"):
        simulate(long, MOVED)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"to_host": 0}, "transfers: to_host is 0; expected a whole number from 1 to"),
        ({"from_host": -5}, "transfers: from_host is -5"),
        ({"latency": 2**62}, "transfers: latency is"),
        ({"least": True}, "transfers: 'least' is true; expected a whole number"),
        ({"host_budget": -1}, "transfers: host_budget is -1"),
        ({"host_budget": "1GiB"}, "transfers: 'host_budget' is \"1GiB\"; expected"),
        ({"serial": 1}, "transfers: 'serial' is 1; expected true or false"),
        ({"rate": 1}, "transfers: the key 'rate' is unknown"),
    ],
)
def test_refused_links(change, sentence):
    record = problem_record(PROBLEM)
    record["transfers"] = record["transfers"] | change
    with pytest.raises(InvalidProblem, match=sentence):
        problem_from_record(record)


def test_problem_files(tmp_path):
    path = tmp_path / "problem.json"
    write_problem(path, PROBLEM)
    assert read_problem(path) == PROBLEM
    record = json.loads(path.read_text())
    assert record["version"] == 1
    link = {"to_host": 10**9, "from_host": 2 * 10**9, "latency": 10, "least": 50}
    assert record["transfers"] == link  # defaults are left out, and do not change the hash
    defaults = record | {"transfers": link | {"host_budget": None, "serial": False}}
    assert problem_hash(problem_from_record(defaults)) == problem_hash(PROBLEM)
    none = replace(PROBLEM, transfers=None)
    assert problem_from_record(problem_record(none) | {"transfers": None}) == none
    assert problem_hash(none) != problem_hash(PROBLEM)
    both = replace(LINK, host_budget=0, serial=True)
    assert problem_from_record(problem_record(replace(PROBLEM, transfers=both))).transfers == both


def test_schedule_files(tmp_path):
    path = tmp_path / "schedule.json"
    write_schedule(path, PROBLEM, MOVED, "auto", 3)
    record = json.loads(path.read_text())
    assert record["version"] == 2
    assert record["steps"] == [
        *(0, ["send", 1], 1, ["drop", 1], 2, ["fetch", 1], 3, ["release", 1]),
    ]
    assert read_schedule(path, PROBLEM) == MOVED
    write_schedule(path, PROBLEM, keep_all(PROBLEM))
    assert read_json(path)["version"] == 1
    write_json(path, record | {"steps": [0, 1, 2, 3]})
    assert read_schedule(path, PROBLEM) == keep_all(PROBLEM)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 3}, "has version 3; this release reads versions 1 and 2"),
        ({"version": 1}, "the key 'ops' is missing"),
        ({"ops": []}, "the key 'ops' is unknown"),
        ({"steps": [True]}, r"step 0 is true; expected an op, 0 to 3, or a transfer, \[kind, v"),
        ({"steps": [0, 4]}, "step 1 is 4; expected an op, 0 to 3"),
        ({"steps": [["send"]]}, "step 0 is no transfer; expected"),
        ({"steps": [["move", 1]]}, "step 0 is no transfer; .* one of send, drop, fetch, release"),
        ({"steps": [[{}, 1]]}, "step 0 is no transfer"),
        ({"steps": [["send", 5]]}, "step 0 moves value 5, and the problem has values 0 to 4"),
        ({"steps": [["send", 1.0]]}, r"step 0 moves value 1\.0"),
    ],
)
def test_refused_schedule_files(change, sentence, tmp_path):
    path = tmp_path / "schedule.json"
    write_schedule(path, PROBLEM, MOVED)
    write_json(path, read_json(path) | change)
    with pytest.raises((InvalidSchedule, FileError), match=sentence):
        read_schedule(path, PROBLEM)


def test_rates():
    assert parse_rate("55GB/s") == parse_rate(" 55 GB/s") == parse_rate(55 * 10**9) == 55 * 10**9
    assert parse_rate("1GiB") == 2**30
    for wrong in ("0GB/s", "fast", "0.5", 0.5, True, "55GB/h", -3):
        with pytest.raises(
            InvalidBudget, match=r"rate .* is not understood: give bytes per second"
        ):
            parse_rate(wrong)
