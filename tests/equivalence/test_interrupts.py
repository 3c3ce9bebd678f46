"""Ctrl-C while Python plans: the first ends the search, the next one the script; none is lost."""

import re
import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import rekindle
from rekindle.solve.progress import listen

signal.signal(signal.SIGINT, signal.default_int_handler)
model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(64, 64), nn.GELU())))
x = torch.randn(1024, 64)
presses = 0

def press(*_):
    global presses
    presses += 1
    os.kill(os.getpid(), signal.SIGINT)

def at_the_first_schedule(progress):
    if not presses and progress.cost is not None:
        press()

def at_once(problem):
    press()
    return rekindle.core.keep_all(problem)

pressed = torch.compiler.assume_constant_result(press)  # it runs while it is read

def pressing(out):
    pressed()
    return out.sum()

def train(options):
    with listen(at_the_first_schedule if "--search" in sys.argv else lambda progress: None):
        managed = rekindle.rematerialize(
            model, (x,), budget=0.7, profile="estimate", cache=False, time_limit_s=600, **options
        )
    assert managed.plan.peak_bytes <= managed.plan.budget_bytes
    managed(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    print("planned, presses", presses)
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT + code, *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


SAID = re.compile(
    r"^interrupted; best so far [+]\d+\.\d %, press Ctrl-C again to stop$",
    re.MULTILINE,
)


@pytest.mark.parametrize("solver", ["auto", "fastsa"])
def test_the_first_ends_the_search_with_the_best_so_far(solver: str) -> None:
    """The script goes on, and the handler is Python's own again."""
    check = "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    answer = run(f"train({{'solver': {solver!r}}}); {check}", "--search")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "planned, presses 1\n"
    assert len(SAID.findall(answer.stderr)) == 1


def test_the_second_ends_the_script() -> None:
    answer = run("train({}); press(); print('not here')", "--search")
    assert answer.returncode not in (0, 1)
    assert answer.stdout == "planned, presses 1\n"
    assert len(SAID.findall(answer.stderr)) == 1
    assert answer.stderr.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize(
    "options",
    [
        "{'profile': 'measure', 'on_progress': press}",  # while ops are measured
        "{'schedule': at_once}",  # while a schedule is made by the caller's own function
        "{'loss_fn': pressing}",  # while the model is captured
    ],
    ids=["profile", "schedule", "capture"],
)
def test_outside_of_the_search_it_is_raised_at_once(options: str) -> None:
    code = f"rekindle.plan(model, (x,), **({{'budget': 0.7, 'profile': 'estimate'}} | {options}))"
    answer = run(code + "; print('not here')")
    assert answer.returncode not in (0, 1)
    assert answer.stdout == ""
    assert not SAID.search(answer.stderr)
    assert answer.stderr.rstrip().endswith("KeyboardInterrupt")


def test_before_any_schedule_it_is_raised() -> None:
    """A budget that keep-all misses, and Ctrl-C before anything else was looked at."""
    code = """
from rekindle.solve.auto import auto
auto._Search._solve_exactly = press
rekindle.plan(model, (x,), budget=0.7, profile="estimate", cache=False); print("not here")
"""
    answer = run(code)
    assert answer.returncode not in (0, 1)
    assert answer.stdout == ""
    assert "KeyboardInterrupt: interrupted before a schedule within the budget" in answer.stderr
