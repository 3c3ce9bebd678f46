"""A pass, a solver and an op's cost each take one file and one list, as docs/extending.md says.

The page's own files are added to a copy of the package; what is asked of it is asked of that copy.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.pages import ROOT, blocks_of

PAGE = "docs/extending.md"
FILES = {
    block.text.splitlines()[0].removeprefix("# src/"): block.text
    for block in blocks_of(PAGE)
    if block.text.startswith("# src/")
}
MODEL = """
import json, torch
from torch import nn
import rekindle

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.second(-(-self.first(x).tanh())).square().mean()

torch.manual_seed(0)
model, x = Model(), torch.randn(64, 32)

def plan(**options):
    return rekindle.plan(model, (x,), profile="estimate", cache=False, **options)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package that may be changed."""
    copy = tmp_path / "src" / "rekindle"
    shutil.copytree(ROOT / "src" / "rekindle", copy, ignore=shutil.ignore_patterns("__pycache__"))
    # An editable install finds the package before the path is asked.
    (copy.parent / "sitecustomize.py").write_text(
        "import sys\n"
        "found_by_path = [f for f in sys.meta_path if '_editable' not in type(f).__module__]\n"
        "sys.meta_path[:] = found_by_path\n",
        encoding="utf-8",
    )
    return copy


def add(package: Path, file: str, path: str, old: str, new: str) -> None:
    """One file of the page, and one edit of one list."""
    if file:
        assert not (package.parent / file).exists()
        (package.parent / file).write_text(FILES[file], encoding="utf-8")
    text = (package / path).read_text(encoding="utf-8")
    assert text.count(old) == 1
    (package / path).write_text(text.replace(old, new), encoding="utf-8")


def run(package: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=package.parents[1],
        env=os.environ
        | {
            "PYTHONPATH": str(package.parent),
            "REKINDLE_CACHE_DIR": str(package.parents[1] / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def test_the_page_has_the_files() -> None:
    assert sorted(FILES) == ["rekindle/rewrite/double_negation.py", "rekindle/solve/one_op.py"]


def test_a_pass(package: Path) -> None:
    script = MODEL + (
        "managed = rekindle.rematerialize(model, (x,), budget=0.9, profile='estimate', "
        "on_miss='raise', cache=False)\n"
        "negs = sum('neg' in op.name for op in managed.plan.problem.ops)\n"
        "print(json.dumps([negs, rekindle.verify(model, managed, (x,)).equal]))"
    )
    assert json.loads(run(package, "-c", script)) == [4, True]
    add(
        package,
        "rekindle/rewrite/double_negation.py",
        "rewrite/passes.py",
        "PASSES: tuple[Pass, ...] = (\n",
        "from rekindle.rewrite.double_negation import drop_double_negation\n\n"
        "PASSES: tuple[Pass, ...] = (\n"
        "    Pass('double_negation', 'backward', drop_double_negation, does='', exact=''),\n",
    )
    assert json.loads(run(package, "-c", script)) == [2, True]


def test_a_solver(package: Path) -> None:
    add(
        package,
        "rekindle/solve/one_op.py",
        "solve/registry.py",
        "SOLVERS: tuple[Solver, ...] = (\n    Auto(),\n",
        "from rekindle.solve.one_op import OneOp\n\n"
        "SOLVERS: tuple[Solver, ...] = (\n    Auto(),\n    OneOp(),\n",
    )
    listed = json.loads(run(package, "-m", "rekindle", "solvers", "--json"))["solvers"]
    assert [solver["name"] for solver in listed][:2] == ["auto", "one-op"]
    script = MODEL + (
        "blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]\n"
        "model, x = nn.Sequential(*blocks), torch.randn(1024, 64)\n"
        "found = plan(budget=0.95, solver='one-op')\n"
        "whole = plan(budget=1.0, solver='keep-all')\n"
        "print(json.dumps([found.solver, len(found.schedule) - len(whole.schedule), "
        "found.peak_bytes <= found.budget_bytes < whole.peak_bytes]))"
    )
    assert json.loads(run(package, "-c", script)) == ["one-op", 1, True]
    problem = "from rekindle.core import write_problem\nfrom rekindle.core.generate import "
    run(package, "-c", f"{problem}chain\nwrite_problem('chain.json', chain(6))")
    arguments = ("chain.json", "--budget", "0.9", "--solver", "one-op", "--json")
    record = json.loads(run(package, "-m", "rekindle", "solve", *arguments))
    assert record["solver"] == "one-op"
    assert record["peak"] <= record["budget"]


def test_the_cost_of_an_op(package: Path) -> None:
    script = MODEL + (
        "op = next(op for op in plan(budget=1.0).problem.ops if 'tanh.default' in op.name)\n"
        "print(json.dumps([op.cost, op.workspace]))"
    )
    cost, workspace = json.loads(run(package, "-c", script))
    add(
        package,
        "",
        "profile/estimate.py",
        "OP_COSTS: dict[str, OpCost] = {\n",
        "OP_COSTS: dict[str, OpCost] = {\n"
        "    'aten.tanh': OpCost(extra_passes=1000.0, workspace=lambda call: 4096),\n",
    )
    dearer, more = json.loads(run(package, "-c", script))
    assert dearer > 10 * cost
    assert (workspace, more) == (0, 4096)
