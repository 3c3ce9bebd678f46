"""The middle of the house: problems, schedules, and the one accounting of bytes and time.

No torch and no solver library in here.
"""

from rekindle.core.budget import is_fraction, parse_budget
from rekindle.core.check import check_problem, check_schedule
from rekindle.core.files import (
    problem_hash,
    read_problem,
    read_schedule,
    write_problem,
    write_schedule,
)
from rekindle.core.problem import Op, Phase, Problem, Value
from rekindle.core.schedule import Schedule, keep_all
from rekindle.core.simulate import Copy, Trace, copies, simulate
from rekindle.core.solution import Solution, Status, gap_sentence

__all__ = [
    "Copy",
    "Op",
    "Phase",
    "Problem",
    "Schedule",
    "Solution",
    "Status",
    "Trace",
    "Value",
    "check_problem",
    "check_schedule",
    "copies",
    "gap_sentence",
    "is_fraction",
    "keep_all",
    "parse_budget",
    "problem_hash",
    "read_problem",
    "read_schedule",
    "simulate",
    "write_problem",
    "write_schedule",
]
