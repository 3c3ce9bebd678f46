"""Chains of random training steps: every op has its place, and no sequence needs more than it says.

Sequences are built for every memory size of the table, lowered to op ids, and simulated.
"""

from random import Random

import pytest

from rekindle.core import Schedule, generate, simulate
from rekindle.partition.chain import Chain, find_chain
from rekindle.solve.base import without_dead_ops
from rekindle.solve.chains.chain_dp import Rule, lower_steps, segment_steps, solve_chain

RULES = (Rule.persistent, Rule.floating, Rule.revolve)
NUM_SLOTS = 40


def assert_safe(problem):
    """Returns the number of blocks, 0 where there is no chain."""
    problem, _ = without_dead_ops(problem)
    chain = find_chain(problem)
    if isinstance(chain, str):
        return 0
    assert_whole(problem, chain)
    whole = sum(max(o.saved for o in b.options) for b in chain.blocks)
    peaks = [
        max(o.forward_peak, o.backward_peak) + b.standing for b in chain.blocks for o in b.options
    ]
    top = whole + max(peaks)
    before = simulate_prelude(problem, chain)
    exact = NUM_SLOTS - len(chain) - 1  # each size that is added up may take a part of a slot more
    for rule in RULES:
        program = solve_chain(chain, -(-max(top, 1) // exact), NUM_SLOTS, rule)
        assert program.feasible(NUM_SLOTS)
        for slots in range(NUM_SLOTS + 1):
            sequence = program.sequence(slots)
            if sequence is None:
                continue
            ops = lower_steps(problem, chain, sequence.steps)
            trace = simulate(problem, Schedule(tuple(ops)))
            limit = slots * program.unit + chain.base + chain.blocks[0].input_size
            assert trace.peak <= max(limit, before), (problem.name, rule, slots)
            once = sum(op.cost for op in problem.ops if op.once)
            prelude = sum(problem.ops[i].cost for i in chain.prelude if not problem.ops[i].once)
            assert trace.cost <= sequence.cost + once + prelude
    for count in range(1, len(chain) + 1):
        simulate(
            problem, Schedule(tuple(lower_steps(problem, chain, segment_steps(len(chain), count))))
        )
    return len(chain)


def assert_whole(problem, chain: Chain):
    placed = list(chain.prelude)
    for block in chain.blocks:
        placed += block.forward_ops
        placed += [i for i in block.options[0].backward_ops if problem.ops[i].phase != "loss"]
    loss = [] if problem.loss_op is None else [problem.loss_op]
    assert sorted(placed + loss) == list(range(len(problem.ops)))


def simulate_prelude(problem, chain):
    """What the prelude needs on its own is no part of the chain's numbers."""
    work = max((problem.ops[i].workspace for i in chain.prelude), default=0)
    return chain.base + work + chain.blocks[0].bare_peak


@pytest.mark.parametrize("seed", range(4))
def test_chains_of_layers(seed):
    assert assert_safe(generate.chain(4 + 5 * seed, seed)) == 4 + 5 * seed


@pytest.mark.parametrize("dropout", [False, True])
def test_transformers(dropout):
    assert assert_safe(generate.transformer(3, dropout=dropout)) == 2 * 3 + 3


def test_unets():
    assert assert_safe(generate.unet(2, blocks=1)) > 2


def test_any_problem_with_phases():
    found = []
    for seed in range(1200):
        size = Random(seed).randint(6, 16)
        found.append(assert_safe(generate.random_problem(seed, size, loss=1.0, resident=0.3)))
    assert sum(n >= 2 for n in found) > 200
    assert sum(n >= 3 for n in found) > 50


@pytest.mark.slow
def test_any_problem_with_phases_many():
    for seed in range(10_000, 30_000):
        size = Random(seed).randint(6, 18)
        assert_safe(generate.random_problem(seed, size, loss=1.0, resident=0.3))
