"""Solutions kept on disk: found again, never believed blindly, never broken."""

import dataclasses
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from support.training_graphs import training_graph

from rekindle.core import Problem, Status, keep_all, simulate
from rekindle.solve import find_solver, run_solver, solution_cache
from rekindle.solve.solution_cache import (
    SolveRequest,
    lookup,
    solutions_clear,
    solutions_dir,
    solutions_info,
    store,
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_CACHE_DIR", str(tmp_path / "cache"))


def request(seed: int = 0, **changes: object) -> SolveRequest:
    problem = training_graph(seed, 6)
    budget = simulate(problem, keep_all(problem)).peak
    return dataclasses.replace(SolveRequest(problem, budget, find_solver("auto"), 0), **changes)


def solved(asked: SolveRequest):
    return run_solver(asked.solver, asked.problem, asked.budget, time_limit_s=2)


def test_an_equal_question_is_answered_from_disk() -> None:
    asked = request()
    assert lookup(asked, 60.0) is None
    solution = solved(asked)
    store(asked, solution, 2.0)
    known = lookup(request(), 60.0)
    assert known is not None
    assert known.schedule == solution.schedule
    assert (known.status, known.bound) == (solution.status, solution.bound)
    others = (
        request(1),
        request(seed=0, budget=asked.budget - 1),
        dataclasses.replace(request(), seed=1),
        request(solver=find_solver("sqrt")),
        request(constraints=(("f1",), ())),
    )
    assert all(lookup(other, 60.0) is None for other in others)


def test_more_time_asks_anew_unless_it_was_proven() -> None:
    asked = request()
    cut_short = dataclasses.replace(solved(asked), status=Status.FEASIBLE, stopped_by="time limit")
    store(asked, cut_short, 5.0)
    assert lookup(asked, 5.0) is not None
    assert lookup(asked, 6.0) is None
    store(asked, dataclasses.replace(cut_short, stopped_by="no improvement"), 5.0)
    assert lookup(asked, 600.0) is not None
    interrupted = request(2)
    store(interrupted, dataclasses.replace(solved(interrupted), stopped_by="interrupt"), 5.0)
    assert lookup(interrupted, 1.0) is None


def test_what_is_broken_or_untrue_counts_as_absent() -> None:
    asked = request()
    store(asked, solved(asked), 2.0)
    path = asked.path(asked.key)
    good = json.loads(path.read_text())
    assert lookup(asked, 2.0) is not None
    bad = [
        "",
        "{",
        "[]",
        json.dumps(good)[:-20],
        json.dumps({**good, "ops": [0]}),
        json.dumps({**good, "ops": [*good["ops"], 10**9]}),
        json.dumps({**good, "ops": [float(i) for i in good["ops"]]}),
        json.dumps({**good, "ops": [True, *good["ops"]]}),
        json.dumps({**good, "status": "INFEASIBLE"}),
        json.dumps({**good, "bound": 10**15}),
        json.dumps({**good, "bound": "3"}),
        json.dumps({**good, "key": {**good["key"], "budget": 1}}),
        json.dumps({k: v for k, v in good.items() if k != "solver"}),
    ]
    for text in bad:
        path.write_text(text)
        assert lookup(asked, 2.0) is None, text[:80]
    path.write_text(json.dumps(good))
    assert lookup(asked, 2.0) is not None


def test_a_schedule_above_the_budget_is_not_believed() -> None:
    asked = request()
    store(asked, solved(asked), 2.0)
    lower = request(budget=asked.budget - 1)
    record = json.loads(asked.path(asked.key).read_text())
    record["key"] = lower.key
    lower.path(lower.key).write_text(json.dumps(record))
    assert lookup(lower, 2.0) is None


def test_old_ones_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution_cache, "MAX_SOLUTIONS", 3)
    questions = [request(k) for k in range(5)]
    for k, asked in enumerate(questions):
        store(asked, solved(asked), 2.0)
        os.utime(asked.path(asked.key), (k, k))
        if k == 2:
            assert lookup(questions[0], 2.0) is not None  # used: the youngest now
    assert solutions_info()[0] == 3
    present = [lookup(asked, 2.0) is not None for asked in questions]
    assert present == [True, False, False, True, True]
    abandoned = solutions_dir() / ".x.json.abc"
    abandoned.write_text("{")
    os.utime(abandoned, (0, 0))
    store(questions[1], solved(questions[1]), 2.0)
    assert not abandoned.exists()
    assert solutions_clear() == 3
    assert solutions_info() == (0, 0)


def test_a_place_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_CACHE_DIR", "/proc/nothing/here")
    asked = request()
    store(asked, solved(asked), 2.0)
    assert lookup(asked, 2.0) is None
    assert solutions_info() == (0, 0)


def _write_for_ever(problem: Problem, budget: int, started) -> None:
    asked = SolveRequest(problem, budget, find_solver("auto"), 0)
    solution = run_solver(asked.solver, problem, budget, time_limit_s=2)
    started.set()
    while True:
        store(asked, solution, 2.0)


def test_a_killed_writer_and_concurrent_ones_leave_whole_files() -> None:
    """SIGKILL at any moment, another writer beside it: every read finds a whole solution."""
    asked = request()
    spawn = multiprocessing.get_context("spawn")
    for delay in (0.0, 0.01, 0.03):
        writers = []
        for _ in range(2):
            started = spawn.Event()
            writer = spawn.Process(
                target=_write_for_ever, args=(asked.problem, asked.budget, started)
            )
            writer.start()
            writers.append((writer, started))
        for _, started in writers:
            assert started.wait(60)
        time.sleep(0.05)
        for _ in range(20):
            assert lookup(asked, 2.0) is not None
        for writer, _ in writers:
            time.sleep(delay)
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            assert lookup(asked, 2.0) is not None
