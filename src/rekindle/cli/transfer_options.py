"""The options of `solve` and `check` about host memory, and what their answers say about it."""

import argparse
from dataclasses import replace
from typing import Any

from rekindle.cli import printing
from rekindle.core import HostLink, Problem, Schedule, Solution, Trace, parse_budget, parse_rate
from rekindle.errors import InvalidProblem
from rekindle.solve.base import Solver
from rekindle.solve.constraints import Constraints
from rekindle.solve.transfers import with_transfers as add_transfers

# What pinned memory over PCIe needs for a transfer to start, and a size below which starting takes
# longer than moving. Rates differ from machine to machine, and so are asked for.
LATENCY_NS = 10_000
LEAST_BYTES = 2**20


def add_transfer_options(parser: argparse.ArgumentParser) -> None:
    """The options that describe the link to host memory."""
    group = parser.add_argument_group(
        "moving values to host memory",
        "for a problem whose file says nothing about it; a schedule made with these options is "
        "checked with the same",
    )
    rate = "bytes per second, such as 55GB/s; alone it holds for both directions"
    group.add_argument("--to-host", metavar="RATE", help=rate)
    group.add_argument("--from-host", metavar="RATE", help=rate)
    group.add_argument("--host-budget", metavar="B", help="bytes in host memory, such as 64GiB")


def with_link(problem: Problem, arguments: argparse.Namespace) -> Problem:
    """The problem with the link to the host that the options describe, if they do."""
    to_host, from_host = arguments.to_host, arguments.from_host
    if to_host is None and from_host is None:
        if arguments.host_budget is not None:
            raise InvalidProblem("--host-budget needs a rate: give --to-host, --from-host or both")
        return problem
    if problem.transfers is not None:
        raise InvalidProblem(
            "the problem has rates to and from the host of its own; leave out --to-host and "
            "--from-host"
        )
    if (problem.cost_unit, problem.size_unit) != ("ns", "bytes"):
        raise InvalidProblem(
            f"rates need costs in ns and sizes in bytes, and the problem's are in "
            f"{problem.cost_unit!r} and {problem.size_unit!r}"
        )
    budget = arguments.host_budget
    link = HostLink(
        to_host=parse_rate(from_host if to_host is None else to_host),
        from_host=parse_rate(to_host if from_host is None else from_host),
        latency=LATENCY_NS,
        least=LEAST_BYTES,
        host_budget=None if budget is None else parse_budget(budget, 0),
    )
    return replace(problem, transfers=link)


def improved(
    solver: Solver,
    problem: Problem,
    budget: int,
    solution: Solution,
    constraints: Constraints,
    arguments: argparse.Namespace,
) -> Solution:
    """The solution with values moved to the host where that is cheaper than recomputing."""
    if problem.transfers is None:
        return solution
    if constraints:
        note = "values are not moved: --save and --recompute are about recomputation alone"
        return replace(solution, notes=(*solution.notes, note))
    left = max(0.0, arguments.time_limit - solution.wall_s)
    return add_transfers(solver, problem, budget, solution, time_limit_s=left, seed=arguments.seed)


def solver_seconds(problem: Problem, arguments: argparse.Namespace) -> float:
    """What recomputation alone has of the time limit."""
    share = 1 if problem.transfers is None or arguments.save or arguments.recompute else 3
    return float(arguments.time_limit / share)


def transfer_record(
    problem: Problem, schedule: Schedule | None, trace: Trace | None
) -> dict[str, Any]:
    """For the JSON answer; nothing for a problem without transfers, as it was before them."""
    if problem.transfers is None:
        return {}
    if schedule is None or trace is None:
        return {"host_peak": None, "lanes": None}
    # Without transfers the compute lane is the only one that anything runs on.
    compute = sum(problem.ops[i].cost for i in schedule.ops)
    lanes = trace.lanes
    busy = {"to_host": 0, "from_host": 0}
    if lanes is not None:
        spans = zip(schedule.steps, lanes.start, lanes.finish, strict=True)
        for step, start, finish in spans:
            if isinstance(step, tuple) and step[0] in ("send", "fetch"):
                busy["to_host" if step[0] == "send" else "from_host"] += finish - start
    return {
        "host_peak": trace.host_peak,
        "lanes": {
            "compute": {"end": compute if lanes is None else lanes.compute, "busy": compute},
            "to_host": {
                "end": 0 if lanes is None else lanes.to_host,
                "busy": busy["to_host"],
                "bytes": moved_bytes(problem, schedule, "send"),
            },
            "from_host": {
                "end": 0 if lanes is None else lanes.from_host,
                "busy": busy["from_host"],
                "bytes": moved_bytes(problem, schedule, "fetch"),
            },
        },
    }


def moved_bytes(problem: Problem, schedule: Schedule, kind: str) -> int:
    """The bytes of all transfers of a kind, such as all that is sent."""
    return sum(problem.values[t.value_id].size for t in schedule.transfers if t.kind == kind)


def transfer_lines(problem: Problem, record: dict[str, Any]) -> list[str]:
    """The same for a reader; nothing where nothing is moved."""
    lanes = record.get("lanes")
    if lanes is None or not lanes["to_host"]["bytes"]:
        return []
    sent, fetched = lanes["to_host"], lanes["from_host"]
    waits = printing.cost(problem, lanes["compute"]["end"] - lanes["compute"]["busy"])
    return [
        f"host      peak {printing.size(problem, record['host_peak'])}; "
        f"{printing.size(problem, sent['bytes'])} sent in {printing.cost(problem, sent['busy'])}, "
        f"{printing.size(problem, fetched['bytes'])} fetched in "
        f"{printing.cost(problem, fetched['busy'])}; ops wait {waits}"
    ]


def step_name(problem: Problem, schedule: Schedule, step: int) -> str:
    """What a step is, for a sentence."""
    found = schedule.steps[step]
    if isinstance(found, tuple):
        return f"{found[0]} {problem.values[found[1]].name!r}"
    return repr(problem.ops[found].name)
