"""Program + Profile -> `Problem`. Ids are the program's: op i of the problem is op i of the
program, value v is value v. Sizes are the blocks that the device's allocator hands out."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rekindle.capture.changing_sizes import SizesAt
from rekindle.core import Op, Problem, Value, check_problem
from rekindle.profile import Profile, blocks_of
from rekindle.program import Program, charged_nodes, value_bytes


def formulate(
    program: Program, profile: Profile, name: str = "", at: SizesAt | None = None
) -> Problem:
    """The problem of a program. A view is charged to the op it is first made for. `at`: the sizes
    that the profile is for, where sizes change."""
    sizes = _sizes(program, profile, at)
    values = [Value(value.name, size) for value, size in zip(program.values, sizes, strict=True)]
    ops = []
    for op, nodes in zip(program.ops, charged_nodes(program), strict=True):
        cost, workspace = _numbers(nodes, profile)
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
        values=tuple(values),
        ops=tuple(ops),
        resident=tuple(v for v, value in enumerate(program.values) if value.resident),
        outputs=program.outputs,
        held=program.held,
        name=name,
    )
    check_problem(problem)
    return problem


@dataclass(frozen=True, slots=True)
class Formulation:
    """The problems of one program whose sizes change. What does not hang on sizes is found once."""

    program: Program
    charged: tuple[tuple[str, ...], ...]
    problem: Problem  # for some sizes

    def at(self, profile: Profile, at: SizesAt) -> Problem:
        """The problem for the sizes of the profile."""
        sizes = _sizes(self.program, profile, at)
        values = tuple([Value(v.name, n) for v, n in zip(self.problem.values, sizes, strict=True)])
        numbers = [_numbers(nodes, profile) for nodes in self.charged]
        ops = tuple(
            [
                Op(
                    *(op.name, cost, op.inputs, op.outputs, workspace),
                    *(op.recomputable, op.inplace, op.phase, op.grad_of),
                )
                for op, (cost, workspace) in zip(self.problem.ops, numbers, strict=True)
            ]
        )
        return replace(self.problem, values=values, ops=ops)


def formulation(program: Program, profile: Profile, name: str, at: SizesAt) -> Formulation:
    """`formulate`, for other sizes as well."""
    return Formulation(program, charged_nodes(program), formulate(program, profile, name, at))


def _sizes(program: Program, profile: Profile, at: SizesAt | None) -> list[int]:
    """Per value its block, as it was seen or as the allocator would round it. One that may be
    written over another is given that block: such values have the size of the largest."""
    blocks = blocks_of(profile.kind)
    known = value_bytes(program, profile)
    sizes = []
    for value in program.values:
        size = None if value.storage is None else known.get(value.storage)
        if size is None:
            num_bytes = value.size_bytes if at is None else at.number(value.size_bytes)
            size = blocks.block_bytes(num_bytes)
        sizes.append(size)
    pairs = [pair for op in program.ops for pair in op.inplace]
    # A chain of such pairs passes the largest size on, in at most as many rounds as it is long.
    while unequal := [pair for pair in pairs if sizes[pair[0]] != sizes[pair[1]]]:
        for old, new in unequal:
            sizes[old] = sizes[new] = max(sizes[old], sizes[new])
    return sizes


def _numbers(nodes: Iterable[str], profile: Profile) -> tuple[int, int]:
    """Nodes of one op run one after the other: costs add up, temporaries do not."""
    found = [profile[node] for node in nodes]
    return sum(c.cost_ns for c in found), max((c.workspace_bytes for c in found), default=0)
