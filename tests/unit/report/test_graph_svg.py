"""The drawing of a graph and its schedule: well-formed, and all of both is in it."""

import xml.etree.ElementTree as ET

import pytest

from rekindle.core import Op, Problem, Schedule, Value, keep_all, simulate
from rekindle.core.generate import chain, random_layered, random_problem, transformer
from rekindle.report.graph_svg import graph_svg
from rekindle.solve import find_solver, run_solver

SVG = "{http://www.w3.org/2000/svg}"
PROBLEMS = {
    "chain": chain(6),
    "transformer": transformer(2),
    "without phases": random_layered(30),
    "random": random_problem(3, 12),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_every_op_edge_and_run_is_drawn(problem):
    budget = simulate(problem, keep_all(problem)).peak * 9 // 10
    found = run_solver(find_solver("floor"), problem, budget, time_limit_s=5)
    for schedule in {keep_all(problem), found.schedule or found.smallest}:
        root = ET.fromstring(graph_svg(problem, schedule))
        circles = root.findall(f"{SVG}circle")
        assert len(circles) == len(problem.ops)
        again = [c for c in circles if c.get("class") == "again"]
        assert len(again) == sum(n > 1 for n in simulate(problem, schedule).runs)
        edges = [p for p in root.findall(f"{SVG}path") if p.get("class") == "e"]
        made = [v for v, by in enumerate(problem.producer) if by >= 0]
        assert len(edges) == sum(len(problem.readers[v]) for v in made)
        bars = [r for r in root.findall(f"{SVG}rect") if r.find(f"{SVG}title") is not None]
        assert len(bars) == len(schedule.ops)
        shaded = [r for r in root.findall(f"{SVG}rect") if r.get("class") == "b"]
        assert bool(shaded) == (problem.name.startswith(("chain", "transformer")))
        width, height = float(root.get("width")), float(root.get("height"))
        for circle in circles:
            assert 0 <= float(circle.get("cx")) <= width
            assert 0 <= float(circle.get("cy")) <= height


def test_names_are_escaped_and_nothing_is_divided_by_zero():
    op = Op("<b>&", 0, (), (0,))
    problem = Problem(values=(Value("v", 0),), ops=(op,), outputs=(0,), name='"<x>"')
    root = ET.fromstring(graph_svg(problem, Schedule((0,))))
    assert "<b>&" in "".join(root.itertext())
