"""The runner of a plan, made when the plan is first called.

Planning needs no code: who compares budgets, writes a plan file or reads a report never runs most
of what is planned. A schedule is checked and simulated before it comes here, and what a call would
have to refuse for the model's sake (`Guards`) is refused at once.
"""

import logging
import threading
import time

from rekindle.capture.gc_pause import collector_at_rest
from rekindle.core import Problem, Schedule
from rekindle.lower.guards import Guards
from rekindle.predict.caching_allocator import best_arena
from rekindle.program import Program
from rekindle.runtime import step_watch
from rekindle.runtime.arena import ArenaUse
from rekindle.runtime.runner import RecordBackward, Runner
from rekindle.runtime.step_watch import NUM_CORRECTIONS
from rekindle.torch_compat import outside_modes

log = logging.getLogger("rekindle")


class LateRunner:
    """A runner that is made at the first call: a plan that is never called is not lowered."""

    __slots__ = (
        *("_arena", "_cuda_graph", "_guards", "_lock", "_problem", "_program", "_record_backward"),
        *("_limit_bytes", "_num_corrections", "_runner", "_schedule"),
    )

    def __init__(
        self,
        program: Program,
        problem: Problem,
        schedule: Schedule,
        record_backward: RecordBackward,
        cuda_graph: bool = False,
        limit_bytes: int | None = None,
        num_corrections: int = NUM_CORRECTIONS,
        arena: bool = False,
    ) -> None:
        """With a limit, the first steps are watched, and the plan may be corrected so often.
        With an arena, steps on a GPU allocate from segments of their own."""
        self._program = program
        self._problem = problem
        self._schedule = schedule
        self._record_backward = record_backward
        self._cuda_graph = cuda_graph
        self._limit_bytes = limit_bytes
        self._num_corrections = num_corrections
        self._arena = arena
        self._guards = Guards(program.joint)
        self._lock = threading.Lock()
        self._runner: Runner | None = None

    def watch_again(self) -> None:
        """Watches the next steps: what comes needs more than what came."""
        if self._runner is not None and self._runner.watch is None:
            self._watch(self._runner)

    def _watch(self, runner: Runner) -> None:
        # A CUDA graph has memory of its own, which lies outside of a step's account.
        if self._limit_bytes is None or runner.graphs is not None or not runner.lowered.stretches:
            return
        meter = step_watch.meter_for(runner.device)
        if meter is not None:
            runner.watch_steps(self._limit_bytes, meter, self._num_corrections)

    def _arena_use(self) -> ArenaUse | None:
        # A CUDA graph has memory of its own; blocks that a copy still reads are not given back by
        # the schedule alone.
        device = self._program.joint.device
        if not self._arena or device.type != "cuda" or self._cuda_graph or self._schedule.transfers:
            return None
        segments = best_arena(self._problem, self._schedule)
        return ArenaUse(device, segments) if segments else None

    @property
    def is_made(self) -> bool:
        """Whether code has been generated for the plan."""
        return self._runner is not None

    def get(self) -> Runner:
        """The runner, made at the first call that needs it."""
        if self._runner is None:
            # The modes around the first call (a counter of operations, say) are not meant for the
            # trials on fake tensors that lowering makes.
            with self._lock, collector_at_rest(), outside_modes():
                if self._runner is None:
                    begun = time.monotonic()
                    num_steps = len(self._schedule)
                    log.info("first planned step: generating its code (%d ops)", num_steps)
                    runner = Runner(
                        self._program,
                        self._schedule,
                        self._record_backward,
                        self._cuda_graph,
                        self._guards,
                        self._problem,
                        self._arena_use(),
                    )
                    self._watch(runner)
                    self._runner = runner
                    log.info("first planned step: %.1f s for its code", time.monotonic() - begun)
        return self._runner
