"""Emission: copies live as simulated, short calls are the same ops, plans are files."""

import gc
import weakref

import pytest
import torch
from support.recording import capture
from torch import nn

import rekindle
from rekindle.capture.node_facts import NodeFacts, set_facts
from rekindle.core import Schedule, keep_all
from rekindle.errors import FileError, PlanMismatch
from rekindle.lower import fast_calls
from rekindle.lower.emit import emit
from rekindle.program import analyse
from rekindle.solve.baselines import segmented


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh()
    )


def managed(schedule, **options):
    x = torch.randn(4, 8)
    model = small()
    options = {"profile": "estimate", "on_miss": "raise", **options}
    return model, rekindle.rematerialize(model, (x,), schedule=schedule, **options), x


def sqrt(problem):
    return Schedule(tuple(segmented(problem, 3)))


def twice(problem):
    """Every op that may run again does, right after its first run."""
    ops = []
    for i, op in enumerate(problem.ops):
        ops += [i] if op.once else [i, i]
    return Schedule(tuple(ops))


@pytest.mark.parametrize("schedule", [keep_all, sqrt, twice])
def test_equal_to_eager(schedule):
    model, new, x = managed(schedule)
    assert rekindle.verify(model, new, (x,)).equal


def test_views_that_undo_each_other_are_not_run():
    program = analyse(capture(small(), (torch.randn(4, 8),)))
    lowered = emit(program, Schedule(tuple(range(len(program.ops)))))
    sources = lowered.forward_source + "".join(s.source for s in lowered.stretches)
    assert "detach" not in sources
    transposed = sources.count(".t()")
    assert transposed <= 6  # two weights, and their gradients' arguments; t of t is gone


def test_short_forms_dispatch_the_same_op():
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    for node in (a, b):
        set_facts(node, NodeFacts(torch.empty(2, 2)))
    aten = torch.ops.aten
    assert fast_calls.call(graph, aten.mm.default, (a, b), {}).op == "call_method"
    assert fast_calls.call(graph, aten.view.default, (a, [4]), {}).target == "view"
    # Bound in Python as one op that runs another: not a short form of either.
    dropout = fast_calls.call(graph, aten.native_dropout.default, (a, 0.5, True), {})
    assert "native_dropout" in str(dropout.target)
    # A name whose Python function means another overload here.
    node = fast_calls.call(graph, aten.sum.dim_IntList, (a, [0], True), {})
    assert node.target == "sum"


def test_no_cycle_keeps_a_step_alive():
    _, new, x = managed(sqrt)
    gc.collect()
    gc.disable()
    try:
        out = new(x)
        alive = weakref.ref(out.grad_fn.step.saved[0].untyped_storage())
        del out
        assert alive() is None
    finally:
        gc.enable()


def test_a_second_backward_says_what_eager_says():
    _, new, x = managed(keep_all)
    loss = new(x).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_parameter_changed_before_the_backward_is_an_error():
    model, new, x = managed(sqrt)
    loss = new(x).sum()
    with torch.no_grad():
        model[3].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_in_another_layout_keep_the_schedule():
    model, new, x = managed(twice)
    first = new.plan
    new(x).sum().backward()  # an expanded gradient
    mine = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    new(x)
    assert new.plan is not first
    assert new.plan.schedule == first.schedule
    assert all(torch.isfinite(g).all() for g in mine)


class TwoHeads(nn.Module):
    """Its backward reads the argument and the parameters alone: the forward keeps nothing."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.left(x), self.right(x)


def test_other_gradients_where_the_forward_keeps_nothing():
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(2, 4)
    expected = torch.autograd.grad(model(x)[1].sum(), list(model.right.parameters()))
    new = rekindle.rematerialize(
        model, (x,), schedule=keep_all, profile="estimate", on_miss="raise"
    )
    new(x)[1].sum().backward()
    assert model.left.weight.grad is None
    for parameter, gradient in zip(model.right.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_plan_files(tmp_path):
    model, new, x = managed(sqrt)
    path = tmp_path / "plan.json"
    new.plan.save(path)
    stored = rekindle.Plan.load(path)
    assert stored.peak_bytes == new.plan.peak_bytes
    assert stored.schedule == new.plan.schedule
    again = stored.apply(model, (x,), on_miss="raise")
    assert rekindle.verify(model, again, (x,)).equal
    with pytest.raises(PlanMismatch, match="another graph"):
        stored.apply(nn.Sequential(nn.Linear(8, 8)), (x,))
    path.write_text(path.read_text().replace('"torch":"', '"torch":"9.'))
    with pytest.raises(PlanMismatch, match="torch"):
        rekindle.Plan.load(path).apply(model, (x,))
    path.write_text("{}")
    with pytest.raises(FileError, match="plan file"):
        rekindle.Plan.load(path)


def test_on_miss_is_checked():
    with pytest.raises(ValueError, match="on_miss"):
        managed(keep_all, on_miss="never")
