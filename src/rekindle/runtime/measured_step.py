"""A step run op by op on the sample itself, so that each op is measured where it will run.

The ops of a program run in a schedule's order on the true parameters, buffers and arguments; each
distinct call is measured on the inputs that it meets there, before it runs. No index, mask, seed or
library record is ever invented: an invented index is a device-side assert, which ends the process,
and what a kernel needs (its algorithm, its workspace, the storage it makes) hangs on what it gets.
Only the gradients that the caller's loss would pass back are made up: floats, all ones.

Nothing is left behind. What the step writes to (running statistics, counters, caches) is written in
copies, so even a run that is broken off has changed nothing; random streams are put back; autograd
sees nothing, so gradients stay as they are. Collectives and ops that make nothing do not run: other
ranks would have to take part, and the world would see an effect twice.
"""

import contextlib
import functools
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rekindle.capture import JointGraph, op_effects
from rekindle.capture.changing_sizes import SizesAt
from rekindle.capture.node_facts import NO_STORAGE, facts, source_of
from rekindle.core import Schedule
from rekindle.lower.lifetimes import lifetimes
from rekindle.lower.runtime_ops import clone_storage, generator_of, replay
from rekindle.profile import OpProfile, Profile, ProfileListener, ProfileProgress, Source
from rekindle.profile.measure import Bench, DeviceLost, DoesNotFit, is_out_of_memory, measure
from rekindle.profile.profiler import expected_s
from rekindle.program import Program, charged_nodes
from rekindle.program.program import ProgramOp
from rekindle.runtime.rescue import own_generators
from rekindle.torch_compat import FakeTensor, outside_modes

Sample = Mapping[fx.Node, torch.Tensor]  # of the placeholders of a joint graph
Tensors = dict[fx.Node, Any]  # recorded nodes that own a storage -> their tensors


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """What was found, by position in `Profile.ops`; and why the step ended early, if it did."""

    found: dict[int, OpProfile]
    why_not: str = ""
    out_of_memory: bool = False
    device_lost: bool = False


def sample_of(joint: JointGraph, inputs: Sequence[Any]) -> Sample | None:
    """The tensors of a graph's placeholders, out of what enters the call's graph; None where one
    of them has no data."""
    sample = {
        node: given if isinstance(given, torch.Tensor) else torch.tensor(given)
        for node, given in zip(joint.entries, inputs, strict=True)
        if node is not None
    }
    for node in joint.nodes:
        if node.op == "placeholder" and source_of(node).kind == "constant":
            sample[node] = joint.constants[source_of(node).index]
    if any(isinstance(t, FakeTensor) or t.is_meta for t in sample.values()):
        return None
    return sample


def not_measured(program: Program, profile: Profile) -> frozenset[int]:
    """Positions in `Profile.ops` of the calls that are estimates and that a step can measure."""
    left_out = {node.name for op in program.ops for node in op.nodes if not _may_run(node, op)}
    names = {name for names in charged_nodes(program) for name in names} - left_out
    positions = {profile.position(name) for name in names}
    return frozenset(i for i in positions if profile.ops[i].source is Source.ESTIMATED)


def measured_step(
    program: Program,
    schedule: Schedule,
    residents: Sample,
    profile: Profile,
    wanted: frozenset[int],
    bench: Bench,
    on_progress: ProfileListener | None = None,
    at: SizesAt | None = None,
) -> MeasuredStep:
    """Runs the schedule until all that is wanted is measured. `residents` are the tensors of the
    placeholders; `at` tells their sizes, where those change. Whatever an op throws, planning goes
    on: with what was found until then."""
    progress = _Progress(profile, wanted, bench, on_progress)
    run = _Run(program, schedule, profile, wanted, bench, progress, at)
    try:
        with _undisturbed(program):
            run.run(residents)
        progress.done()
        return MeasuredStep(run.found)
    except (DoesNotFit, DeviceLost) as error:
        lost = isinstance(error, DeviceLost)
        why = f"the device was lost: {error}" if lost else f"out of memory: {error}"
        return MeasuredStep(run.found, why, not lost, lost)
    except Exception as error:
        full = is_out_of_memory(error)
        lost = not full and not bench.is_alive()
        line = next(iter(str(error).splitlines()), "")
        why = f"the step broke off at {run.at}: {type(error).__name__}: {line}"
        return MeasuredStep(run.found, why, full, lost)


def _may_run(node: fx.Node, op: ProgramOp) -> bool:
    """Not a collective, and not an op that is run for an effect that nobody sees."""
    if op_effects.runs_once(node.target):
        return False
    return bool(op.makes or facts(node).writes)


class _Progress:
    def __init__(
        self,
        profile: Profile,
        wanted: frozenset[int],
        bench: Bench,
        listener: ProfileListener | None,
    ) -> None:
        self.start = time.perf_counter()
        self.num_total = len(wanted)
        self.listener = listener
        calls = [profile.calls[i] for i in sorted(wanted)]
        self.expected_s = expected_s(calls, bench.device) if listener is not None else 0.0

    def tell(self, num_done: int, op: str) -> None:
        if self.listener is not None:
            elapsed_s = time.perf_counter() - self.start
            seen = ProfileProgress(num_done, self.num_total, op, elapsed_s, self.expected_s)
            self.listener(seen)

    def done(self) -> None:
        self.tell(self.num_total, "")


class _Run:
    """The state of one run: the copies of values that are alive, by the rule of `lifetimes`."""

    def __init__(
        self,
        program: Program,
        schedule: Schedule,
        profile: Profile,
        wanted: frozenset[int],
        bench: Bench,
        progress: _Progress,
        at: SizesAt | None,
    ) -> None:
        self._numbers = _as_they_are if at is None else at.numbers
        self.program, self.steps, self.profile = program, schedule.ops, profile
        self.wanted, self.bench, self.progress = set(wanted), bench, progress
        self.lives = lifetimes(program, schedule.ops)
        self.found: dict[int, OpProfile] = {}
        self.at = ""  # the op that runs
        self.seen: set[int] = set()  # ops that have run
        self.residents: Tensors = {}
        self.copies: dict[int, Tensors] = {}
        self.place: dict[int, Tensors] = {}  # storage -> the tensors that a step sees
        self.random: dict[fx.Node, torch.Tensor] = {}  # random op -> the stream before it first ran

    def run(self, residents: Sample) -> None:
        written = {facts(a).storage for op in self.program.ops for a in _written(op.nodes)}
        copied: dict[int, torch.UntypedStorage] = {}
        for node, tensor in residents.items():
            storage = facts(node).storage
            # Nothing here needs a gradient, so autograd has nothing to do.
            self.residents[node] = tensor.detach()
            if storage in written:
                if storage not in copied:
                    copied[storage] = tensor.untyped_storage().clone()
                self.residents[node] = _over(copied[storage], tensor)
        for t in range(len(self.steps)):
            if not self.wanted:
                return
            self._step(t)

    # ---- steps

    def _step(self, t: int) -> None:
        op, reads = self.program.ops[self.steps[t]], self.lives.reads[t]
        self.at = op.name
        self.place = {s: self.copies[reads[value]] for s, value in op.reads.items()}
        if op.phase == "loss":
            self._make_tangents(op)
        elif op.instead is not None and self.lives.dies(reads[op.instead.source], t):
            # Measured as an op of its own, then run as the schedule has it.
            node, instead = op.nodes[0], op.instead
            args, kwargs = self._arguments(node)
            self._measure(node, node.target, args, kwargs)
            kwargs[instead.out_name] = self._tensor(instead.out)
            call: Any = instead.call
            args = fx.node.map_arg(self._numbers(instead.args), self._tensor)
            self.place[facts(node).storage] = {node: call(*args, **kwargs)}
        else:
            for storage in op.writes:
                old = reads[op.reads[storage]]
                if not self.lives.dies(old, t):  # another run reads the old contents later
                    self.place[storage] = _copied(self.copies[old])
            is_first = self.steps[t] not in self.seen
            self.seen.add(self.steps[t])
            for node in op.nodes:
                self._call(node, op, is_first)
        for storage, value in op.makes.items():
            self.copies[self.lives.makes[t][value]] = self.place[storage]
        for copy in (*reads.values(), *self.lives.makes[t].values()):
            if self.lives.dies(copy, t):
                self.copies.pop(copy, None)
        self.place = {}

    def _make_tangents(self, op: ProgramOp) -> None:
        for node in self.program.joint.nodes:
            if node.op == "placeholder" and source_of(node).kind == "tangent":
                like = facts(node).value
                shape, stride = self._numbers((tuple(like.shape), like.stride()))
                made = torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)
                if facts(node).storage in op.makes:
                    self.place[facts(node).storage] = {node: made.fill_(1)}

    def _call(self, node: fx.Node, op: ProgramOp, is_first: bool) -> None:
        if not _may_run(node, op):
            self._leave_out(node, op)
            return
        args, kwargs = self._arguments(node)
        if not is_first:  # batch norm moves its running statistics once
            statistics = op_effects.statistics_positions(node)
            args = tuple([None if i in statistics else a for i, a in enumerate(args)])
        target: Any = node.target
        self._measure(node, target, args, kwargs)
        if op_effects.is_random(target):
            device = self.program.joint.device
            if is_first:
                self.random[node] = generator_of(device).get_state()
            else:
                target = functools.partial(replay, target, device, self.random[node])
        self._settle(node, op, target(*args, **kwargs))

    def _settle(self, node: fx.Node, op: ProgramOp, made: Any) -> None:
        storage = facts(node).storage
        if storage != NO_STORAGE:
            if storage in op.makes:
                self.place.setdefault(storage, {})[node] = made
            return
        for user in node.users:
            if user.target is operator.getitem and facts(user).storage in op.makes:
                self.place.setdefault(facts(user).storage, {})[user] = made[user.args[1]]

    def _leave_out(self, node: fx.Node, op: ProgramOp) -> None:
        """What a collective would make: floats, of which the values matter to nobody here."""

        def blank(like: Any) -> Any:
            if isinstance(like, (tuple, list)):
                return [blank(item) for item in like]
            if not isinstance(like, torch.Tensor):
                return like
            if not (like.is_floating_point() or like.is_complex()):
                raise TypeError(f"{node.target} makes integers, which only other ranks can tell")
            shape, stride = self._numbers((tuple(like.shape), like.stride()))
            made = torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)
            return made.fill_(1)

        if not facts(node).writes and op.makes:
            self._settle(node, op, blank(facts(node).value))

    # ---- measuring

    def _measure(self, node: fx.Node, target: Any, args: Any, kwargs: Any) -> None:
        position = self.profile.position(node.name) if node.name in self.profile else -1
        if position not in self.wanted:
            return
        self.progress.tell(len(self.found), self.profile.calls[position].name)
        if facts(node).writes:  # again and again, into a copy
            before = self.place, self.residents
            storages = {self._storage(a) for a in facts(node).writes}
            self.place = {
                s: _copied(tensors) if s in storages else tensors
                for s, tensors in self.place.items()
            }
            self.residents = {
                n: clone_storage(tensor) if facts(n).storage in storages else tensor
                for n, tensor in self.residents.items()
            }
            args, kwargs = self._arguments(node)
            self.place, self.residents = before
        run = functools.partial(target, *args, **kwargs)
        self.found[position] = measure(self.profile.calls[position], self.bench, run)
        self.wanted.discard(position)

    # ---- tensors

    def _arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args: tuple[Any, ...] = fx.node.map_arg(self._numbers(tuple(node.args)), self._tensor)
        return args, {**fx.node.map_arg(self._numbers(node.kwargs), self._tensor)}

    def _storage(self, node: fx.Node) -> int:
        while (storage := facts(node).storage) == NO_STORAGE:
            node = self.program.base[node]
        return storage

    def _tensor(self, node: fx.Node) -> Any:
        """The tensor of a recorded node at this step: its copy, or a view of it."""
        return self._view(node, self.place.get(self._storage(node), self.residents))

    def _view(self, node: fx.Node, roots: Tensors) -> Any:
        if node in roots:
            return roots[node]
        args = fx.node.map_arg(self._numbers(node.args), lambda a: self._view(a, roots))
        target: Any = node.target
        self._measure(node, target, args, node.kwargs)
        return target(*args, **node.kwargs)


def _as_they_are(nest: Any) -> Any:
    return nest


def _written(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    for node in nodes:
        yield from facts(node).writes


def _over(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A tensor like the given one over another storage."""
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(
        storage, like.storage_offset(), like.shape, like.stride()
    )


def _copied(tensors: Tensors) -> Tensors:
    """The same over a copy of their storage."""
    storage = next(iter(tensors.values())).untyped_storage().clone()
    return {node: _over(storage, tensor) for node, tensor in tensors.items()}


@contextlib.contextmanager
def _undisturbed(program: Program) -> Iterator[None]:
    """No autocast and no mode of the caller's, whose random streams are put back. The grad mode is
    on, as when eager runs a forward: oneDNN's LSTM makes its backward's state only then."""
    device = program.joint.device
    on_gpu = device.type == "cuda"
    own = own_generators(program)
    with contextlib.ExitStack() as stack:
        stack.enter_context(outside_modes())
        if on_gpu:
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.random.fork_rng(devices=[device] if on_gpu else []))
        for generator in own:
            stack.callback(_putting_back(generator))
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.enable_grad())
        yield


def _putting_back(generator: torch.Generator) -> Callable[[], None]:
    state = generator.get_state()
    return lambda: generator.set_state(state)
