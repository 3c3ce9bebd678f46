"""`Problem`: what may be computed, what it costs, what it needs.

A value is one storage; an op reads values and makes values. Ids are positions. The meaning of
memory and cost is in `simulate`; the rules that a problem must keep are in `check`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, Literal

from rekindle import _native

Phase = Literal["forward", "loss", "backward"]


@dataclass(frozen=True, slots=True)
class Value:
    """One storage in one state. Its size is in the problem's size unit."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Op:
    """Reads values and makes values, by their ids. Its cost is in the problem's cost unit."""

    name: str
    cost: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    workspace: int = 0
    recomputable: bool = True
    inplace: tuple[tuple[int, int], ...] = ()
    phase: Phase | None = None
    grad_of: int | None = None

    @property
    def once(self) -> bool:
        """Must stand exactly once in every schedule."""
        return self.phase == "loss" or not self.recomputable


@dataclass(frozen=True, slots=True)
class HostLink:
    """How values may be moved to host memory and back. Costs are nanoseconds where it is given."""

    to_host: int  # bytes per second
    from_host: int
    latency: int  # ns that a transfer takes besides its bytes
    least: int  # smaller values are never moved
    host_budget: int | None = None  # bytes in host memory; None: no bound
    serial: bool = False  # the cost is a sum of times, not the end of the last lane


@dataclass(frozen=True, slots=True)
class Problem:
    """The ops and values of one training step. Op i and value i are the i-th of the tuples; all
    amounts are whole numbers."""

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    resident: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    # (value, op): what the forward of an opaque op read lives until the op, its backward, has run.
    pinned: tuple[tuple[int, int], ...] = ()
    name: str = ""
    cost_unit: str = "ns"
    size_unit: str = "bytes"
    transfers: HostLink | None = None  # None: nothing can be moved
    # Derived on first use and kept: they follow from the fields above.
    _handle: _native.Problem | None = field(default=None, init=False, repr=False, compare=False)
    _producer: tuple[int, ...] | None = field(default=None, init=False, repr=False, compare=False)
    _readers: tuple[tuple[int, ...], ...] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled and copied without what is derived: the native handle cannot travel."""
        given = (getattr(self, f.name) for f in fields(self) if f.init)
        return Problem, tuple(given)

    def __str__(self) -> str:
        """A line per op, with its cost, and per value that an op makes, with its size."""
        lines = [f"{len(self.ops)} ops, {len(self.values)} values"]
        for i, op in enumerate(self.ops):
            made = ", ".join(f"v{v} of {self.values[v].size:,}" for v in op.outputs)
            read = " ".join(f"v{v}" for v in op.inputs)
            work = f", workspace {op.workspace:,}" if op.workspace else ""
            lines.append(f"op {i}: {op.cost:,} {self.cost_unit}{work}: {read} -> {made}")
        return "\n".join(lines)

    @property
    def native(self) -> _native.Problem:
        """The problem as the native core reads it."""
        if self._handle is None:
            ops = self.ops
            loss = self.loss_op
            link = self.transfers
            native = _native.Problem(
                sizes=[v.size for v in self.values],
                resident=self.resident,
                costs=[op.cost for op in ops],
                workspaces=[op.workspace for op in ops],
                once=[op.once for op in ops],
                inputs=_flat(op.inputs for op in ops),
                outputs=_flat(op.outputs for op in ops),
                inplace=_flat(tuple(chain.from_iterable(op.inplace)) for op in ops),
                targets=self.outputs,
                held=self.held,
                pins=_pins(self) if self.pinned else None,
                loss=-1 if loss is None else loss,
                link=None
                if link is None
                else _native.HostLink(
                    to_host=link.to_host,
                    from_host=link.from_host,
                    latency=link.latency,
                    least=link.least,
                    host_budget=link.host_budget,
                    serial=link.serial,
                ),
            )
            object.__setattr__(self, "_handle", native)
        assert self._handle is not None
        return self._handle

    @property
    def producer(self) -> tuple[int, ...]:
        """Per value: the op that makes it, or -1 where the value is resident."""
        if self._producer is None:
            producer = [-1] * len(self.values)
            for op_id, op in enumerate(self.ops):
                for v in op.outputs:
                    producer[v] = op_id
            object.__setattr__(self, "_producer", tuple(producer))
        assert self._producer is not None
        return self._producer

    @property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Per value: the ops that read it, in listed order."""
        if self._readers is None:
            readers: list[list[int]] = [[] for _ in self.values]
            for op_id, op in enumerate(self.ops):
                for v in op.inputs:
                    readers[v].append(op_id)
            object.__setattr__(self, "_readers", tuple(tuple(r) for r in readers))
        assert self._readers is not None
        return self._readers

    @property
    def loss_op(self) -> int | None:
        return next((i for i, op in enumerate(self.ops) if op.phase == "loss"), None)


def _pins(problem: Problem) -> tuple[list[int], list[int]]:
    """Per op: the values whose copies it pins, each followed by the op until which they live."""
    rows: list[list[int]] = [[] for _ in problem.ops]
    resident = set(problem.resident)
    for v, backward in problem.pinned:
        forward = problem.ops[backward].grad_of
        if forward is None:
            raise ValueError(f"op {backward}, until which value {v} is pinned, has no grad_of")
        if v not in resident:  # always there, and never counted
            rows[forward] += (v, backward)
    return _flat(tuple(row) for row in rows)


def _flat(rows: Iterable[tuple[int, ...]]) -> tuple[list[int], list[int]]:
    """All ids of the rows one after the other, and where each row ends."""
    ids: list[int] = []
    ends: list[int] = []
    for row in rows:
        ids += row
        ends.append(len(ids))
    return ids, ends
