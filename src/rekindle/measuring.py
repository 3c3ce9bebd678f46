"""Costs on the device: a step on the sample, in which what no earlier run has measured is measured.

Where the step does not fit the device as eager runs it, the schedule with the smallest peak that
can be found by the estimates runs instead: it keeps least, and computes the rest again.
"""

import logging
import time
from collections.abc import Iterator

from rekindle.capture.changing_sizes import SizesAt
from rekindle.core import Problem, Schedule, keep_all, simulate
from rekindle.plans.options import Options
from rekindle.profile import OpProfile, Profile, ProfileListener
from rekindle.profile.measure import Bench, bench_for
from rekindle.profile.profiler import with_measured
from rekindle.program import Program
from rekindle.program.formulate import formulate
from rekindle.runtime.measured_step import Sample, measured_step, not_measured
from rekindle.solve.constraints import constrained_min_budget

log = logging.getLogger("rekindle")

_SHARE_TO_FILL = 0.8  # of the device's free memory, by the first measured step


def measured_in_place(
    options: Options,
    program: Program,
    profile: Profile,
    sample: Sample | None,
    on_progress: ProfileListener | None,
    at: SizesAt | None = None,
) -> Profile:
    """The profile with what a step on the sample shows of the ops that are estimates. Without a
    sample that has data, nothing runs."""
    wanted = not_measured(program, profile)
    if not wanted:
        return profile
    start, device = time.perf_counter(), program.joint.device
    if sample is None:
        return with_measured(profile, device, {}, "the sample has no data")
    try:
        bench = bench_for(device)
    except RuntimeError as error:
        line = next(iter(str(error).splitlines()), "")
        return with_measured(profile, device, {}, f"the device cannot be used: {line}")
    found: dict[int, OpProfile] = {}
    why_not = "does not fit on the device"
    problem = formulate(program, profile, at=at)
    for schedule in _schedules_to_measure(options, problem, bench):
        left = wanted.difference(found)
        step = measured_step(program, schedule, sample, profile, left, bench, on_progress, at)
        found |= step.found
        why_not = step.why_not
        if step.device_lost:
            break
        bench.release()  # what the step had stays with nobody
        if not step.out_of_memory:
            break
    took_s = time.perf_counter() - start
    if len(found) < len(wanted):
        log.warning(
            "%d of %d distinct ops were not measured (%s): their costs are estimates, so predicted "
            "times may be far off and the schedule slower than it could be; free memory on the "
            "device and plan again for measured costs",
            *(len(wanted) - len(found), len(wanted), why_not),
        )
    return with_measured(profile, device, found, why_not, cache=options.cache, wall_s=took_s)


def _schedules_to_measure(options: Options, problem: Problem, bench: Bench) -> Iterator[Schedule]:
    everything = keep_all(problem)
    free_bytes = bench.free_bytes()
    if simulate(problem, everything).peak <= _SHARE_TO_FILL * free_bytes:
        yield everything
    smallest = constrained_min_budget(problem, options.wishes)
    # A CPU that runs out of memory raises nothing: the system ends a process.
    if simulate(problem, smallest).peak <= free_bytes:
        yield smallest
