"""The partitioner and the option maker of docs/extending.md make solvers that work."""

import re
from pathlib import Path

from rekindle.core import keep_all, simulate
from rekindle.core.generate import transformer
from rekindle.solve import run_solver

PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


def test_every_example_makes_a_solver_that_works():
    problem = transformer(1, batch=16)
    budget = int(simulate(problem, keep_all(problem)).peak * 0.8)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    examples = [text for text in blocks if "\nsolver = " in text]
    assert len(examples) == 2
    names: dict = {}  # the second one goes on from the first
    for text in examples:
        exec(text, names)
        solution = run_solver(names["solver"], problem, budget, time_limit_s=15)
        assert solution.schedule is not None
        assert simulate(problem, solution.schedule).peak <= budget
