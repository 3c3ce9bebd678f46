"""`explain`, `report` and `export`, and what Ctrl-C leaves of the commands that search."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.report_problems import HOSTILE, layered, solved

from rekindle.cli import main
from rekindle.core import keep_all, read_schedule, simulate, write_problem, write_schedule
from rekindle.core.generate import transformer
from rekindle.report import verdict

PROBLEM = layered()


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = solved(PROBLEM, 0.6)
    write_problem("problem.json", PROBLEM)
    write_schedule("schedule.json", PROBLEM, found.schedule, found.facts.solver)
    return found


def run(capsys, *arguments):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err


def both(found):
    return "problem.json", "schedule.json", "--budget", str(found.facts.budget)


def test_explain(files, capsys):
    code, out, err = run(capsys, "explain", *both(files))
    assert (code, err) == (0, "")
    assert out.startswith(verdict(files).partition(", proven")[0])
    assert "layers" in out
    assert "Alive at the peak" in out
    code, out, _ = run(capsys, "explain", *both(files), "--module", "layers.2.act")
    assert code == 0
    assert out.startswith("layers.2.act: ")
    assert out.count("\n") == 1


def test_explain_json(files, capsys):
    code, out, _ = run(capsys, "explain", *both(files), "--json")
    record = json.loads(out)
    assert code == 0
    assert record["peak"] == files.trace.peak
    assert record["fits"] is True
    assert record["bound"] <= record["cost"]
    code, out, _ = run(capsys, "explain", *both(files), "--module", "layers", "--json")
    assert json.loads(out)["sentence"].startswith("layers: ")


def test_a_problem_alone_is_kept_whole(files, capsys):
    code, out, _ = run(capsys, "explain", "problem.json")
    assert code == 0
    assert "nothing recomputed, proven optimal" in out


def test_report(files, capsys):
    limits = ("--time-limit", "1", "--points", "4", "-q")
    code, out, err = run(capsys, "report", *both(files), "-o", "page.html", *limits)
    assert (code, err) == (0, "")
    assert out.endswith("written to page.html\n")
    text = Path("page.html").read_text()
    assert "What memory costs in time" in text
    assert "schedule.json" not in text.partition("How to reproduce this")[0]
    code, out, _ = run(capsys, "report", *both(files), "--graph", "step.svg")
    assert code == 0
    assert "written to step.svg" in out
    assert Path("step.svg").read_text().startswith("<svg")
    code, out, _ = run(capsys, "report", *both(files), "--no-curve", "--json")
    record = json.loads(out)
    assert (code, record["report"]) == (0, "report.html")
    assert record["verdict"].startswith("Fits")
    assert "What memory costs in time" not in Path("report.html").read_text()


def test_export(files, capsys):
    code, out, _ = run(capsys, "export", *both(files), "--format", "memory-viz")
    assert code == 0
    assert "problem.pickle" in out
    with open("problem.pickle", "rb") as file:
        assert pickle.load(file)["device_traces"][0]
    code, out, _ = run(capsys, "export", *both(files), "--format", "chrome-trace", "--json")
    assert (code, json.loads(out)["output"]) == (0, "problem.trace.json")
    with open("problem.trace.json") as file:
        assert json.load(file)["otherData"]["peak"] == files.trace.peak


@pytest.mark.parametrize(
    ("arguments", "holds"),
    [
        (("explain", "nowhere.json"), "cannot be read"),
        (("explain", "problem.json", "--module", "x.y"), "no op stands in a module 'x.y'"),
        (("explain", "schedule.json"), "expected 'rekindle.problem'"),
        (("report", "problem.json", "-o", "no/such/folder.html"), "there is no folder"),
        (("report", "problem.json", "--model", "m:f"), "--model needs a plan file"),
        (("report", "problem.json", "--points", "1"), "2 to 1000"),
        (("export", "problem.json", "--format", "pdf"), "invalid choice"),
        (("explain", "problem.json", "problem.json"), "expected 'rekindle.schedule'"),
        (("explain", "problem.json", "--budget", "8XB"), "is not understood"),
    ],
)
def test_bad_usage(arguments, holds, files, capsys):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert holds in err
    assert err.count("\n") == 1


def test_hostile_names(files, capsys):
    write_problem("hostile.json", layered(extra=HOSTILE))
    assert run(capsys, "explain", "hostile.json")[0] == 0
    assert run(capsys, "report", "hostile.json", "--no-curve")[0] == 0
    for kind in ("memory-viz", "chrome-trace"):
        assert run(capsys, "export", "hostile.json", "--format", kind)[0] == 0


def interrupted(*arguments, after_s=0.5):
    """The command, sent a Ctrl-C some time after its first word of progress."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rekindle", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ),
    )
    begun = threading.Event()
    errors: list[bytes] = []

    def read() -> None:
        for line in process.stderr:
            errors.append(line)
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    begun.wait(60)
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    out = process.stdout.read()
    process.stdout.close()
    code = process.wait(60)
    reader.join()
    process.stderr.close()
    err = b"".join(errors).decode()
    assert "Traceback" not in err
    return code, out.decode(), err


@pytest.fixture
def big(tmp_path, monkeypatch):
    """A problem that keeps a search busy for as long as it may."""
    monkeypatch.chdir(tmp_path)
    problem = transformer(40, batch=8, sequence=256, width=256, vocabulary=1024)
    write_problem("big.json", problem)
    return problem


def test_interrupted_solve_writes_the_best_so_far(big):
    code, out, _ = interrupted(
        *("solve", "big.json", "--budget", "0.4", "--gap", "0", "--time-limit", "100"),
        *("-o", "s.json"),
    )
    assert code == 0
    assert "ended by interrupt" in out
    peak = simulate(big, read_schedule("s.json", big)).peak
    assert peak <= 0.4 * simulate(big, keep_all(big)).peak


def test_interrupted_pareto_prints_the_points_so_far(big):
    code, out, _ = interrupted("pareto", "big.json", "--time-limit", "100")
    assert code == 0
    assert "100.0 %" in out


def test_interrupted_demo_prints_the_rows_so_far(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = interrupted("demo", "--graph", after_s=0.0)
    assert code == 0
    assert "100.0 %" in out
    assert "20.0 %" not in out


def test_a_curve_interrupted_at_once_is_keep_all(monkeypatch):
    from rekindle.solve import pareto as room

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "min_budget", interrupt)
    (point,) = room.pareto(PROBLEM, num_points=3, time_limit_s=1)
    assert point.peak == simulate(PROBLEM, keep_all(PROBLEM)).peak


def test_interrupted_report_is_written_all_the_same(big):
    code, out, _ = interrupted("report", "big.json", "--time-limit", "100")
    assert code == 0
    assert "written to report.html" in out
    assert Path("report.html").stat().st_size < 1_000_000


@pytest.mark.parametrize("command", [["explain"], ["report", "--no-curve"], ["export"]])
def test_a_plan_file_is_told_without_torch(command, tmp_path):
    plan = Path(__file__).parents[2] / "instances" / "plans" / "mlp.json"
    argv = [*command, str(plan), *(("--format", "chrome-trace") if command == ["export"] else ())]
    code = f"import sys; from rekindle.cli import main; main({argv}); print('torch' in sys.modules)"
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert told.stdout.splitlines()[-1] == "False"
