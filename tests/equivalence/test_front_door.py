"""Models whose code asks about its tensors, keeps weights out of its modules or stores what it
computes: read as eager runs it, or refused with the line and what to try."""

import copy
import functools
from pathlib import Path

import numpy
import pytest
import torch
from support.manage import assert_trains_alike, example_of, manage
from support.schedules import SCHEDULES
from support.zoo import Example, gaussian
from torch import Tensor, nn

import rekindle
from rekindle.capture.node_facts import facts
from rekindle.errors import CaptureError, PlanMismatch

EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)
WIDTH = 16

# Dynamo's own deprecations, and its word on lru_cache, are not about the model.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*lru_cache.*:UserWarning"),
]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.ReLU(inplace=True))
        self.last = nn.Linear(WIDTH, WIDTH)


class InsistsOnTensor(Layers):
    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise TypeError(f"expected a Tensor, got a {type(x).__name__}")
        return self.last(self.inner(self.first(x)))


class AsksWhetherItIsCompiled(Layers):
    """Takes another path where it believes that it is: the captured one must be eager's."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise TypeError
        h = self.first(x)
        if torch.compiler.is_compiling() or torch.compiler.is_dynamo_compiling():
            h = h * 2
        return self.last(self.inner(h))


class WeightInClosure(Layers):
    def __init__(self) -> None:
        super().__init__()
        weight = self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.mix = lambda x: x @ weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.mix(self.first(x))))


class WeightInPartial(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.mix = functools.partial(nn.functional.linear, weight=self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.mix(self.first(x))))


class WeightDeepInTables(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.table = {"a": {"b": {"c": [self.weight]}}}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x) @ self.table["a"]["b"]["c"][0]))


class ReadsANumber(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise TypeError
        return self.last(self.inner(self.first(x) * self.scale.item()))


class KeepsARunningMean(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise TypeError
        h = self.first(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(dim=0)
        return self.last(self.inner(h - self.mean))


class UsesSavedRegion(Layers):
    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor:
            raise TypeError
        from torch.utils.checkpoint import checkpoint

        return checkpoint(self.last, self.inner(self.first(x)), use_reentrant=False)


READ = (
    InsistsOnTensor,
    AsksWhetherItIsCompiled,
    WeightInClosure,
    WeightInPartial,
    WeightDeepInTables,
    ReadsANumber,
    KeepsARunningMean,
    UsesSavedRegion,
)


def example(kind: type[nn.Module], device: torch.device) -> Example:
    torch.manual_seed(0)
    return example_of(
        kind().to(device), lambda step: gaussian(step, device, 8, WIDTH, requires_grad=True)
    )


@EVERY_SCHEDULE
@pytest.mark.parametrize("kind", READ, ids=lambda kind: kind.__name__)
def test_code_that_is_read(kind: type[nn.Module], schedule: str, device: torch.device) -> None:
    managed, _ = assert_trains_alike(lambda: example(kind, device), schedule, device)
    joint = managed.plan.joint
    sources = [facts(node).source for node in joint.nodes if node.op == "placeholder"]
    entered = {s.name for s in sources if s.kind == "parameter"}
    assert entered == {name for name, _ in kind().named_parameters()}
    modules = {facts(node).module for node in joint.nodes if node.op == "call_function"}
    assert {"first", "last"} <= modules


def test_source_lines_are_known(device: torch.device) -> None:
    managed = manage(example(InsistsOnTensor, device))
    lines = {facts(n).where for n in managed.plan.joint.nodes if n.op == "call_function"}
    assert any("test_front_door.py:" in line for line in lines)


def test_a_number_that_was_read_is_guarded(device: torch.device) -> None:
    made = example(ReadsANumber, device)
    managed = manage(made)
    managed(*made.inputs(0)[0])
    managed.scale.fill_(0.25)
    with pytest.raises(PlanMismatch, match=r"0\.5"):
        managed(*made.inputs(0)[0])


def test_many_captures_in_one_process(device: torch.device) -> None:
    """Dynamo gives up on a function that it has read eight times in a row."""
    for _ in range(10):
        manage(example(InsistsOnTensor, device))


def test_what_users_have_compiled_stays_compiled(device: torch.device) -> None:
    count = 0

    def backend(graph, _inputs):
        nonlocal count
        count += 1
        return graph.forward

    compiled = torch.compile(lambda x: x.sin() * 2, backend=backend)
    x = torch.randn(3, device=device)
    compiled(x)
    manage(example(InsistsOnTensor, device))
    compiled(x)
    assert count == 1


def doubled(x: Tensor) -> Tensor:
    return x * 2


@torch.compiler.substitute_in_graph(doubled)
def doubled_when_read(x: Tensor) -> Tensor:
    return x * 3


class CallsWhatIsSubstituted(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(doubled(self.first(x)))


def test_code_that_readers_are_to_replace(device: torch.device) -> None:
    """A compiler was told to read other code: eager runs the function's own."""
    assert_trains_alike(lambda: example(CallsWhatIsSubstituted, device), "floor", device)


class AsksForAddresses(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = h.tanh()
        if y.data_ptr() == h.data_ptr():  # the line to be named
            y = y + 1
        return self.last(y)


def test_code_that_cannot_be_read(device: torch.device) -> None:
    line = next(
        number
        for number, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text.endswith("# the line to be named")
    )
    with pytest.raises(CaptureError, match="cannot be read in one piece") as refusal:
        manage(example(AsksForAddresses, device))
    text = str(refusal.value)
    assert f"at {__file__}:{line}; " in text
    assert "Data pointer" in text
    assert "submodule" in text
    assert len(text) < 2000


def test_a_failed_capture_leaves_the_model_alone(device: torch.device) -> None:
    made = example(AsksForAddresses, device)
    state = {k: v.clone() for k, v in made.model.state_dict().items()}
    stream = torch.get_rng_state()
    with pytest.raises(CaptureError):
        manage(made)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(v, state[k]) for k, v in made.model.state_dict().items())
    assert all(type(p) is nn.Parameter for p in made.model.parameters())


class ArrayOfABuffer(Layers):
    """What numpy computes has other last bits where it is translated to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        grid = torch.from_numpy(numpy.cbrt(self.grid.cpu().numpy())).to(x.device)
        return self.last(self.inner(self.first(x) + grid))


class ArrayOfAnActivation(Layers):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h * float(h.detach().cpu().numpy().mean()))


@pytest.mark.parametrize("kind", [ArrayOfABuffer, ArrayOfAnActivation])
def test_arrays_are_refused(kind: type[nn.Module], device: torch.device) -> None:
    with pytest.raises(CaptureError, match=r"numpy array made at .*test_front_door\.py:\d+; "):
        manage(example(kind, device))


class ArrayMadeBefore(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.grid = numpy.cbrt(numpy.linspace(0, 1, WIDTH, dtype=numpy.float32))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x) + torch.from_numpy(self.grid).to(x.device)))


def test_an_array_that_becomes_a_tensor(device: torch.device) -> None:
    """A plan would not see what is written into the array later."""
    made = example(ArrayMadeBefore, device)
    with pytest.raises(CaptureError, match="numpy"):
        manage(made)


class FillsAList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor, kept: list[Tensor] | None = None) -> Tensor:
        h = self.first(x).tanh()
        if kept is not None:
            kept.append(h.sin())
        return self.second(h)


@pytest.mark.filterwarnings("ignore::rekindle.runtime.managed_module.MissedPlanWarning")
def test_a_call_with_fewer_outputs_than_planned() -> None:
    """A list that forward fills for one call, and that the next one does not give."""
    torch.manual_seed(0)
    plain = FillsAList()
    managed = rekindle.rematerialize(
        copy.deepcopy(plain), torch.zeros(4, 6), {"kept": []}, budget=1.0, profile="estimate"
    )
    for step in range(4):
        x = gaussian(step, torch.device("cpu"), 4, 6)
        found = []
        for model in (plain, managed):
            kept: list[Tensor] | None = None if step == 2 else []
            model.zero_grad()
            loss = model(x, kept).square().mean() + sum(h.abs().mean() for h in kept or ())
            loss.backward()
            found.append([loss, *(p.grad for p in model.parameters())])
        assert all(map(torch.equal, *found))


def test_a_tensor_of_a_closure_gets_its_gradient() -> None:
    """It requires grad and is neither a parameter nor an argument."""

    class Scaled(nn.Module):
        def __init__(self, factor: Tensor) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.scale = lambda h: h * factor

        def forward(self, x: Tensor) -> Tensor:
            return self.scale(self.linear(x)).square().sum()

    found = []
    for is_managed in (False, True):
        torch.manual_seed(0)
        factor, x = torch.ones(4, requires_grad=True), torch.ones(2, 4)
        model: nn.Module = Scaled(factor)
        if is_managed:
            model = rekindle.rematerialize(
                model, x, budget=1.0, profile="estimate", on_miss="raise"
            )
        model(x).backward()
        found.append(factor.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("on_miss", ["eager", "replan", "raise"])
def test_a_call_that_raises_leaves_what_eager_leaves(on_miss):
    """Its forward raises in the middle: what it drew and counted until then stays so."""

    class Refusing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
            self.fails, self.num_calls = False, 0

        def forward(self, x):
            self.num_calls += 1
            x = self.drop(self.layer(x))
            if self.fails:
                raise ValueError("a batch that the model refuses")
            return x.sum()

    def train(managed):
        torch.manual_seed(0)
        model, x = Refusing(), torch.randn(4, 8)
        if managed:
            model = rekindle.rematerialize(model, args=(x,), budget=1.0, on_miss=on_miss)
        losses = []
        for step in range(4):
            model.fails = step % 2 == 1
            try:
                losses.append(model(x))
                losses[-1].backward()
            except ValueError as error:
                losses.append(str(error))
        return [str(loss) for loss in losses], model.num_calls, torch.get_rng_state().tolist()

    torch.manual_seed(0)
    expected, found = train(False), train(True)
    assert [e.split(", grad_fn")[0] for e in found[0]] == [
        e.split(", grad_fn")[0] for e in expected[0]
    ]
    assert found[1:] == expected[1:]
