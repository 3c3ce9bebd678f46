"""`sequential`: bitwise the same as the plain model, and within the budget it was given."""

import copy
import warnings

import pytest
import torch
from torch import nn

from rekindle.errors import BudgetInfeasible, CaptureError
from rekindle.nn_sequential.managed_sequential import ManagedSequential, sequential
from rekindle.nn_sequential.memory_meters import StorageMeter
from rekindle.solve.chains.chain_dp import Run


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.body = nn.Sequential(*layers)

    def forward(self, x):
        # Data-dependent control flow: nothing that could be captured as one graph.
        if float(x.detach().sum()) == 12345.678:
            return x
        return x + self.body(x)


class Pair(nn.Module):
    """Hands on two tensors, one of them of whole numbers."""

    def forward(self, x):
        if isinstance(x, tuple):
            return (x[0] * 1.5, x[1] + 1)
        return (x * 2, torch.arange(x.shape[0]))


class Unpair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(64, width)

    def forward(self, pair):
        return pair[0] + self.table(pair[1] % 64)


def mlp(depth=10):
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(depth)])


def dropouts():
    blocks = [Residual(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.3), nn.Linear(96, 64))] * 1
    blocks += [Residual(nn.Linear(64, 96), nn.Dropout(0.2), nn.Linear(96, 64)) for _ in range(7)]
    return nn.Sequential(*blocks)


def norms():
    layers = []
    for _ in range(6):
        layers += [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def spectral():
    layers = [nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64)) for _ in range(8)]
    return nn.Sequential(*[m for layer in layers for m in (layer, nn.Tanh())])


def views():
    return nn.Sequential(
        nn.Identity(),
        nn.Unflatten(1, (8, 8)),
        nn.Conv1d(8, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv1d(16, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv1d(16, 16, 3, padding=1),
        nn.Tanh(),
        nn.Conv1d(16, 8, 3, padding=1),
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.Tanh(),
    )


def pairs():
    return nn.Sequential(
        nn.Linear(64, 64), nn.Tanh(), Pair(), Pair(), Pair(), Unpair(64), nn.Linear(64, 64), *mlp(5)
    )


def shared():
    layer = nn.Linear(64, 64)
    return nn.Sequential(*[m for _ in range(6) for m in (layer, nn.Tanh())])


def frozen():
    model = mlp(8)
    for p in model[:3].parameters():
        p.requires_grad_(False)
    return model


@pytest.fixture(autouse=True)
def one_thread():
    """The models are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


MODELS = (mlp, dropouts, norms, spectral, views, pairs, shared, frozen)


def run(model, x, seed=3, autocast=False):
    torch.manual_seed(seed)
    x = x.detach().clone().requires_grad_(x.requires_grad)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        y = model(x)
        loss = y.float().square().mean()
    loss.backward()
    grads = [x.grad, *(p.grad for p in model.parameters())]
    state = [b.clone() for b in model.buffers()]
    return [y.detach(), *grads, *state, torch.rand(3)]


def assert_same(mine, theirs):
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def clear(model):
    for p in model.parameters():
        p.grad = None


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("budget", [1.0, 0.7, None])
@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_bitwise_equal(make, budget, needs_grad):
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    x = torch.randn(32, 64, requires_grad=needs_grad)
    before = copy.deepcopy(model.state_dict())
    generator = torch.get_rng_state()
    managed = planned(model, x, budget)
    assert torch.equal(torch.get_rng_state(), generator)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    for seed in (3, 4):  # two steps: what the first leaves behind is right too
        clear(model)
        clear(plain)
        assert_same(run(managed, x, seed), run(plain, x, seed))


def planned(model, x, budget):
    """With None, the least that can be done."""
    if budget is not None:
        try:
            return sequential(model, x, budget=budget)
        except BudgetInfeasible as error:
            return sequential(model, x, budget=error.smallest_peak_bytes)
    with pytest.raises(BudgetInfeasible) as caught:
        sequential(model, x, budget=1)
    return sequential(model, x, budget=caught.value.smallest_peak_bytes)


@pytest.mark.parametrize("solver", ["rotor", "rotor-floating", "revolve"])
def test_solvers(solver):
    torch.manual_seed(0)
    model = dropouts()
    plain = copy.deepcopy(model)
    x = torch.randn(512, 64)
    managed = sequential(model, x, budget=0.6, solver=solver)
    assert any(step_run == Run.keep for step_run, _, _ in managed.plan.steps)
    assert_same(run(managed, x), run(plain, x))


def test_autocast():
    torch.manual_seed(0)
    model = dropouts()
    plain = copy.deepcopy(model)
    x = torch.randn(32, 64)
    managed = planned(model, x, None)
    assert_same(run(managed, x, autocast=True), run(plain, x, autocast=True))


@pytest.mark.parametrize("make", [mlp, dropouts, norms, views], ids=lambda f: f.__name__)
@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_measured_memory_is_within_the_budget(make, share):
    torch.manual_seed(0)
    model = make()
    x = torch.randn(512, 64)
    managed = planned(model, x, share)
    plan = managed.plan
    peak = measured_peak(managed, model, x)
    assert peak <= plan.budget_bytes
    # Keep-all as the plan counts it is a little above eager's own peak, never far.
    plain = measured_peak(copy.deepcopy(model), model, x)
    assert plain <= plan.keep_all_peak_bytes <= 1.4 * plain
    if make in (mlp, dropouts) and share == 0.6:
        assert peak < 0.75 * plain


def measured_peak(model, original, x):
    clear(model)
    known = [x, *model.parameters(), *model.buffers()]
    # The gradient of the loss arrives from outside, as it does from the caller's own loss.
    probe = nn.Sequential(*original)(x)
    gradient = torch.ones_like(probe)
    del probe
    clear(model)
    meter = StorageMeter(known)
    with meter:
        y = model(x)
        y.backward(gradient)
    return meter.peak_bytes


def test_less_memory_costs_more_and_less_than_twice():
    torch.manual_seed(0)
    model = mlp(16)
    x = torch.randn(256, 64)
    full = sequential(model, x, budget=1.0)
    half = sequential(model, x, budget=0.6)
    assert full.plan.overhead == 0
    assert 0 <= half.plan.overhead < 1


def test_same_class_keys_and_parameters():
    class Net(nn.Sequential):
        pass

    model = Net(*mlp(4))
    managed = sequential(model, torch.randn(8, 64), budget=1.0)
    assert managed is not model
    assert isinstance(managed, Net)
    assert list(managed.state_dict()) == list(model.state_dict())
    for a, b in zip(managed.parameters(), model.parameters(), strict=True):
        assert a is b
    assert isinstance(managed[:2], nn.Sequential)
    assert managed[0] is model[0]


def test_calls_beside_the_plan_run_plainly_and_say_so_once():
    torch.manual_seed(0)
    model = mlp(6)
    managed = sequential(model, torch.randn(512, 64), budget=0.8)
    other = torch.randn(5, 64)
    with pytest.warns(UserWarning, match="differs from the sample"):
        y = managed(other)
    assert torch.equal(y, model(other))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        managed(other)
        with torch.no_grad():
            assert torch.equal(managed(other), model(other))
        managed.eval()
        assert torch.equal(managed(other), model(other))


def test_a_second_backward_is_refused():
    managed = sequential(mlp(3), torch.randn(4, 64), budget=1.0)
    loss = managed(torch.randn(4, 64)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_a_copy_is_the_plain_model():
    managed = sequential(mlp(3), torch.randn(4, 64), budget=1.0)
    other = copy.deepcopy(managed)
    assert not isinstance(other, ManagedSequential)
    x = torch.randn(4, 64)
    assert torch.equal(other(x), managed(x))


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (nn.Linear(4, 4), "nn.Sequential"),
        (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 4)), "writes into"),
        (nn.Sequential(), "no stages"),
    ],
)
def test_refusals(model, word):
    with pytest.raises(CaptureError, match=word):
        sequential(model, torch.randn(4, 64), budget=1.0)


def test_unknown_solver():
    with pytest.raises(ValueError, match="no chain solver"):
        sequential(mlp(2), torch.randn(4, 64), budget=1.0, solver="best")
