"""Plan files and what is kept on disk: a stale plan is refused by reason or made anew, planning
again is quick, killed and concurrent processes leave nothing broken."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.compare import assert_same, train
from support.manage import example_of
from support.zoo import Example, gaussian
from torch import nn

import rekindle
from rekindle import measuring, pipeline, solving
from rekindle.cli import main
from rekindle.core import keep_all
from rekindle.errors import FileError, PlanMismatch, RekindleError, WishRefused
from rekindle.solve.constraints import check_constraints, parse_constraints, resolve

CPU = torch.device("cpu")


def make(width: int = 32, num_layers: int = 5, batch: int = 64) -> Example:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))
        for _ in range(num_layers)
    ]
    return example_of(nn.Sequential(*layers), lambda step: gaussian(step, CPU, batch, width))


def planned(example: Example, **options) -> rekindle.Plan:
    return rekindle.plan(
        example.model,
        *example.inputs(0),
        **{"budget": 0.8, "time_limit_s": 5, "profile": "estimate", **options},
    )


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    planned(make()).save(path)
    return path


def test_a_plan_file_says_what_it_was_made_with(plan_file: Path) -> None:
    plan = planned(make())
    record = json.loads(plan_file.read_text())
    assert record["torch"] == ".".join(torch.__version__.split(".")[:2])
    assert record["device"] == "cpu"
    assert record["costs"] == {"device": plan.profile.device, "estimated": len(plan.profile)}
    assert record["budget"] == plan.budget_bytes
    assert record["bound"] == plan.bound
    assert len(record["graph"]) == 64
    loaded = rekindle.Plan.load(plan_file)
    assert (loaded.peak_bytes, loaded.cost_ns) == (plan.peak_bytes, plan.cost_ns)
    assert (loaded.status, loaded.bound) == (plan.status, plan.bound)
    assert loaded.solver == plan.solver
    managed = loaded.apply(make().model, make().inputs(0)[0])
    assert managed.plan.cost_ns == plan.cost_ns  # the costs of the file
    assert managed.plan.bound == plan.bound


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (lambda: make(num_layers=4), "another graph"),
        (lambda: make(width=24), "other sizes"),
        (lambda: make(batch=32), "other sizes"),
    ],
    ids=["model", "widths", "batch"],
)
def test_a_stale_plan_is_refused_or_made_anew(other, reason: str, plan_file: Path, caplog) -> None:
    stored = rekindle.Plan.load(plan_file)
    example = other()
    args, kwargs = example.inputs(0)
    with pytest.raises(PlanMismatch, match=reason):
        stored.apply(example.model, args, kwargs)
    managed = stored.apply(example.model, args, kwargs, on_stale="replan", on_miss="raise")
    assert reason in caplog.text
    assert managed.plan.peak_bytes <= stored.budget_bytes
    assert_same(train(other()), train(example, managed))


def test_another_torch_or_device_is_refused(plan_file: Path, monkeypatch) -> None:
    example = make()
    arguments = (example.model, *example.inputs(0))
    record = json.loads(plan_file.read_text())

    def refused(match: str, **changes) -> None:
        plan_file.write_text(json.dumps({**record, **changes}))
        with pytest.raises(PlanMismatch, match=match):
            rekindle.Plan.load(plan_file).apply(*arguments)

    refused("made with torch 1.9", torch="1.9")
    refused("made for cuda and the model is on cpu", device="cuda")
    refused("measured on Z80", costs={"device": "Z80", "measured": 3})
    plan_file.write_text(json.dumps({**record, "costs": {"device": "Z80", "estimated": 3}}))
    rekindle.Plan.load(plan_file).apply(*arguments)
    monkeypatch.setattr(pipeline, "torch_release", lambda: "9.9")
    with pytest.raises(PlanMismatch, match=r"torch 9\.9 is installed"):
        rekindle.Plan.load(plan_file).apply(*arguments)


def test_a_file_that_contradicts_itself_is_refused(plan_file: Path) -> None:
    record = json.loads(plan_file.read_text())
    for changes in (
        {"budget": 1},
        {"bound": 10**18},
        {"status": "ERROR"},
        {"costs": {"device": 3}},
        {"costs": {"device": "cpu", "guessed": 1}},
        {"save": [3]},
        {"graph": None},
    ):
        plan_file.write_text(json.dumps({**record, **changes}))
        with pytest.raises(FileError):
            rekindle.Plan.load(plan_file)


def test_planning_again_is_quick_and_gives_the_same_plan(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REKINDLE_CACHE_DIR", str(tmp_path))
    options = {"profile": "measure", "budget": 0.7, "time_limit_s": 4}
    first = planned(make(num_layers=12), **options)
    with monkeypatch.context() as patch:  # what takes the time: neither measured nor solved again
        patch.setattr(measuring, "measured_step", None)
        patch.setattr(solving, "run_constrained", None)
        second = planned(make(num_layers=12), **options)
    assert not first.kept
    assert second.kept
    assert second.schedule == first.schedule
    assert (second.bound, second.status) == (first.bound, first.status)
    assert not planned(make(num_layers=12), **options, cache=False).kept


# ---- a user's own word


def test_wishes_hold_in_training_and_in_the_file(tmp_path: Path) -> None:
    def example() -> Example:
        return make(num_layers=6)

    wishes = {"save": "2", "recompute": ["[013]::gelu", "4.0"]}
    plan = planned(example(), budget=1.0, **wishes)
    wanted = resolve(plan.problem, parse_constraints(**wishes))
    assert len(wanted.save) >= 2
    check_constraints(plan.problem, wanted, plan.schedule)
    assert plan.cost_ns > plan.keep_all_cost_ns  # even where everything would fit
    path = tmp_path / "plan.json"
    plan.save(path)
    stored = rekindle.Plan.load(path)
    assert (stored.options.save, stored.recompute) == (("2",), ("[013]::gelu", "4.0"))
    applied = example()
    managed = stored.apply(applied.model, *applied.inputs(0), on_miss="raise")
    assert_same(train(example()), train(applied, managed))


def test_a_wish_that_cannot_be_kept_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(WishRefused, match="no pattern"):
        planned(make(), save=[""])
    with pytest.raises(WishRefused, match="'nowhere' means no op"):
        planned(make(), recompute=["nowhere"])
    with pytest.raises(rekindle.BudgetInfeasible, match=r"with save=\['\*'\]"):
        planned(make(num_layers=10), budget=0.7, save=["*"])
    with pytest.raises(RekindleError, match="is to be recomputed and is kept"):
        planned(make(), recompute="0", schedule=keep_all)


def test_wishes_on_the_command_line(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(SOURCE)
    common = ("models.py:small", "--budget", "1.0", "--time-limit", "5", "--json", "--profile")
    code = main(
        ["plan", *common, "estimate", "--recompute", "1", "--recompute", "2", "--save", "3"]
    )
    assert code == 0
    assert json.loads(capsys.readouterr().out)["num_recomputed"] >= 2
    code = main(["plan", *common, "estimate", "--save", "nothing.like.this"])
    assert code == 2
    assert "means no op" in capsys.readouterr().err
    code = main(["plan", *common, "estimate", "--save", "1", "--recompute", "1"])
    assert code == 2
    assert "leave one out" in capsys.readouterr().err
    assert main(["capture", "models.py:small", "-o", "p.json", "--profile", "estimate"]) == 0
    capsys.readouterr()
    solve = ["solve", "p.json", "--budget", "1.0", "--time-limit", "5", "--json"]
    assert main([*solve, "--recompute", "gelu"]) == 0
    assert json.loads(capsys.readouterr().out)["num_recomputed"] >= 1
    assert main([*solve[:3], "0.7", *solve[4:], "--save", "*"]) == 3
    assert json.loads(capsys.readouterr().out)["smallest_peak"] > 0


# ---- killed and concurrent processes

SOURCE = """
import torch
from torch import nn

def small(width=24):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)]
    return nn.Sequential(*layers).train(), (torch.ones(64, width),), {}
"""


def start(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rekindle", "plan", "models.py:small", "--budget", "0.7"]
    return subprocess.Popen(
        [*command, "--time-limit", "3", "--json", *options],
        cwd=tmp_path,
        env={**os.environ, "REKINDLE_CACHE_DIR": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_at_once_and_one_that_is_killed(tmp_path: Path, capsys, monkeypatch) -> None:
    """Two plan the same model at once, a third is killed as soon as it writes: all that comes after
    finds a cache in order."""
    (tmp_path / "models.py").write_text(SOURCE)
    doomed = start(tmp_path, "-o", "doomed.json")
    cache = tmp_path / "cache"
    while not any(cache.rglob("*.jsonl")) and doomed.poll() is None:
        time.sleep(0.002)
    doomed.send_signal(signal.SIGKILL)
    doomed.communicate()
    both = [start(tmp_path, "-o", f"{name}.json") for name in ("one", "two")]
    for process in both:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        assert json.loads(out)["peak"] <= json.loads(out)["budget"]
    for name in ("one", "two"):
        rekindle.Plan.load(tmp_path / f"{name}.json")
    monkeypatch.setenv("REKINDLE_CACHE_DIR", str(cache))
    monkeypatch.chdir(tmp_path)
    again = ["plan", "models.py:small", "--budget", "0.7", "--time-limit", "3", "--json"]
    assert main(again) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["kept"] is True
    assert "estimated" not in answer["costs"]


# ---- several ranks


def test_the_budget_of_each_rank(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(SOURCE)
    common = ["plan", "models.py:small", "--time-limit", "2", "--profile", "estimate"]
    asked = [*common, "--device-budget", "200KB", "--headroom", "0"]
    answers = {}
    for num in ("1", "4"):
        assert main([*asked, "--ranks", num, "--json"]) == 0
        answers[num] = json.loads(capsys.readouterr().out)
    buckets = 8 * (24 * 24 + 24) * 4
    assert answers["4"]["bucket_bytes"] == buckets
    assert answers["1"]["budget"] - answers["4"]["budget"] == buckets
    assert answers["4"]["device_budget"]["gradient buckets"] == buckets
    assert main([*common, "--budget", "0.9", "--ranks", "4"]) == 0
    assert "each of 4 ranks: " in capsys.readouterr().out
    for bad in ("0", "-1", "many", "9" * 30):
        with pytest.raises(SystemExit):
            main([*common, "--budget", "0.9", "--ranks", bad])
        assert "--ranks" in capsys.readouterr().err
