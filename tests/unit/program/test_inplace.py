"""Each kernel that writes over an argument gives the bits of its ordinary form."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.recording import capture

from rekindle import rematerialize, verify
from rekindle.capture.node_facts import facts
from rekindle.core import keep_all, simulate
from rekindle.profile import profile_nodes
from rekindle.program import analyse
from rekindle.program.formulate import formulate
from rekindle.program.inplace import OVER
from rekindle.rewrite.cross_entropy import join_loss_gradients, over, whole
from rekindle.rewrite.graph_edit import GraphEdit
from rekindle.rewrite.passes import rewrite

aten = torch.ops.aten
SHAPES = [(7, 33), (64, 1000), (3, 5, 1031), (16, 5003)]
_EXTRA: dict[Any, tuple[Any, ...]] = {
    aten.clamp.default: (-0.5, 0.5),
    aten.clamp_min.default: (0.1,),
    aten.threshold_backward.default: (0,),
    aten.elu_backward.default: (1.0, 1.0, 1.0, False),
    aten.leaky_relu_backward.default: (0.01, False),
    aten.hardtanh_backward.default: (-1.0, 1.0),
    aten.softplus_backward.default: (1.0, 20.0),
    aten.pow.Tensor_Scalar: (2,),
    aten._softmax.default: (-1, False),
    aten._log_softmax.default: (-1, False),
}


def _tensors(target: Any) -> int:
    """How many tensors the op takes."""
    return sum(str(a.type) == "Tensor" for a in target._schema.arguments)


def _arguments(target: Any, tensors: list[torch.Tensor], extra: tuple[Any, ...]) -> list[Any]:
    """Tensors and the rest, in the order of the op's arguments."""
    left, rest = list(tensors), list(extra)
    places = [left if str(a.type) == "Tensor" else rest for a in target._schema.arguments]
    return [place.pop(0) for place in places if place]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", [t for t in OVER if t is not whole], ids=str)
def test_over_an_argument_is_exact(target: Any, dtype: torch.dtype, device: torch.device) -> None:
    form, name = OVER[target]
    assert torch.Tag.generated not in form.tags, "a form that computes elsewhere and copies"
    generator = torch.Generator(device).manual_seed(0)
    for shape in SHAPES:
        tensors = [
            torch.randn(shape, generator=generator, device=device, dtype=dtype)
            for _ in range(_tensors(target))
        ]
        if target is aten.where.self:
            tensors[0] = tensors[0] > 0
        extra = _EXTRA.get(target, ())
        if "softmax_backward_data" in str(target):
            extra = (-1, dtype)
            tensors[1] = (
                tensors[1].log_softmax(-1) if "log" in str(target) else tensors[1].softmax(-1)
            )
        expected = target(*_arguments(target, tensors, extra))
        for k, source in enumerate(tensors):
            if source.dtype != expected.dtype:
                continue
            given = [t.clone() for t in tensors]
            address = given[k].data_ptr()
            result = form(*_arguments(target, given, extra), **{name: given[k]})
            assert result.data_ptr() == address
            assert torch.equal(result.view(torch.uint8), expected.view(torch.uint8)), (shape, k)
            for j, (now, before) in enumerate(zip(given, tensors, strict=True)):
                assert j == k or torch.equal(now.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(1, 3), (13, 7), (300, 1031), (257, 50257)])
def test_the_joined_gradient_of_cross_entropy_is_exact(
    reduction: str,
    dtype: torch.dtype,
    weighted: bool,
    shape: tuple[int, int],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rekindle.rewrite.cross_entropy._ROWS_BYTES", 1 << 20)  # several parts
    generator = torch.Generator(device).manual_seed(0)
    rows, classes = shape
    logits = torch.randn(shape, generator=generator, device=device).mul_(3).to(dtype)
    target = torch.randint(classes, (rows,), generator=generator, device=device)
    target[rows // 2] = -100 if rows > 1 else 0
    weight = torch.rand(classes, generator=generator, device=device).to(dtype) if weighted else None
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    log_probabilities = logits.log_softmax(1)
    rest = (target, weight, number, -100)
    out, total = aten.nll_loss_forward.default(log_probabilities, *rest)
    grad = torch.rand(out.shape, generator=generator, device=device).to(dtype)
    sparse = aten.nll_loss_backward.default(grad, log_probabilities, *rest, total)
    expected = aten._log_softmax_backward_data.default(sparse, log_probabilities, 1, dtype)
    assert torch.equal(whole(grad, log_probabilities, *rest, total), expected)
    result = over(grad, log_probabilities, *rest, total, out=log_probabilities)
    assert result.data_ptr() == log_probabilities.data_ptr()
    assert torch.equal(log_probabilities, expected)


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 4096)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(x).float(), target)


def test_the_loss_region_holds_the_logits_once(device: torch.device) -> None:
    """Eager holds the log-probabilities, their sparse gradient and its result together."""
    model = Classifier().to(device)
    args = torch.randn(256, 8, device=device), torch.randint(4096, (256,), device=device)
    joint = rewrite(capture(model, args))
    program = analyse(joint)
    names = [op.name for op in program.ops]
    assert any("nll_log_softmax_backward" in name for name in names)
    assert not any("nll_loss_backward" in name for name in names)
    problem = formulate(program, profile_nodes(joint.nodes))
    logits = 256 * 4096 * 4
    assert simulate(problem, keep_all(problem)).peak < logits * 1.2 + problem_workspace(problem)
    managed = rematerialize(model, args, budget="1GiB", solver="keep-all")
    assert verify(model, managed, args).equal


def problem_workspace(problem: Any) -> int:
    return max(op.workspace for op in problem.ops)


def test_a_gradient_with_two_readers_is_left_alone(device: torch.device) -> None:
    """Only a sparse gradient that nobody else reads is made in parts."""
    given = torch.randn(4, 8, device=device), torch.randint(9, (4,), device=device)
    joint = rewrite(capture(Classifier().to(device), given))
    before = [n.target for n in joint.nodes]
    edit = GraphEdit(joint.nodes[0].graph, int, 0, False, forward=())
    join_loss_gradients(edit)  # a second time changes nothing
    assert [n.target for n in joint.nodes] == before


@pytest.mark.parametrize("which", [0, 1])
def test_a_value_written_over_another_has_its_block(which: int) -> None:
    """Of two blocks for as many bytes one may be larger: the allocator does not always split."""
    joint = rewrite(capture(Classifier(), (torch.randn(256, 8), torch.randint(4096, (256,)))))
    program = analyse(joint)
    profile = profile_nodes(joint.nodes)
    op = next(op for op in program.ops if op.inplace)
    pair = op.inplace[0]
    made = program.values[pair[which]].storage
    node = next(n for n in joint.nodes if facts(n).storage == made)
    distinct = profile.which[profile.names.index(node.name)]
    seen = 256 * 4096 * 4 + 614_400
    larger = replace(profile.ops[distinct], output_bytes=(seen,))
    ops = tuple(larger if i == distinct else o for i, o in enumerate(profile.ops))
    assert [formulate(program, profile).values[v].size for v in pair] == [256 * 4096 * 4] * 2
    problem = formulate(program, replace(profile, ops=ops))
    assert [problem.values[v].size for v in pair] == [seen, seen]
