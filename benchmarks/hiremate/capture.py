"""Captures the models of `models.py` on no memory at all (meta tensors), with estimated costs.

    python benchmarks/hiremate/capture.py [--out DIR] [--device p100.toml] [NAME ...]

The paper's budgets do not count the gradients of parameters, so they have size 0 in the files that
end in `.paper.json`; the others count them, as the product does.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from models import FACTORIES, FURTHER, SMALL, Sample

from rekindle.core import Problem, write_problem
from rekindle.pipeline import captured
from rekindle.plans.options import Options
from rekindle.profile import load_device, profile_nodes
from rekindle.program import analyse
from rekindle.program.formulate import formulate

HERE = Path(__file__).parent
PROBLEMS = HERE.parents[1] / "build" / "hiremate"  # where the other scripts look for them


def without_gradients(problem: Problem) -> Problem:
    """The problem with outputs that take no memory."""
    free = set(problem.outputs)
    return replace(
        problem,
        values=tuple(
            replace(value, size=0) if v in free else value for v, value in enumerate(problem.values)
        ),
        ops=tuple(
            replace(op, inplace=tuple(pair for pair in op.inplace if free.isdisjoint(pair)))
            for op in problem.ops
        ),
    )


def capture_model(factory: Callable[[], Sample], name: str, device: str) -> Problem:
    with torch.device("meta"):
        model, args = factory()
    joint = captured(Options(), model, args, {})[0]
    description = load_device(device)
    profile = profile_nodes(joint.nodes, joint.device, description=description)
    return formulate(analyse(joint), profile, name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=PROBLEMS)
    parser.add_argument("names", nargs="*", default=[*FACTORIES, *SMALL, *FURTHER])
    parser.add_argument("--device", default=str(HERE / "p100.toml"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(options.names):
        factory = {**SMALL, **FURTHER, **FACTORIES}[name]
        problem = capture_model(factory, name, options.device)
        stem = options.out / name.replace(" ", "_")
        write_problem(f"{stem}.json", problem)
        write_problem(f"{stem}.paper.json", without_gradients(problem))
        print(name, len(problem.ops), "ops", flush=True)


if __name__ == "__main__":
    main()
