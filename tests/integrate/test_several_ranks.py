"""Two ranks on gloo: DistributedDataParallel, fully_shard and pipeline stages around managed
modules give what they give around plain ones, and all ranks run one plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp
from support import ranks

Results = dict[str, tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(ranks.work, args=(str(folder), list(ranks.SCENARIOS)), nprocs=2)
    found: Results = {}
    for name in ranks.SCENARIOS:
        files = [Path(folder) / f"{name} {rank}.json" for rank in (0, 1)]
        both = [json.loads(f.read_text()) if f.exists() else {"failed": "no"} for f in files]
        found[name] = (both[0], both[1])
    return found


def of(results: Results, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    for rank, result in enumerate(results[name]):
        assert "failed" not in result, f"rank {rank}: {result['failed']}"
    return results[name]


def test_data_parallel_gives_the_plain_gradients(results: Results) -> None:
    one, two = of(results, "ddp")
    for result in (one, two):
        assert result["managed"] == result["plain"]
        assert result["managed accumulated"] == result["plain accumulated"]
        assert len(result["plain"]["losses"]) == 20
        outside = 3 * ranks.BATCH * ranks.WIDTH * 4 + 64  # the loss is not the module's
        assert result["managed peak"] <= result["plan"]["peak"] + outside
        assert result["managed peak"] < result["plain peak"]
        assert result["plan"]["again"] > 0
        assert result["plan"]["peak"] <= result["plan"]["budget"]
    assert one["managed"]["gradients"] == two["managed"]["gradients"]
    assert one["managed"]["losses"] != two["managed"]["losses"]
    assert one["plan"]["schedule"] == two["plan"]["schedule"]


def test_buckets_leave_while_the_backward_runs(results: Results) -> None:
    """Gradients leave as they are computed: the first bucket is on its way long before the last
    gradient is there, as in the plain model."""
    for result in of(results, "ddp"):
        for name in ("plain", "managed"):
            events = result[f"{name} events"]
            assert events.count("bucket") >= 3
            assert events.index("bucket") < 0.6 * len(events)


def test_unused_parameters_are_found(results: Results) -> None:
    for result in of(results, "ddp_unused"):
        assert result["managed"] == result["plain"]
        assert any(gradient is None for gradient in result["plain"]["gradients"])


def test_the_first_plan_of_a_callback_is_made_together(results: Results) -> None:
    one, two = of(results, "ddp_first_sight")
    for result in (one, two):
        assert result["managed"] == result["plain"]
    assert one["plan"] == two["plan"]  # costs too: they were measured once
    assert one["uneven"]["keep_all_peak"] < two["uneven"]["keep_all_peak"]  # planned alone


def test_one_plan_and_the_smallest_budget(results: Results) -> None:
    one, two = of(results, "one_plan")
    assert one["smallest wins"] == two["smallest wins"]
    assert one["smallest wins"]["budget"] == int(0.8 * one["keep_all"])
    assert one["device budgets"] == two["device budgets"]
    parameters = 6 * (ranks.WIDTH + 1) * ranks.WIDTH * 4
    left = 170_000 - 2 * parameters - ranks.BATCH * ranks.WIDTH * 4  # buckets are a copy
    assert one["device budgets"]["budget"] == left
    assert one["measured"] == two["measured"]
    assert one["afterwards"] == two["afterwards"]  # the group still works


def test_an_error_of_one_rank_is_raised_by_all(results: Results) -> None:
    one, two = of(results, "one_plan")
    assert one["out of reach"].startswith("BudgetInfeasible: 100 B cannot be met")
    assert two["out of reach"].startswith("BudgetInfeasible: rank 0: 100 B cannot be met")
    assert one["other model"].startswith("PlanMismatch: rank 1: the plan was made for another")
    assert two["other model"].startswith("PlanMismatch: the plan was made for another graph")
    assert one["bad budget"].startswith("RekindleError: rank 1: InvalidBudget")
    assert two["bad budget"].startswith("InvalidBudget")
    for result in (one, two):
        assert "some a fraction" in result["two kinds"]
        assert "'nowhere' means no op" in result["bad wish"]


def test_fully_shard_over_managed_blocks(results: Results) -> None:
    for result in of(results, "sharded"):
        assert result["managed"] == result["plain"]
        assert result["first sight"] == result["plain"]
        assert result["managed plans"] == [1, 1, 1, 1]


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
def test_pipeline_stages_each_with_their_budget(schedule: str, results: Results) -> None:
    for result in of(results, "pipeline"):
        assert result[f"{schedule} managed"] == result[f"{schedule} plain"]
        assert result[f"{schedule} planned calls"] >= 8  # four microbatches, two steps
        plan = result[f"{schedule} plan"]
        assert plan["peak"] <= plan["budget"] < plan["keep_all_peak"]
