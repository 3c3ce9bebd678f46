"""What a plan covers, and what happens to calls it does not: never a wrong answer."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_same, seed, train
from support.manage import assert_trains_alike, example_of, manage
from support.schedules import SCHEDULES
from support.zoo import Example, gaussian
from torch import Tensor, nn

import rekindle
from rekindle import pipeline
from rekindle.core import simulate
from rekindle.errors import BudgetInfeasible, PlanMismatch
from rekindle.frontend import read
from rekindle.runtime.managed_module import MissedPlanWarning

EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


def small(device: torch.device) -> Example:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16)
    )
    return example_of(model.to(device), lambda step: gaussian(step, device, 8, 16))


def eager_once(managed: nn.Module, *args, **kwargs):
    """Runs the call twice: the first says that it is eager, the second is silent."""
    with pytest.warns(UserWarning, match="eager"):
        first = managed(*args, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        managed(*args, **kwargs)
    return first


def test_eval(device: torch.device) -> None:
    plain, example = small(device).model, small(device)
    managed = manage(example, "thrice", on_miss="eager")
    plain.eval()
    managed.eval()
    x = gaussian(0, device, 8, 16)
    assert torch.equal(eager_once(managed, x), plain(x))
    managed.train()
    assert_same(train(small(device)), train(example, managed))


class OwnDropout(nn.Module):
    """Reads its own training flag, and has no submodule that would show a change of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x @ self.weight, 0.5, self.training).tanh()


@pytest.mark.parametrize("how", ["itself", "copy", "copied in eval"])
def test_eval_before_the_first_call(how: str, device: torch.device) -> None:
    example = example_of(OwnDropout().to(device), lambda step: gaussian(step, device, 8, 16))
    managed = manage(example, "thrice")
    if how == "copied in eval":
        managed = copy.deepcopy(managed.eval())
    elif how == "copy":
        managed = copy.deepcopy(managed).eval()
    else:
        managed.eval()
    with pytest.raises(PlanMismatch, match="training"):
        managed(gaussian(0, device, 8, 16))
    managed.train()
    managed(gaussian(0, device, 8, 16)).sum().backward()


def test_eval_of_one_submodule(device: torch.device) -> None:
    example = small(device)
    managed = manage(example, "thrice")
    managed[3].eval()
    with pytest.raises(PlanMismatch):
        managed(gaussian(0, device, 8, 16))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad(mode, device: torch.device) -> None:
    plain, example = small(device).model, small(device)
    managed = manage(example, "thrice", on_miss="eager")
    x = gaussian(0, device, 8, 16)
    with mode():
        seed(1)
        expected = plain(x)
        seed(1)
        with pytest.warns(UserWarning, match="eager"):
            got = managed(x)
    assert torch.equal(got, expected)
    assert not got.requires_grad
    assert got.is_inference() == expected.is_inference()


def test_another_batch_size(device: torch.device) -> None:
    plain, example = small(device), small(device)
    managed = manage(example, "thrice", on_miss="eager")
    x = gaussian(0, device, 5, 16)
    seed(1)
    expected = plain.model(x)
    seed(1)
    with pytest.warns(UserWarning, match="eager"):
        got = managed(x)
    assert torch.equal(got, expected)
    expected.sum().backward()
    got.sum().backward()
    for mine, theirs in zip(managed.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    with pytest.raises(PlanMismatch):
        manage(small(device), "thrice")(x)


def test_another_batch_size_planned_again(device: torch.device) -> None:
    def build(batches: tuple[int, ...]):
        example = small(device)
        return example_of(
            example.model, lambda step: gaussian(step, device, batches[step % len(batches)], 16)
        )

    expected = train(build((8, 5, 8)))
    example = build((8, 5, 8))
    assert_same(expected, train(example, manage(example, "thrice", on_miss="replan")))


def test_an_input_that_newly_requires_grad(device: torch.device) -> None:
    example = small(device)
    x = gaussian(0, device, 8, 16, requires_grad=True)
    with pytest.raises(PlanMismatch):
        manage(example)(x)
    managed = manage(small(device), "thrice", on_miss="replan")
    plain = small(device).model
    seed(1)
    managed(x).sum().backward()
    mine = x.grad
    x.grad = None
    seed(1)
    plain(x).sum().backward()
    assert mine is not None
    assert torch.equal(mine, x.grad)


def test_a_parameter_frozen_after_planning(device: torch.device) -> None:
    example = small(device)
    managed = manage(example, "thrice")
    managed[0].weight.requires_grad_(False)
    with pytest.raises(PlanMismatch):
        managed(gaussian(0, device, 8, 16))


@pytest.mark.parametrize("mode", ["raise", "eager"])
def test_other_arguments_than_planned(mode: str, device: torch.device) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor, scale: float = 1.0, flag: bool = False) -> Tensor:
            return self.linear(x) * scale + (1 if flag else 0)

    torch.manual_seed(0)
    example = example_of(
        Scaled().to(device), lambda step: ((gaussian(step, device, 8, 16), 2.0), {})
    )
    managed = manage(example, on_miss=mode)
    x = gaussian(0, device, 8, 16)
    for args, kwargs in (((x, 3.0), {}), ((x, 2.0), {"flag": True}), ((x,), {})):
        if mode == "raise":
            with pytest.raises(PlanMismatch):
                managed(*args, **kwargs)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                got = managed(*args, **kwargs)
            assert torch.equal(got, example.model(*args, **kwargs))


class AsksTheData(nn.Module):
    """Takes another branch when a mask is not all ones, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.linear(x)
        if mask.all():
            return h.tanh()
        return h.masked_fill(~mask, 0.0).tanh()


def test_what_capture_assumed_of_the_data_is_guarded(device: torch.device) -> None:
    ones = torch.ones(8, 16, dtype=torch.bool, device=device)
    holes = ones.clone()
    holes[2:4] = False

    def make(mask: Tensor) -> Example:
        torch.manual_seed(0)
        return example_of(
            AsksTheData().to(device),
            lambda step: ((gaussian(step, device, 8, 16, requires_grad=True), mask), {}),
        )

    for mask in (ones, holes):
        assert_trains_alike(lambda mask=mask: make(mask), "thrice", device)
    managed = manage(make(ones), "thrice", on_miss="eager")
    x = gaussian(0, device, 8, 16, requires_grad=True)
    with pytest.warns(UserWarning, match="eager"):
        got = managed(x, holes)
    assert torch.equal(got, make(holes).model(x, holes))
    with pytest.raises(PlanMismatch):
        manage(make(ones), "thrice")(x, holes)


class Caches(nn.Module):
    """Keeps a constant in a plain attribute at its first call, as position embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.grid: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.grid is None:
            self.grid = torch.linspace(0, 1, 16, device=x.device)
        return (self.linear(x) + self.grid).tanh()


@pytest.mark.parametrize("warm", [False, True], ids=["first-call", "cached-before"])
def test_a_tensor_cached_in_an_attribute(warm: bool, device: torch.device) -> None:
    """Capture leaves no tensor of its own in the model, and what is cached counts as it is."""

    def make() -> Example:
        torch.manual_seed(0)
        return example_of(Caches().to(device), lambda step: gaussian(step, device, 8, 16))

    expected = train(make())
    example = make()
    if warm:
        example.model(*example.inputs(0)[0])
    managed = manage(example, "thrice")
    assert example.model.grid is None or type(example.model.grid) is Tensor
    assert_same(expected, train(example, managed))
    assert_same(expected, train(make_from(example, make())))


def make_from(used: Example, fresh: Example) -> Example:
    """The model of an example that was managed and trained, with the fresh weights again."""
    used.model.load_state_dict(fresh.model.state_dict())
    return used


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_a_hook_set_on_a_submodule_after_planning(kind: str, device: torch.device) -> None:
    """It runs: the call is read again, or, where that cannot be, runs eagerly and says so."""
    example = small(device)
    managed = manage(example, "thrice", on_miss="eager")
    x = example.inputs(0)[0][0]
    seen = []
    handle = getattr(managed[4], f"register_{kind}")(lambda *_: seen.append(1))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        out = managed(x)
        out.sum().backward()
    assert seen == [1]
    assert bool(told) is ("_Outputs" not in out.grad_fn.name())
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        managed(x).sum().backward()
    assert seen == [1]


class Scales(nn.Module):
    """Forward reads the scale and the dropout's probability; it does not read the other ones."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.dropout = nn.Dropout(0.1)
        self.scale = 2.0
        self.gain = 1.0
        self.epoch = 0
        self.config = Configuration()

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.linear(x)) * self.scale * self.gain
        return (h.tanh() if self.config.bounded else h) * self.config.power


class Configuration:
    note: str | None = None
    power: int = 1

    def __init__(self) -> None:
        self.note, self.power = None, 1
        self.bounded = True
        self.title = "plain"


CHANGES = {
    "scale": lambda model: setattr(model, "scale", 3.0),
    "gain": lambda model: setattr(model, "gain", 2.0),
    "dropout.p": lambda model: setattr(model.dropout, "p", 0.5),
    "config.bounded": lambda model: setattr(model.config, "bounded", False),
    "config.power": lambda model: setattr(model.config, "power", 3),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_attribute_that_forward_reads(name: str, device: torch.device) -> None:
    """A call after it has changed is not covered, and is right in each way to go on."""
    torch.manual_seed(0)
    x = gaussian(0, device, 8, 16)
    example = example_of(Scales().to(device), lambda step: gaussian(step, device, 8, 16))
    raising = manage(example, "thrice")
    replanning = manage(example, "thrice", on_miss="replan")
    eager = manage(example, "thrice", on_miss="eager")
    raising(x)
    CHANGES[name](example.model)
    for call in (raising, replanning, eager):
        CHANGES[name](call)
    with pytest.raises(PlanMismatch, match=name.replace(".", r"\.")):
        raising(x)
    outs = []
    for call in (example.model, replanning, eager):
        seed(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", MissedPlanWarning)
            outs.append(call(x))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


def test_an_attribute_that_forward_does_not_read(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not guarded; one that it reads is."""
    example = example_of(Scales().to(device), lambda step: gaussian(step, device, 8, 16))
    managed = manage(example, "thrice")
    x = gaussian(0, device, 8, 16)
    reads = []
    monkeypatch.setattr(
        pipeline, "read", lambda *args, **kwargs: reads.append(1) or read(*args, **kwargs)
    )
    for epoch in range(4):
        managed.epoch = epoch
        managed.config.title = f"epoch {epoch}"
        managed(x).sum().backward()
    assert len(reads) == 0
    assert managed.epoch == 3
    managed.scale = 3.0
    for _ in range(2):
        with pytest.raises(PlanMismatch, match=r"model\.scale == 2\.0"):
            managed(x)
    managed.scale = 2.0
    managed(x)


def test_an_attribute_with_a_default_in_its_class(device: torch.device) -> None:
    """Saving a model from Hugging Face writes its class into its config."""
    example = example_of(Scales().to(device), lambda step: gaussian(step, device, 8, 16))
    managed = manage(example, "thrice")
    x = gaussian(0, device, 8, 16)
    for note in ("saved", "saved", "saved again"):
        managed.config.note = note
        managed(x).sum().backward()
    managed.config.power = 2
    with pytest.raises(PlanMismatch, match=r"model\.config\.power == 1"):
        managed(x)


@dataclass
class Batch:
    x: Tensor
    extra: dict[str, list[Tensor]]


@dataclass
class Result:
    out: Tensor
    parts: tuple[Tensor, Tensor]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, batch: Batch, *, options: dict | None = None) -> Result:
        h = self.linear(batch.x) + batch.extra["add"][0] * batch.extra["add"][1]
        if options is not None:
            h = h * options["scale"]
        return Result(h.tanh(), (h.sin(), h.detach()))


@EVERY_SCHEDULE
def test_nested_inputs_and_outputs(schedule: str, device: torch.device) -> None:
    """Dicts, lists and dataclasses, in and out, the dataclasses not known to pytree."""

    def inputs(step: int):
        x, a, b, c = (gaussian(10 * step + i, device, 8, 16, requires_grad=i < 3) for i in range(4))
        return (Batch(x, {"add": [a, b]}),), {"options": {"scale": c, "name": "n", "number": 2}}

    def run(call: nn.Module) -> list[Tensor]:
        args, kwargs = inputs(0)
        out = call(*args, **kwargs)
        assert type(out) is Result
        (out.out.sum() + out.parts[0].square().sum()).backward()
        batch = args[0]
        leaves = [batch.x, *batch.extra["add"]]
        grads = [*(p.grad for p in call.parameters()), *(t.grad for t in leaves)]
        assert not out.parts[1].requires_grad
        return [out.out, *out.parts, *grads]

    def build():
        torch.manual_seed(0)
        return example_of(Nested().to(device), inputs)

    expected, got = run(build().model), run(manage(build(), schedule))
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@EVERY_SCHEDULE
def test_a_loss_taken_into_the_captured_region(schedule: str, device: torch.device) -> None:
    """With `loss_fn` the managed call returns the loss."""
    target = torch.arange(8, device=device) % 16

    def loss_fn(output: Tensor) -> Tensor:
        return F.cross_entropy(output, target)

    plain = small(device)
    expected = train(Example(plain.model, plain.inputs, loss_fn, optimizer="sgd"))
    example = small(device)
    managed = manage(example, schedule, loss_fn=loss_fn)
    identity = Example(example.model, example.inputs, lambda loss: loss, optimizer="sgd")
    got = train(identity, managed)
    same = {name: value for name, value in expected.items() if "output" not in name}
    mine = {name: value for name, value in got.items() if "output" not in name}
    assert_same(
        {n: v for n, v in same.items() if "structure" not in n},
        {n: v for n, v in mine.items() if "structure" not in n},
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_only_plan(mode, device: torch.device) -> None:
    """Planned under no_grad, the plan is for inference: no loss, no backward, same budget rules."""
    plain, example = small(device).model.eval(), small(device)
    example.model.eval()
    x = gaussian(0, device, 8, 16)
    with mode():
        managed = rekindle.rematerialize(
            example.model, (x,), schedule=SCHEDULES["thrice"], on_miss="raise"
        )
        got = managed(x)
        assert torch.equal(got, plain(x))
    assert not got.requires_grad
    assert all(op.phase != "backward" for op in managed.plan.problem.ops)
    with pytest.raises(PlanMismatch):
        managed(x)  # with gradients: not what was planned


def test_a_budget_is_kept(device: torch.device) -> None:
    expected = train(small(device))
    example = small(device)
    args, kwargs = example.inputs(0)
    managed = rekindle.rematerialize(
        example.model, args, kwargs, budget=0.9, time_limit_s=5, on_miss="raise"
    )
    plan = managed.plan
    assert plan.peak_bytes <= 0.9 * plan.keep_all_peak_bytes
    assert plan.peak_bytes == simulate(plan.problem, plan.schedule).peak
    assert_same(expected, train(example, managed))


def test_a_budget_nobody_can_reach_names_the_smallest_peak(device: torch.device) -> None:
    example = small(device)
    with pytest.raises(BudgetInfeasible) as refusal:
        rekindle.rematerialize(example.model, *example.inputs(0), budget="64B", time_limit_s=5)
    assert refusal.value.smallest_peak_bytes is not None
    assert refusal.value.smallest_peak_bytes > 64
    assert f"{refusal.value.smallest_peak_bytes}" in str(refusal.value).replace(",", "")


def test_verify_says_yes_and_no(device: torch.device) -> None:
    example = small(device)
    args, kwargs = example.inputs(0)
    managed = manage(example, "thrice")
    before = copy.deepcopy(managed.state_dict())
    verdict = rekindle.verify(example.model, managed, args, kwargs)
    assert verdict.equal
    assert not verdict.differences
    for name, value in managed.state_dict().items():
        assert torch.equal(value, before[name]), f"verify changed {name}"
    assert all(p.grad is None for p in managed.parameters())
    other = small(device).model
    with torch.no_grad():
        other[0].weight[0, 0] += 1e-3
    verdict = rekindle.verify(other, managed, args, kwargs)
    assert not verdict.equal
    assert verdict.differences
