"""Program + Profile -> `Problem`. Ids are the program's: op i of the problem is op i of the
program, value v is value v. Sizes are the blocks that the device's allocator hands out."""

from collections.abc import Iterable

from rekindle.core import Op, Problem, Value, check_problem
from rekindle.profile import Profile, blocks_of
from rekindle.program import Program, charged_nodes, value_bytes


def formulate(program: Program, profile: Profile, name: str = "") -> Problem:
    """The problem of a program. A view is charged to the op it is first made for."""
    sizes = _sizes(program, profile)
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


def _sizes(program: Program, profile: Profile) -> list[int]:
    """Per value its block, as it was seen or as the allocator would round it. One that may be
    written over another is given that block: such values have the size of the largest."""
    blocks = blocks_of(profile.kind)
    known = value_bytes(program, profile)
    sizes = []
    for value in program.values:
        size = None if value.storage is None else known.get(value.storage)
        sizes.append(blocks.block_bytes(value.size_bytes) if size is None else size)
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
