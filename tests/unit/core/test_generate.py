import math
from statistics import mean

import pytest

from rekindle.core import check_problem, check_schedule, keep_all, problem_hash, simulate
from rekindle.core.generate import (
    TrainingGraph,
    chain,
    random_layered,
    random_problem,
    random_schedule,
    transformer,
    unet,
)

TRAINING = [
    chain(1),
    chain(12, 3),
    chain(8, uniform=True),
    unet(1),
    unet(3, 1),
    transformer(1),
    transformer(3, 2, dropout=True),
]


@pytest.mark.parametrize("problem", TRAINING, ids=lambda p: p.name)
def test_training_graphs(problem):
    check_problem(problem)
    check_schedule(problem, keep_all(problem))
    phases = [op.phase for op in problem.ops]
    loss = phases.index("loss")
    assert set(phases[:loss]) == {"forward"}
    assert set(phases[loss + 1 :]) == {"backward"}
    # Each forward op with a weight has a backward op, and each weight a gradient of its size.
    weights = [v for v in problem.resident if problem.values[v].name.endswith(".weight")]
    grads = {problem.values[v].name: problem.values[v].size for v in problem.outputs}
    assert grads == {f"grad.{problem.values[v].name}": problem.values[v].size for v in weights}
    assert len(problem.outputs) == len(weights) > 0
    paired = [op.grad_of for op in problem.ops if op.grad_of is not None]
    assert sorted(paired, reverse=True) == paired
    assert all(problem.ops[i].phase == "forward" for i in paired)
    assert problem.held == problem.ops[loss].inputs
    # The forward's values are alive together at the turn: the peak lies around it.
    trace = simulate(problem, keep_all(problem))
    assert trace.peak_step >= loss // 2


def test_gradients_that_meet_are_summed_in_place():
    graph = TrainingGraph()
    x = graph.resident("x")
    a = graph.forward("a", 1, [x], 8, weight_size=1)
    b = graph.forward("b", 1, [a], 8, saves_inputs=True)
    c = graph.forward("c", 1, [a, b], 8)
    problem = graph.finish([c], "diamond")
    check_problem(problem)
    sums = [op for op in problem.ops if op.name.endswith(".sum")]
    assert len(sums) == 1
    assert len(sums[0].inplace) == 1
    assert [op.name for op in problem.ops] == [
        *("a", "b", "c", "loss", "c.backward", "b.backward", "grad.a.sum", "a.backward")
    ]


@pytest.mark.parametrize("num_ops", [3, 4, 10, 100, 1000])
def test_random_layered(num_ops):
    problem = random_layered(num_ops, seed=1)
    check_problem(problem)
    assert len(problem.ops) == num_ops
    assert [op.cost for op in (problem.ops[0], problem.ops[-1])] == [0, 0]
    # One source, one sink; everything reaches the sink.
    assert [i for i, op in enumerate(problem.ops) if not op.inputs] == [0]
    assert [v for v, readers in enumerate(problem.readers) if not readers] == [num_ops - 1]
    assert problem.outputs == (num_ops - 1,)


def test_random_layered_has_the_published_shape():
    """Edges, sizes and costs like those of RL4: 5,875 edges, mean size about 1.93 kB."""
    problems = [random_layered(1000, seed) for seed in range(5)]
    edges = mean(sum(len(op.inputs) for op in p.ops) for p in problems)
    assert 4500 < edges < 7500
    sizes = [value.size for p in problems for value in p.values]
    assert all(size > 0 and size % 10 == 0 for size in sizes)
    assert math.isclose(mean(sizes), 1930, rel_tol=0.05)
    costs = [op.cost for p in problems for op in p.ops[1:-1]]
    assert (min(costs), max(costs)) == (1, 999)
    assert math.isclose(mean(costs), 500, rel_tol=0.05)


def test_random_layered_needs_three():
    with pytest.raises(ValueError, match="at least 3"):
        random_layered(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: random_layered(50, seed),
        lambda seed: chain(9, seed),
        lambda seed: unet(2, seed),
        lambda seed: transformer(2, seed),
        lambda seed: random_problem(seed, 20),
    ],
)
def test_same_seed_same_problem(make):
    assert problem_hash(make(5)) == problem_hash(make(5)) != problem_hash(make(6))


def test_random_problems_have_every_feature():
    problems = [random_problem(seed, 10) for seed in range(200)]
    for problem in problems:
        check_problem(problem)
    ops = [op for p in problems for op in p.ops]
    assert any(op.inplace for op in ops)
    assert any(len(op.inplace) > 1 for op in ops)
    assert any(len(op.outputs) > 2 for op in ops)
    assert any(not op.recomputable for op in ops)
    assert any(op.workspace for op in ops)
    assert any(op.cost == 0 for op in ops)
    assert any(value.size == 0 for p in problems for value in p.values)
    assert any(p.held for p in problems)
    assert any(set(p.outputs) & set(p.resident) for p in problems)
    read = [{v for op in p.ops for v in op.inputs} for p in problems]
    assert any(
        set(range(len(p.values))) - set(p.resident) - r - set(p.outputs)
        for p, r in zip(problems, read, strict=True)
    )


def test_random_schedules_are_valid_and_repeat():
    repeated = reordered = 0
    for seed in range(300):
        problem = random_problem(seed, 10)
        schedule = random_schedule(problem, seed, repeats=0.4)
        check_schedule(problem, schedule)
        repeated += len(schedule) > len(problem.ops)
        first = list(dict.fromkeys(schedule.ops))
        reordered += first != sorted(first)
        listed = random_schedule(problem, seed, repeats=0.0, reorder=False)
        assert listed == keep_all(problem)
    assert repeated > 200
    assert reordered > 200
