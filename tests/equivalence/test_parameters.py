"""Parameters and state: tied, frozen, copied, saved, pickled, hooked; the objects stay the same."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from support.compare import assert_same, seed, train
from support.manage import assert_trains_alike, example_of, manage
from support.schedules import SCHEDULES
from support.zoo import Example, gaussian, tokens
from torch import Tensor, nn

import rekindle

EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


class Tied(nn.Module):
    """The embedding is the output layer; one weight is also registered under a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.middle = nn.Linear(16, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.again = self.middle

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.again(self.middle(self.embedding(ids)).tanh()))


def tied(device: torch.device) -> Example:
    torch.manual_seed(0)
    return example_of(Tied().to(device), lambda step: tokens(step, device, 32, 4, 8))


@EVERY_SCHEDULE
def test_tied_weights(schedule: str, device: torch.device) -> None:
    managed, _ = assert_trains_alike(lambda: tied(device), schedule, device)
    assert managed.head.weight is managed.embedding.weight
    assert len(list(managed.parameters())) == 3


class Stack(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("offset", torch.full((width,), 0.25))

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = self.dropout(layer(x).tanh() + self.offset)
        x = x * scale
        return x if shift is None else x + shift


def stack(device: torch.device) -> Example:
    torch.manual_seed(0)
    return example_of(Stack().to(device), lambda step: gaussian(step, device, 8, 16))


@EVERY_SCHEDULE
@pytest.mark.parametrize("needs_grad", [False, True], ids=["plain-input", "input-with-gradient"])
@pytest.mark.parametrize("frozen", [(0,), (3,), (0, 1), (1, 2), (0, 1, 2)])
def test_frozen_parameters_and_inputs_without_gradients(
    frozen: tuple[int, ...], needs_grad: bool, schedule: str, device: torch.device
) -> None:
    def make():
        torch.manual_seed(0)
        model = Stack().to(device)
        for i in frozen:
            model.layers[i].requires_grad_(False)
        model.layers[-1].bias.requires_grad_(False)
        return example_of(
            model, lambda step: gaussian(step, device, 8, 16, requires_grad=needs_grad)
        )

    assert_trains_alike(make, schedule, device)


def test_only_the_input_requires_grad(device: torch.device) -> None:
    def run(call: nn.Module) -> tuple[Tensor, Tensor]:
        seed(1)
        x = gaussian(0, device, 8, 16, requires_grad=True)
        out = call(x)
        out.square().sum().backward()
        return out, x.grad

    def build():
        torch.manual_seed(0)
        return example_of(
            Stack().to(device).requires_grad_(False),
            lambda step: gaussian(step, device, 8, 16, requires_grad=True),
        )

    expected, got = run(build().model), run(manage(build(), "thrice"))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_the_managed_module_looks_like_the_model(device: torch.device) -> None:
    example = stack(device)
    model = example.model
    managed = manage(example)
    assert isinstance(managed, Stack)
    assert managed is not model
    assert list(managed.state_dict()) == list(model.state_dict())
    for (name, mine), (other, theirs) in zip(
        managed.named_parameters(), model.named_parameters(), strict=True
    ):
        assert name == other
        assert mine is theirs
    for mine, theirs in zip(managed.buffers(), model.buffers(), strict=True):
        assert mine is theirs
    assert [n for n, _ in managed.named_modules()] == [n for n, _ in model.named_modules()]
    assert inspect.signature(managed.forward) == inspect.signature(model.forward)
    assert len(managed.layers) == 4


def test_the_given_model_is_left_alone(device: torch.device) -> None:
    example = stack(device)
    forward = example.model.forward
    manage(example, "thrice")
    assert type(example.model) is Stack
    assert example.model.forward == forward
    assert_same(train(stack(device)), train(example))


def test_in_place_changes_the_given_model(device: torch.device) -> None:
    example = stack(device)
    managed = manage(example, "thrice", inplace=True)
    assert managed is example.model
    assert managed.plan.schedule is not None
    assert_same(train(stack(device)), train(example))


@EVERY_SCHEDULE
def test_deepcopy(schedule: str, device: torch.device) -> None:
    expected = train(stack(device))
    example = stack(device)
    managed = manage(example, schedule)
    copied = copy.deepcopy(managed)
    for mine, theirs in zip(copied.parameters(), managed.parameters(), strict=True):
        assert mine is not theirs
    other = Example(copied, example.inputs, example.loss, optimizer=example.optimizer)
    assert_same(expected, train(other))  # trains its own parameters ...
    untouched = stack(device).model
    for mine, theirs in zip(managed.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(mine, theirs)  # ... and not those it was copied from
    assert_same(expected, train(example, managed))


def test_deepcopy_of_a_model_managed_in_place(device: torch.device) -> None:
    example = stack(device)
    managed = manage(example, "thrice", inplace=True)
    copied = copy.deepcopy(managed)
    other = Example(copied, example.inputs, example.loss, optimizer=example.optimizer)
    assert_same(train(stack(device)), train(other))


def test_state_dict_round_trip(device: torch.device) -> None:
    example = stack(device)
    managed = manage(example, "thrice")
    train(example, managed)
    saved = copy.deepcopy(managed.state_dict())
    plain = Stack().to(device)
    plain.load_state_dict(saved)  # into a plain model
    fresh = stack(device)
    again = manage(fresh, "thrice")
    again.load_state_dict(plain.state_dict())  # and back into a managed one
    assert all(torch.equal(again.state_dict()[name], value) for name, value in saved.items())
    continued = Example(plain.train(), example.inputs, example.loss, optimizer="sgd")
    assert_same(train(continued), train(fresh, again))


def test_loading_by_assignment(device: torch.device) -> None:
    """`load_state_dict(assign=True)` replaces the parameters: the plan must see the new ones."""
    source = Stack().to(device).train()
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.mul_(2.0)
    example = stack(device)
    managed = manage(example, "thrice")
    managed.load_state_dict(copy.deepcopy(source.state_dict()), assign=True)
    seed(2)
    expected = source(gaussian(0, device, 8, 16))
    seed(2)
    got = managed(gaussian(0, device, 8, 16))
    assert torch.equal(expected, got)
    expected.sum().backward()
    got.sum().backward()
    for mine, theirs in zip(managed.parameters(), source.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_the_state_can_be_pickled(device: torch.device) -> None:
    example = stack(device)
    managed = manage(example, "thrice")
    train(example, managed, steps=1)
    back = pickle.loads(pickle.dumps(managed.state_dict()))
    assert all(torch.equal(back[name], value) for name, value in managed.state_dict().items())
    file = io.BytesIO()
    torch.save(managed.state_dict(), file)
    file.seek(0)
    plain = Stack().to(device)
    plain.load_state_dict(torch.load(file, weights_only=True))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("inplace", [False, True])
def test_a_managed_model_is_pickled_as_the_plain_one(
    inplace: bool, protocol: int, device: torch.device
) -> None:
    example = stack(device)
    managed = manage(example, "thrice", inplace=inplace)
    back = pickle.loads(pickle.dumps(managed, protocol))
    assert type(back) is Stack
    assert not any("rekindle" in name for name in vars(back))
    other = Example(back, example.inputs, example.loss, optimizer=example.optimizer)
    assert_same(train(stack(device)), train(other))


def test_torch_save_of_a_managed_model(device: torch.device) -> None:
    example = stack(device)
    file = io.BytesIO()
    torch.save(nn.ModuleDict({"inner": manage(example, "thrice")}), file)
    file.seek(0)
    back = torch.load(file, weights_only=False)["inner"]
    assert type(back) is Stack
    other = Example(back, example.inputs, example.loss, optimizer=example.optimizer)
    assert_same(train(stack(device)), train(other))


class TwoForwards(nn.Linear):
    def doubled(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_of_a_managed_model_with_a_forward_of_its_own(copied_by) -> None:
    model = TwoForwards(4, 4)
    model.forward = model.doubled
    x = torch.randn(3, 4)
    managed = rekindle.rematerialize(model, (x,), budget=1.0, profile="estimate")
    copied = copied_by(managed)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    out = copied(x)
    assert torch.equal(out, 2 * nn.functional.linear(x, copied.weight, copied.bias))
    assert out.any()  # it reads its own parameters, not those it was copied from


@pytest.mark.parametrize("first_inplace", [False, True])
@pytest.mark.parametrize("then_inplace", [False, True])
def test_managing_a_managed_model(
    first_inplace: bool, then_inplace: bool, device: torch.device
) -> None:
    """The new plan takes the old one's place, on the same class and the same parameters."""
    example = stack(device)
    once = manage(example, "keep-all", inplace=first_inplace)
    again = Example(once, example.inputs, example.loss, optimizer=example.optimizer)
    managed = manage(again, "thrice", inplace=then_inplace)
    assert (managed is once) is then_inplace
    assert type(managed).__mro__[2] is Stack
    assert len(managed.plans) == 1
    assert len(managed.plan.schedule.ops) > len(managed.plan.problem.ops)
    assert_same(train(stack(device)), train(again, managed))


def test_managing_a_managed_model_with_a_forward_of_its_own() -> None:
    model = TwoForwards(4, 4)
    model.forward = model.doubled
    x = torch.randn(3, 4)
    expected = model(x)
    options = {"budget": 1.0, "profile": "estimate"}
    for inplace in (False, True):
        once = rekindle.rematerialize(model, (x,), **options)
        assert torch.equal(
            rekindle.rematerialize(once, (x,), inplace=inplace, **options)(x), expected
        )


def test_hooks_run_once(device: torch.device) -> None:
    calls: list[str] = []
    example = stack(device)
    example.model.register_forward_hook(lambda *_: calls.append("before managing"))
    example.model.register_forward_pre_hook(lambda *_: calls.append("pre"))
    managed = manage(example, "thrice")
    assert not calls, "capture must not run the caller's hooks"
    managed.register_forward_hook(lambda *_: calls.append("after managing"))
    out = managed(*example.inputs(0)[0])
    assert sorted(calls) == ["after managing", "before managing", "pre"]
    out.sum().backward()
    assert len(calls) == 3


def test_gradient_hooks_of_parameters(device: torch.device) -> None:
    """Tensor hooks see and change gradients, post-accumulate hooks run once a parameter."""

    def run(example: Example, call: nn.Module) -> tuple[list[str], list[Tensor]]:
        order: list[str] = []
        for name, parameter in call.named_parameters():
            parameter.register_hook(lambda grad, name=name: order.append(name) or grad * 2)
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: order.append(f"{name} accumulated")
            )
        seed(4)
        call(*example.inputs(0)[0]).square().sum().backward()
        return order, [p.grad for p in call.parameters()]

    plain = stack(device)
    expected_order, expected = run(plain, plain.model)
    example = stack(device)
    order, got = run(example, manage(example, "thrice"))
    assert sorted(order) == sorted(expected_order)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_gradients_leave_the_backward_one_after_another(device: torch.device) -> None:
    """A later layer's gradient arrives while earlier layers' are not there yet, as buckets of
    distributed training need it."""
    example = stack(device)
    managed = manage(example, "keep-all")
    there: list[int] = []
    for parameter in managed.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: there.append(sum(p.grad is not None for p in managed.parameters()))
        )
    managed(*example.inputs(0)[0]).sum().backward()
    assert len(there) == 8
    assert there[0] < 8
    assert len(set(there)) >= 4, f"the gradients came in {len(set(there))} groups"
