"""The command line: what it prints, its exit codes, and its answer to every kind of bad input."""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.cli import main
from rekindle.cli.entry import build_parser
from rekindle.core import Problem, keep_all, read_schedule, simulate, write_problem
from rekindle.core.disk import write_json
from rekindle.core.files import problem_record, schedule_record
from rekindle.core.generate import chain, random_layered
from rekindle.plans.options import DEFAULTS, Options
from rekindle.solve import SOLVERS

PROBLEM = chain(12, 1)
KEEP_ALL = simulate(PROBLEM, keep_all(PROBLEM))
PEAKS = {
    "RL1": 46319,
    "RL2": 146840,
    "RL3": 284439,
    "RL4": 608619,
    "CM1": 13484795520,
    "CM2": 38059356160,
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A problem and its keep-all schedule, in the current folder."""
    monkeypatch.chdir(tmp_path)
    write_problem("problem.json", PROBLEM)
    write_json("schedule.json", schedule_record(PROBLEM, keep_all(PROBLEM)))
    return tmp_path


def run(capsys, *arguments):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err


def run_json(capsys, *arguments):
    code, out, err = run(capsys, *arguments, "--json")
    assert err == ""
    assert out.count("\n") == 1
    return code, json.loads(out)


def test_solve(files, capsys):
    code, out, _ = run(capsys, "solve", "problem.json", "--budget", "0.8", "-o", "out.json")
    assert code == 0
    assert str(KEEP_ALL.peak * 8 // 10) in out
    schedule = read_schedule("out.json", PROBLEM)
    assert simulate(PROBLEM, schedule).peak <= KEEP_ALL.peak * 8 // 10


def test_solve_json(files, capsys):
    code, record = run_json(capsys, "solve", "problem.json", "--budget", "0.8", "--seed", "3")
    assert code == 0
    assert record["status"] in ("OPTIMAL", "FEASIBLE")
    assert record["solver"]
    assert record["seed"] == 3
    assert record["budget"] == KEEP_ALL.peak * 8 // 10 >= record["peak"]
    assert record["keep_all_peak"] == KEEP_ALL.peak
    assert record["keep_all_cost"] == KEEP_ALL.cost
    assert record["overhead"] == pytest.approx(record["cost"] / KEEP_ALL.cost - 1)
    assert record["bound"] is None or record["bound"] <= record["cost"]
    assert record["wall_s"] >= 0


@pytest.mark.parametrize("solver", [solver.name for solver in SOLVERS])
def test_solve_with_each_solver(files, capsys, solver):
    arguments = ("--budget", "1.0", "--solver", solver, "--time-limit", "5", "--quiet", "--json")
    code, out, err = run(capsys, "solve", "problem.json", *arguments)
    if code == 2:
        assert_refused(code, out, err, f"solver {solver!r} does not handle this problem")
        return
    assert (code, err) == (0, "")
    assert json.loads(out)["cost"] == KEEP_ALL.cost


def test_infeasible(files, capsys):
    code, out, _ = run(capsys, "solve", "problem.json", "--budget", "1", "-o", "out.json")
    assert code == 3
    assert "the smallest peak found is" in out
    assert not os.path.exists("out.json")
    code, record = run_json(capsys, "solve", "problem.json", "--budget", "1")
    assert code == 3
    assert record["status"] == "INFEASIBLE"
    assert record["peak"] is record["cost"] is record["overhead"] is None
    assert 1 < record["smallest_peak"] < KEEP_ALL.peak
    assert str(record["smallest_peak"]) in out


def test_infeasible_for_one_solver_alone(files, capsys):
    code, out, _ = run(capsys, "solve", "problem.json", "--budget", "0.8", "--solver", "keep-all")
    assert code == 3
    assert "try another --solver" in out


@pytest.mark.parametrize("name", PEAKS)
def test_check_public_instances(name, instances, tmp_path, capsys):
    problem, schedule = str(instances / f"{name}.json"), str(tmp_path / "s.json")
    code, *_ = run(
        capsys, "solve", problem, "--budget", "1.0", "--solver", "keep-all", "-o", schedule
    )
    assert code == 0
    code, record = run_json(capsys, "check", problem, schedule, "--budget", str(PEAKS[name]))
    assert (code, record["peak"], record["within_budget"]) == (0, PEAKS[name], True)


def test_check(files, capsys):
    code, out, _ = run(capsys, "check", "problem.json", "schedule.json")
    assert code == 0
    assert f"({KEEP_ALL.peak}, 100.0 % of keep-all, first at step" in out
    code, record = run_json(capsys, "check", "problem.json", "schedule.json", "--budget", "0.99")
    assert (code, record["valid"], record["within_budget"]) == (1, True, False)
    code, out, _ = run(capsys, "check", "problem.json", "schedule.json", "--budget", "0.99")
    assert code == 1
    assert "over" in out


def test_check_invalid(files, capsys):
    record = schedule_record(PROBLEM, keep_all(PROBLEM)) | {"ops": [1, 0]}
    write_json("schedule.json", record)
    code, out, _ = run(capsys, "check", "problem.json", "schedule.json")
    assert code == 1
    assert "step 0 runs op 1" in out
    code, record = run_json(capsys, "check", "problem.json", "schedule.json")
    assert (code, record["valid"], record["peak"]) == (1, False, None)


def test_solvers(capsys):
    code, out, _ = run(capsys, "solvers")
    assert code == 0
    code, record = run_json(capsys, "solvers")
    assert [item["name"] for item in record["solvers"]] == [solver.name for solver in SOLVERS]
    for item in record["solvers"]:
        assert item["name"] in out
        assert item["available"] == (item["message"] == "")


def test_demo(capsys):
    code, out, _ = run(capsys, "demo", "--graph")
    assert code == 0
    assert "overhead" in out
    code, record = run_json(capsys, "demo", "--graph")
    assert code == 0
    feasible = [point for point in record["points"] if point["peak"] is not None]
    assert len(feasible) >= 5
    assert all(point["peak"] <= point["budget"] for point in feasible)
    assert feasible[0]["overhead"] == 0


def test_empty_problem(tmp_path, capsys):
    path = str(tmp_path / "p.json")
    write_problem(path, Problem((), ()))
    code, record = run_json(capsys, "solve", path, "--budget", "1")
    assert (code, record["peak"], record["cost"], record["overhead"]) == (0, 0, 0, 0.0)
    schedule = str(tmp_path / "s.json")
    assert run(capsys, "solve", path, "--budget", "1", "-o", schedule)[0] == 0
    assert run(capsys, "check", path, schedule)[0] == 0


def changed(**changes):
    return problem_record(PROBLEM) | changes


def with_op(op_id, **changes):
    record = problem_record(PROBLEM)
    record["ops"][op_id] |= changes
    return record


def with_value(value_id, **changes):
    record = problem_record(PROBLEM)
    record["values"][value_id] |= changes
    return record


PAIR = PROBLEM.ops[0].inputs[0], PROBLEM.ops[0].outputs[0]
RESIDENT = PROBLEM.resident[0]
FIRST_OUTPUT = PROBLEM.ops[0].outputs[0]
LAST_OUTPUT = PROBLEM.ops[-1].outputs[0]
TEXT = json.dumps(problem_record(PROBLEM))

# What is wrong -> (the file, what the sentence must hold)
BAD_PROBLEMS = {
    "broken JSON": (TEXT[:100], "not valid JSON"),
    "empty file": ("", "not valid JSON"),
    "not UTF-8": (b"\xff\xfe{}", "not UTF-8"),
    "nested too deeply": ("[" * 100_000, "nested too deeply"),
    "a list": ("[]", "expected a JSON object"),
    "a number": ("3", "expected a JSON object"),
    "no format": ({}, "expected 'rekindle.problem'"),
    "unknown format": (changed(format="rekindle.plan"), "'rekindle.plan'"),
    "unknown version": (changed(version=2), "version 2"),
    "version as text": (changed(version="1"), "version 1"),
    "version true": (changed(version=True), "version True"),
    "missing key": ({k: v for k, v in changed().items() if k != "ops"}, "'ops' is missing"),
    "unknown key": (changed(budget=3), "'budget' is unknown"),
    "unknown key of an op": (with_op(2, color="red"), "op 2: the key 'color' is unknown"),
    "unknown key of a value": (with_value(2, dtype="f"), "value 2: the key 'dtype' is unknown"),
    "key twice": (TEXT.replace('"version": 1', '"version": 1, "version": 1'), "stands twice"),
    "op is a number": (changed(ops=[1]), "op 0 must be a JSON object"),
    "value is null": (changed(values=[None]), "value 0 must be a JSON object"),
    "input out of range": (with_op(0, inputs=[999]), "inputs of op 0: 999"),
    "input negative": (with_op(0, inputs=[-1]), "inputs of op 0: -1"),
    "input is text": (with_op(0, inputs=["0"]), "inputs of op 0: 0"),
    "input is a list": (with_op(0, inputs=[[0]]), "inputs of op 0"),
    "input is true": (with_op(0, inputs=[True]), "inputs of op 0: True"),
    "outputs out of range": (changed(outputs=[999]), "outputs: 999"),
    "resident out of range": (changed(resident=[999]), "resident: 999"),
    "held out of range": (changed(held=[999]), "held: 999"),
    "grad_of out of range": (with_op(7, grad_of=99), "grad_of of op 7 is 99"),
    "reads before producing": (with_op(0, inputs=[LAST_OUTPUT]), "op 0 reads value"),
    "two producers": (with_op(3, outputs=[FIRST_OUTPUT]), "and again by op 3"),
    "negative size": (with_value(0, size=-1), "size of value 0 is -1"),
    "size 1.5": (with_value(0, size=1.5), "value 0: 'size' is 1.5; expected a whole number"),
    "size 1.0": (with_value(0, size=1.0), "'size' is 1.0"),
    "size as text": (with_value(0, size="8"), "'size' is \"8\""),
    "size NaN": (TEXT.replace('"size": 1000', '"size": NaN', 1), "NaN is not a number"),
    "size 1e999": (TEXT.replace('"size": 1000', '"size": 1e999', 1), "'size' is Infinity"),
    "size with 9,999 digits": (TEXT.replace('"size": 1000', '"size": ' + "9" * 9999), "JSON"),
    "size 2^62": (with_value(0, size=2**62), "from 0 to 2^62 - 1"),
    "sum of sizes 2^62": (
        changed(values=[v | {"size": 2**60} for v in problem_record(PROBLEM)["values"]]),
        "the sum of the sizes",
    ),
    "negative cost": (with_op(0, cost=-1), "cost of op 0 is -1"),
    "cost true": (with_op(0, cost=True), "'cost' is true"),
    "cost null": (with_op(0, cost=None), "'cost' is null"),
    "size true": (with_value(0, size=True), "'size' is true; expected a whole number"),
    "workspace true": (with_op(0, workspace=True), "'workspace' is true"),
    "recomputable 1": (with_op(0, recomputable=1), "'recomputable' is 1; expected true or false"),
    "name is a number": (with_op(0, name=3), "'name' is 3; expected a string"),
    "half a surrogate pair": (TEXT.replace("layer0", "\\ud800"), "surrogate"),
    "input twice": (with_op(0, inputs=[RESIDENT, RESIDENT]), "stands twice"),
    "outputs twice": (changed(outputs=[LAST_OUTPUT] * 2), "stands twice"),
    "resident twice": (changed(resident=[RESIDENT, RESIDENT]), "stands twice"),
    "input is output": (with_op(1, inputs=[*PROBLEM.ops[1].outputs]), "both an input and an out"),
    "no outputs": (with_op(0, outputs=[]), "op 0 has no outputs"),
    "resident produced": (changed(resident=[*PROBLEM.resident, FIRST_OUTPUT]), "is resident"),
    "no producer": (changed(resident=[]), "neither resident nor produced"),
    "inplace of unequal size": (
        with_op(1, inplace=[[FIRST_OUTPUT, PROBLEM.ops[1].outputs[0]]]),
        "unequal sizes",
    ),
    "inplace of a resident": (with_op(0, inplace=[[*PAIR]]), "overwrites a resident"),
    "inplace is no pair": (with_op(1, inplace=[[1, 2, 3]]), "must be [input, output]"),
    "inplace true": (with_op(1, inplace=[[True, 1]]), "must be [input, output]"),
    "unknown phase": (with_op(0, phase="warmup"), "'warmup'"),
    "two losses": (with_op(0, phase="loss"), "both have phase 'loss'"),
    "held is no loss input": (changed(held=[FIRST_OUTPUT]), "is held but is not an input"),
}


def assert_refused(code, out, err, holds):
    assert code == 2
    assert out == ""
    assert holds in err
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert "Traceback" not in err


@pytest.mark.parametrize("case", BAD_PROBLEMS)
def test_bad_problem(case, files, capsys):
    content, holds = BAD_PROBLEMS[case]
    if not isinstance(content, str | bytes):
        content = json.dumps(content)
    data = content if isinstance(content, bytes) else content.encode()
    (files / "problem.json").write_bytes(data)
    before = sorted(os.listdir())
    refused = run(capsys, "solve", "problem.json", "--budget", "0.5", "-o", "out.json")
    assert_refused(*refused, holds)
    assert "problem.json" in refused[2]
    assert_refused(*run(capsys, "check", "problem.json", "schedule.json"), holds)
    assert sorted(os.listdir()) == before


def schedule(**changes):
    return schedule_record(PROBLEM, keep_all(PROBLEM)) | changes


BAD_SCHEDULES = {
    "broken JSON": ("{", "not valid JSON"),
    "a problem": (problem_record(PROBLEM), "expected 'rekindle.schedule'"),
    "unknown version": (schedule(version=0), "version 0"),
    "for another problem": (schedule_record(chain(5), keep_all(chain(5))), "another problem"),
    "problem is null": (schedule(problem=None), "'problem' is null"),
    "unknown op": (schedule(ops=[0, 99]), "step 1 names op 99"),
    "negative op": (schedule(ops=[-1]), "step 0 names op -1"),
    "op is text": (schedule(ops=["0"]), "step 0 names op 0"),
    "op is true": (schedule(ops=[True]), "step 0 names op True"),
    "op 0.0": (schedule(ops=[0.0]), "step 0 names op 0.0"),
    "op 2^80": (schedule(ops=[2**80]), "step 0 names op 1208925819614629174706176"),
    "ops is an object": (schedule(ops={}), "'ops' is {}; expected a list"),
    "unknown key": (schedule(peak=3), "'peak' is unknown"),
}


@pytest.mark.parametrize("case", BAD_SCHEDULES)
def test_bad_schedule(case, files, capsys):
    content, holds = BAD_SCHEDULES[case]
    text = content if isinstance(content, str) else json.dumps(content)
    (files / "schedule.json").write_text(text)
    assert_refused(*run(capsys, "check", "problem.json", "schedule.json"), holds)


@pytest.mark.parametrize("budget", ["8XB", "0", "-1", "1.5", "NaN", "inf", "", "0.0", "1e9"])
def test_bad_budget(budget, files, capsys):
    holds = f"budget {budget!r} is not understood"
    refused = run(capsys, "solve", "problem.json", f"--budget={budget}", "-o", "out.json")
    assert_refused(*refused, holds)
    assert not os.path.exists("out.json")
    assert_refused(
        *run(capsys, "check", "problem.json", "schedule.json", f"--budget={budget}"), holds
    )


def test_minus_one_without_an_equals_sign(files, capsys):
    refused = run(capsys, "solve", "problem.json", "--budget", "-1")
    assert_refused(*refused, "budget '-1' is not understood")


@pytest.mark.parametrize(
    ("arguments", "holds"),
    [
        ((), "COMMAND"),
        (("sove",), "sove"),
        (("solve",), "PROBLEM.json"),
        (("solve", "problem.json"), "--budget"),
        (("solve", "problem.json", "--budget"), "--budget"),
        (("solve", "missing.json", "--budget", "1"), "missing.json cannot be read: No such file"),
        (("solve", ".", "--budget", "1"), "cannot be read: Is a directory"),
        (("solve", "a\0b", "--budget", "1"), "is not a file name"),
        (("solve", "problem.json", "--budget", "1", "--solver", "flor"), "did you mean 'floor'"),
        (("solve", "problem.json", "--budget", "1", "--solver", "x y"), "no solver 'x y'"),
        (("solve", "problem.json", "--budget", "1", "--seed", "-1"), "'-1' is not a whole number"),
        (("solve", "problem.json", "--budget", "1", "--seed", "9" * 30), "is not a whole number"),
        (("solve", "problem.json", "--budget", "1", "--time-limit", "0"), "'0' is not a number of"),
        (("solve", "problem.json", "--budget", "1", "--time-limit", "nan"), "'nan' is not a numb"),
        (("solve", "problem.json", "--budget", "0.9", "-o", "no/s.json"), "there is no folder no"),
        (("solve", "problem.json", "--budget", "0.9", "-o", "."), "is a folder"),
        (("check", "problem.json"), "SCHEDULE.json"),
        (("check", "problem.json", "missing.json"), "missing.json cannot be read"),
        (("solvers", "--jsn"), "--jsn"),
    ],
)
def test_bad_usage(arguments, holds, files, capsys):
    before = sorted(os.listdir())
    assert_refused(*run(capsys, *arguments), holds)
    assert sorted(os.listdir()) == before


def python_m_rekindle(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "rekindle", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **options,
    )


def test_as_a_module(files):
    process = python_m_rekindle("--version")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert out.startswith(b"rekindle ")
    process = python_m_rekindle("solve", "problem.json", "--budget", "8XB")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, b"")
    assert err.startswith(b"rekindle: budget '8XB' is not understood")


def test_a_reader_that_leaves(files):
    """`rekindle solvers | head -0`: no traceback, whatever the buffering."""
    code = (
        "import sys; from rekindle.cli import main; sys.stdout.reconfigure(write_through=True);"
        "sys.stdin.readline(); raise SystemExit(main(['solvers']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    process.stdin.write(b"\n")
    process.stdin.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 141
    assert err == b""


def test_interrupt_gives_the_best_so_far_or_130(files, instances):
    write_problem("big.json", random_layered(6000))
    os.mkfifo("pipe.json")
    process = python_m_rekindle(
        *("solve", "pipe.json", "--budget", "0.3", "--time-limit", "100", "--solver", "floor")
    )
    # Opened by the command itself: before it runs, Python ends by the signal.
    Path("pipe.json").write_bytes(Path("big.json").read_bytes())
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (0, 3, 130)
    assert b"Traceback" not in err
    assert process.returncode == 130 or b"result" in out


def test_no_torch_and_quick(files):
    """None of these commands loads torch, and starting takes a fraction of a second of work."""
    code = (
        "import sys, time; from rekindle.cli import main;"
        "codes = [main(['solvers']), main(['demo', '--graph']),"
        " main(['solve', 'problem.json', '--budget', '0.9', '-o', 's.json']),"
        " main(['check', 'problem.json', 's.json'])];"
        "print(codes, 'torch' in sys.modules, 'rich' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[0, 0, 0, 0] False False"


@pytest.mark.parametrize("solver", ["auto", "sqrt"])
def test_d2_solve_for_the_smallest_budget(files, capsys, solver):
    arguments = ("--budget", "min", "--solver", solver, "--time-limit", "2")
    code, record = run_json(capsys, "solve", "problem.json", *arguments)
    assert code == 0
    assert record["peak"] <= record["budget"] < KEEP_ALL.peak
    _, infeasible = run_json(capsys, "solve", "problem.json", "--budget", "1", "--time-limit", "2")
    assert record["budget"] <= infeasible["smallest_peak"]


def test_d3_a_gap_ends_the_search(files, capsys):
    arguments = ("--budget", "0.7", "--gap", "0.9", "--time-limit", "20", "--solver", "auto")
    code, record = run_json(capsys, "solve", "problem.json", *arguments)
    assert (code, record["stopped_by"]) in ((0, "gap"), (0, "proof"))
    for gap in ("1", "-0.1", "nan", "much"):
        code, out, err = run(capsys, "solve", "problem.json", "--budget", "0.7", "--gap", gap)
        assert_refused(code, out, err, "is not a share from 0 up to 1")


def test_d10_one_name_for_one_option():
    """Every option that both have is called the same: underscores are hyphens, `no-` is off."""
    plan = next(
        action.choices["plan"]
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    shown = [a for a in plan._actions if a.option_strings and a.help != argparse.SUPPRESS]
    options = {a.dest: a.option_strings[-1] for a in shown}
    fields = {f.name for f in dataclasses.fields(Options)}
    for name in fields & options.keys():
        plain = name.removesuffix("_s").replace("_", "-")
        off = "no-" if getattr(DEFAULTS, name) is True else ""
        assert options[name] == f"--{off}{plain}"
    for name in ("--no-hold-outputs", "--outputs-dropped"):  # the old name is hidden
        parsed = build_parser().parse_args(["plan", "m:f", "--budget", "0.5", name])
        assert parsed.hold_outputs is False
    assert "--outputs-dropped" not in plan.format_help()
