"""The chains of blocks of `rockmate`, beside those of Rockmate's Fig. 12 and HiRemate C.1.3.

    python benchmarks/hiremate/structure.py [--problems DIR]

DIR is what `capture.py` wrote. Writes `structure.md` beside this file. The papers count on a graph
of larger ops than ours, so the blocks are counted twice: on the captured ops, and on ops joined as
Rockmate's App. A.3 and A.4 join them (`at_the_papers_ops`).
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rekindle.core import Op, Problem, check_problem, read_problem
from rekindle.partition.separators import find_rows
from rekindle.solve.hierarchy.rockmate import Blocks

HERE = Path(__file__).parent
CHEAP = ("aten.add.", "aten.sub.", "aten.mul.", "aten.div.")
# model -> the paper's blocks, kinds (None: not given), and why the captured ops give another count
PAPER: dict[str, tuple[int, int | None, str]] = {
    "GPT-12": (
        26,
        5,
        "the sum of the two embeddings, and the last residual sum, are blocks' ends for us; in the "
        "paper they are part of the dropout and of the normalization after them",
    ),
    "ResNet-101": (38, 13, "the same"),
    "RegNet": (27, 11, "the same"),
    "Mixer": (
        27,
        6,
        "as for GPT: the last residual sum. And the first token block is a kind of its own: it "
        "reads the patches transposed, which costs otherwise",
    ),
    "Transformer 6-6": (
        24,
        None,
        "residual sums before normalizations end blocks for us (two for each half of a layer); "
        "with joined ops two blocks of one op each are missing, which the paper does not name",
    ),
}
Joins = Callable[[Op, Op], bool]


def at_the_papers_ops(problem: Problem) -> Problem:
    """A dropout with its mask, a matrix product with its bias, are one op; then a cheap op joins
    the op that reads it, unless all the forward goes through it and reads on at several places."""
    problem = _joined(problem, lambda op, reader: "bernoulli" in op.name)
    problem = _joined(problem, lambda op, reader: _is(op, "aten.mm.") and _is(reader, "aten.add."))
    rows = find_rows(problem)
    assert not isinstance(rows, str)
    separators = [problem.producer[crossing[0]] for crossing in rows.crossing if crossing]
    protected = {
        i
        for i, after in zip(separators, [*separators[1:], -1], strict=True)
        if _forward_readers(problem, i) != {after}
    }
    names = {id(problem.ops[i]) for i in protected}
    return _joined(problem, lambda op, reader: _is_cheap(op) and id(op) not in names)


def _is(op: Op, name: str) -> bool:
    return op.name.startswith(name)


def _is_cheap(op: Op) -> bool:
    """A sum, product or quotient by itself; with an in-place op on top it is that op's for us."""
    return op.name.startswith(CHEAP) and "+" not in op.name


def _forward_readers(problem: Problem, op_id: int) -> set[int]:
    """The forward ops that read what the op makes; the order of random ops counts for nothing."""
    return {
        r
        for v in problem.ops[op_id].outputs
        if problem.values[v].size
        for r in problem.readers[v]
        if problem.ops[r].phase == "forward"
    }


def _joined(problem: Problem, joins: Joins) -> Problem:
    """Each forward op with one forward reader that `joins` agrees with becomes part of it."""
    ops: list[Op | None] = list(problem.ops)
    part_of = list(range(len(ops)))
    for i, op in enumerate(problem.ops):
        readers = _forward_readers(problem, i)
        if op.phase != "forward" or len(readers) != 1:
            continue
        into = readers.pop()
        here, reader = ops[i], ops[into]
        assert here is not None
        assert reader is not None
        if not joins(op, problem.ops[into]):
            continue
        reads = dict.fromkeys(v for v in (*here.inputs, *reader.inputs) if v not in here.outputs)
        elsewhere = [
            v
            for v in here.outputs
            if any(part_of[r] != into for r in problem.readers[v]) or v in problem.outputs
        ]
        ops[into] = replace(
            reader,
            name=f"{here.name}, {reader.name}",
            cost=here.cost + reader.cost,
            inputs=tuple(reads),
            outputs=(*reader.outputs, *elsewhere),
            inplace=(),
            recomputable=here.recomputable and reader.recomputable,
        )
        ops[i] = None
        part_of = [into if part == i else part for part in part_of]
    return _renumbered(problem, ops, part_of)


def _renumbered(problem: Problem, ops: list[Op | None], part_of: list[int]) -> Problem:
    kept = [i for i, op in enumerate(ops) if op is not None]
    number = {i: k for k, i in enumerate(kept)}
    left = [op for op in ops if op is not None]
    used = {v for op in left for v in (*op.inputs, *op.outputs)} | set(problem.outputs)
    values = [v for v in range(len(problem.values)) if v in used]
    new = {v: k for k, v in enumerate(values)}
    joined = Problem(
        values=tuple(problem.values[v] for v in values),
        ops=tuple(
            replace(
                op,
                inputs=tuple(new[v] for v in op.inputs),
                outputs=tuple(new[v] for v in op.outputs),
                inplace=tuple((new[a], new[b]) for a, b in op.inplace),
                grad_of=None if op.grad_of is None else number[part_of[op.grad_of]],
            )
            for op in left
        ),
        resident=tuple(new[v] for v in problem.resident if v in new),
        outputs=tuple(new[v] for v in problem.outputs),
        held=tuple(new[v] for v in problem.held if v in new),
        name=problem.name,
    )
    check_problem(joined)
    return joined


def counts(problem: Problem) -> tuple[int, int, int, int]:
    """Forward ops, blocks, kinds of blocks, forward ops in the largest block."""
    rows = find_rows(problem)
    assert not isinstance(rows, str)
    blocks = Blocks(problem, rows)
    num_forward = sum(op.phase == "forward" for op in problem.ops)
    largest = max(len(ops) for ops in rows.forward)
    return num_forward, len(blocks.parts), blocks.num_distinct, largest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--problems", type=Path, default=HERE.parents[1] / "build" / "hiremate")
    options = parser.parse_args()
    lines = [
        "Blocks and kinds of blocks of the chain that `rockmate` works on.",
        "",
        "| model | paper | ours, joined ops (forward ops, largest block) | ours, captured ops "
        "(forward ops, largest block) | where captured ops differ |",
        "|---|---|---|---|---|",
    ]
    for name, (blocks, kinds, why) in PAPER.items():
        problem = read_problem(options.problems / f"{name.replace(' ', '_')}.paper.json")
        cells = []
        for version in (at_the_papers_ops(problem), problem):
            num_ops, num_blocks, num_kinds, largest = counts(version)
            cells.append(f"{num_blocks} of {num_kinds} ({num_ops}, {largest})")
        paper = f"{blocks} of {kinds}" if kinds is not None else f"{blocks}"
        lines.append(f"| {name} | {paper} | {cells[0]} | {cells[1]} | {why} |")
        print(lines[-1], flush=True)
    (HERE / "structure.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
