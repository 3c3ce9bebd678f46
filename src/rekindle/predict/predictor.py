"""What a planned step will need: its peak by the device's allocator, its time by its stream."""

import functools
import itertools
from dataclasses import dataclass

from rekindle.capture import op_effects
from rekindle.capture.node_facts import facts
from rekindle.core import Problem, Schedule, keep_all, simulate
from rekindle.predict.caching_allocator import best_arena, pool_peak, reserved_peak
from rekindle.predict.step_measurement import Prediction
from rekindle.profile.base import Profile
from rekindle.profile.block_sizes import ROUND, blocks_of, expandable_segments
from rekindle.profile.profiler import stream_sums
from rekindle.program import Program, charged_nodes

# A random op that runs again keeps the generator's state of its first run: on the CPU a tensor of
# this size per op (on a GPU a few bytes, on the host). The problem has no value for it.
_CPU_RANDOM_STATE_BYTES = 5056


@dataclass(frozen=True)
class Predictor:
    """Foretells what `measure` will find, for any schedule of one problem."""

    program: Program
    profile: Profile
    problem: Problem
    has_arena: bool = False  # the step has segments of its own
    in_reserved: bool = False  # what a schedule needs is what the allocator reserves for it

    @functools.cached_property
    def keep_all_bytes(self) -> int:
        """What is needed when nothing is recomputed; a planner asks for it more than once."""
        return self.needed_bytes(keep_all(self.problem))

    def needed_bytes(self, schedule: Schedule) -> int:
        """What a budget is held against."""
        return self.reserved_bytes(schedule) if self.in_reserved else self.peak_bytes(schedule)

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

    def reserved_bytes(self, schedule: Schedule) -> int:
        """What the allocator takes from the device for a step that begins with an empty cache: on a
        GPU, whole segments."""
        if self.profile.kind != "cuda":
            return self.peak_bytes(schedule)
        ones = [ROUND] * (self._root_gradients_bytes() // ROUND)
        arena = self.arena(schedule)
        return reserved_peak(self.problem, schedule, arena=arena, also=ones)

    def arena(self, schedule: Schedule) -> tuple[int, ...]:
        """Bytes of the segments of its own that the step allocates from; without any it allocates
        as eager does."""
        if self.profile.kind != "cuda" or not self.has_arena or schedule.transfers:
            return ()
        if schedule not in self._arenas:  # a search of a second
            self._arenas[schedule] = best_arena(self.problem, schedule)
        return self._arenas[schedule]

    @functools.cached_property
    def _arenas(self) -> dict[Schedule, tuple[int, ...]]:
        return {}

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
        return max(self.stream_sums(schedule))

    def stream_sums(self, schedule: Schedule) -> tuple[int, int]:
        """How long the host needs to issue a step, and how long a GPU to run it."""
        nodes = charged_nodes(self.program)
        return stream_sums(self.profile[name] for op_id in schedule.ops for name in nodes[op_id])

    def predict(self, schedule: Schedule) -> Prediction:
        return Prediction(
            self.peak_bytes(schedule), self.step_ns(schedule), self.reserved_bytes(schedule)
        )

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
        for step, op_id in enumerate(schedule.ops):
            if op_id in random:
                first.setdefault(op_id, step)
                last[op_id] = step
        # Differences, summed up below: states are added at their first run and taken off after the
        # last.
        changes = [0] * (len(schedule.ops) + 1)
        for op_id, step in first.items():
            if last[op_id] > step:
                changes[step] += 1
                changes[last[op_id] + 1] -= 1
        kept = itertools.accumulate(changes[:-1])
        return [
            count + (op_id in first and first[op_id] < step)
            for step, (op_id, count) in enumerate(zip(schedule.ops, kept, strict=True))
        ]
