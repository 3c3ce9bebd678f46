"""Random forward/backward problems, and the optimum of tiny ones by search over all states."""

import heapq
import random
from collections.abc import Iterator

from rekindle.core import Op, Problem, Value


def training_graph(
    seed: int,
    num_layers: int,
    *,
    reach: int = 4,
    num_inputs: int = 2,
    extras: bool = True,
    inplace: bool = True,
) -> Problem:
    """Layers that read up to three earlier ones (skips), the inputs and shared parameters; each
    with a backward op that adds to the gradients of what it read. `extras`: workspaces, second
    outputs, ops that run once and a held output; `inplace`: gradients added in place."""
    rng = random.Random(seed)
    sizes: list[int] = []
    ops: list[Op] = []

    def value(size: int) -> int:
        sizes.append(size)
        return len(sizes) - 1

    resident = [value(rng.randint(1, 9)) for _ in range(num_inputs)]
    parameters = [value(rng.randint(1, 5)) for _ in range(max(1, num_layers // 3))]
    resident += parameters
    sources = [resident[0]]
    reads: list[tuple[int, ...]] = []
    saved: list[int | None] = []
    forward: list[int] = []
    for k in range(num_layers):
        near = sources[-reach:]
        inputs = set(rng.sample(near, min(len(near), rng.randint(1, 3))))
        inputs.add(near[-1] if rng.random() < 0.8 else rng.choice(near))
        if rng.random() < 0.1:
            inputs.add(rng.choice(resident))
        if rng.random() < 0.6 or k == num_layers - 1:
            inputs.add(rng.choice(parameters))
        out = value(rng.randint(1, 9))
        second = value(rng.randint(1, 4)) if extras and rng.random() < 0.25 else None
        ops.append(
            Op(
                name=f"f{k}",
                cost=rng.randint(0, 9),
                inputs=tuple(sorted(inputs)),
                outputs=(out,) if second is None else (out, second),
                workspace=rng.randint(0, 4) if extras and rng.random() < 0.3 else 0,
                recomputable=not (extras and rng.random() < 0.05),
                phase="forward",
            )
        )
        forward.append(len(ops) - 1)
        reads.append(tuple(sorted(inputs)))
        saved.append(second)
        sources.append(out)
    outputs: list[int] = []
    if extras and rng.random() < 0.5:  # a counter that is moved on once, as in batch norm
        for k in range(0, num_layers, 3):
            outputs.append(value(0))
            op = Op(f"count{k}", 1, (), (outputs[-1],), recomputable=False, phase="forward")
            ops.append(op)
    last = ops[forward[-1]].outputs[0]
    gradient = {last: value(sizes[last])}
    ops.append(
        Op(
            name="loss",
            cost=rng.randint(0, 3),
            inputs=(last,),
            outputs=(gradient[last],),
            phase="loss",
        )
    )
    for k in reversed(range(num_layers)):
        out = ops[forward[k]].outputs[0]
        if out not in gradient:
            continue
        mine = gradient[out]
        for v in reads[k]:
            if v in resident and v not in parameters:
                continue
            kept = [v] if rng.random() < 0.7 else [out]
            if saved[k] is not None and rng.random() < 0.7:
                kept.append(saved[k])
            inputs_b = {mine, *kept}
            before = gradient.get(v)
            if before is not None:
                inputs_b.add(before)
            fresh = value(sizes[v])
            pairs = ((before, fresh),) if before is not None and rng.random() < 0.5 else ()
            ops.append(
                Op(
                    name=f"b{k}_{v}",
                    cost=rng.randint(0, 9),
                    inputs=tuple(sorted(inputs_b)),
                    outputs=(fresh,),
                    inplace=pairs if inplace else (),
                    phase="backward",
                    grad_of=forward[k],
                )
            )
            gradient[v] = fresh
    outputs += [gradient[p] for p in parameters if p in gradient]
    return Problem(
        values=tuple(Value(f"v{i}", size) for i, size in enumerate(sizes)),
        ops=tuple(ops),
        resident=tuple(resident),
        outputs=tuple(outputs),
        held=(last,) if extras and rng.random() < 0.5 else (),
        name=f"training-{seed}",
    )


def cheapest(problem: Problem, budget: int) -> int | None:
    """The least cost of any schedule within the budget, by shortest paths over what is live and
    which run-once ops have run. In-place pairs are not known to it."""
    resident = set(problem.resident)
    size = [0 if v in resident else value.size for v, value in enumerate(problem.values)]
    held = [v for v in problem.held if v not in resident]
    goal = {v for v in problem.outputs if v not in resident}
    once = [i for i, op in enumerate(problem.ops) if op.once]
    State = tuple[frozenset[int], frozenset[int]]
    start: State = (frozenset(), frozenset())
    best: dict[State, int] = {start: 0}
    heap: list[tuple[int, int, State]] = [(0, 0, start)]
    count = 0

    def moves(state: State) -> Iterator[tuple[int, State]]:
        live, ran = state
        pinned = set(held) if problem.loss_op in ran else set()
        for v in live:
            if v not in pinned:
                yield 0, (live - {v}, ran)
        for i, op in enumerate(problem.ops):
            if i in ran or not all(v in resident or v in live for v in op.inputs):
                continue
            again = live & set(op.outputs)
            if again:  # freeing first reaches the same states
                continue
            memory = sum(size[v] for v in live) + sum(size[v] for v in op.outputs) + op.workspace
            if memory <= budget:
                yield op.cost, (live | set(op.outputs), ran | {i} if op.once else ran)

    while heap:
        cost, _, state = heapq.heappop(heap)
        if cost > best[state]:
            continue
        if goal <= state[0] and all(i in state[1] for i in once):
            return cost
        for extra, after in moves(state):
            if cost + extra < best.get(after, 1 << 62):
                best[after] = cost + extra
                count += 1
                heapq.heappush(heap, (cost + extra, count, after))
    return None
