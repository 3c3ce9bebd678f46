"""A plan's record and its file, without a model: files of earlier releases are read."""

import dataclasses
import json
from pathlib import Path

import pytest

from rekindle.core import (
    HostLink,
    Schedule,
    Status,
    gap_sentence,
    keep_all,
    schedule_of,
    simulate,
)
from rekindle.core.generate import chain
from rekindle.errors import FileError, InvalidSchedule
from rekindle.plans.options import Options
from rekindle.plans.plan_account import account_of
from rekindle.plans.plan_files import plan_from_json, plan_to_json, read_plan, write_plan
from rekindle.plans.plan_record import PlanRecord, Provenance

WRITTEN_BEFORE = Path(__file__).parents[2] / "instances" / "plans"


def record_of(schedule: Schedule | None = None) -> PlanRecord:
    problem = chain(6)
    return PlanRecord(
        problem=problem,
        schedule=schedule or keep_all(problem),
        status=Status.FEASIBLE,
        bound=None,
        budget_bytes=None,
        solver="floor",
        options=Options(seed=2, save=("a",)),
        provenance=Provenance("2.13", "0.1.0", "cpu", "0" * 64, "Z80", (("measured", 2),)),
    )


def test_a_file_written_before_is_read_and_written_the_same(tmp_path: Path) -> None:
    path = WRITTEN_BEFORE / "mlp.json"
    plan = read_plan(path)
    assert (plan.peak_bytes, plan.cost_ns) == (55488, 103000)
    assert (plan.keep_all_peak_bytes, plan.keep_all_cost_ns) == (71680, 98000)
    assert (plan.budget_bytes, plan.bound, plan.status) == (57350, 100501, Status.FEASIBLE)
    assert plan.solver == "auto"
    assert plan.options == Options(seed=3, recompute=("1.1",), hold_outputs=False)
    assert plan.provenance.torch == "2.13"
    assert plan.provenance.costs == (("estimated", 64),)
    assert not plan.provenance.measured
    assert plan.overhead == pytest.approx(0.05102040816326525)
    assert plan.gap == gap_sentence(103000, 100501)
    write_plan(tmp_path / "again.json", plan)
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    facts = dict(account_of(plan).facts.made_for)
    assert facts == {
        "rekindle": "0.1.0",
        "torch": "2.13",
        "device": "cpu",
        "costs of": "cpu",
        "seed": "3",
        "recomputed by request": "1.1",
    }


def test_a_plan_that_moves_values_comes_back_as_it_was() -> None:
    link = HostLink(10**9, 10**9, 0, 1)
    problem = dataclasses.replace(chain(6), transfers=link)
    first = problem.ops[0].outputs[0]
    moved = (0, ("send", first), ("drop", first), ("fetch", first), *range(1, len(problem.ops)))
    record = dataclasses.replace(
        record_of(),
        problem=problem,
        schedule=schedule_of(moved),
        options=Options(offload="host_budget 1GiB"),
    )
    data = plan_to_json(record)
    assert data["offload"] == "host_budget 1GiB"
    assert plan_from_json(data, "plan.json") == record
    assert record.moved_bytes == record.host_peak_bytes == problem.values[first].size
    assert "to the host and back" in str(record)
    with pytest.raises(FileError, match="'offload' is neither false nor a text"):
        plan_from_json({**data, "offload": 3}, "plan.json")


def test_a_file_without_the_keys_that_may_be_missing() -> None:
    plan = read_plan(WRITTEN_BEFORE / "mlp-without-optional-keys.json")
    assert (plan.budget_bytes, plan.bound, plan.solver) == (None, None, "")
    assert plan.options == Options()
    assert plan.cost_ns == plan.keep_all_cost_ns
    assert plan_from_json(plan_to_json(plan), "what was read") == plan


def test_a_record_simulates_what_it_says() -> None:
    record = record_of()
    trace = simulate(record.problem, record.schedule)
    assert (record.peak_bytes, record.cost_ns) == (trace.peak, trace.cost)
    again = dataclasses.replace(record, schedule=Schedule((0, *record.schedule.ops)))
    assert again.cost_ns > record.keep_all_cost_ns == record.cost_ns
    assert again.overhead > record.overhead == 0.0
    with pytest.raises(InvalidSchedule):
        record_of(Schedule((len(record.problem.ops) - 1,)))


def test_a_record_is_what_its_file_says(tmp_path: Path) -> None:
    record = record_of()
    write_plan(tmp_path / "plan.json", record)
    assert read_plan(tmp_path / "plan.json") == record
    assert record.provenance.measured
    assert json.loads((tmp_path / "plan.json").read_text())["costs"] == {
        "device": "Z80",
        "measured": 2,
    }
