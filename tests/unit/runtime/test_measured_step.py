"""A step is measured op by op on the sample itself, leaves no trace, and failures are data."""

import ast
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.meter import measure_step
from support.profile_graphs import Fno, Gpt, Unet, Vit, resnet
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rekindle
from rekindle import measuring
from rekindle.core import keep_all, simulate
from rekindle.profile import Source
from rekindle.profile.measure import CpuBench, Timing
from rekindle.runtime import measured_step as measured_step_module
from rekindle.runtime.measured_step import measured_step
from rekindle.torch_compat import TorchDispatchMode

SOURCE = Path(__file__).parents[3] / "src" / "rekindle"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REKINDLE_CACHE_DIR", str(tmp_path))


class QuickBench(CpuBench):
    """Runs each call once and takes no time: what is tested is which calls run, and on what."""

    def __init__(self):
        self.device = torch.device("cpu")

    def in_stream(self, host_ns):
        return host_ns

    def workspace_bytes(self, run):
        return 0

    def timing(self, run, num_input_bytes):
        run()
        return Timing(10, 10)

    def host_ns(self, run):
        return 1


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(measuring, "bench_for", lambda device: QuickBench())


def planned(model, *args, **options):
    return rekindle.plan(model, args, **{"schedule": keep_all, **options})


def models():
    torch.manual_seed(0)
    image = torch.randn(2, 3, 32, 32)
    return {
        "gpt": (Gpt(), torch.randint(0, 131, (2, 16))),
        "vit": (Vit(), image),
        "resnet": (resnet(), image),
        "unet": (Unet(), image),
        "fno": (Fno(), torch.randn(2, 2, 16, 16)),
        "vit bf16": (Vit().bfloat16(), image.bfloat16()),
    }


@pytest.mark.parametrize("name", models())
def test_every_op_of_the_models_is_measured(name, monkeypatch):
    model, x = models()[name]
    profile = planned(model, x).profile
    assert profile.not_measured == ()
    assert set(profile.num_by_source) == {Source.MEASURED}
    monkeypatch.setattr(measuring, "measured_step", None)  # the second time nothing runs
    again = planned(model, x).profile
    assert set(again.num_by_source) == {Source.CACHED}
    assert [op.cost_ns for op in again.ops] == [op.cost_ns for op in profile.ops]


def index_cases():
    table, index = torch.rand(7, 5), torch.full((3, 5), 2)
    rows = torch.full((4,), 4)
    scores = torch.zeros(6, 9, requires_grad=True)
    image = torch.zeros(2, 3, 8, 8, requires_grad=True)

    def grad(fn):
        return fn  # whose backward is part of the step

    leaf = table.clone().requires_grad_()
    return {
        "gather": (lambda t, i: torch.gather(t, 0, i), table, index),
        "gather backward": (grad(lambda t, i: torch.gather(t, 0, i)), leaf, index),
        "scatter": (lambda t, i: t.scatter(1, i, 1.0), table, index % 5),
        "scatter_add": (lambda t, i: t.scatter_add(0, i, torch.ones(3, 5)), table, index),
        "index": (lambda t, r: t[r], table, rows),
        "index two": (lambda t, r: t[r, r], table, rows),
        "index second": (lambda t, r: t[:, r], table, rows),
        "index backward": (grad(lambda t, r: t[:, r]), leaf, rows),
        "index_put": (lambda t, r: t.index_put((r,), torch.ones(4, 5)), table, rows),
        "index_select": (lambda t, r: t.index_select(1, r), table, rows),
        "index_select backward": (grad(lambda t, r: t.index_select(1, r)), leaf, rows),
        "index_add": (lambda t, r: t.index_add(0, r, torch.ones(4, 5)), table, rows),
        "embedding": (lambda r, t: F.embedding(r, t), rows, table),
        "embedding backward": (grad(lambda t, r: F.embedding(r, t)), leaf, rows),
        "nll": (lambda s, y: F.cross_entropy(s, y), scores, torch.zeros(6, dtype=torch.int64)),
        "nll backward": (grad(F.cross_entropy), scores, torch.zeros(6, dtype=torch.int64)),
        "nll 2d backward": (
            grad(F.cross_entropy),
            torch.zeros(2, 4, 3, 3, requires_grad=True),
            torch.zeros(2, 3, 3, dtype=torch.int64),
        ),
        "max_pool backward": (grad(lambda x: F.max_pool2d(x, 2)), image),
        "adaptive max pool backward": (grad(lambda x: F.adaptive_max_pool2d(x, 2)), image),
        "max along": (grad(lambda t: t.max(1).values), leaf),
        "topk backward": (grad(lambda t: t.topk(2, 1).values), leaf),
        "one_hot": (lambda r: F.one_hot(r, 5), rows),
        "take": (lambda t, r: t.take(r), table, rows),
        "masked_fill": (lambda t: t.masked_fill(torch.ones(7, 5, dtype=torch.bool), 0.0), table),
        "tril mask": (lambda t: torch.where(torch.ones(7, 5).tril().bool(), t, -1e9), table),
        "complex": (lambda t: torch.fft.irfft(torch.fft.rfft(t).conj() * 2), table),
        "float64 batch norm": (
            grad(lambda x, m, v: F.batch_norm(x, m, v, training=True)),
            image.detach().double().requires_grad_(),
            torch.zeros(3, dtype=torch.float64),
            torch.ones(3, dtype=torch.float64),
        ),
        "group norm backward": (grad(lambda x: F.group_norm(x, 1)), image),
        "binary cross entropy": (
            grad(F.binary_cross_entropy),
            torch.full((4,), 0.5, requires_grad=True),
            torch.full((4,), 0.5),
        ),
        "multinomial": (lambda t: torch.multinomial(t.sigmoid(), 3), table),
        "bernoulli": (lambda t: torch.bernoulli(t.sigmoid()), table),
        "empty": (lambda t: t[:0] + 1, table),
        "attention mask": (
            lambda q, m: F.scaled_dot_product_attention(q, q, q, m),
            torch.zeros(2, 2, 8, 8),
            torch.ones(8, 8, dtype=torch.bool),
        ),
    }


class Calls(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, *args):
        return self.fn(*args)


@pytest.mark.parametrize("name", index_cases())
def test_a3_indices_masks_and_states_are_those_of_the_step(name, quick):
    """Of all that reads integers, masks or a library's records nothing is invented: each op gets
    what the step gives it, so it runs."""
    fn, *args = index_cases()[name]
    with torch.set_grad_enabled(any(a.requires_grad for a in args)):
        profile = planned(Calls(fn), *args).profile
    assert profile.not_measured == ()
    assert set(profile.num_by_source) == {Source.MEASURED}


def test_a_state_that_only_the_forward_op_makes_is_made_by_it(quick):
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.LSTM(8, 4)

        def forward(self, x):
            return self.layer(x)[0]

    profile = planned(Tagger(), torch.randn(3, 2, 8)).profile
    assert profile.not_measured == ()
    assert any("rnn_layer_backward" in target for target in profile.targets)


@torch.library.custom_op("rekindle_test::row", mutates_args=())
def row(table: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    assert int(key) == 12345, "a device-side assert"
    return table.clone()


@row.register_fake
def _(table: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(table)


def _row_backward(ctx, gradient):
    return gradient, None


row.register_autograd(_row_backward)


def test_a3_an_op_that_dies_of_an_invented_index_is_measured(quick):
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 4))

        def forward(self, key):
            return row(self.table, key + 12000)

    assert planned(Lookup(), torch.tensor(345)).profile.not_measured == ()


class IntegersMade(TorchDispatchMode):
    """The ops that make integers from no tensor."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        from_nothing = not any(isinstance(a, torch.Tensor) for a in args)
        if from_nothing and isinstance(out, torch.Tensor) and not out.is_floating_point():
            is_stream = out.shape == torch.get_rng_state().shape
            if out.numel() and not is_stream:
                self.made.append(str(func))
        return out


def test_a3_no_integers_are_made_while_a_step_is_measured(quick, monkeypatch):
    spy, undisturbed = IntegersMade(), measured_step_module._undisturbed

    @measured_step_module.contextlib.contextmanager
    def watched(program):
        with undisturbed(program), spy:
            yield

    monkeypatch.setattr(measured_step_module, "_undisturbed", watched)
    gpt, ids = models()["gpt"]
    assert planned(gpt, ids).profile.not_measured == ()
    # The positions of the model's own `arange`, once for the measurement and once for the step.
    assert set(spy.made) <= {"aten.arange.default", "aten.arange.start"}


def test_a3_no_profiling_code_can_invent_integers():
    """What makes tensors in the profiling code makes floats, or copies what is there."""
    integers = {f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64)} | {"bool", "long"}
    inventors = {"randint", "randint_like", "random_", "randperm", "arange", "bernoulli"}
    flood = "self._flood = torch.zeros(2 * self._cache_bytes, dtype=torch.uint8, device=device)"
    for path in (*sorted((SOURCE / "profile").glob("*.py")), SOURCE / "runtime/measured_step.py"):
        text = path.read_text("utf-8").replace(flood, "")  # overwrites a cache, is no argument
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute):
                assert node.attr not in inventors, f"{path.name}:{node.lineno}"
                of_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
                assert not (of_torch and node.attr in integers), f"{path.name}:{node.lineno}"


def test_e15_storages_are_as_large_as_they_are():
    """The 0-dim result of mse_loss keeps the storage of its input's size; fold keeps what it
    unfolded."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, y):
            return F.mse_loss(self.second(torch.tanh(self.first(x))), y)

    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            parts = torch.tanh(F.unfold(self.conv(x), 3, padding=1))
            return F.fold(parts, (16, 16), 3, padding=1).tanh().sum()

    torch.manual_seed(0)
    x = torch.randn(64, 16)
    for model, args in ((Loss(), (x, x)), (Folded(), (torch.randn(2, 3, 16, 16),))):
        managed = rekindle.rematerialize(model, args, schedule=keep_all, fuse=False)
        assert measure_step(managed, (args, {})).peak <= managed.plan.peak_bytes


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.first, self.second = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return {"loss": self.first(x).square().mean(), "other": self.second(x).exp()}


def test_a_plan_for_other_gradients_is_measured_on_the_call_that_it_is_made_for(quick):
    x = torch.randn(4, 8)
    managed = rekindle.rematerialize(TwoHeads(), (x,), budget=1.0, time_limit_s=1)
    first = managed.plan
    for _ in range(2):
        managed(x)["other"].sum().backward()
    assert managed.plan is not first
    assert managed.plan.joint.tangents != first.joint.tangents
    assert managed.plan.profile.not_measured == ()
    assert Source.ESTIMATED not in managed.plan.profile.num_by_source


def test_a_sample_without_data_is_not_measured(monkeypatch):
    monkeypatch.setattr(measuring, "measured_step", None)
    with FakeTensorMode():
        profile = planned(TwoHeads(), torch.randn(4, 8)).profile
    assert set(profile.num_by_source) == {Source.ESTIMATED}
    assert {reason for _, reason in profile.not_measured} == {"the sample has no data"}
    profile = planned(TwoHeads().to("meta"), torch.randn(4, 8, device="meta")).profile
    assert set(profile.num_by_source) == {Source.ESTIMATED}


# ---- no trace


class Busy(nn.Module):
    """Writes to buffers, to an argument, and draws random numbers, also from its own generator."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(4, 8))

    def forward(self, x, given):
        self.seen += 1
        self.cache[self.seen.view(1)] = x.detach()[:1]
        given.add_(1)
        return F.dropout(self.linear(self.norm(x) + self.cache.sum(0)), 0.5)


def test_measuring_leaves_no_trace():
    torch.manual_seed(0)
    model, x, given = Busy(), torch.randn(6, 8), torch.zeros(3)
    model.linear.weight.grad = torch.ones(8, 8)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    stream = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        profile = planned(model, x, given).profile
        assert torch.is_autocast_enabled("cpu")
    assert profile.not_measured == ()
    assert any("index_put_" in target for target in profile.targets)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert torch.equal(given, torch.zeros(3))
    assert torch.equal(model.linear.weight.grad, torch.ones(8, 8))
    assert all(p.grad is None for p in model.norm.parameters())
    assert torch.is_grad_enabled()


def test_an_interrupted_step_leaves_no_trace(quick):
    def press(progress):
        if progress.num_done == 5:
            raise KeyboardInterrupt

    model, x, given = Busy(), torch.randn(6, 8), torch.zeros(3)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    stream = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        planned(model, x, given, on_progress=press)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert torch.equal(given, torch.zeros(3))


# ---- single numbers


@torch.library.custom_op("rekindle_test::with_scratch", mutates_args=())
def with_scratch(x: torch.Tensor) -> torch.Tensor:
    scratch = torch.empty(250_000, dtype=torch.float32)
    del scratch
    return x.clone()


@with_scratch.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("rekindle_test::cannot_run", mutates_args=())
def cannot_run(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("this op needs a cluster\nand more")


@cannot_run.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_workspace_is_the_peak_beyond_inputs_and_outputs():
    with torch.no_grad():
        profile = planned(Calls(with_scratch), torch.zeros(100)).profile
    ((name, op),) = profile.items()
    assert name.startswith("with_scratch")
    # The scratch is gone before the output is made: it only counts above it.
    assert op.workspace_bytes == 1_000_000 - 400
    assert op.output_bytes == (400,)


# ---- failures


def test_an_op_that_fails_ends_the_step_and_the_rest_is_estimated(quick):
    with torch.no_grad():
        profile = planned(Calls(lambda x: cannot_run(x + 1) * 2), torch.zeros(100)).profile
    (first, reason), (second, _) = profile.not_measured
    assert first.startswith("rekindle_test.cannot_run")
    assert second == "aten.mul.Tensor"
    assert "broke off at rekindle_test.cannot_run" in reason
    assert "needs a cluster" in reason
    assert "and more" not in reason
    assert profile.num_by_source == {Source.ESTIMATED: 2, Source.MEASURED: 1}
    assert "2 distinct not measured" in profile.summary()


class FullBench(QuickBench):
    """A device that has room for so many measurements, each time it is tried."""

    def __init__(self, *rooms):
        super().__init__()
        self.rooms = list(rooms)
        self.num_left = 0
        self.num_tries = 0

    def release(self):
        self.num_left = 0

    def timing(self, run, num_input_bytes):
        if self.num_left == 0:
            self.num_left = self.rooms.pop(0)
            self.num_tries += 1
        self.num_left -= 1
        if self.num_left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return Timing(10, 10)


def test_what_does_not_fit_is_run_again_with_less_kept(monkeypatch):
    bench = FullBench(20, 1000)
    monkeypatch.setattr(measuring, "bench_for", lambda device: bench)
    tried = []

    def spy(program, schedule, *rest):
        tried.append(schedule)
        return measured_step(program, schedule, *rest)

    monkeypatch.setattr(measuring, "measured_step", spy)
    plan = planned(*models()["vit"])
    assert plan.profile.not_measured == ()
    assert set(plan.profile.num_by_source) == {Source.MEASURED}
    problem = plan.problem
    peaks = [simulate(problem, schedule).peak for schedule in tried]
    assert peaks[1] < peaks[0] == simulate(problem, keep_all(problem)).peak
    assert len(tried[1].ops) > len(tried[0].ops)


def test_where_nothing_fits_the_rest_is_estimated(monkeypatch):
    monkeypatch.setattr(measuring, "bench_for", lambda device: FullBench(10, 3, 3))
    profile = planned(*models()["vit"]).profile
    assert set(profile.num_by_source) == {Source.MEASURED, Source.ESTIMATED}
    assert all("out of memory: CUDA" in reason for _, reason in profile.not_measured)
    assert all(op.cost_ns >= 0 for op in profile.ops)


def test_a_cpu_without_room_is_not_tried(monkeypatch, caplog):
    class Small(QuickBench):
        def free_bytes(self):
            return 1000

    monkeypatch.setattr(measuring, "bench_for", lambda device: Small())
    profile = planned(*models()["vit"]).profile
    assert set(profile.num_by_source) == {Source.ESTIMATED}
    assert profile.not_measured[0][1] == "does not fit on the device"
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "ops were not measured (does not fit on the device)" in said


class DyingBench(QuickBench):
    def __init__(self):
        super().__init__()
        self.num_timed = 0

    def timing(self, run, num_input_bytes):
        self.num_timed += 1
        if self.num_timed > 2:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return Timing(10, 10)

    def is_alive(self):
        return self.num_timed <= 2


def test_a_lost_device_leaves_the_rest_to_estimates(monkeypatch):
    monkeypatch.setattr(measuring, "bench_for", lambda device: DyingBench())
    profile = planned(*models()["vit"]).profile
    measured = [op for op in profile.ops if op.source is Source.MEASURED]
    assert sum(op.device_ns == 10 for op in measured) == 2  # the others are views
    assert all("was lost" in reason for _, reason in profile.not_measured)
    assert len(profile.not_measured) == len(profile.ops) - len(measured) > 0


def test_a_device_that_is_not_there_leaves_all_to_estimates(monkeypatch):
    def no_device(device):
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(measuring, "bench_for", no_device)
    profile = planned(*models()["vit"]).profile
    assert set(profile.num_by_source) == {Source.ESTIMATED}
    assert "No CUDA GPUs" in profile.not_measured[0][1]


# ---- what it takes


def test_progress_and_what_it_will_take(quick):
    seen = []
    profile = planned(*models()["resnet"], on_progress=seen.append).profile
    assert [p.num_done for p in seen] == list(range(len(profile.ops) + 1))
    assert {p.num_total for p in seen} == {len(profile.ops)}
    assert len({p.expected_s for p in seen}) == 1
    assert seen[0].expected_s > 0
    assert 0 < seen[-1].elapsed_s <= profile.wall_s


def test_more_layers_cost_no_more_ops(quick):
    ids = torch.randint(0, 131, (2, 16))
    first, second = (planned(Gpt(num), ids).profile for num in (2, 8))
    assert set(first.num_by_source) == {Source.MEASURED}
    assert set(second.num_by_source) == {Source.CACHED}
