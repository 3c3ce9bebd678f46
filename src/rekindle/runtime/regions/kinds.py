"""A region as it was read once: its guards, its problem, and what runs its options.

Equal layers are one kind: guards are about a call, whichever module it is of, so a layer for whose
call the guards of another one hold shares its graph, its costs and its code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rekindle.capture import JointGraph
from rekindle.core import Problem, Schedule, problem_hash
from rekindle.frontend import Reading
from rekindle.program import Program
from rekindle.runtime.plan_table import AnswerChanged, Layout
from rekindle.runtime.runner import RecordBackward, Runner
from rekindle.solve.regions import RegionOption, keeps_inputs_only
from rekindle.torch_compat import outside_modes

_MOST_ADOPTED = 3  # where each step brings other gradients, no plan fits them all


@dataclass(frozen=True, slots=True)
class MadeRegion:
    """A call of a submodule that was read, captured and measured."""

    reading: Reading
    uses: tuple[int, ...]  # per placeholder of the graph: which input of the reading it is
    program: Program
    problem: Problem
    record_backward: RecordBackward
    # The stages from another joint graph of the same call to its problem.
    formulate: Callable[[JointGraph], tuple[Program, Problem]]


class RegionKind:
    """What all calls have in common for which one set of guards holds."""

    def __init__(self, cls: type, made: MadeRegion, layouts: dict[str, Layout]) -> None:
        self.cls = cls
        self.guards = made.reading.guards
        self.layouts = layouts
        self._replay = made.reading.replay
        self._asked = made.reading.asked
        self._uses = made.uses
        self._record_backward, self._formulate = made.record_backward, made.formulate
        self._num_adopted = 0
        self._set(made.program, made.problem)

    def _set(self, program: Program, problem: Problem) -> None:
        self.program, self.problem = program, problem
        self.hash = problem_hash(problem)
        self.default = keeps_inputs_only(problem)
        self._runners: dict[RegionOption, Runner] = {}

    def adopt(self) -> bool:
        """Whether gradients arrived for other outputs, or in another layout, than was expected when
        the call was read: from now on those are expected."""
        wanted = [runner.wanted for runner in self._runners.values() if runner.wanted is not None]
        if not wanted or self._num_adopted >= _MOST_ADOPTED:
            return False
        self._num_adopted += 1
        with outside_modes():
            self._set(*self._formulate(wanted[-1].joint))
        return True

    def runner(self, option: RegionOption) -> Runner:
        """The code of an option, made once."""
        if option not in self._runners:
            loss = self.problem.loss_op
            assert loss is not None
            schedule = Schedule((*option.forward, loss, *option.backward))
            with outside_modes():
                self._runners[option] = Runner(
                    self.program,
                    schedule,
                    self._record_backward,
                    problem=self.problem,
                    max_stretches=1,
                )
        return self._runners[option]

    def callable(
        self, option: RegionOption, ran: Callable[[Runner, Sequence[Any]], None] | None
    ) -> Callable[..., Any]:
        """What does as the module's forward does; `ran` hears what the region gives out."""
        runner = self.runner(option)

        def run(*inputs: torch.Tensor) -> list[Any]:
            for i, name, value in self._asked:
                if getattr(inputs[i], name) != value:
                    raise AnswerChanged(f"{name} of a tensor is no longer {value}")
            residents = runner.gather([inputs[i] for i in self._uses])
            why = runner.broken_assumption(residents)
            if why is not None:
                raise AnswerChanged(why)
            outs = runner(residents)
            if ran is not None:
                ran(runner, outs)
            return runner.all_outputs(outs, residents)

        return self._replay(run)
