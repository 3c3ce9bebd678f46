"""What a planned step will need: its peak by the device's allocator, its time by its stream."""

import bisect
import functools
import itertools
from dataclasses import dataclass, replace

from rekindle.capture import op_effects
from rekindle.capture.node_facts import facts
from rekindle.core import Lanes, Problem, Schedule, keep_all, simulate
from rekindle.predict.caching_allocator import pool_peak
from rekindle.predict.step_measurement import Prediction
from rekindle.profile.base import Profile
from rekindle.profile.block_sizes import blocks_of, expandable_segments
from rekindle.profile.estimate import flops
from rekindle.profile.host_rates import HostRates
from rekindle.profile.profiler import stream_sums
from rekindle.program import Program, charged_nodes

# A random op that runs again keeps the generator's state of its first run: on the CPU a tensor of
# this size per op (on a GPU a few bytes, on the host). The problem has no value for it.
_CPU_RANDOM_STATE_BYTES = 5056
_TRANSFER_HOST_NS = 15_000  # what the host needs to issue one: two or three calls of the driver


@dataclass(frozen=True)
class Predictor:
    """Foretells what `measure` will find, for any schedule of one problem."""

    program: Program
    profile: Profile
    problem: Problem

    @functools.cached_property
    def keep_all_bytes(self) -> int:
        """The peak when nothing is recomputed; a planner asks for it more than once."""
        return self.peak_bytes(keep_all(self.problem))

    def peak_bytes(self, schedule: Schedule) -> int:
        """At least the simulated peak, and what the allocator will count: on a GPU its blocks may
        be larger than the requests."""
        trace = simulate(self.problem, schedule)
        ones = self._root_gradients_bytes()
        if self.profile.kind != "cuda":
            # The CPU allocator hands out what is asked for, so the simulated peak is the peak but
            # for these.
            states = self._num_states(schedule)
            kept = (_CPU_RANDOM_STATE_BYTES * n for n in states)
            return ones + max((m + k for m, k in zip(trace.memory, kept, strict=True)), default=0)
        if expandable_segments():
            return ones + trace.peak
        # In a real pool other blocks may be lying about.
        return ones + (max(trace.peak, pool_peak(self.problem, schedule)) * 257) // 256

    @property
    def outputs_are(self) -> str:
        """What has to be there at the end of a step, in words."""
        joint = self.program.joint
        if joint.forward_only:
            return "the outputs"
        sources = (facts(leaf).source for leaf, _ in joint.gradients)
        if all(source is not None and source.kind == "parameter" for source in sources):
            return "the parameters' gradients"
        return "the gradients of parameters and inputs"

    def step_ns(self, schedule: Schedule) -> int:
        if self.profile.kind != "cuda":
            return simulate(self.problem, schedule).cost
        issued, done = self.stream_sums(schedule)
        if not schedule.transfers:
            return max(issued, done)
        issued += _TRANSFER_HOST_NS * len(schedule.transfers)
        return max(issued, done + self._beside_transfers_ns(schedule))

    def _beside_transfers_ns(self, schedule: Schedule) -> int:
        """How much longer ops take because of transfers: they wait for some, and run slower beside
        them."""
        rates = self.profile.host
        lanes = simulate(self.problem, schedule).lanes
        assert lanes is not None
        alone = sum(self.problem.ops[i].cost for i in schedule.ops)
        if rates is None:
            return max(0, lanes.compute - alone)
        # Slower ops give transfers more time: the lanes run again with the costs beside them.
        beside = _shares_beside(self.problem, schedule, lanes)
        slower = [
            replace(op, cost=round(op.cost * (1 + beside[i] * self._slowdown(i, rates))))
            for i, op in enumerate(self.problem.ops)
        ]
        trace = simulate(replace(self.problem, ops=tuple(slower)), schedule)
        assert trace.lanes is not None
        return max(0, trace.cost - alone)

    def _slowdown(self, op_id: int, rates: HostRates) -> float:
        """Of an op beside transfers: a matrix product's, or that of what is bound by memory."""
        calls = self.profile.calls
        for node in self.program.ops[op_id].nodes:
            if node.name in self.profile and flops(calls[self.profile.position(node.name)]):
                return rates.compute_slowdown
        return rates.memory_slowdown

    def stream_sums(self, schedule: Schedule) -> tuple[int, int]:
        """How long the host needs to issue a step, and how long a GPU to run it."""
        nodes = charged_nodes(self.program)
        return stream_sums(self.profile[name] for op_id in schedule.ops for name in nodes[op_id])

    def predict(self, schedule: Schedule) -> Prediction:
        return Prediction(self.peak_bytes(schedule), self.step_ns(schedule))

    def _root_gradients_bytes(self) -> int:
        """The gradient of one that `loss.backward()` makes for a scalar and holds to its end; where
        the loss is the caller's, that scalar too."""
        blocks = blocks_of(self.profile.kind)
        joint = self.program.joint
        losses = joint.differentiated
        own = sum(blocks.block_bytes(v.dtype.itemsize) for v in losses if v.dim() == 0)
        return own if all(v.dim() == 0 for v in losses) else own + 2 * blocks.block_bytes(4)

    def _num_states(self, schedule: Schedule) -> list[int]:
        """Per step: how many random ops' states are kept, each from its first to its last run, and
        the stream's own while an earlier state stands in for it."""
        random = {
            op_id
            for op_id, op in enumerate(self.program.ops)
            if any(op_effects.is_random(node.target) for node in op.nodes)
        }
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        steps = schedule.steps
        for step, op_id in enumerate(steps):
            if isinstance(op_id, int) and op_id in random:
                first.setdefault(op_id, step)
                last[op_id] = step
        # Differences, summed up below: states are added at their first run and taken off after the
        # last.
        changes = [0] * (len(steps) + 1)
        for op_id, step in first.items():
            if last[op_id] > step:
                changes[step] += 1
                changes[last[op_id] + 1] -= 1
        kept = itertools.accumulate(changes[:-1])
        return [
            count + (isinstance(op_id, int) and op_id in first and first[op_id] < step)
            for step, (op_id, count) in enumerate(zip(steps, kept, strict=True))
        ]


def _shares_beside(problem: Problem, schedule: Schedule, lanes: Lanes) -> list[float]:
    """Per op: over which share of its runs values move, as the lanes run. Slowdowns are measured
    with both lanes busy, so that one alone counts half."""
    rows = list(zip(schedule.steps, lanes.start, lanes.finish, strict=True))
    together, whole = [0.0] * len(problem.ops), [0] * len(problem.ops)
    for step, begin, end in rows:
        if isinstance(step, int):
            whole[step] += end - begin
    for kind in ("send", "fetch"):
        # One after the other on their lane, so both columns rise.
        moving = [(a, b) for step, a, b in rows if not isinstance(step, int) and step[0] == kind]
        ends = [stop for _, stop in moving]
        for step, begin, end in rows:
            if not isinstance(step, int):
                continue
            for start, stop in moving[bisect.bisect_right(ends, begin) :]:
                if start >= end:
                    break
                together[step] += (min(end, stop) - max(begin, start)) / 2
    return [t / w if w else 0.0 for t, w in zip(together, whole, strict=True)]
