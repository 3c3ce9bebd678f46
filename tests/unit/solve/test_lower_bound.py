"""The bound under a clock that runs out anywhere in it."""

from random import Random

from rekindle import _native
from rekindle.core import keep_all, simulate
from rekindle.core.generate import transformer
from rekindle.solve.lower_bound import cost_bound


def test_a_clock_that_runs_out_inside_leaves_a_bound():
    """Once it ended the process: the clock ran out between the start of a round and its flow."""
    problem = transformer(6, batch=8, sequence=512, width=256, vocabulary=4096)
    base = simulate(problem, keep_all(problem))
    whole = _native.bound_at(problem.native, problem.loss_op, base.peak // 2, 10.0)[0]
    rng = Random(1)
    for _ in range(10_000):
        found = _native.bound_at(
            problem.native, problem.loss_op, base.peak // 2, 2e-4 * rng.random()
        )
        assert 0 <= found[0] <= whole


def test_a_bound_on_the_whole_cost():
    problem = transformer(2, batch=2, sequence=64, width=32, vocabulary=64)
    base = simulate(problem, keep_all(problem))
    assert cost_bound(problem, base.peak, 1.0) == base.cost
    assert cost_bound(problem, base.peak // 2, 1.0) >= base.cost
    assert cost_bound(problem, 1, 1.0) is None
