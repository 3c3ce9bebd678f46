"""The middle of the house: problems, schedules, and the one accounting of bytes and time.

No torch and no solver library in here.
"""

from rekindle.core.budget import MIN_BUDGET, is_fraction, parse_budget, parse_rate
from rekindle.core.check import check_problem, check_schedule
from rekindle.core.files import (
    problem_hash,
    read_problem,
    read_schedule,
    write_problem,
    write_schedule,
)
from rekindle.core.host_layout import HostLayout, HostSlot, host_layout
from rekindle.core.problem import HostLink, Op, Phase, Problem, Value
from rekindle.core.schedule import Schedule, Transfer, TransferKind, keep_all, schedule_of
from rekindle.core.simulate import Copy, Lanes, Trace, copies, simulate
from rekindle.core.solution import Solution, Status, gap_sentence

__all__ = [
    "MIN_BUDGET",
    "Copy",
    "HostLayout",
    "HostLink",
    "HostSlot",
    "Lanes",
    "Op",
    "Phase",
    "Problem",
    "Schedule",
    "Solution",
    "Status",
    "Trace",
    "Transfer",
    "TransferKind",
    "Value",
    "check_problem",
    "check_schedule",
    "copies",
    "gap_sentence",
    "host_layout",
    "is_fraction",
    "keep_all",
    "parse_budget",
    "parse_rate",
    "problem_hash",
    "read_problem",
    "read_schedule",
    "schedule_of",
    "simulate",
    "write_problem",
    "write_schedule",
]
