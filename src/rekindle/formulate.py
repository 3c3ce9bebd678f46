"""Program + Profile -> `Problem`. Ids are the program's: op i of the problem is op i of the
program, value v is value v."""

from collections.abc import Iterable
from typing import Protocol

from torch import fx

from rekindle.capture import Program
from rekindle.core import Op, Problem, Value, check_problem


class NodeCost(Protocol):
    @property
    def cost_ns(self) -> int: ...

    @property
    def workspace_bytes(self) -> int: ...


class Costs(Protocol):
    """What each node costs, by its name; a `Profile`."""

    def __getitem__(self, name: str) -> NodeCost: ...


def formulate(program: Program, costs: Costs, name: str = "") -> Problem:
    """The problem of a program. Views are charged to nobody: they are re-made at use, and cost a
    fraction of an op."""
    ops = []
    for op in program.ops:
        cost, workspace = _numbers(op.nodes, costs)
        ops.append(
            Op(
                name=op.name,
                cost=cost,
                inputs=op.inputs,
                outputs=op.outputs,
                workspace=workspace,
                recomputable=op.recomputable,
                inplace=op.inplace,
                phase=op.phase,
                grad_of=op.grad_of,
            )
        )
    problem = Problem(
        values=tuple(Value(v.name, v.size_bytes) for v in program.values),
        ops=tuple(ops),
        resident=tuple(v for v, value in enumerate(program.values) if value.resident),
        outputs=program.outputs,
        held=program.held,
        name=name,
    )
    check_problem(problem)
    return problem


def _numbers(nodes: Iterable[fx.Node], costs: Costs) -> tuple[int, int]:
    """Nodes of one op run one after the other: costs add up, temporaries do not."""
    found = [costs[node.name] for node in nodes]
    return sum(c.cost_ns for c in found), max((c.workspace_bytes for c in found), default=0)
