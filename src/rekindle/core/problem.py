"""`Problem`: what may be computed, what it costs, what it needs.

A value is one storage; an op reads values and makes values. Ids are positions. The meaning of
memory and cost is in `simulate`; the rules that a problem must keep are in `check`.
"""

from dataclasses import dataclass, field
from typing import Literal

from rekindle import _native

Phase = Literal["forward", "loss", "backward"]


@dataclass(frozen=True, slots=True)
class Value:
    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Op:
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
class Problem:
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    resident: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    name: str = ""
    cost_unit: str = "ns"
    size_unit: str = "bytes"
    # Derived on first use and kept: they follow from the fields above.
    _handle: _native.Problem | None = field(default=None, init=False, repr=False, compare=False)
    _producer: tuple[int, ...] | None = field(default=None, init=False, repr=False, compare=False)
    _readers: tuple[tuple[int, ...], ...] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    @property
    def native(self) -> _native.Problem:
        """The problem as the native core reads it."""
        if self._handle is None:
            resident = set(self.resident)
            loss = [i for i, op in enumerate(self.ops) if op.phase == "loss"]
            native = _native.Problem(
                sizes=[v.size for v in self.values],
                resident=list(self.resident),
                costs=[op.cost for op in self.ops],
                workspaces=[op.workspace for op in self.ops],
                once=[op.once for op in self.ops],
                inputs=[[v for v in op.inputs if v not in resident] for op in self.ops],
                outputs=[list(op.outputs) for op in self.ops],
                inplace=[[v for pair in op.inplace for v in pair] for op in self.ops],
                targets=[v for v in self.outputs if v not in resident],
                held=[v for v in self.held if v not in resident],
                loss=loss[0] if loss else -1,
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
