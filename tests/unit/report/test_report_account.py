"""The account of a schedule: its numbers are the simulator's, sorted and nothing else."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.random_transfers import random_transfer_problem, random_transfer_schedule
from support.report_problems import MIB, layered, solved

from rekindle.core import Schedule, copies, keep_all, simulate
from rekindle.core.generate import random_problem, random_schedule, transformer
from rekindle.errors import InvalidSchedule, RekindleError
from rekindle.report import Facts, account, explain, explain_module, verdict
from rekindle.report.account import KINDS, SAVED
from rekindle.report.exports import chrome_trace, memory_snapshot
from rekindle.report.module_paths import joined_modules, joined_names, places, ranges, starred
from rekindle.report.module_table import MAX_ROWS, MAX_WAYS, module_rows
from rekindle.report.text import explain_record
from rekindle.report.timeline import LANES, MAX_SAMPLES, timeline

seeds = st.integers(0, 2**32)


def drawn(seed, num_ops, **rates):
    rng = Random(seed)
    problem = random_problem(rng, num_ops, **rates)
    return account(problem, random_schedule(problem, rng, repeats=0.4))


@given(seeds, st.integers(1, 12))
def test_copies_are_what_the_memory_consists_of(seed, num_ops):
    found = drawn(seed, num_ops, inplace=0.0, workspace=0.0)
    made = copies(found.problem, found.schedule)
    for step, memory in enumerate(found.trace.memory):
        alive = [c for c in made if c.first <= step <= c.last]
        assert sum(found.problem.values[c.value_id].size for c in alive) == memory


@given(seeds, st.integers(1, 12))
def test_stacks_and_the_peak_add_up_exactly(seed, num_ops):
    found = drawn(seed, num_ops, inplace=0.5, workspace=0.4)
    line = timeline(found)
    assert line.memory == found.trace.memory
    for view in line.views:
        assert all(x >= 0 for row in view.stacks for x in row)
        sums = [sum(column) for column in zip(*view.stacks, strict=True)] if view.stacks else []
        assert sums == list(found.trace.memory) or not any(found.trace.memory)
    assert sum(item.num_bytes for item in found.alive_at_peak) == found.trace.peak


@given(seeds, st.integers(1, 12))
def test_the_table_adds_up(seed, num_ops):
    found = drawn(seed, num_ops)
    top = module_rows(found)[0]
    assert top.saved == sum(found.saved)
    assert top.num_recomputed == found.trace.num_recomputed
    runs, ops = found.trace.runs, found.problem.ops
    assert top.extra_cost == sum((r - 1) * op.cost for r, op in zip(runs, ops, strict=True) if r)
    if found.turn is not None:
        kinds = zip(found.copies, found.kinds, strict=True)
        waiting = [copy for copy, kind in kinds if kind == SAVED]
        assert top.saved == sum(found.problem.values[c.value_id].size for c in waiting)


def test_verdicts():
    problem = layered()
    plain = account(problem, keep_all(problem))
    assert verdict(plain) == (
        "Peak 63.00 MiB (was 63.00 MiB), +0.0 % time, nothing recomputed, optimality gap unknown"
    )
    half = solved(problem, 0.6)
    line = verdict(half)
    assert line.startswith("Fits 37.80 MiB: peak ")
    assert f"{half.trace.num_recomputed} ops recomputed" in line
    assert "optimal" in line
    assert "\n" not in line
    over = account(problem, keep_all(problem), Facts(budget=50 * MIB))
    assert verdict(over).startswith("Does not fit 50.00 MiB: peak 63.00 MiB")


def test_a_gap_is_rounded_up():
    problem = layered()
    cost = simulate(problem, keep_all(problem)).cost
    told = verdict(account(problem, keep_all(problem), Facts(bound=cost - 1)))
    assert told.endswith("of optimal")
    told = verdict(account(problem, keep_all(problem), Facts(bound=cost)))
    assert told.endswith("proven optimal")


def test_identical_layers_share_a_row():
    """The last layer's result is read by the loss alone, so it is a row of its own."""
    rows = module_rows(account(layered(), keep_all(layered())))
    paths = [(row.path, row.num_modules) for row in rows if row.path.startswith("layers")]
    assert paths == [
        ("layers", 1),
        ("layers.0-4", 5),
        ("layers.0-4.fc", 5),
        ("layers.0-4.act", 5),
        ("layers.5", 1),
        ("layers.5.fc", 1),
        ("layers.5.act", 1),
    ]
    half = module_rows(solved(layered(), 0.6))
    layers = [r for r in half if r.depth == 2 and r.path.startswith("layers.")]
    assert sum(row.num_modules for row in layers) == 6
    assert 1 < len(layers) <= MAX_WAYS


def test_layers_treated_in_many_ways_share_a_row_too():
    problem = layered(8)
    # The ops of layer k run k times more, right after their first run.
    ops = []
    for i in range(len(problem.ops)):
        name = problem.ops[i].name
        again = (
            int(name.split("layers.")[1][0])
            if problem.ops[i].phase == "forward" and "layers" in name
            else 0
        )
        ops += [i] * (1 + again)
    rows = module_rows(account(problem, Schedule(tuple(ops))))
    top = [row for row in rows if row.num_modules > 1 and row.path.startswith("layers.0")]
    assert MAX_WAYS < 8
    assert top[0].num_modules == 8
    assert top[0].num_recomputed == 2 * sum(range(8))


def test_why():
    found = solved(layered(), 0.6)
    whys = {row.path: row.why for row in module_rows(found)}
    again = [why for path, why in whys.items() if path.endswith("act") and "recomputed" in why]
    assert again
    assert all("per GiB" in why for why in again)
    kept = [why for path, why in whys.items() if path.endswith("fc")]
    assert any(why.startswith("kept: recomputing it would cost") for why in kept)
    sentence = explain_module(found, "layers.3.act")
    assert sentence.startswith("layers.3.act: ")
    assert sentence.count("\n") == 0
    with pytest.raises(RekindleError, match="there are embed, layers"):
        explain_module(found, "nothing.here")


def test_explain_and_its_record_agree():
    found = solved(layered(), 0.6)
    text, record = explain(found), explain_record(found)
    assert text.startswith(record["verdict"])
    assert record["peak"] == found.trace.peak
    assert record["modules"][0]["saved"] == record["saved"]
    assert sum(item["bytes"] for item in record["alive_at_peak"]) == record["peak"]
    assert {item["kind"] for item in record["alive_at_peak"]} <= set(KINDS)


def test_an_invalid_schedule_has_no_account():
    problem = layered()
    with pytest.raises(InvalidSchedule):
        account(problem, Schedule((3,)))


def test_thinning_keeps_the_peaks():
    problem = transformer(700, batch=1, sequence=8, width=8, vocabulary=16)
    assert len(problem.ops) > 4 * MAX_SAMPLES
    found = account(problem, keep_all(problem))
    line = timeline(found)
    assert len(line.steps) <= MAX_SAMPLES + 4
    assert max(line.memory) == found.trace.peak
    assert found.trace.peak_step in line.steps
    assert max(line.keep_all) == found.base.peak
    assert found.turn in line.steps
    # Each stretch between samples is no higher than the samples around it.
    near = 2 * (len(found.schedule) // (MAX_SAMPLES // 2) + 1)
    for step in range(0, len(found.schedule), 97):
        around = [m for t, m in zip(line.steps, line.memory, strict=True) if abs(t - step) <= near]
        assert found.trace.memory[step] <= max(around)
    covered = {step for _, a, b, _, _ in line.lanes for step in range(a, b)}
    assert covered == set(range(len(found.schedule)))
    assert len(LANES) == 3


def test_names_of_places():
    problem = layered(2)
    assert places(problem)[0].module == "embed"
    assert places(problem)[1].call == "aten.mm.default"
    assert starred("h.3.mlp.c2") == "h.*.mlp.c*"
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"
    assert joined_names(["3", "4", "6"]) == "3-4,6"
    assert joined_names(["block1-0", "block1-1"]) == "block1-{0-1}"
    assert joined_modules(["h.0.mlp", "h.1.mlp"]) == "h.0-1.mlp"
    assert joined_modules(["a.0.b.1", "a.1.b.0"]) == "a.*.b.*"
    assert joined_modules([""]) == "(model)"


def test_huge_tables_stay_small():
    problem = transformer(60, batch=1, sequence=8, width=8, vocabulary=16)
    rng = Random(3)
    found = account(problem, random_schedule(problem, rng, repeats=0.3))
    assert len(module_rows(found)) <= MAX_ROWS


def test_the_account_of_a_schedule_that_moves_values() -> None:
    """Whatever is moved, what is stacked is the simulator's memory, and times are the lanes'."""
    for seed in range(30):
        rng = Random(seed)
        problem = random_transfer_problem(rng, 10)
        link = replace(problem.transfers, host_budget=None, serial=False)
        problem = replace(problem, transfers=link)
        found = account(problem, random_transfer_schedule(problem, rng))
        line = timeline(found)
        assert [sum(column) for column in zip(*line.views[2].stacks, strict=True)] == [
            found.trace.memory[t] for t in line.steps
        ]
        assert list(line.starts) == sorted(line.starts)
        assert found.starts[-1] <= found.trace.cost
        if found.trace.peak_step >= 0:
            assert sum(a.num_bytes for a in found.alive_at_peak) == found.trace.peak
        assert explain(found)
        chrome_trace(found)
        memory_snapshot(found)
