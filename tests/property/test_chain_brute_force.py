"""The chain programs against a search over all sequences of Rotor's Table 1 operations."""

import heapq
import itertools
import math
from random import Random

import pytest

from rekindle.partition.chain import Stage, chain_of_stages
from rekindle.solve.chains.chain_dp import Rule, Run, solve_chain


class Table1:
    """Rotor's model, straight from Table 1 and Definitions 3.3, 3.4 and 4.1.

    A state is what is stored: activations a, saved sets a-bar, and the one gradient.
    """

    def __init__(self, stages, input_size, input_gradient):
        self.stages = stages
        self.n = len(stages)
        self.a = [input_size, *(s.output for s in stages)]
        self.bar = [0, *(max(s.saved, s.output) for s in stages)]
        self.delta = [input_gradient, *(s.gradient for s in stages)]
        self.kept = [0, *(s.kept_gradient for s in stages)]

    def stored(self, a, bar, delta):
        total = sum(self.a[k] for k in range(self.n + 1) if a >> k & 1)
        total += sum(self.bar[k] for k in range(self.n + 1) if bar >> k & 1)
        return total + self.delta[delta] + sum(self.kept[delta + 1 :])

    def moves(self, a, bar, delta):
        """(run, stage, a, bar, delta, cost, memory while it runs) for each operation."""
        now = self.stored(a, bar, delta)
        for k in range(1, self.n + 1):
            stage = self.stages[k - 1]
            has_a, has_bar = a >> (k - 1) & 1, bar >> (k - 1) & 1
            if has_a or has_bar:
                cost = stage.forward_cost
                makes_a = 0 if a >> k & 1 else self.a[k]
                makes_bar = 0 if bar >> k & 1 else self.bar[k]
                over = stage.forward_overhead
                yield Run.keep, k, a | 1 << k, bar, delta, cost, now + makes_a + over
                yield Run.save, k, a, bar | 1 << k, delta, cost, now + makes_bar + over
                if has_a:
                    gone = (a & ~(1 << (k - 1))) | 1 << k
                    yield Run.drop, k, gone, bar, delta, cost, now + makes_a + over
            if delta == k and bar >> k & 1 and (has_a or has_bar):
                memory = now + self.delta[k - 1] + stage.backward_overhead + self.kept[k]
                left = bar & ~(1 << k)
                cost = stage.backward_cost
                if has_a:
                    yield Run.back, k, a & ~(1 << (k - 1)), left, k - 1, cost, memory
                if has_bar:
                    yield Run.back, k, a, left, k - 1, cost, memory

    def rest(self, bar, delta):
        """What every sequence still pays: each B, and F_all of each stage that is not saved."""
        return sum(
            stage.backward_cost + (0 if bar >> k & 1 else stage.forward_cost)
            for k, stage in enumerate(self.stages[:delta], start=1)
        )

    def best(self, budget, persistent, limit=math.inf):
        """The least cost of a valid sequence within the budget, if it is at most `limit`: A*."""
        start = (1, 0, self.n, 0)
        best = {start: 0}
        heap = [(self.rest(0, self.n), 0, start)]
        while heap:
            _, cost, state = heapq.heappop(heap)
            if cost > best[state]:
                continue
            a, bar, delta, pending = state
            if delta == 0:
                return cost
            for run, k, a2, bar2, delta2, extra, memory in self.moves(a, bar, delta):
                if memory > budget:
                    continue
                waiting = pending
                if persistent:
                    # Definition 4.1: until B of a kept stage, nothing runs below it.
                    if pending >> (k + 1) or (run == Run.drop and pending >> k & 1):
                        continue
                    if run == Run.back:
                        waiting &= ~(1 << k)
                    elif run != Run.drop:
                        waiting |= 1 << k
                after = (a2, bar2, delta2, waiting)
                total = cost + extra
                least = total + self.rest(bar2, delta2)
                if total < best.get(after, math.inf) and least <= limit:
                    best[after] = total
                    heapq.heappush(heap, (least, total, after))
        return math.inf

    def replay(self, steps):
        """Peak and cost of a sequence; fails where an operation has not its inputs."""
        a, bar, delta, peak, cost = 1, 0, self.n, 0, 0
        for run, block, _ in steps:
            ways = [m for m in self.moves(a, bar, delta) if m[:2] == (run, block + 1)]
            assert ways, f"{run} of stage {block + 1} lacks an input"
            # Where both a and a-bar are there, B consumes the a that was kept for it.
            _, _, a, bar, delta, extra, memory = ways[0]
            peak, cost = max(peak, memory), cost + extra
        assert delta == 0
        return peak, cost


def random_stages(rng, length, *, falling=False, kept=False):
    sizes = [rng.randint(0, 6) for _ in range(length + 1)]
    if falling:
        sizes.sort(reverse=True)
    stages = [
        Stage(
            forward_cost=rng.randint(0, 5),
            backward_cost=rng.randint(0, 3),
            output=size,
            saved=size + rng.choice((0, 0, 1, 3)),
            gradient=size,
            forward_overhead=rng.choice((0, 0, 1, 2)),
            backward_overhead=rng.choice((0, 0, 2, 5)),
            kept_gradient=rng.choice((0, 1, 2)) if kept else 0,
        )
        for size in sizes[1:]
    ]
    stages.append(Stage(0, 0, 0, 0, 0))  # the loss
    return stages, sizes[0]


def programs(stages, input_size, top):
    chain = chain_of_stages(stages, input_size, input_size)
    return {rule: solve_chain(chain, 1, top, rule) for rule in (Rule.persistent, Rule.floating)}


def compare(rng, length, *, hopeless=True, **features):
    """One random chain at three budgets up to keep-all; `hopeless` ones take the longest."""
    stages, input_size = random_stages(rng, length, **features)
    model = Table1(stages, input_size, input_size)
    steps = [(Run.save, k, 0) for k in range(len(stages))]
    steps += [(Run.back, k, 0) for k in reversed(range(len(stages)))]
    keep_all_peak, _ = model.replay(steps)
    found = programs(stages, input_size, keep_all_peak)
    low = keep_all_peak // 2
    if not hopeless:
        program = found[Rule.floating]
        feasible = (b for b in range(keep_all_peak + 1) if program.feasible(program.slots_in(b)))
        low = next(feasible)
    budgets = sorted({rng.randint(low, keep_all_peak) for _ in range(3)})
    for budget, rule in itertools.product(budgets, found):
        program = found[rule]
        slots = program.slots_in(budget)
        cost = program.table.cost(slots) if slots >= 0 else math.inf
        # Nothing is cheaper, and that cost is reached: dearer states need no visit.
        expected = model.best(budget, persistent=rule == Rule.persistent, limit=cost)
        assert cost == expected, (rule, budget, stages, input_size)
        if cost < math.inf:
            peak, replayed = model.replay(program.sequence(slots).steps)
            assert replayed == cost
            assert peak <= budget
    return found


@pytest.mark.parametrize(("length", "count"), [(2, 40), (3, 40), (4, 12), (5, 8), (6, 4)])
def test_programs_equal_brute_force(length, count):
    rng = Random(length)
    for _ in range(count):
        compare(rng, length, hopeless=length < 4)


def test_programs_equal_brute_force_with_parameter_gradients():
    rng = Random(11)
    for _ in range(30):
        compare(rng, 3, kept=True)


@pytest.mark.slow
@pytest.mark.parametrize("length", [5, 6])
def test_programs_equal_brute_force_on_many_longer_chains(length):
    rng = Random(100 + length)
    for _ in range(100 if length == 5 else 60):
        compare(rng, length, hopeless=False, kept=rng.random() < 0.3)


def test_where_sizes_never_grow_both_programs_agree():
    """Corollary 4.5: then an optimal sequence is persistent."""
    rng = Random(5)
    for _ in range(150):
        stages, input_size = random_stages(rng, rng.randint(2, 9), falling=True)
        found = programs(stages, input_size, 60)
        for slots in range(61):
            costs = {program.table.cost(slots) for program in found.values()}
            assert len(costs) == 1, (slots, stages)
