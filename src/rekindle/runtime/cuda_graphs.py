"""A lowered plan as CUDA graphs: its forward and each stretch of its backward recorded once, then
replayed by one launch each.

The first step runs plainly, so that libraries make their handles. The second is recorded, all
parts in one memory pool: what a part frees, later parts use, exactly as the schedule says, and the
pool is as large as the planned peak. It stays reserved between steps. After that a step copies its
arguments into the recorded places, replays, and copies outputs and finished gradients out, since
the next replay writes over them.

A call that the recording does not cover runs plainly, with the same result: another forward while
a backward is still to come, a backward that keeps its graph, parameters that have moved. Random ops
draw from the device's stream as always, which the graph advances by what it draws; running one
again in another graph is not possible, so plans for CUDA graphs run each of them once.
"""

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rekindle.capture.node_facts import facts, source_of
from rekindle.torch_compat import backward_keeps_graph, borrowed, copy_all, eager_kernels

if TYPE_CHECKING:
    from rekindle.runtime.runner import Runner, Step

Run = Callable[[list[Any]], list[Any]]

_MAX_TRIES = 4


class Recording:
    """One recorded part: what to replay, and where its results lie afterwards."""

    __slots__ = ("graph", "results")

    def __init__(self, graph: Any, results: Sequence[Any]) -> None:
        self.graph = graph
        self.results = [borrowed(r) if isinstance(r, torch.Tensor) else r for r in results]

    def replay(self) -> None:
        """Runs what was recorded, on what lies in its static inputs."""
        self.graph.replay()


class Graphs:
    """The recordings of one runner."""

    def __init__(self, runner: "Runner") -> None:
        self.runner = runner
        self.num_tries = 0  # steps without anything to replay; the first only warms up
        self.forward_part: Recording | None = None
        self.parts: list[Recording] = []
        self.residents: list[torch.Tensor] = []  # as recorded: arguments are copies
        self.addresses: list[int] = []
        self.tangents: list[torch.Tensor] = []
        self.pending: weakref.ref[Step] | None = None  # the last step that used the recordings
        self.why_not = _not_by_copies(runner)
        kinds = [source_of(node).kind for node in runner.placeholders]
        self.arguments = [i for i, kind in enumerate(kinds) if kind == "input"]
        self.fixed = [i for i, kind in enumerate(kinds) if kind != "input"]

    @property
    def complete(self) -> bool:
        """Whether the forward and all stretches of the backward are recorded."""
        return len(self.parts) == len(self.runner.lowered.stretches)

    # ---- forward

    def forward(self, step: "Step") -> list[Any] | None:
        """The outputs, with the step ready for its backward; None where it must run plainly."""
        if self._busy():
            return None
        if self.why_not:
            self.forward_part, self.parts, self.residents = None, [], []
            return None
        if self.forward_part is None or not self.complete:
            return self._record_forward(step)
        if [step.residents[i].data_ptr() for i in self.fixed] != self.addresses:
            self._give_up("parameters or buffers lie elsewhere than when it was recorded")
            return None
        self._take_arguments(step)
        self.forward_part.replay()
        num = len(self.runner.internal)
        step.saved = list(self.forward_part.results[num:])
        self._claim(step)
        return copies(self.forward_part.results[:num])

    def _record_forward(self, step: "Step") -> list[Any] | None:
        runner = self.runner
        self.num_tries += 1
        if self.num_tries == 1:
            return None
        if self.num_tries > _MAX_TRIES:
            self._give_up("no backward came that could be recorded")
            return None
        for i in self.arguments:
            argument = step.residents[i]
            if torch.empty_like(argument).stride() != argument.stride():
                self._give_up(f"argument {runner.placeholders[i].name} is not dense")
                return None
        self.parts, self.pool = [], torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(runner.device)
        self.addresses = [step.residents[i].data_ptr() for i in self.fixed]
        self.residents = [t.detach() for t in step.residents]
        for i in self.arguments:
            self.residents[i] = torch.empty_like(self.residents[i])
        self._take_arguments(step)
        args = [self.residents[p] for p in runner.forward_positions]
        made = self._record(runner.lowered.forward, args)
        if made is None:
            return None
        self.forward_part = Recording(self._graph, made)
        num = len(runner.internal)
        step.saved = made[num:]
        self._claim(step)
        return copies(made[:num])

    def _take_arguments(self, step: "Step") -> None:
        for i in self.arguments:
            self.residents[i].copy_(step.residents[i])

    def _claim(self, step: "Step") -> None:
        step.graphed = True
        self.pending = weakref.ref(step)

    def _busy(self) -> bool:
        """Whether the backward of the last step that used the recordings may still come."""
        step = None if self.pending is None else self.pending()
        return step is not None and (step.saved is not None or step.env is not None)

    # ---- backward

    def backward(self, step: "Step", index: int) -> list[Any] | None:
        """The gradients that leave this stretch; None where it must run plainly, from what
        `step.saved` holds."""
        runner = self.runner
        if index == 0 and backward_keeps_graph():
            step.graphed = False
            return None
        stretch = runner.lowered.stretches[index]
        if index == 0:
            if step.saved is None:
                return None
            given = [step.tangents[slot] for slot in runner.tangent_slots]
            step.tangents = []
            self._take_tangents(given)
        num = len(stretch.gradients)
        if index < len(self.parts):
            self.parts[index].replay()
            made = self.parts[index].results[:num]
            step.saved = None
            last = index == len(self.parts) - 1
            step.env = None if last and self.complete else []
            return copies(made)
        if index == 0:
            args, step.saved = step.saved, None
            assert args is not None
            args = [*args, *self.tangents]
        else:
            assert step.env is not None
            args, step.env = step.env, None
        args += [self.residents[p] for p in runner.stretch_positions[index]]
        plainly = [borrowed(a) if isinstance(a, torch.Tensor) else a for a in args]
        recorded = self._record(stretch.run, args)
        if recorded is None:
            with eager_kernels():
                recorded = stretch.run(plainly)
        else:
            self.parts.append(Recording(self._graph, recorded))
        step.env = recorded[num:]
        result = copies(recorded[:num])
        if index == len(runner.lowered.stretches) - 1:
            step.env = None
        return result

    def _take_tangents(self, given: Sequence[torch.Tensor]) -> None:
        if not self.tangents:
            self.tangents = [torch.empty_like(t) for t in given]
        for mine, theirs in zip(self.tangents, given, strict=True):
            mine.copy_(theirs)

    # ---- recording

    def _record(self, run: Run, args: list[Any]) -> list[Any] | None:
        """Records a part and runs it; None where it cannot be recorded, with nothing done."""
        if self.why_not:
            return None
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                torch.cuda.graph(
                    graph,
                    pool=self.pool,
                    stream=self.stream,
                    capture_error_mode="thread_local",
                ),
                eager_kernels(),
            ):
                made = run(args)
        except RuntimeError as error:
            self._give_up(str(error).strip().splitlines()[0])
            return None
        # Where a recording begins, torch sets the counter of the random stream to zero, on the
        # stream of the recording; the replay sets it to what it is, and must come later.
        torch.cuda.current_stream(self.runner.device).wait_stream(self.stream)
        graph.replay()
        self._graph = graph
        return made

    def _give_up(self, why: str) -> None:
        self.why_not = why  # what was recorded is dropped before the next step
        warnings.warn(
            f"the step cannot run as a CUDA graph: {why}; it runs as with cuda_graph=False, with "
            "the same results",
            RuntimeWarning,
            stacklevel=2,
        )


def _not_by_copies(runner: "Runner") -> str:
    """Why not, where the model writes into what the caller gave: the copy would be written; nor
    where outputs share memory, which copies of them do not."""
    if len(runner.changes.leaders) < len(runner.internal):
        return "outputs share memory"
    arguments = {facts(n).storage for n in runner.placeholders if source_of(n).kind == "input"}
    for node in runner.joint.nodes:
        if any(facts(w).storage in arguments for w in facts(node).writes):
            return f"{node.target} writes into an argument"
    return ""


def copies(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Tensors of their own, laid out alike, by as few launches as there can be."""
    if not tensors:
        return []
    made = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in tensors
    ]
    copy_all(made, tensors)
    return made
