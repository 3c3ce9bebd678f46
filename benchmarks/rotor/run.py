"""The chain programs: how long they take, and what the chain solvers reach.

    python benchmarks/rotor/run.py [--quick]

Writes results.json and results.md beside this file. Times are CPU seconds of one core, the median
of three runs. The paper (Sec. 5.3): 339 stages with 500 slots below 20 s.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from random import Random

from rekindle.core import Schedule, generate, keep_all, simulate
from rekindle.partition.chain import Chain, Stage, chain_of_stages, find_chain
from rekindle.solve import run_solver
from rekindle.solve.chains.chain_dp import Rule, best_sequence, lower_steps, segment_steps
from rekindle.solve.chains.rotor import Revolve, Rotor, RotorFloating, Sequential

HERE = Path(__file__).parent
TOY_BUDGETS = (10701, 10000, 9000, 8600, 8300, 8212, 8211)
SOLVERS = {
    "rotor": Rotor(),
    "rotor, as published": Rotor(prune=False),
    "rotor-floating, as published": RotorFloating(prune=False),
    "revolve": Revolve(),
    "sequential": Sequential(),
}
PERCENTS = (90, 80, 70, 60, 50, 40, 30)


def toy() -> Chain:
    """Table 2 in hundredths; where a-bar is printed below a, a counts."""
    sizes = (763, 954, 1068, 1106, 1068, 954, 763)
    saved = (763, 954, 1068, 1108, 1066, 954, 763)
    overheads = (2001, 2764, 3099, 3099, 2764, 1908)
    forward = (160, 220, 244, 251, 210, 143)
    backward = (305, 448, 509, 493, 421, 334)
    stages = [
        Stage(forward[k], backward[k], sizes[k + 1], saved[k + 1], sizes[k + 1], 0, overheads[k])
        for k in range(6)
    ]
    return chain_of_stages([*stages, Stage(0, 0, 0, 0, 0)], sizes[0], sizes[0])


def long_chain(length: int) -> tuple[Chain, int]:
    """A random heterogeneous chain and a budget of 30 % of what saving all needs."""
    rng = Random(length)
    stages = []
    for _ in range(length - 1):
        size = rng.randint(50, 150) * 10**5
        cost = rng.randint(1000, 2000)
        stages.append(Stage(cost, 2 * cost, size, size * rng.randint(1, 4), size, 10**5, 10**5))
    stages.append(Stage(0, 0, 0, 0, 0))
    chain = chain_of_stages(stages, 10**7, 10**7)
    return chain, sum(stage.saved for stage in stages) * 3 // 10


def cpu_seconds(length: int, rule: Rule) -> float:
    chain, budget = long_chain(length)
    times = []
    for _ in range(3):
        start = time.process_time()
        assert best_sequence(chain, budget, rule) is not None
        times.append(time.process_time() - start)
    return statistics.median(times)


def overheads(problem) -> dict[str, list[float | None]]:
    """Per solver: cost over keep-all, in per cent, at each budget."""
    keep = simulate(problem, keep_all(problem))
    table = {}
    for name, solver in SOLVERS.items():
        row = []
        for percent in PERCENTS:
            solution = run_solver(solver, problem, keep.peak * percent // 100)
            cost = simulate(problem, solution.schedule).cost if solution.schedule else None
            row.append(None if cost is None else round(100 * (cost / keep.cost - 1), 2))
        table[name] = row
    return table


def against_sequential(problem) -> dict[str, float]:
    """The paper's comparison (Sec. 5.5): two segments or more at their fastest, and the published
    rotor with the memory that takes."""
    chain = find_chain(problem)
    assert isinstance(chain, Chain)
    best = None
    for count in range(2, len(chain) + 1):
        ops = lower_steps(problem, chain, segment_steps(len(chain), count))
        trace = simulate(problem, Schedule(tuple(ops)))
        if best is None or (trace.cost, trace.peak) < (best.cost, best.peak):
            best = trace
    assert best is not None
    solution = run_solver(Rotor(prune=False), problem, best.peak)
    cost = simulate(problem, solution.schedule).cost
    return {"faster_percent": round(100 * (best.cost / cost - 1), 2), "peak": best.peak}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    lengths = (50, 100, 339) if quick else (50, 100, 200, 339, 500)
    floating = (20, 40) if quick else (20, 40, 60, 80, 100)
    problems = [generate.chain(60, 1), generate.transformer(12), generate.transformer(24)]
    results = {
        "machine": platform.processor() or platform.machine(),
        "toy": {
            str(budget / 100): {
                rule.name: (found.cost / 100 if found else None)
                for rule in (Rule.persistent, Rule.floating, Rule.revolve)
                for found in [best_sequence(toy(), budget, rule, slots=budget)]
            }
            for budget in TOY_BUDGETS
        },
        "cpu_seconds_500_slots": {
            "persistent": {str(n): round(cpu_seconds(n, Rule.persistent), 3) for n in lengths},
            "floating": {str(n): round(cpu_seconds(n, Rule.floating), 3) for n in floating},
        },
        "overhead_percent": {
            p.name: {"budgets_percent": PERCENTS, **overheads(p)} for p in problems
        },
        "against_sequential": {p.name: against_sequential(p) for p in problems},
    }
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (HERE / "results.md").write_text(as_text(results))
    print(as_text(results))


def as_text(results) -> str:
    lines = ["# Chain programs", "", "## Rotor's toy example (Table 2)", ""]
    lines += ["| budget, MB | rotor, ms | rotor-floating, ms | revolve, ms |", "|---|---|---|---|"]
    for budget, row in results["toy"].items():
        cells = ["none" if x is None else f"{x:.2f}" for x in row.values()]
        lines.append(f"| {budget} | {' | '.join(cells)} |")
    lines += ["", "## CPU seconds of one core, 500 slots", ""]
    for rule, row in results["cpu_seconds_500_slots"].items():
        text = ", ".join(f"{n} stages {s:.2f}" for n, s in row.items())
        lines.append(f"- {rule}: {text}")
    for name, table in results["overhead_percent"].items():
        budgets = table["budgets_percent"]
        lines += ["", f"## {name}: cost over keep-all in per cent", ""]
        lines += ["| budget, % |" + "".join(f" {b} |" for b in budgets)]
        lines += ["|---" * (len(budgets) + 1) + "|"]
        for solver, row in table.items():
            if solver != "budgets_percent":
                cells = ["none" if x is None else f"{x:.1f}" for x in row]
                lines.append(f"| {solver} | {' | '.join(cells)} |")
    lines += ["", "## Against equal segments at their fastest, with the same memory", ""]
    for name, row in results["against_sequential"].items():
        lines.append(f"- {name}: rotor as published is {row['faster_percent']:.1f} % faster")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
