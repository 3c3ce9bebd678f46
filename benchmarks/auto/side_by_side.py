"""`auto` in 30 s on two cores beside the solvers of the papers, ten minutes and one core each.

    python benchmarks/auto/side_by_side.py --jobs 16 --seconds 540 --deadline 580
    python benchmarks/auto/side_by_side.py --rows resnet101:0.2,fno3d:0.6:hiremate+fastsa
    python benchmarks/auto/side_by_side.py --table          # print what is stored

One process for each (problem, budget, solver), bound to its own cores, so that a library cannot
take more threads than it is given. Results are appended to `--out` (JSON lines) as each case ends;
a case that is there with at least the asked seconds is not run again, so the same command goes on
where the last one stopped. A case starts only if it can end before `--deadline`, or with less time
where `--least` allows that. A process that overruns its limit is killed; what it had reported by
then stays in its trail, and its schedule, which nobody could simulate, does not count.

A record has the cost increase over keep-all and the lower bound in percent, and the trail:
[seconds, increase] of every improvement that the solver reported.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

HERE = Path(__file__).resolve().parent
SOLVERS = ("auto", "hiremate", "rockmate", "checkmate", "moccasin", "twremat", "fastsa", "rotor")
BUDGETS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
GRACE_S = 8.0  # start of Python, reading the problem, the last simulation
Record = dict[str, Any]


@dataclass(frozen=True)
class Case:
    problem: str
    budget: float
    solver: str
    limit_s: float

    @property
    def key(self) -> tuple[str, float, str]:
        return (self.problem, self.budget, self.solver)

    @property
    def num_cores(self) -> int:
        return 2 if self.solver == "auto" else 1


# --- one case, in a process of its own ----------------------------------------------------------


def run_case(case: Case, seed: int) -> None:
    """Prints a line of JSON for each improvement, then one with the result."""
    from table import load

    from rekindle.core import keep_all, simulate
    from rekindle.errors import RekindleError
    from rekindle.solve import find_solver, run_solver
    from rekindle.solve.progress import Progress, listen

    problem = load(case.problem)
    base = simulate(problem, keep_all(problem))

    def percent(cost: float) -> float:
        return round(100 * (cost / base.cost - 1), 4)

    def tell(progress: Progress) -> None:
        if progress.cost is not None:
            point = [round(progress.elapsed_s, 2), percent(progress.cost)]
            print(json.dumps({"point": point}), flush=True)

    solver: Any = find_solver(case.solver)
    for option in ("threads", "num_threads"):
        if hasattr(solver, option):
            solver = replace(solver, **{option: case.num_cores})
    print(json.dumps({"num_ops": len(problem.ops)}), flush=True)
    try:
        with listen(tell):
            solution = run_solver(
                solver, problem, int(case.budget * base.peak), time_limit_s=case.limit_s, seed=seed
            )
    except RekindleError as error:
        print(json.dumps({"refused": str(error)[:200]}), flush=True)
        return
    result: Record = {
        "status": solution.status.name,
        "wall_s": round(solution.wall_s, 2),
        "stopped_by": solution.stopped_by,
        "message": solution.message[:200],
    }
    if solution.schedule is not None:
        trace = simulate(problem, solution.schedule)
        result |= {"increase": percent(trace.cost), "peak": round(trace.peak / base.peak, 4)}
    elif solution.smallest is not None:
        result["peak"] = round(simulate(problem, solution.smallest).peak / base.peak, 4)
    if solution.bound is not None:
        result["bound"] = percent(solution.bound)
    print(json.dumps(result), flush=True)


# --- all cases ----------------------------------------------------------------------------------


class Running:
    """A started case: its process, its cores and the file that it writes to."""

    def __init__(self, case: Case, cores: list[int], seed: int, folder: Path) -> None:
        self.case = case
        self.cores = cores
        self.start = time.monotonic()
        self.path = folder / f"{case.problem}-{case.budget}-{case.solver}.lines"
        command = [
            sys.executable, str(Path(__file__).resolve()), "--case",
            json.dumps([case.problem, case.budget, case.solver, case.limit_s]), "--seed", str(seed),
        ]  # fmt: skip
        with self.path.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,  # so that its own worker processes are killed with it
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )

    def ended(self, now: float) -> bool:
        if self.process.poll() is not None:
            return True
        if now - self.start <= self.case.limit_s + GRACE_S:
            return False
        self.kill()
        return True

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def record(self) -> Record:
        case = self.case
        record: Record = {
            "problem": case.problem, "budget": case.budget, "solver": case.solver,
            "limit_s": case.limit_s, "cores": case.num_cores,
            "elapsed_s": round(time.monotonic() - self.start, 2), "trail": [],
        }  # fmt: skip
        text = self.path.read_text(errors="replace")
        for line in text.splitlines():
            try:
                part = json.loads(line)
            except ValueError:
                continue
            if not isinstance(part, dict):
                continue
            if "point" in part:
                record["trail"].append(part["point"])
            else:
                record |= part
        if "status" not in record and "refused" not in record:
            killed = self.process.returncode == -signal.SIGKILL
            record["status"] = "KILLED" if killed else "CRASHED"
            record["message"] = text[-300:]
        self.path.unlink()
        return record


def read_records(path: Path) -> list[Record]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def missing_cases(args: argparse.Namespace, records: list[Record]) -> list[Case]:
    """What is not there yet, row by row, the quick `auto` after the long ones of its row."""
    done: dict[tuple[str, float, str], float] = {}
    for r in records:
        if r.get("status") == "CRASHED":
            continue
        key = (r["problem"], r["budget"], r["solver"])
        # Refused, proven or given up early: more time would change nothing.
        enough = "refused" in r or (
            r.get("status") in ("OPTIMAL", "INFEASIBLE", "FEASIBLE")
            and r["stopped_by"] != "time limit"
            and r["elapsed_s"] < 0.9 * r["limit_s"]
        )
        done[key] = max(done.get(key, 0.0), float("inf") if enough else r["limit_s"])
    cases = []
    for problem, budget, solvers in asked_rows(args):
        for solver in sorted(solvers, key=lambda name: name == "auto"):
            limit = args.auto_seconds if solver == "auto" else args.seconds
            case = Case(problem, budget, solver, limit)
            if done.get(case.key, 0.0) < limit:
                cases.append(case)
    return cases


def asked_rows(args: argparse.Namespace) -> list[tuple[str, float, list[str]]]:
    """(problem, budget, solvers), the first to be run first."""
    solvers = args.solvers.split(",")
    if not args.rows:
        problems, budgets = args.problems.split(","), args.budgets.split(",")
        return [(problem, float(b), solvers) for problem in problems for b in budgets]
    rows = []
    for row in args.rows.split(","):
        problem, budget, *named = row.split(":")
        rows.append((problem, float(budget), named[0].split("+") if named else solvers))
    return rows


def run_all(args: argparse.Namespace) -> None:
    deadline = time.monotonic() + args.deadline
    waiting = missing_cases(args, read_records(args.out))
    print(f"{len(waiting)} cases to run", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    free = sorted(os.sched_getaffinity(0))[: args.jobs]
    running: list[Running] = []
    try:
        with args.out.open("a") as out, tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            while waiting or running:
                now = time.monotonic()
                for job in [r for r in running if now > deadline or r.ended(now)]:
                    job.kill()
                    record = job.record()
                    out.write(json.dumps(record) + "\n")
                    out.flush()
                    running.remove(job)
                    free = sorted(free + job.cores)
                    show(record, deadline)
                start = next_case(waiting, len(free), deadline - now, args.least)
                if start is not None:
                    waiting.remove(next(c for c in waiting if c.key == start.key))
                    cores, free = free[: start.num_cores], free[start.num_cores :]
                    running.append(Running(start, cores, args.seed, folder))
                elif not running:
                    print(f"{len(waiting)} cases left: the same command goes on with them")
                    break
                else:
                    time.sleep(0.05)
    finally:
        for job in running:
            job.kill()


def next_case(
    waiting: list[Case], num_free: int, left_s: float, least_s: float | None
) -> Case | None:
    """The first that fits the free cores and the time that is left; cut short where allowed."""
    for case in waiting:
        room = left_s - GRACE_S - 1.0
        if case.num_cores > num_free:
            continue
        if case.limit_s <= room:
            return case
        if least_s is not None and case.solver != "auto" and least_s <= room:
            return replace(case, limit_s=float(int(room)))
    return None


def show(record: Record, deadline: float) -> None:
    left = max(0.0, deadline - time.monotonic())
    print(
        f"{record['problem']:24} {record['budget']:4.0%} {record['solver']:10} "
        f"{cell(record):>18}  {left:4.0f} s left",
        flush=True,
    )


# --- the table ----------------------------------------------------------------------------------


def cell(record: Record | None) -> str:
    if record is None:
        return ""
    if "increase" in record:
        seconds = min(record["wall_s"], record["limit_s"])
        star = "*" if record["status"] == "OPTIMAL" else ""
        return f"{record['increase']:.2f}{star} ({seconds:.0f} s)"
    if "refused" in record:
        return "refuses"
    return {"KILLED": "overran", "CRASHED": "failed"}.get(record["status"], "none")


def longest(records: list[Record]) -> dict[tuple[str, float, str], Record]:
    """Per case the record with the most time, the newest of equals."""
    best: dict[tuple[str, float, str], Record] = {}
    for r in records:
        key = (r["problem"], r["budget"], r["solver"])
        if key not in best or r["limit_s"] >= best[key]["limit_s"]:
            best[key] = r
    return best


def verdict(mine: Record | None, others: list[Record]) -> str:
    """How `auto` stands against the best of the others, to a hundredth of a percent point."""
    if mine is None or not others:
        return ""
    theirs = min((r["increase"] for r in others if "increase" in r), default=None)
    if "increase" not in mine:
        return "none fits" if theirs is None else "**loses**"
    if theirs is None:
        return "only auto"
    gain = theirs - mine["increase"]
    if gain <= -0.005:
        return f"**loses by {-gain:.2f}**"
    return f"wins by {gain:.2f}" if gain >= 0.005 else "equal"


def time_to_beat(mine: Record | None, others: list[Record]) -> str:
    """The seconds after which `auto` had what the best of the others had at their end."""
    theirs = min((r["increase"] for r in others if "increase" in r), default=None)
    if mine is None or theirs is None:
        return ""
    for seconds, increase in mine["trail"]:
        if increase <= theirs + 0.005:
            return f"{seconds:.1f}"
    return ""


def markdown(records: list[Record]) -> str:
    by = longest(records)
    solvers = [s for s in SOLVERS if any(key[2] == s for key in by)]
    rows = sorted({(key[0], -key[1]) for key in by})
    lines = [
        "Cost increase over saving everything, in %, and the seconds taken.",
        "",
        "| in the table | meaning |",
        "|---|---|",
        "| bound | proven: no schedule within the budget costs less |",
        "| * | proven optimal among the schedules that the solver considers |",
        "| none | no schedule within the budget found |",
        "| overran | exceeded its time limit and was killed |",
        "| even after | seconds until `auto` was as good as the best result of the others |",
        "",
        "| problem | ops | budget | bound | "
        + " | ".join(solvers)
        + " | auto against the best | even after, s |",
        "|---|---|---|---|" + "---|" * len(solvers) + "---|---|",
    ]
    counts: dict[str, int] = {}
    for problem, minus in rows:
        mine = by.get((problem, -minus, "auto"))
        others = [by[k] for s in solvers if s != "auto" and (k := (problem, -minus, s)) in by]
        word = verdict(mine, others)
        kind = word.strip("*").split(" by ")[0]
        if kind:
            counts[kind] = counts.get(kind, 0) + 1
        present = [r for r in (mine, *others) if r is not None]
        num_ops = next((r["num_ops"] for r in present if "num_ops" in r), "")
        bound = f"{mine['bound']:.2f}" if mine is not None and "bound" in mine else ""
        cells = " | ".join(cell(by.get((problem, -minus, s))) for s in solvers)
        lines.append(
            f"| {problem} | {num_ops} | {-minus:.0%} | {bound} | {cells} | {word} "
            f"| {time_to_beat(mine, others)} |"
        )
    total = ", ".join(f"{kind}: {n}" for kind, n in sorted(counts.items()))
    return "\n".join([*lines, "", f"`auto` over {sum(counts.values())} rows: {total}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="cores to use")
    parser.add_argument("--seconds", type=float, default=600.0, help="for each solver but auto")
    parser.add_argument("--auto-seconds", type=float, default=30.0)
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds for all of this call")
    parser.add_argument("--least", type=float, help="start a case with less time, down to this")
    parser.add_argument("--problems", default="")
    parser.add_argument("--budgets", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--solvers", default=",".join(SOLVERS))
    parser.add_argument(
        "--rows",
        default="",
        help="PROBLEM:BUDGET[:SOLVER+SOLVER],... in place of --problems and --budgets",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE / "side_by_side.jsonl")
    parser.add_argument("--table", action="store_true", help="print the stored results and end")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case is not None:
        run_case(Case(*json.loads(args.case)), args.seed)
        return
    if not args.problems:
        stored = (HERE.parent / "problems").glob("*.json.gz")
        args.problems = ",".join(sorted(path.name.removesuffix(".json.gz") for path in stored))
    if not args.table:
        run_all(args)
    text = markdown(read_records(args.out))
    args.out.with_suffix(".md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
