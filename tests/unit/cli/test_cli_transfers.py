"""`solve` and `check` with values moved to host memory."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rekindle.cli import main
from rekindle.core import (
    HostLink,
    keep_all,
    read_problem,
    read_schedule,
    schedule_of,
    simulate,
    write_problem,
    write_schedule,
)
from rekindle.core.disk import read_json
from rekindle.core.generate import chain, transformer

RATES = ("--to-host", "40GB/s", "--from-host", "30GB/s", "--host-budget", "64GiB")
PROBLEM = transformer(4, batch=64)  # its values are of some megabytes


@pytest.fixture
def problem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_problem("problem.json", PROBLEM)
    return PROBLEM


def run(capsys, *arguments):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err


def test_solve_and_check(problem, capsys):
    solve = ("solve", "problem.json", "--budget", "0.6", "--time-limit", "3", "-o", "out.json")
    code, out, _ = run(capsys, *solve, *RATES, "--json")
    assert code == 0
    answer = json.loads(out)
    assert answer["peak"] <= answer["budget"]
    assert answer["host_peak"] > 0
    lanes = answer["lanes"]
    assert lanes["to_host"]["bytes"] == answer["host_peak"] == lanes["from_host"]["bytes"]
    assert max(lane["end"] for lane in lanes.values()) == answer["cost"]
    assert lanes["compute"]["busy"] >= answer["keep_all_cost"]
    assert read_json("out.json")["version"] == 2

    code, out, _ = run(capsys, "check", "problem.json", "out.json", *RATES, "--budget", "0.6")
    assert code == 0
    assert "host      peak" in out
    assert "ops wait" in out
    code, out, _ = run(capsys, "check", "problem.json", "out.json", *RATES, "--json")
    checked = json.loads(out)
    for key in ("peak", "cost", "host_peak", "lanes", "num_recomputed"):
        assert checked[key] == answer[key]
    # The rates are a part of the problem.
    code, _, err = run(capsys, "check", "problem.json", "out.json")
    assert code == 2
    assert "made for another problem" in err


def test_a_problem_with_rates_of_its_own(problem, capsys):
    link = HostLink(4 * 10**11, 4 * 10**11, 0, 1)
    write_problem("own.json", replace(problem, transfers=link))
    solve = ("solve", "own.json", "--budget", "0.7", "--time-limit", "2", "-o", "own-out.json")
    code, out, _ = run(capsys, *solve, "-q")
    assert code == 0
    assert "host      peak" in out
    own = read_problem("own.json")
    assert simulate(own, read_schedule("own-out.json", own)).host_peak > 0
    code, _, err = run(capsys, *solve, "--to-host", "1GB/s")
    assert code == 2
    assert "rates to and from the host of its own" in err


def test_without_rates_nothing_is_said_of_the_host(problem, capsys):
    solve = ("solve", "problem.json", "--budget", "0.9", "--time-limit", "1", "--json")
    _, out, _ = run(capsys, *solve)
    assert not {"host_peak", "lanes"} & json.loads(out).keys()


def test_wishes_are_about_recomputation_alone(problem, capsys):
    solve = ("solve", "problem.json", "--budget", "0.8", "--time-limit", "1", "--json")
    code, out, _ = run(capsys, *solve, *RATES, "--save", "*gelu*")
    assert code == 0
    assert "values are not moved" in json.loads(out)["notes"][-1]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--to-host", "fast"), "rate 'fast' is not understood: give bytes per second"),
        (("--from-host", "0.5"), "rate '0.5' is not understood"),
        (("--host-budget", "4GiB"), "--host-budget needs a rate: give --to-host"),
        (("--to-host", "1GB/s", "--host-budget", "lots"), "budget 'lots' is not understood"),
    ],
)
@pytest.mark.parametrize("command", ["solve", "check"])
def test_bad_options(problem, capsys, command, options, sentence):
    rest = ("--budget", "0.5") if command == "solve" else ("none.json",)
    code, out, err = run(capsys, command, "problem.json", *rest, *options)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_other_units_have_no_rates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_problem("problem.json", replace(chain(6), cost_unit="unit"))
    solve = ("solve", "problem.json", "--budget", "0.5", "--to-host", "1GB/s")
    code, _, err = run(capsys, *solve)
    assert code == 2
    assert "rates need costs in ns and sizes in bytes" in err


def test_the_peak_of_a_schedule_with_transfers_names_its_step(problem, capsys):
    own = replace(problem, transfers=HostLink(10**9, 10**9, 0, 1))
    write_problem("own.json", own)
    ops = keep_all(own).ops
    v = next(v for v in own.ops[0].outputs)
    steps = (ops[0], ("send", v), ("drop", v), ("fetch", v), *ops[1:])
    write_schedule("s.json", own, schedule_of(steps))
    code, out, _ = run(capsys, "check", "own.json", "s.json")
    assert code == 0
    assert f"{len(ops) + 3} steps" in out
    assert "first at step" in out
    # Reports know the steps that are no op.
    code, out, _ = run(capsys, "explain", "own.json", "s.json")
    assert code == 0
    assert "1 value moved to host memory, " in out
    assert "ops wait " in out
    code, _, _ = run(capsys, "report", "own.json", "s.json", "-o", "r.html", "--no-curve")
    assert code == 0
    page = Path("r.html").read_text(encoding="utf-8")
    assert "Moved to the host" in page
    assert '"to the host","from the host"' in page
    for form in ("chrome-trace", "memory-viz"):
        code, _, err = run(capsys, "export", "own.json", "s.json", "--format", form, "-o", "t.out")
        assert (code, err) == (0, "")
