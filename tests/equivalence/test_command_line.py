"""`capture`, `plan`, `verify` and `demo` on the command line, and plan files, end to end."""

import json
from pathlib import Path

import pytest
import torch
from support.compare import assert_same, train
from support.manage import example_of
from support.zoo import Example, gaussian

import rekindle
from rekindle.cli import main
from rekindle.core import check_problem, keep_all, read_problem, simulate
from rekindle.errors import PlanMismatch, RekindleError

SOURCE = """
import torch
from torch import nn

def small(width=32):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    return nn.Sequential(*layers).train(), (torch.ones(64, width),), {}

def wider():
    return small(48)

class Selects(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        h = self.linear(x)
        return h[h > 0].sum()

def dynamic():
    return Selects(), (torch.ones(4, 8),)
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "models.py"
    path.write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return int(code), out, err


def build(models: Path, factory: str = "small") -> tuple:
    names: dict = {}
    exec(models.read_text(), names)  # the file that the command line reads
    return names[factory]()


def test_capture_writes_a_problem(models: Path, capsys) -> None:
    code, out, _ = run(capsys, "capture", f"{models}:small", "-o", "p.json", "--json")
    assert code == 0
    problem = read_problem("p.json")
    check_problem(problem)
    assert json.loads(out)["keep_all_peak"] == simulate(problem, keep_all(problem)).peak
    assert json.loads(out)["num_ops"] == len(problem.ops)
    assert any(op.grad_of is not None for op in problem.ops)
    code, out, _ = run(capsys, "solve", "p.json", "--budget", "0.8", "--json", "--time-limit", "5")
    assert code == 0
    assert json.loads(out)["peak"] <= 0.8 * json.loads(out)["keep_all_peak"]


def test_a_plan_file_is_applied(models: Path, capsys) -> None:
    arguments = ("--budget", "0.7", "--time-limit", "5", "-o", "plan.json", "--json")
    code, out, _ = run(capsys, "plan", f"{models}:small", *arguments)
    assert code == 0
    assert json.loads(out)["peak"] <= 0.7 * json.loads(out)["keep_all_peak"]

    def example() -> Example:
        model, _, _ = build(models)
        cpu = torch.device("cpu")
        return example_of(model, lambda step: gaussian(step, cpu, 64, 32))

    expected = train(example())
    planned = example()
    stored = rekindle.Plan.load("plan.json")
    managed = stored.apply(planned.model, planned.inputs(0)[0], on_miss="raise")
    assert managed.plan.peak_bytes == json.loads(out)["peak"]
    assert_same(expected, train(planned, managed))
    code, out, _ = run(capsys, "verify", f"{models}:small", "--plan", "plan.json", "--json")
    assert code == 0
    assert json.loads(out)["equal"] is True


def test_a_plan_for_another_model_is_refused(models: Path, capsys) -> None:
    arguments = ("--budget", "0.8", "--time-limit", "5", "-o", "plan.json", "--json")
    assert run(capsys, "plan", f"{models}:small", *arguments)[0] == 0
    model, args, _ = build(models, "wider")
    stored = rekindle.Plan.load("plan.json")
    with pytest.raises(PlanMismatch):
        stored.apply(model, args)
    plan = rekindle.plan(*build(models), budget=0.8, time_limit_s=5)
    with pytest.raises(PlanMismatch):
        plan.apply(model, args)
    code, _, err = run(capsys, "verify", f"{models}:wider", "--plan", "plan.json")
    assert code == 2
    assert "plan" in err


def test_verify(models: Path, capsys) -> None:
    arguments = ("--budget", "0.7", "--time-limit", "5", "--json")
    code, out, _ = run(capsys, "verify", f"{models}:small", *arguments)
    assert code == 0
    assert json.loads(out)["equal"] is True
    assert json.loads(out)["num_compared"] > 12


def test_what_cannot_be_done_has_its_exit_code(models: Path, capsys) -> None:
    code, _, err = run(capsys, "capture", f"{models}:dynamic", "-o", "p.json")
    assert code == 2
    assert "nonzero" in err or "index" in err
    assert "models.py" in err
    code, _, err = run(capsys, "plan", f"{models}:small", "--budget", "100B", "--time-limit", "3")
    assert code == 3
    assert any(character.isdigit() for character in err)
    for name in ("nothing_here", f"{models}:absent", "no.such.module:f"):
        code, _, err = run(capsys, "capture", name, "-o", "p.json")
        assert code == 2
        assert "Traceback" not in err


def test_a_plan_file_runs_no_code(models: Path, capsys) -> None:
    arguments = ("--budget", "0.8", "--time-limit", "5", "-o", "plan.json", "--json")
    assert run(capsys, "plan", f"{models}:small", *arguments)[0] == 0
    record = json.loads(Path("plan.json").read_text())  # JSON, not a pickle
    assert torch.__version__.split("+")[0].rpartition(".")[0] in json.dumps(record)
    Path("plan.json").write_text(json.dumps({**record, "version": 99}))
    with pytest.raises(RekindleError):
        rekindle.Plan.load("plan.json")


def test_demo(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(capsys, "demo", "--steps", "2")
    assert code == 0
    assert out.count("yes") >= 3
    assert out.count("Fits ") == 3
    assert out.splitlines()[-1] == "Report page of the plan at 50 %: report.html"
    assert "Fits " in Path("report.html").read_text()
    assert "no" not in out.lower().split()
