"""Problems and accounts that the tests of reports share."""

import functools

from rekindle.core import Op, Problem, Value, keep_all, simulate
from rekindle.report import Account, CurvePoint, Facts, Step, account
from rekindle.solve import find_solver, run_solver
from rekindle.solve.pareto import pareto

MIB = 2**20
HOSTILE = "</script><img src=x onerror=document.title='broken'>\"'&{{ 7 * 7 }}"


def layered(num_layers: int = 6, extra: str = "") -> Problem:
    """A step of a small net, named as capture names ops: `embed`, then layers of a cheap wide op
    (`act`) on a dear narrow one (`fc`), `head`, the loss, and the backward of it all."""
    values = [Value("weight", MIB // 4), Value("x", MIB)]
    ops: list[Op] = []

    def op(call, module, cost, inputs, size, phase, grad_of=None, **more):
        values.append(Value(f"v{len(values)}", size))
        name = f"aten.{call}.default#{len(ops)}" + (f" {module}" if module else "")
        ops.append(
            Op(name, cost, tuple(inputs), (len(values) - 1,), phase=phase, grad_of=grad_of, **more)
        )
        return len(values) - 1

    x = op("embedding", f"embed{extra}", 1000, [1], MIB, "forward")
    made = []
    for k in range(num_layers):
        fc = op("mm", f"layers.{k}.fc", 90_000, [x, 0], 2 * MIB, "forward", workspace=MIB // 2)
        act = op("gelu", f"layers.{k}.act", 3_000, [fc], 8 * MIB, "forward")
        made.append((x, fc, act, len(ops) - 2, len(ops) - 1))
        x = act
    out = op("sum", "", 1000, [x], MIB, "forward")
    grad = op("loss", "", 0, [out], MIB, "loss")
    results = []
    for before, fc, act, fc_op, act_op in reversed(made):
        wide = op("gelu_backward", ops[act_op].name.split()[1], 4_000, [grad, fc], 8 * MIB,
                  "backward", act_op)  # fmt: skip
        results.append(op("mm", ops[fc_op].name.split()[1], 90_000, [wide, before], MIB // 4,
                          "backward", fc_op))  # fmt: skip
        grad = op("mm", ops[fc_op].name.split()[1], 90_000, [wide, 0], 8 * MIB, "backward", fc_op)
        assert act
    return Problem(
        tuple(values),
        tuple(ops),
        resident=(0, 1),
        outputs=(*results, grad),
        held=(out,),
        name="Net",
    )


@functools.cache
def solved(problem: Problem, share: float, *, with_curve: bool = False, **facts) -> Account:
    """The account of what `auto` finds within a share of keep-all's peak."""
    budget = int(simulate(problem, keep_all(problem)).peak * share)
    solution = run_solver(find_solver("auto"), problem, budget, time_limit_s=0.5)
    assert solution.schedule is not None
    curve = ()
    if with_curve:
        points = pareto(problem, num_points=5, time_limit_s=1)
        curve = tuple(CurvePoint(p.peak, p.cost, p.bound) for p in points)
    given = Facts(budget=budget, bound=solution.bound, solver=solution.solver, curve=curve, **facts)
    return account(problem, solution.schedule, given)


def measured(found: Account) -> Step:
    return Step(found.trace.peak - 12_345, found.trace.cost + 54_321)
