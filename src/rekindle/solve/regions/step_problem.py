"""A step of a model in regions as one `Problem`: what was recorded of a real step, as data.

Events follow each other as they did in the step: an op that ran eagerly, the forward of a region,
the loss, the backward of a region. Each storage that crosses from one to another was born at an
event and was gone after one. An opaque op runs once, where it ran; what keeps a storage until an
event reads it there, so the simulation frees it when eager did. A chain of values without size
holds the events in order. Of the regions' problems only the loss is left out: what stood for "all
that runs between" is now there itself.

A storage that a region made, and that somebody holds beyond the begin of the region's own backward,
is `pinned`: that copy stays, whether or not the backward recomputes the value.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rekindle.core import Op, Problem, Schedule, Value, check_problem
from rekindle.solve.regions.menu import RegionOption

EventKind = Literal["op", "forward", "loss", "backward"]


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Something that ran as a whole."""

    kind: EventKind
    name: str = ""
    call: int = -1  # of a region's forward or backward
    cost: int = 0  # of an op


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes that were seen from outside: born with an event, and there until another."""

    size: int
    born: int  # position of an event
    died: int | None  # position of the last event that it was there at; None: it stayed


Key = tuple[str, int, str]  # module path, number of its call in the step, hash of its problem


@dataclass(frozen=True, slots=True)
class RegionCall:
    """One call of a region, and which of its values are which storages."""

    problem: Problem
    key: Key
    given: dict[int, int]  # value that its forward gives -> storage
    tangents: dict[int, int]  # value that its loss makes -> storage; those that arrived
    gradients: dict[int, int]  # value among the problem's outputs -> storage
    final: frozenset[int]  # of those, gradients that stay to the end of the step

    @property
    def path(self) -> str:
        return self.key[0]


@dataclass
class _Building:
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    pinned: list[tuple[int, int]] = field(default_factory=list)
    token: int = -1

    def value(self, name: str, size: int) -> int:
        self.values.append(Value(name, size))
        return len(self.values) - 1

    def fixed(self, op: Op) -> int:
        """An op that runs once and in its place: it waits for the one before it."""
        before = () if self.token < 0 else (self.token,)
        self.token = self.value(f"done {len(self.ops)}", 0)
        inputs = tuple(dict.fromkeys((*before, *op.inputs)))
        op = replace(op, inputs=inputs, outputs=(*op.outputs, self.token), recomputable=False)
        self.ops.append(op)
        return len(self.ops) - 1


class StepProblem:
    """The problem of a step, and how the options of its regions become a schedule of it."""

    def __init__(
        self,
        events: Sequence[StepEvent],
        storages: Sequence[Storage],
        calls: Sequence[RegionCall],
        held: Sequence[int],
        name: str,
    ) -> None:
        """`held`: the storages of the model's outputs, which the caller keeps."""
        self.events, self.storages, self.calls = tuple(events), tuple(storages), tuple(calls)
        self.held = frozenset(held)
        self._in = _Building()
        self._value_of: dict[int, int] = {}  # storage -> value
        self._op_of: list[dict[int, int]] = [{} for _ in calls]  # region's op -> op
        self._made: list[dict[int, int]] = [{} for _ in calls]  # region's value -> value
        self._around: list[tuple[list[int], list[int]]] = []  # per event: ops before and after
        self._done: dict[int, int] = {}  # call -> the op that ends its forward
        self._backward_at = {e.call: t for t, e in enumerate(events) if e.kind == "backward"}
        self._owner = {s: k for k, call in enumerate(calls) for s in call.given.values()}
        self._dying: dict[int, list[int]] = {}
        for s, storage in enumerate(self.storages):
            if storage.died is not None:
                self._dying.setdefault(storage.died, []).append(s)
        self.problem = self._build(name)

    # ---- building

    def _build(self, name: str) -> Problem:
        born: dict[int, list[int]] = {}
        mine = {s for c in self.calls for s in (*c.given.values(), *c.gradients.values())}
        for s, storage in enumerate(self.storages):
            if s not in mine:
                born.setdefault(storage.born, []).append(s)
        for t, event in enumerate(self.events):
            fresh = tuple(self._storage_value(s) for s in born.get(t, ()))
            if event.kind == "forward":
                self._around.append(self._forward(t, event.call, fresh))
            elif event.kind == "backward":
                self._around.append(self._backward(t, event.call, fresh))
            else:
                reads = self._reads(t)
                phase: Literal["loss"] | None = "loss" if event.kind == "loss" else None
                if phase is not None:
                    held = (self._value_of[s] for s in self.held if s in self._value_of)
                    reads = tuple(dict.fromkeys((*reads, *held)))
                op = Op(event.name or event.kind, event.cost, reads, fresh, phase=phase)
                self._around.append(([self._in.fixed(op)], []))
            self._pin(t)
        self._end()
        building = self._in
        held_values = [self._value_of[s] for s in sorted(self.held) if s in self._value_of]
        problem = Problem(
            values=tuple(building.values),
            ops=tuple(building.ops),
            outputs=self._outputs(),
            held=tuple(dict.fromkeys(held_values)),
            pinned=tuple(dict.fromkeys(building.pinned)),
            name=name,
        )
        check_problem(problem)
        return problem

    def _storage_value(self, s: int) -> int:
        if s not in self._value_of:
            self._value_of[s] = self._in.value(f"storage {s}", self.storages[s].size)
        return self._value_of[s]

    def _reads(self, t: int) -> tuple[int, ...]:
        """What is there until this event and no longer."""
        found = []
        for s in self._dying.get(t, ()):
            known = s in self._value_of and self.storages[s].born != t
            # What is held stays whatever reads it; a read could only keep a later copy of it.
            if not known or s in self.held or self._is_pinned(s):
                continue
            found.append(self._value_of[s])
        return tuple(dict.fromkeys(found))

    def _is_pinned(self, s: int) -> bool:
        """Whether somebody holds a region's output when that region's backward has begun."""
        k = self._owner.get(s)
        if k is None or k not in self._backward_at or s in self.held:
            return False
        died = self.storages[s].died
        return died is None or died > self._backward_at[k]

    def _forward(self, t: int, k: int, fresh: tuple[int, ...]) -> tuple[list[int], list[int]]:
        call, problem = self.calls[k], self.calls[k].problem
        loss = problem.loss_op
        assert loss is not None
        made = self._made[k]
        for i in range(loss):
            self._copy_op(k, i)
        for v, s in call.given.items():
            self._value_of.setdefault(s, made[v])
        waits = [made[v] for v in problem.ops[loss].inputs if v in made]
        reads = tuple(dict.fromkeys((*waits, *self._reads(t))))
        op = Op(f"forward done {call.path}".strip(), 0, reads, fresh, phase="forward")
        self._done[k] = self._in.fixed(op)
        return [], [self._done[k]]

    def _copy_op(self, k: int, i: int) -> None:
        call = self.calls[k]
        op, made = call.problem.ops[i], self._made[k]
        for v in op.outputs:
            made[v] = self._in.value(call.problem.values[v].name, call.problem.values[v].size)
        self._op_of[k][i] = len(self._in.ops)
        self._in.ops.append(
            replace(
                op,
                name=_named(op.name, call.path),
                inputs=tuple(dict.fromkeys(made[v] for v in op.inputs if v in made)),
                outputs=tuple(made[v] for v in op.outputs),
                inplace=tuple((made[a], made[b]) for a, b in op.inplace),
                grad_of=None if op.grad_of is None else self._op_of[k].get(op.grad_of),
            )
        )

    def _backward(self, t: int, k: int, fresh: tuple[int, ...]) -> tuple[list[int], list[int]]:
        call, problem = self.calls[k], self.calls[k].problem
        loss = problem.loss_op
        assert loss is not None
        made = self._made[k]
        arrived, missing = [], []
        for v in problem.ops[loss].outputs:
            s = call.tangents.get(v)
            if s is not None and s in self._value_of:
                made[v] = self._value_of[s]
                arrived.append(made[v])
            else:  # nothing arrived: the backward gets zeros
                made[v] = self._in.value(problem.values[v].name, problem.values[v].size)
                missing.append(made[v])
        reads = tuple(dict.fromkeys(arrived))
        name = f"backward begins {call.path}".strip()
        begin = self._in.fixed(Op(name, 0, reads, tuple(missing), phase="backward"))
        for i in range(loss + 1, len(problem.ops)):
            self._copy_op(k, i)
        for v, s in call.gradients.items():
            self._value_of.setdefault(s, made[v])
        tangents = set(call.tangents.values())
        results = [made[v] for v in problem.outputs if v in made]
        gone = [
            v
            for v in self._reads(t)
            if not any(self._value_of.get(s) == v for s in tangents | set(call.given.values()))
        ]
        reads = tuple(dict.fromkeys((*results, *gone)))
        name = f"backward done {call.path}".strip()
        return [begin], [self._in.fixed(Op(name, 0, reads, fresh, phase="backward"))]

    def _pin(self, t: int) -> None:
        """Region outputs that are there until this event, and may have been recomputed before."""
        for s in self._dying.get(t, ()):
            if s in self._value_of and self._is_pinned(s):
                self._pinned_until(s, t)

    def _pinned_until(self, s: int, t: int) -> None:
        forward = self._done[self._owner[s]]
        op = Op("kept by the caller", 0, (), (), phase="backward", grad_of=forward)
        until = self._in.fixed(op)
        self._in.pinned.append((self._value_of[s], until))
        self._around[t][1].append(until)

    def _end(self) -> None:
        for s, storage in enumerate(self.storages):
            if storage.died is None and s in self._value_of and self._is_pinned(s):
                self._pinned_until(s, len(self.events) - 1)

    def _outputs(self) -> tuple[int, ...]:
        found = []
        for s, storage in enumerate(self.storages):
            stays = storage.died is None and s not in self.held and not self._is_pinned(s)
            if stays and s in self._value_of:
                found.append(self._value_of[s])
        for k, call in enumerate(self.calls):
            found += [self._made[k][v] for v in call.final if v in self._made[k]]
        return tuple(dict.fromkeys(found))

    # ---- schedules

    def schedule(self, chosen: Sequence[RegionOption]) -> Schedule:
        """Each region by its option, everything else once, in the order of the events."""
        ops: list[int] = []
        for event, (before, after) in zip(self.events, self._around, strict=True):
            ops += before
            if event.kind == "forward":
                ops += [self._op_of[event.call][i] for i in chosen[event.call].forward]
            elif event.kind == "backward":
                ops += [self._op_of[event.call][i] for i in chosen[event.call].backward]
            ops += after
        return Schedule(tuple(ops))


def _named(name: str, path: str) -> str:
    """`aten.mm.default#3 fc1` of the region decoder.layers.0."""
    op, _, module = name.partition(" ")
    return f"{op} {'.'.join(part for part in (path, module) if part)}".strip()
