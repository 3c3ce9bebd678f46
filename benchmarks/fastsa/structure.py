"""The annealer's memory of slots: an array in blocks against the add-max segment tree.

    structure.py [PROBLEM.json ...]      -> structure.md beside this file

Builds the native module once for each structure, from a copy of the sources in which one line of
`anneal/timeline.h` names another class (`structure/tree_memory.h`), with the same flags. Then:

- moves per second of whole annealing runs at 70 % of the keep-all peak, by the excess (`area`, the
  default), by the peak (equation 1 with the paper's moves) and by a log-add-exp of it. The runs of
  `area` and of the peak must end with the very same schedules;
- what the structures alone take: the questions of a real `area` run are recorded
  (`structure/record_memory.h`) and asked again of each (`structure/replay.cpp`), which checks every
  answer.

Needs what a build from source needs. CPU seconds, best of nine, since other work on the machine can
only slow it down.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PARTS = HERE / "structure"
INSTANCES = ROOT / "tests" / "instances"
MOVES = 200_000
ROUNDS, REPEATS = 3, 3  # seeds, in turn over the structures, and runs of each

# name -> (class, header)
STRUCTURES = {
    "blocks": ("BlockMemory", "anneal/memory.h"),
    "tree": ("TreeMemory<0>", "tree_memory.h"),
    "tree of blocks": ("TreeMemory<5>", "tree_memory.h"),
    "record": ("RecordMemory", "record_memory.h"),
}
COMPARED = tuple(STRUCTURES)[:3]
OBJECTIVES = ("area", "peak", "log-add-exp")
QUESTIONS = {
    "add": "range additions of a move",
    "excess_change": "what a move does to the excess",
    "at": "memory of one slot",
    "all": "all, the rare ones too",
}


def build(folder: Path) -> dict[str, Path]:
    """The folders to import each module's package from."""
    copy = folder / "copy"
    ignore = shutil.ignore_patterns("_native*", "__pycache__")
    for name in ("cpp", "src"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for path in (ROOT / "CMakeLists.txt", ROOT / "LICENSE"):
        shutil.copy(path, copy)
    for path in (PARTS / "tree_memory.h", PARTS / "tree_memory.cpp", PARTS / "record_memory.h"):
        shutil.copy(path, copy / "cpp" / "anneal")
    sources = copy / "CMakeLists.txt"
    listed = "  cpp/anneal/timeline.cpp\n"
    assert sources.read_text().count(listed) == 1
    sources.write_text(
        sources.read_text().replace(listed, listed + "  cpp/anneal/tree_memory.cpp\n")
    )
    timeline = copy / "cpp" / "anneal" / "timeline.h"
    text = timeline.read_text()
    begin = ["cmake", "-S", str(copy), "-B", str(copy / "build"), "-DREKINDLE_STRICT=ON"]
    run([*begin, f"-DPython_EXECUTABLE={sys.executable}"])
    packages = {}
    for name, (memory, header) in STRUCTURES.items():
        patched = text
        for old, new in (
            ('#include "anneal/memory.h"', f'#include "{header}"'),
            ("    BlockMemory memory_;", f"    {memory} memory_;"),
        ):
            assert patched.count(old) == 1, old
            patched = patched.replace(old, new)
        timeline.write_text(patched)
        run(["cmake", "--build", str(copy / "build")])
        packages[name] = folder / name.replace(" ", "-")
        shutil.copytree(copy / "src", packages[name])
    return packages


def run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def anneal(path: str, objective: str, seed: int) -> None:
    """In a process of its own, with one of the modules: prints the rate and what came out."""
    from rekindle import _native
    from rekindle.core import keep_all, read_problem, simulate

    problem = read_problem(path)
    start = list(keep_all(problem).ops)
    options: dict[str, object] = {"objective": _native.Objective.area}
    if objective != "area":
        options = {"objective": _native.Objective.product, "paper_moves": True}
        options |= {"hot": 1e-3, "cold": 1e-7}
    if objective == "log-add-exp":
        options["smooth"] = max(value.size for value in problem.values) / 10
    budget = simulate(problem, keep_all(problem)).peak * 7 // 10
    rate = 0.0
    for _ in range(REPEATS):
        begun = time.process_time()
        results, _ = _native.anneal(
            problem.native, [start], budget, seeds=[seed], max_moves=MOVES, time_limit_s=300.0,
            **options,
        )  # fmt: skip
        result = results[0]
        rate = max(rate, result.moves / 1e6 / (time.process_time() - begun))
    outcome = [list(result.best), list(result.smallest), result.judged, result.accepted]
    print(json.dumps({"rate": rate, "outcome": outcome}))


def whole_runs(packages: dict[str, Path], path: Path) -> list[dict[str, float]]:
    """Millions of moves per second by objective and structure."""
    best = [dict.fromkeys(COMPARED, 0.0) for _ in OBJECTIVES]
    for seed in range(ROUNDS):
        for rates, objective in zip(best, OBJECTIVES, strict=True):
            outcomes = []
            for name in COMPARED:
                command = [sys.executable, __file__, "anneal", str(path), objective, str(seed)]
                made = json.loads(run(command, PYTHONPATH=str(packages[name])))
                rates[name] = max(rates[name], made["rate"])
                outcomes.append(made["outcome"])
            if objective != "log-add-exp":  # rounded
                assert all(outcome == outcomes[0] for outcome in outcomes), (path, objective)
    return best


def replay(packages: dict[str, Path], program: Path, path: Path) -> dict[str, dict[str, str]]:
    """By question and structure: how often it is asked, and ns for each."""
    trace = program.parent / "trace"
    command = [sys.executable, __file__, "anneal", str(path), "area", "0"]
    run(command, PYTHONPATH=str(packages["record"]), REKINDLE_TRACE=str(trace))
    rows: dict[str, dict[str, str]] = {}
    for line in run([str(program), str(trace)]).splitlines():
        name, question, count, each = line.split(",")
        rows.setdefault(question, {"count": count})[name] = each
    trace.unlink()
    return rows


def problems(folder: Path) -> list[Path]:
    from rekindle.core import write_problem
    from rekindle.core.generate import chain, random_layered

    paths = [INSTANCES / "RL4.json", *map(Path, sys.argv[1:])]
    for name, problem in (
        ("random_layered(10000)", random_layered(10_000)),
        ("chain(25000)", chain(25_000)),
    ):
        paths.append(folder / f"{name}.json")
        write_problem(paths[-1], problem)
    return paths


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        packages = build(folder)
        program = folder / "replay"
        sources = [PARTS / "replay.cpp", PARTS / "tree_memory.cpp", ROOT / "cpp/anneal/memory.cpp"]
        flags = ["-O3", "-std=c++20", f"-I{ROOT / 'cpp'}", f"-I{PARTS}", "-o", str(program)]
        run([os.environ.get("CXX", "c++"), *flags, *map(str, sources)])
        paths = problems(folder)
        rates = [whole_runs(packages, path) for path in paths]
        questions = [replay(packages, program, path) for path in paths]
    write(paths, rates, questions)


def write(
    paths: list[Path],
    rates: list[list[dict[str, float]]],
    questions: list[dict[str, dict[str, str]]],
) -> None:
    command = " ".join(["structure.py", *(Path(path).name for path in sys.argv[1:])])
    columns = " | ".join(COMPARED)
    lines = [
        "# The annealer's memory of slots: blocks against the add-max segment tree",
        "",
        f"Made by `{command}`: {MOVES} moves each, CPU seconds, the fastest of {ROUNDS * REPEATS}.",
        "`tree` is the paper's, a leaf for each slot; `tree of blocks` has a leaf for 32 slots.",
        "",
        "## Whole annealing runs, millions of moves per second",
        "",
        "With `area` and `peak` all three end with the same schedules.",
        "",
        f"| problem | objective | {columns} |",
        "|---|---|---|---|---|",
    ]
    for path, by_objective in zip(paths, rates, strict=True):
        for objective, row in zip(OBJECTIVES, by_objective, strict=True):
            shown = " | ".join(f"{row[name]:.2f}" for name in COMPARED)
            lines.append(f"| {path.stem} | {objective} | {shown} |")
    lines += [
        "",
        "## The questions of one `area` run, nanoseconds for each",
        "",
        "Asked again of each structure alone; every answer is the recorded one.",
        "",
        f"| problem | question | times | {columns} |",
        "|---|---|---|---|---|---|",
    ]
    for path, rows in zip(paths, questions, strict=True):
        for question, row in rows.items():
            shown = " | ".join(row[name] for name in COMPARED)
            lines.append(f"| {path.stem} | {QUESTIONS[question]} | {row['count']} | {shown} |")
    text = "\n".join(lines) + "\n"
    print(text)
    (HERE / "structure.md").write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["anneal"]:
        anneal(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
