"""The managed module inside autograd: losses, outputs, several calls and backwards, failures."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoint_module
from support.compare import Record, assert_same, keep, record_gradients, seed, train
from support.manage import assert_trains_alike, example_of, manage
from support.schedules import SCHEDULES
from support.zoo import Example, gaussian
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rekindle.errors import RekindleError

EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.gelu(self.norm(self.first(x))), 0.2, self.training)
        return x + self.second(h)


def net(device: torch.device, *, requires_grad: bool = True) -> Example:
    torch.manual_seed(0)
    return example_of(
        nn.Sequential(Net(), Net(), Net()).to(device),
        lambda step: gaussian(step, device, 8, 16, requires_grad=requires_grad),
    )


def assert_steps_alike(
    make: Callable[[], Example],
    step: Callable[[nn.Module, Example], Any],
    schedule: str,
    **options: Any,
) -> None:
    """A step of the caller's own making, with eager and managed; gradients of parameters and what
    the step returns are compared."""

    def run(example: Example, call: nn.Module) -> Record:
        seed(11)
        returned = step(call, example)
        record: Record = {}
        record_gradients(record, "", call, ())
        for i, value in enumerate(returned if isinstance(returned, (tuple, list)) else [returned]):
            record[f"returned {i}"] = keep(value) if isinstance(value, Tensor) else None
        return record

    plain, example = make(), make()
    assert_same(run(plain, plain.model), run(example, manage(example, schedule, **options)))


@EVERY_SCHEDULE
def test_sum_as_the_loss(schedule: str, device: torch.device) -> None:
    def make():
        example = net(device)
        return Example(example.model, example.inputs, torch.sum, optimizer="sgd")

    assert_trains_alike(make, schedule, device)


class NamedInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, input: Tensor, self_: float = 1.0, args: Tensor | None = None) -> Tensor:
        return self.linear(input).tanh() * self_ + (0 if args is None else args)


@EVERY_SCHEDULE
@pytest.mark.parametrize("by_name", [False, True], ids=["by-position", "by-name"])
def test_an_argument_called_input(by_name: bool, schedule: str, device: torch.device) -> None:
    def inputs(step: int):
        x = gaussian(step, device, 8, 16, requires_grad=True)
        extra = gaussian(step + 20, device, 8, 16)
        return ((), {"input": x, "args": extra}) if by_name else ((x, 0.5, extra), {})

    def make():
        torch.manual_seed(0)
        return example_of(NamedInput().to(device), inputs)

    assert_trains_alike(make, schedule, device)


class ManyOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.unused = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> dict[str, Any]:
        first = self.layers[0](x).tanh()
        second = self.layers[1](first).tanh()
        side = self.layers[2](first)
        return {
            "main": second,
            "side": (side, [first.detach(), second.argmax(dim=-1)]),
            "unused": self.unused(x),
            "constant": 3,
            "nothing": None,
        }


@EVERY_SCHEDULE
@pytest.mark.parametrize(
    "loss",
    [
        lambda out: out["main"].sum(),
        lambda out: out["side"][0].sum(),
        lambda out: out["main"].sum() + out["side"][0].square().sum(),
    ],
    ids=["main", "side", "both"],
)
def test_several_outputs_of_which_some_are_unused(
    loss: Callable, schedule: str, device: torch.device
) -> None:
    def make():
        torch.manual_seed(0)
        return example_of(
            ManyOutputs().to(device),
            lambda step: gaussian(step, device, 8, 16, requires_grad=True),
            loss,
        )

    assert_trains_alike(make, schedule, device)


class Aliases(nn.Module):
    """Outputs that are an input, a parameter, a view of each other, and the same tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.linear(x).tanh()
        return h, h.view(4, 2, 16), h, x, h[:, :4]


@EVERY_SCHEDULE
def test_outputs_that_share_storage(schedule: str, device: torch.device) -> None:
    def loss(out: tuple[Tensor, ...]) -> Tensor:
        a, b, c, d, e = out
        return a.sum() + b.square().sum() + c.sin().sum() + d.sum() + e.cos().sum()

    def make():
        torch.manual_seed(0)
        return example_of(
            Aliases().to(device),
            lambda step: gaussian(step, device, 8, 16, requires_grad=True),
            loss,
        )

    managed, _ = assert_trains_alike(make, schedule, device)
    x = gaussian(0, device, 8, 16, requires_grad=True)
    out = managed(x)
    pointers = [t.untyped_storage().data_ptr() for t in out]
    assert pointers[0] == pointers[1] == pointers[2] == pointers[4]
    assert pointers[3] == x.untyped_storage().data_ptr()


@EVERY_SCHEDULE
def test_two_managed_modules_in_one_process(schedule: str, device: torch.device) -> None:
    def make(width: int):
        torch.manual_seed(width)
        layers = [nn.Linear(16, width), nn.Dropout(0.1), nn.GELU(), nn.Linear(width, 16)]
        return example_of(
            nn.Sequential(*layers).to(device),
            lambda step: gaussian(step, device, 8, 16, requires_grad=True),
        )

    def together(a: nn.Module, b: nn.Module) -> list[Tensor]:
        seed(3)
        x = gaussian(0, device, 8, 16, requires_grad=True)
        y = gaussian(1, device, 8, 16, requires_grad=True)
        out, other = a(x), b(y)
        (out * other).sum().backward()
        return [out, other, x.grad, y.grad, *(p.grad for m in (a, b) for p in m.parameters())]

    expected = together(make(8).model, make(24).model)
    got = together(manage(make(8), schedule), manage(make(24), schedule))
    assert all(torch.equal(p, q) for p, q in zip(expected, got, strict=True))


@EVERY_SCHEDULE
@pytest.mark.parametrize("order", ["first-first", "last-first", "one-loss"])
def test_two_forwards_before_the_backward(order: str, schedule: str, device: torch.device) -> None:
    def step(call: nn.Module, example: Example) -> list[Tensor]:
        a, b = example.inputs(0)[0][0], example.inputs(1)[0][0]
        out, other = call(a), call(b)
        if order == "one-loss":
            (out * other).sum().backward()
        else:
            for loss in (out.sum(), other.square().sum())[:: 1 if order == "first-first" else -1]:
                loss.backward()
        return [out, other, a.grad, b.grad]

    assert_steps_alike(lambda: net(device), step, schedule)


@EVERY_SCHEDULE
def test_a_forward_without_a_backward(schedule: str, device: torch.device) -> None:
    """A dropped graph leaves nothing behind that the next step could meet."""

    def step(call: nn.Module, example: Example) -> list[Tensor]:
        call(*example.inputs(0)[0])
        gc.collect()
        x = example.inputs(1)[0][0]
        out = call(x)
        out.sum().backward()
        return [out, x.grad]

    assert_steps_alike(lambda: net(device), step, schedule)


@EVERY_SCHEDULE
def test_gradient_accumulation(schedule: str, device: torch.device) -> None:
    def step(call: nn.Module, example: Example) -> list[Tensor]:
        losses = []
        for micro_batch in range(3):
            loss = example.loss(call(*example.inputs(micro_batch)[0])) / 3
            loss.backward()
            losses.append(loss)
        return losses

    assert_steps_alike(lambda: net(device), step, schedule)


@EVERY_SCHEDULE
def test_retain_graph(schedule: str, device: torch.device) -> None:
    def step(call: nn.Module, example: Example) -> list[Tensor]:
        x = example.inputs(0)[0][0]
        out = call(x)
        out.sum().backward(retain_graph=True)
        out.square().sum().backward(retain_graph=True)
        once_more = torch.autograd.grad(out.sin().sum(), x)[0]
        return [out, x.grad, once_more]

    assert_steps_alike(lambda: net(device), step, schedule)


class WrittenLate(nn.Module):
    """What a cube keeps for its backward is written over there, in whichever stretch that is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(160, 160) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(torch.pow(layer(x), 3))
        return x


def test_retain_graph_where_later_stretches_write(device: torch.device) -> None:
    def make() -> Example:
        torch.manual_seed(0)
        return example_of(WrittenLate().to(device), lambda step: gaussian(step, device, 32, 160))

    example = make()
    lowered = manage(example, "keep-all").plan.runner.lowered
    assert len(lowered.stretches) > 2
    assert len(lowered.written) > 1

    def step(call: nn.Module, example: Example) -> list[Tensor]:
        out = call(*example.inputs(0)[0])
        out.sum().backward(retain_graph=True)
        out.sum().backward()
        return [out]

    assert_steps_alike(make, step, "keep-all")


def test_a_second_backward_without_retain_graph_is_refused(device: torch.device) -> None:
    example = net(device)
    out = manage(example, "sqrt")(*example.inputs(0)[0])
    out.sum().backward(retain_graph=False)
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()


@EVERY_SCHEDULE
def test_gradients_of_some_inputs_by_autograd_grad(schedule: str, device: torch.device) -> None:
    def step(call: nn.Module, example: Example) -> list[Tensor]:
        x = example.inputs(0)[0][0]
        out = call(x)
        wanted = [x, next(iter(call.parameters()))]
        return [out, *torch.autograd.grad(out.square().sum(), wanted)]

    assert_steps_alike(lambda: net(device), step, schedule)


def test_double_backward_is_refused_clearly(device: torch.device) -> None:
    example = net(device)
    x = example.inputs(0)[0][0]
    out = manage(example, "sqrt")(x)

    def differentiate_twice() -> None:
        (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        gradient.square().sum().backward()

    with pytest.raises((RuntimeError, RekindleError), match=r"(?i)twice|double"):
        differentiate_twice()


class Fails(torch.autograd.Function):
    """Raises in the backward as often as told."""

    left = 0

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        if Fails.left:
            Fails.left -= 1
            raise ValueError("thrown inside backward")
        return gradient


@EVERY_SCHEDULE
@pytest.mark.parametrize("where", ["after the model", "before the model", "in a hook"])
def test_an_exception_inside_backward(where: str, schedule: str, device: torch.device) -> None:
    """The step that failed leaves no trace: the next one is right, random stream included."""

    def step(call: nn.Module, example: Example) -> list[Tensor]:
        inputs = example.inputs(0)[0][0]
        parameters = list(call.parameters())
        Fails.left = 1
        x = Fails.apply(inputs) if where == "before the model" else inputs
        out = call(x)
        if where == "after the model":
            out = Fails.apply(out)
        hook = None
        if where == "in a hook":
            hook = parameters[len(parameters) // 2].register_hook(
                lambda grad: Fails.backward(None, grad)
            )
        with pytest.raises(ValueError, match="thrown inside backward"):
            out.sum().backward()
        if hook is not None:
            hook.remove()
        assert Fails.left == 0
        for parameter in parameters:
            parameter.grad = None
        after = torch.rand(2, device=device)
        y = example.inputs(1)[0][0]
        good = call(y)
        good.square().sum().backward()
        return [after, good, y.grad, torch.rand(2, device=device)]

    assert_steps_alike(lambda: net(device), step, schedule)


class Reentered(nn.Module):
    """Blocks under `torch.utils.checkpoint`, with dropout."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(Net() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@EVERY_SCHEDULE
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torch_checkpoint_inside_the_model(
    use_reentrant: bool, schedule: str, device: torch.device
) -> None:
    def make():
        torch.manual_seed(0)
        return example_of(
            Reentered(use_reentrant).to(device),
            lambda step: gaussian(step, device, 8, 16, requires_grad=True),
        )

    assert_trains_alike(make, schedule, device)


class Decorated(Net):
    """Blocks under `torch.utils.checkpoint` as a decorator, which torch 2.14 brought."""

    def forward(self, x: Tensor) -> Tensor:
        region = checkpoint(use_reentrant=False)(super().forward)
        return region(x)


@pytest.mark.skipif(not hasattr(checkpoint_module, "_checkpoint_impl"), reason="torch < 2.14")
@EVERY_SCHEDULE
def test_torch_checkpoint_as_a_decorator(schedule: str, device: torch.device) -> None:
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(Decorated(), Decorated()).to(device)
        return example_of(model, lambda step: gaussian(step, device, 8, 16))

    assert_trains_alike(make, schedule, device)


@EVERY_SCHEDULE
def test_a_part_of_a_larger_graph(schedule: str, device: torch.device) -> None:
    """Called once on a tensor that requires grad and once on the raw input, outputs added, one
    backward (HiRemate C.2.2): each signature has a plan of its own."""

    def step(call: nn.Module, example: Example) -> list[Tensor]:
        weight = gaussian(5, device, 16, requires_grad=True)
        x = example.inputs(0)[0][0].detach()
        out = call(x * weight) + call(x)
        out.square().sum().backward()
        return [out, weight.grad]

    assert_steps_alike(lambda: net(device), step, schedule, on_miss="replan")


class Dynamic(nn.Module):
    """The number of rounds depends on the data: only its body can be managed."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Net(), Net())

    def forward(self, x: Tensor) -> Tensor:
        rounds = 1 + int(x.detach().abs().sum() > 0) + int(x.detach()[0, 0] > 5)
        for _ in range(rounds):
            x = self.body(x)
        return x


@EVERY_SCHEDULE
def test_one_submodule_of_a_dynamic_model(schedule: str, device: torch.device) -> None:
    def make():
        torch.manual_seed(0)
        return example_of(
            Dynamic().to(device), lambda step: gaussian(step, device, 8, 16, requires_grad=True)
        )

    expected = train(make())
    example = make()
    body = Example(example.model.body, example.inputs, example.loss)
    example.model.body = manage(body, schedule)
    assert_same(expected, train(example))


def test_a_parameter_changed_between_forward_and_backward(device: torch.device) -> None:
    """Eager refuses when a value that the backward needs was overwritten; so do we, whatever the
    schedule would have recomputed from it."""
    for schedule in SCHEDULES:
        example = net(device)
        managed = manage(example, schedule)
        out = managed(*example.inputs(0)[0])
        with torch.no_grad():
            managed[1].second.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_functional_call_with_other_parameters(device: torch.device) -> None:
    """`torch.func.functional_call` swaps parameters in: the plan runs on those."""
    example = net(device)
    managed = manage(example, "thrice")
    others = {
        name: (p.detach() * 2).requires_grad_() for name, p in example.model.named_parameters()
    }

    def run(call: nn.Module) -> list[Tensor]:
        seed(6)
        x = example.inputs(0)[0][0]
        out = torch.func.functional_call(call, others, (x,))
        return [out, *torch.autograd.grad(out.square().sum(), [x, *others.values()])]

    plain = net(device).model
    assert all(torch.equal(a, b) for a, b in zip(run(plain), run(managed), strict=True))
