"""`moccasin` on the captured rows and the public instances, beside `auto`.

    python benchmarks/staged/captured.py [--seconds S] [--solver NAME] [PROBLEM:BUDGET ...]
    python benchmarks/staged/captured.py --table        # prints what is stored

Runs the rows that are missing, one after another, one core for the solver, and writes each as it
ends to `captured.jsonl` beside itself. `auto` is the figure of benchmarks/auto/side_by_side.jsonl
(30 s, two cores). Overheads in percent of keep-all.
"""

import argparse
import json
import sys
from pathlib import Path

from rekindle.core import keep_all, simulate
from rekindle.solve import find_solver, run_solver

HERE = Path(__file__).resolve().parent
AUTO = HERE.parent / "auto"
PATH = HERE / "captured.jsonl"
sys.path.insert(0, str(AUTO))


def records(path: Path) -> list[dict]:
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def auto_rows() -> dict[tuple[str, float], float]:
    """The overhead of `auto` in each captured row that it solves."""
    rows = {}
    for record in records(AUTO / "side_by_side.jsonl"):
        if record["solver"] == "auto" and "increase" in record:
            rows[record["problem"], record["budget"]] = record["increase"]
    return rows


def measure(name: str, share: float, solver: str, seconds: float) -> dict:
    from table import load

    problem = load(name)
    whole = simulate(problem, keep_all(problem))
    solution = run_solver(
        find_solver(solver), problem, int(share * whole.peak), time_limit_s=seconds
    )

    def percent(cost: int | None) -> float | None:
        return None if cost is None else round(100 * (cost / whole.cost - 1), 3)

    found = solution.schedule and simulate(problem, solution.schedule)
    return {
        "problem": name,
        "budget": share,
        "solver": solver,
        "limit_s": seconds,
        "status": solution.status.name,
        "overhead": percent(found and found.cost),
        "bound": percent(solution.bound),
        "wall_s": round(solution.wall_s, 1),
    }


def table(solver: str) -> None:
    auto = auto_rows()
    near = 0
    for record in records(PATH):
        key = (record["problem"], record["budget"])
        if key not in auto:
            continue
        ours = record["overhead"]
        near += record["solver"] == solver and ours is not None and ours <= 1.1 * auto[key]
        if record["solver"] != solver:
            continue
        print(f"{key[0]:24} {key[1]:4.0%} {record['solver']} {ours} auto {auto[key]:.2f}")
    print(f"within 10 % of auto: {near} of {len(auto)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=45)
    parser.add_argument("--solver", default="moccasin")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("cases", nargs="*", metavar="PROBLEM:BUDGET")
    options = parser.parse_args()
    if options.table:
        table(options.solver)
        return
    cases = [tuple(case.split(":")) for case in options.cases] or sorted(auto_rows())
    done = {(r["problem"], r["budget"], r["solver"]) for r in records(PATH)}
    for name, share in cases:
        if (name, float(share), options.solver) not in done:
            record = measure(name, float(share), options.solver, options.seconds)
            print(json.dumps(record), flush=True)
            with PATH.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
