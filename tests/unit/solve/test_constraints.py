"""A user's own word: `save` and `recompute` hold for every solver, or are refused by reason."""

import random

import pytest
from support.training_graphs import training_graph

from rekindle.core import (
    Op,
    Problem,
    Schedule,
    Value,
    check_schedule,
    keep_all,
    simulate,
)
from rekindle.core.generate import random_schedule, transformer
from rekindle.errors import InvalidSchedule, SolverRefused, WishRefused
from rekindle.solve import find_solver
from rekindle.solve.constraints import (
    check_constraints,
    constrain,
    parse_constraints,
    resolve,
    run_constrained,
    to_original,
)
from rekindle.solve.op_patterns import matches
from rekindle.solve.pareto import pareto

SOLVERS = ("auto", "fastsa", "checkmate", "moccasin", "hiremate", "twremat", "sqrt", "keep-all")


def layered(num_layers: int = 4, *, once: int = -1) -> Problem:
    """Layers `blocks.k` of two ops each, whose backward reads what both make."""
    values = [Value("x", 8)]
    ops: list[Op] = []
    last = 0
    for k in range(num_layers):
        for j, call in enumerate(("aten.mm.default", "aten.gelu.default")):
            values.append(Value(f"v{k}{j}", 8))
            ops.append(
                Op(
                    f"{call}#{len(ops)} blocks.{k}.{'fc' if j == 0 else 'act'}",
                    cost=5 - j,
                    inputs=(last,),
                    outputs=(len(values) - 1,),
                    phase="forward",
                    recomputable=len(ops) != once,
                )
            )
            last = len(values) - 1
    values.append(Value("tangent", 8))
    ops.append(Op("loss", 0, (last,), (len(values) - 1,), phase="loss"))
    gradient = len(values) - 1
    for i in reversed(range(2 * num_layers)):
        values.append(Value(f"g{i}", 8))
        out = ops[i].outputs[0]
        inputs = (gradient, out, ops[i].inputs[0])
        ops.append(
            Op(f"aten.mul.Tensor#{len(ops)}", 3, inputs, (len(values) - 1,), phase="backward")
        )
        gradient = len(values) - 1
    return Problem(tuple(values), tuple(ops), (0,), (gradient,), name="layered")


def names(problem: Problem, ops: frozenset[int]) -> list[str]:
    return [problem.ops[i].name.partition(" ")[2] for i in sorted(ops)]


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("blocks.*.mlp", "aten.mm.default#3 blocks.0.mlp", True),
        ("blocks.*.mlp", "aten.mm.default#3 blocks.0.mlp.fc1", True),
        ("blocks.0", "aten.mm.default#3 blocks.0.mlp.fc1", True),
        ("blocks.1", "aten.mm.default#3 blocks.10.mlp", False),
        ("blocks", "aten.mm.default#3 blocks.10.mlp", True),
        ("mlp", "aten.mm.default#3 blocks.0.mlp", False),
        ("*mlp", "aten.mm.default#3 blocks.0.mlp", True),
        ("mm", "aten.mm.default#3 blocks.0.mlp", True),
        ("aten.mm*", "aten.mm.default#3", True),
        ("aten.mm.out", "aten.mm.default#3", False),
        ("native_dropout", "aten.t.default+aten.native_dropout.default#1 drop", True),
        ("blocks.*::mm", "aten.mm.default#3 blocks.0.mlp", True),
        ("blocks.*::mm", "aten.gelu.default#3 blocks.0.mlp", False),
        ("head::mm", "aten.mm.default#3 blocks.0.mlp", False),
        ("::mm", "aten.mm.default#3", True),
        ("*", "aten.mm.default#3", True),
        ("gelu", "fused_mul_gelu_add_1a2b#3 blocks.0.act", True),
        ("aten.gelu*", "fused_gelu_1a2b#3 blocks.0.act", True),
        ("elu", "fused_gelu_1a2b#3 blocks.0.act", False),
        ("blocks.*::tanh", "fused_pow_tanh_1a2b#3 blocks.0.act", True),
    ],
)
def test_what_a_pattern_means(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


def test_patterns_mean_forward_ops_alone() -> None:
    problem = layered()
    wanted = resolve(problem, parse_constraints("blocks.1", ["blocks.2::gelu", "blocks.3.fc"]))
    assert names(problem, wanted.save) == ["blocks.1.fc", "blocks.1.act"]
    assert names(problem, wanted.recompute) == ["blocks.2.act", "blocks.3.fc"]
    with pytest.raises(WishRefused, match="means no op of the forward"):
        resolve(problem, parse_constraints(save="aten.mul*"))  # of the backward alone


@pytest.mark.parametrize(
    ("save", "recompute", "sentence"),
    [
        ("nowhere", (), "'nowhere' means no op of the forward; its modules are blocks.0.fc"),
        ((), ("blocks.0", "zzz"), "'zzz' means no op"),
        ("blocks.1", "*.act", "to be saved ('blocks.1') and to be recomputed ('*.act')"),
        ("", (), "no pattern"),
        ([3], (), "no pattern"),
    ],
)
def test_what_is_refused(save, recompute, sentence: str) -> None:
    with pytest.raises(WishRefused) as refusal:
        resolve(layered(), parse_constraints(save, recompute))
    assert sentence in str(refusal.value)


def test_what_can_run_only_once_cannot_be_recomputed() -> None:
    problem = layered(once=2)
    with pytest.raises(WishRefused, match=r"aten\.mm\.default#2 blocks\.1\.fc' can run only once"):
        constrain(problem, resolve(problem, parse_constraints(recompute="blocks.1")))
    constrain(problem, resolve(problem, parse_constraints(recompute="blocks.2")))


def test_recompute_holds_even_where_everything_fits() -> None:
    problem = layered()
    wishes = parse_constraints(recompute=["blocks.0", "blocks.2.act"])
    budget = simulate(problem, keep_all(problem)).peak * 2
    solution = run_constrained(find_solver("auto"), problem, budget, wishes, time_limit_s=5)
    assert solution.schedule is not None
    wanted = resolve(problem, wishes)
    runs = simulate(problem, solution.schedule).runs
    assert [i for i, r in enumerate(runs) if r > 1] == sorted(wanted.recompute)
    with pytest.raises(InvalidSchedule, match="is to be recomputed and is kept"):
        check_constraints(problem, wanted, keep_all(problem))


def test_save_costs_elsewhere_or_the_budget() -> None:
    problem = layered(6)
    solver = find_solver("auto")
    peak = simulate(problem, keep_all(problem)).peak
    free = run_constrained(solver, problem, peak // 2, parse_constraints(), time_limit_s=5)
    asked = parse_constraints(save="blocks.1")
    bound = run_constrained(solver, problem, peak // 2, asked, time_limit_s=5)
    assert free.schedule is not None
    assert bound.schedule is not None
    check_constraints(problem, resolve(problem, asked), bound.schedule)
    assert simulate(problem, bound.schedule).cost >= simulate(problem, free.schedule).cost
    refused = run_constrained(
        solver, problem, peak // 2, parse_constraints(save="*"), time_limit_s=5
    )
    assert refused.schedule is None
    assert "save=['*']" in refused.message
    assert simulate(problem, refused.smallest).peak > peak // 2


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_solver_keeps_its_word(solver: str) -> None:
    """On graphs with skips, second outputs, in-place sums and ops that run once."""
    found = 0
    for seed in range(6):
        problem = training_graph(seed, 8)
        rng = random.Random(seed)
        forward = [op.name for op in problem.ops if op.phase == "forward" and op.recomputable]
        rng.shuffle(forward)
        wishes = parse_constraints(forward[:2], forward[2:5])
        wanted = resolve(problem, wishes)
        base = simulate(problem, keep_all(problem)).peak
        for budget in (base, 3 * base // 4):
            try:
                solution = run_constrained(
                    find_solver(solver), problem, budget, wishes, time_limit_s=2, seed=seed
                )
            except SolverRefused:
                continue  # an answer too
            for schedule in (solution.schedule, solution.smallest):
                if schedule is not None:
                    check_schedule(problem, schedule)
                    check_constraints(problem, wanted, schedule)
            if solution.schedule is not None:
                found += 1
                trace = simulate(problem, solution.schedule)
                assert trace.peak <= budget
                assert solution.bound is None or solution.bound <= trace.cost
    assert found or solver in ("keep-all", "sqrt")


def test_any_schedule_of_the_constrained_problem_becomes_one_that_keeps_the_wishes() -> None:
    """Whatever a solver does, and never with a larger peak unless something had to be repaired."""
    larger = 0
    for seed in range(120):
        problem = training_graph(seed, 7)
        rng = random.Random(seed)
        forward = [op.name for op in problem.ops if op.phase == "forward" and op.recomputable]
        wishes = parse_constraints((), rng.sample(forward, min(3, len(forward))))
        wanted = resolve(problem, wishes)
        made = constrain(problem, wanted)
        schedule = random_schedule(made.problem, seed)
        mapped = to_original(problem, wanted, made, schedule)
        check_schedule(problem, mapped)
        check_constraints(problem, wanted, mapped)
        if len(mapped.ops) == len(schedule.ops):
            before = simulate(made.problem, schedule).peak
            assert simulate(problem, mapped).peak <= before
        else:
            larger += 1
    assert larger < 120


def test_the_twin_stands_before_its_first_reader() -> None:
    """Listed so that the plain order is a good one: recomputed late, not right behind the loss."""
    problem = layered(4)
    made = constrain(problem, resolve(problem, parse_constraints(recompute="*")))
    peak = simulate(made.problem, keep_all(made.problem)).peak
    assert peak < simulate(problem, keep_all(problem)).peak * 1.5
    every = to_original(
        problem, resolve(problem, parse_constraints(recompute="*")), made, keep_all(made.problem)
    )
    check_constraints(problem, resolve(problem, parse_constraints(recompute="*")), every)


def test_on_a_transformer() -> None:
    problem = transformer(4, seed=1)
    forward = [op.name for op in problem.ops if op.phase == "forward"]
    some = [name for name in forward if "1." in name or "layer1" in name][:6] or forward[4:10]
    wishes = parse_constraints(recompute=some)
    base = simulate(problem, keep_all(problem)).peak
    solution = run_constrained(find_solver("auto"), problem, base // 2, wishes, time_limit_s=3)
    assert solution.schedule is not None
    check_constraints(problem, resolve(problem, wishes), solution.schedule)
    assert isinstance(solution.schedule, Schedule)


def test_a_curve_keeps_the_wishes() -> None:
    problem = layered(6)
    wishes = parse_constraints(save="blocks.1", recompute="blocks.4")
    curve = pareto(problem, num_points=4, time_limit_s=3, constraints=wishes)
    assert len(curve) >= 2
    for point in curve:
        check_constraints(problem, resolve(problem, wishes), point.schedule)
        assert simulate(problem, point.schedule).peak == point.peak
    assert [p.cost for p in curve] == sorted((p.cost for p in curve), reverse=True)
