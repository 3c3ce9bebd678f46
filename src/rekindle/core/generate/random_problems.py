"""Random problems with everything the format allows, and random valid schedules of any problem."""

from dataclasses import replace
from random import Random

from rekindle.core.problem import Op, Phase, Problem, Value
from rekindle.core.schedule import Schedule


def random_problem(
    seed: int | Random,
    num_ops: int = 8,
    *,
    max_size: int = 20,
    max_cost: int = 20,
    zeros: float = 0.15,
    resident: float = 0.2,
    multi_output: float = 0.2,
    workspace: float = 0.25,
    inplace: float = 0.25,
    once: float = 0.1,
    loss: float = 0.5,
    dead: float = 0.1,
    pinned: float = 0.0,
) -> Problem:
    """A valid problem of `num_ops` ops; each rate is the chance of its feature, 0.0 is never.

    `zeros`: a size or a cost is 0; `resident`: an op reads a resident value too; `multi_output`: an
    op makes a second or third value; `once`: an op may not run twice; `loss`: one op is the loss,
    ops before it are forward and after it backward, and some of its inputs are held; `dead`: a
    value that nothing reads is not an output either; `pinned`: an op and a later one are the
    forward and the backward of an opaque op, which holds some of what it has read.
    """
    rng = seed if isinstance(seed, Random) else Random(seed)
    # A generator that the caller hands in goes on where this one ends: one seed can draw many.
    name = "random" if isinstance(seed, Random) else f"random-{num_ops}-{seed}"
    problem = _Drawing(rng, max_size, max_cost, zeros).problem(
        name, num_ops, resident, multi_output, workspace, inplace, once, loss, dead
    )
    return _with_pins(problem, rng, pinned) if pinned else problem


def _with_pins(problem: Problem, rng: Random, rate: float) -> Problem:
    ops = list(problem.ops)
    pins: list[tuple[int, int]] = []
    for forward in range(len(ops) - 1):
        if not ops[forward].inputs or rng.random() >= rate:
            continue
        backward = rng.randrange(forward + 1, len(ops))
        if any(i == backward for _, i in pins):
            continue
        ops[forward] = replace(ops[forward], recomputable=False)
        ops[backward] = replace(ops[backward], recomputable=False, grad_of=forward)
        reads = ops[forward].inputs
        pins += [(v, backward) for v in rng.sample(reads, rng.randint(1, len(reads)))]
    return replace(problem, ops=tuple(ops), pinned=tuple(pins))


class _Drawing:
    def __init__(self, rng: Random, max_size: int, max_cost: int, zeros: float) -> None:
        self.rng = rng
        self.max_size = max_size
        self.max_cost = max_cost
        self.zeros = zeros
        self.values: list[Value] = []
        self.residents: list[int] = []
        # In the order in which they are made: an op reads only what stands before it, so the listed
        # order is topological by itself.
        self.produced: list[int] = []

    def chance(self, rate: float) -> bool:
        return self.rng.random() < rate

    def number(self, largest: int) -> int:
        return 0 if self.chance(self.zeros) else self.rng.randint(1, largest)

    def value(self, name: str, size: int) -> int:
        self.values.append(Value(name, size))
        return len(self.values) - 1

    def problem(
        self,
        name: str,
        num_ops: int,
        resident: float,
        multi_output: float,
        workspace: float,
        inplace: float,
        once: float,
        loss: float,
        dead: float,
    ) -> Problem:
        rng = self.rng
        if resident > 0:
            self.residents = [self.value(f"r{k}", self.number(self.max_size)) for k in range(2)]
        # Never the first: a loss without a forward is no loss.
        loss_op = rng.randrange(1, num_ops) if num_ops > 1 and self.chance(loss) else -1
        ops: list[Op] = []
        for i in range(num_ops):
            # Recent values are read more often: long narrow graphs are the usual ones.
            pool = self.produced[-6:] if self.chance(0.7) else self.produced
            reads = rng.sample(pool, min(len(pool), rng.choice((0, 1, 1, 1, 2, 2, 3))))
            if i == loss_op and not reads and self.produced:
                reads = [self.produced[-1]]
            sizes = [self.number(self.max_size)]
            while len(sizes) < 3 and self.chance(multi_output):
                sizes.append(self.number(self.max_size))
            outputs = [self.value(f"v{i}.{k}", size) for k, size in enumerate(sizes)]
            # Before a resident value is read: one that is overwritten would be gone for good.
            pairs = self.pairs(reads, outputs) if self.chance(inplace) else ()
            if self.residents and self.chance(resident):
                reads.append(rng.choice(self.residents))
            ops.append(
                Op(
                    name=f"op{i}",
                    cost=self.number(self.max_cost),
                    inputs=tuple(reads),
                    outputs=tuple(outputs),
                    workspace=self.number(self.max_size) if self.chance(workspace) else 0,
                    # Anything may be a run-once op here, though in a model few are: solvers have to
                    # cope.
                    recomputable=not self.chance(once),
                    inplace=pairs,
                    phase=_phase(i, loss_op),
                    # Any forward op: pairs that contradict the data flow are allowed by the format.
                    grad_of=rng.randrange(loss_op) if 0 <= loss_op < i else None,
                )
            )
            self.produced.extend(outputs)
        return self.finish(name, ops, loss_op, dead)

    def pairs(self, reads: list[int], outputs: list[int]) -> tuple[tuple[int, int], ...]:
        """One or more input-output pairs; each output takes the size of its input."""
        count = self.rng.randint(1, 2)
        pairs = tuple(zip(reads[:count], outputs, strict=False))
        for v, out in pairs:
            self.values[out] = Value(self.values[out].name, self.values[v].size)
        return pairs

    def finish(self, name: str, ops: list[Op], loss_op: int, dead: float) -> Problem:
        read = {v for op in ops for v in op.inputs}
        # The last op always counts, so that a problem is never empty of goals.
        last = ops[-1].outputs[0] if ops else None
        outputs = [
            v
            for v in self.produced
            if v == last or (not self.chance(dead) if v not in read else self.chance(0.1))
        ]
        held = []
        if loss_op >= 0:
            held = [v for v in ops[loss_op].inputs if self.chance(0.5)]
        if self.residents and self.chance(0.1):
            outputs.append(self.residents[0])
        # The order of outputs means nothing, and nothing may come to depend on it.
        self.rng.shuffle(outputs)
        return Problem(
            values=tuple(self.values),
            ops=tuple(ops),
            resident=tuple(self.residents),
            outputs=tuple(outputs),
            held=tuple(held),
            name=name,
            cost_unit="unit",
        )


def _phase(op_id: int, loss_op: int) -> Phase | None:
    if loss_op < 0:
        return None
    if op_id == loss_op:
        return "loss"
    return "forward" if op_id < loss_op else "backward"


def random_schedule(
    problem: Problem, seed: int | Random, *, repeats: float = 0.3, reorder: bool = True
) -> Schedule:
    """A valid schedule: each op at least once, in a random topological order (the listed one
    without `reorder`), with ops run again in between at the rate of `repeats` (below 1.0)."""
    rng = seed if isinstance(seed, Random) else Random(seed)
    producer = problem.producer
    # Each producer once, however many of its outputs an op reads.
    missing = [len({producer[v] for v in op.inputs if producer[v] >= 0}) for op in problem.ops]
    waiting: list[set[int]] = [set() for _ in problem.ops]
    for i, op in enumerate(problem.ops):
        for v in op.inputs:
            if producer[v] >= 0:
                waiting[producer[v]].add(i)
    ready = [i for i, count in enumerate(missing) if count == 0]
    again: list[int] = []
    steps: list[int] = []
    for i in range(len(problem.ops)):
        while again and rng.random() < repeats:
            steps.append(rng.choice(again))
        if reorder:
            k = rng.randrange(len(ready))
            ready[k], ready[-1] = ready[-1], ready[k]
            i = ready.pop()
            for reader in sorted(waiting[i]):
                missing[reader] -= 1
                if missing[reader] == 0:
                    ready.append(reader)
        steps.append(i)
        if not problem.ops[i].once:
            again.append(i)
    while again and rng.random() < repeats:
        steps.append(rng.choice(again))
    return Schedule(tuple(steps))
