"""Capture and analysis: eager's own ops, storages and states, order without data."""

from collections import Counter

import pytest
import torch
from support.random_models import WIDTH, RandomModel
from support.recording import capture
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.capture import Tangent
from rekindle.capture.node_facts import facts, source_of
from rekindle.capture.pytrees import split
from rekindle.errors import CaptureError
from rekindle.program import analyse


def targets(joint, phase):
    return [
        str(n.target)
        for n in joint.nodes
        if n.op == "call_function" and facts(n).phase == phase and "getitem" not in str(n.target)
    ]


class Log(TorchDispatchMode):
    """What eager dispatches."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_the_ops_are_those_that_eager_dispatches():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(True), nn.Dropout(0.5))
    x = torch.randn(2, 3, 6, 6)
    with Log() as log:
        model(x)
    seen = [str(f) for f in log.seen if not str(f).startswith(("prim", "aten.detach"))]
    mine = [name for name in targets(capture(model, (x,)), "forward") if "detach" not in name]
    assert mine == seen


class Scaled(nn.Module):
    """Ops that take a factor, which Dynamo may write as two ops: rounded twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("running", torch.ones(4))

    def forward(self, x):
        h = self.linear(x)
        self.running.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        self.running.sub_(h.detach().sum(0), alpha=0.3)
        self.running.addcmul_(h.detach()[0], h.detach()[1], value=0.7)
        h = torch.add(h, x, alpha=0.3).sub(self.running, alpha=0.7)
        h = h.addcdiv_(x, x.exp(), value=0.1).lerp(x, 0.3)
        return torch.rsub(torch.addmm(h, x.t(), x, beta=0.5, alpha=0.7), 1, alpha=0.3)


MODELS_OF_CALLS = {
    "scaled": lambda: (Scaled(), torch.randn(4, 4)),
    # Random models that eager itself can train.
    **{
        f"random-{n}": lambda n=n: (RandomModel(n), torch.randn(8, WIDTH), torch.randn(8, WIDTH))
        for n in (2, 3, 5, 12, 13, 17, 23, 40)
    },
}


@pytest.mark.parametrize("name", MODELS_OF_CALLS)
def test_no_kernel_is_another_than_eagers(name):
    """Views alone may be written in other ways than eager's, and memory made in other ones."""
    torch.manual_seed(0)
    model, *inputs = MODELS_OF_CALLS[name]()
    found = capture(model, inputs)
    with Log() as log:
        model(*inputs)
    forward = [n for n in found.nodes if n.op == "call_function" and facts(n).phase == "forward"]
    mine = [n.target for n in forward if isinstance(n.target, torch._ops.OpOverload)]

    def kernels(targets):
        names = [str(t) for t in targets if not t.is_view and t.namespace == "aten"]
        return Counter(name for name in names if not name.startswith("aten.empty"))

    assert kernels(mine) == kernels(log.seen)


def test_in_place_ops_take_a_storage_from_state_to_state():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    program = analyse(capture(model, (torch.randn(2, 4),)))
    merged = [op for op in program.ops if len(op.nodes) > 1]
    assert [len(op.nodes) for op in merged] == [2]  # addmm and relu_ are one op
    assert "relu_" in merged[0].name


def test_a_state_with_another_reader_is_not_merged_and_may_be_written_in_place():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            h = self.linear(x)
            y = h * h.detach()
            h.mul_(2.0)
            return y.sum() + h.sum()

    class Free(Model):
        def forward(self, x):
            h = self.linear(x)
            y = h.detach().exp()
            h.mul_(2.0)
            return y.sum() + h.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        capture(Model(), (torch.randn(2, 4),))  # as eager says in its backward
    program = analyse(capture(Free(), (torch.randn(2, 4),)))
    writer = next(op for op in program.ops if "mul_" in op.name)
    ((source, target),) = writer.inplace
    assert program.values[source].storage == program.values[target].storage
    assert program.values[target].state == program.values[source].state + 1


def test_random_ops_form_a_chain_that_the_loss_reads():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5))
    program = analyse(capture(model, (torch.randn(2, 4),)))
    tokens = [i for i, v in enumerate(program.values) if v.storage is None]
    assert [program.values[v].size_bytes for v in tokens] == [0, 0]
    first, second = [op for op in program.ops if "bernoulli_" in op.name]
    assert tokens[0] in first.outputs
    assert tokens[0] in second.inputs
    loss = next(op for op in program.ops if op.phase == "loss")
    assert tokens[1] in loss.inputs


def test_a_written_buffer_orders_its_readers_and_they_run_once():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("count", torch.ones(4))

        def forward(self, x):
            before = self.linear(x) - self.count
            self.count.add_(1)
            return (before + self.count).sum()

    program = analyse(capture(Model(), (torch.randn(2, 4),)))
    before = next(op for op in program.ops if "sub" in op.name)
    writes = next(op for op in program.ops if "add_" in op.name)
    after = next(op for op in program.ops if op.name.startswith("aten.add.Tensor"))
    assert not before.recomputable
    assert not writes.recomputable
    assert not after.recomputable
    assert set(before.outputs) & set(writes.inputs)
    assert set(writes.outputs) & set(after.inputs)
    assert set(writes.outputs) & set(next(o for o in program.ops if o.phase == "loss").inputs)


def test_batch_norm_may_run_again_though_it_writes_statistics():
    program = analyse(capture(nn.Sequential(nn.BatchNorm1d(4)), (torch.randn(8, 4),)))
    norm = next(op for op in program.ops if op.name.startswith("aten.native_batch_norm.default"))
    assert norm.recomputable
    assert set(norm.outputs) & set(next(o for o in program.ops if o.phase == "loss").inputs)


def test_gradients_that_meet_are_added_into_the_one_that_dies():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            h = self.linear(x)
            return h.sin() + h.cos()

    program = analyse(capture(Model(), (torch.randn(2, 4),)))
    adds = [op for op in program.ops if op.phase == "backward" and "aten.add.Tensor" in op.name]
    assert len(adds) == 1
    assert adds[0].instead is not None


def test_a_tied_weight_is_one_input_with_one_gradient():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).tanh())

    joint = capture(Tied(), (torch.randn(2, 4),))
    sources = [source_of(n) for n in joint.entries if n is not None]
    assert [s.name for s in sources if s.kind == "parameter"] == ["a.weight"]
    assert len(joint.gradients) == 1


def test_only_the_loss_gets_a_gradient_where_there_is_one():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            logits = self.linear(x)
            return {"logits": logits, "loss": logits.square().mean()}

    joint = capture(Model(), (torch.randn(2, 4),))
    assert [facts(joint.outputs[t.output]).value.dim() for t in joint.tangents] == [0]
    other = joint.with_tangents([Tangent(0, (4, 1)), Tangent(1, ())])
    assert len(other.tangents) == 2
    assert other.nodes[: len(joint.session.forward_nodes)] == joint.session.forward_nodes
    held = analyse(joint).held
    assert len(held) == 2
    assert len(analyse(joint, hold_outputs=False).held) == 1


def test_capture_leaves_the_model_alone():
    class Caches(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            self.steps.add_(1)
            self.cached = x * 2
            return nn.functional.dropout(self.linear(self.cached))

    model = Caches()
    weight = model.linear.weight
    stream = torch.get_rng_state()
    capture(model, (torch.randn(2, 4, generator=torch.Generator()),))
    assert model.linear.weight is weight
    assert model.steps.item() == 0
    assert not hasattr(model, "cached")
    assert torch.equal(torch.get_rng_state(), stream)


def test_module_paths_forward_and_backward():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    joint = capture(model, (torch.randn(2, 4),))
    paths = {str(n.target): facts(n).module for n in joint.nodes if n.op == "call_function"}
    assert paths["aten.tanh.default"] == "1.0"
    assert paths["aten.tanh_backward.default"] == "1.0"


def test_the_same_model_gives_the_same_program():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1))
    x = torch.randn(2, 4)
    first, second = analyse(capture(model, (x,))), analyse(capture(model, (x,)))
    assert [(o.name, o.inputs, o.outputs) for o in first.ops] == [
        (o.name, o.inputs, o.outputs) for o in second.ops
    ]
    assert first.values == second.values


def test_an_argument_that_forward_changes_is_left_alone():
    class Appends(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, seen):
            seen.append(1)
            return self.linear(x)

    seen: list[int] = []
    capture(Appends(), (torch.randn(2, 4), seen))
    assert seen == []


def test_python_random_is_refused():
    import random

    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) * random.random()

    with pytest.raises(CaptureError, match="random"):
        capture(Draws(), (torch.randn(2, 4),))


def test_nests_are_split_and_rebuilt():
    from dataclasses import dataclass

    @dataclass
    class Box:
        a: torch.Tensor
        b: int

    x, y = torch.zeros(1), torch.ones(1)
    nest = {"box": Box(x, 3), "list": [y, x, 2.0]}
    tensors, structure = split(nest)
    assert [id(t) for t in tensors] == [id(x), id(y)]
    rebuilt = structure.rebuild([y, x])
    assert rebuilt["box"].a is y
    assert rebuilt["box"].b == 3
    assert rebuilt["list"][0] is x
    assert rebuilt["list"][1] is y
    assert split({"box": Box(x, 3), "list": [y, x, 2.0]})[1].key == structure.key
    assert split({"box": Box(x, 4), "list": [y, x, 2.0]})[1].key != structure.key
