"""Ops that torch does not bring or does not run as one: custom, higher-order, Triton, collective.
They work as opaque ops, bit for bit, or are refused by name."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from support.compare import assert_same, train
from support.manage import assert_trains_alike, example_of, manage
from support.schedules import SCHEDULES
from support.zoo import Example, gaussian, require
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rekindle.errors import CaptureError

EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


@torch.library.custom_op("rekindle_tests::scaled_tanh", mutates_args=())
def scaled_tanh(x: Tensor, scale: float) -> Tensor:
    return torch.tanh(x * scale)


@scaled_tanh.register_fake
def _(x: Tensor, scale: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("rekindle_tests::scaled_tanh_backward", mutates_args=())
def scaled_tanh_backward(gradient: Tensor, out: Tensor, scale: float) -> Tensor:
    return gradient * (1 - out * out) * scale


@scaled_tanh_backward.register_fake
def _(gradient: Tensor, out: Tensor, scale: float) -> Tensor:
    return torch.empty_like(gradient)


def _save(ctx, inputs, output) -> None:
    ctx.scale = inputs[1]
    ctx.save_for_backward(output)


def _backward(ctx, gradient: Tensor):
    return scaled_tanh_backward(gradient, ctx.saved_tensors[0], ctx.scale), None


scaled_tanh.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("rekindle_tests::count_into", mutates_args=("counter",))
def count_into(counter: Tensor, x: Tensor) -> None:
    counter.add_(x.detach().sum(dim=0))


@torch.library.custom_op("rekindle_tests::no_fake", mutates_args=())
def no_fake(x: Tensor) -> Tensor:
    return x * 2


no_fake.register_autograd(lambda ctx, gradient: gradient * 2)


class UsesCustomOps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.register_buffer("counter", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        h = scaled_tanh(self.first(x), 1.5)
        count_into(self.counter, h)
        return scaled_tanh(self.second(h), 0.5) + self.counter


@EVERY_SCHEDULE
def test_custom_ops(schedule: str, device: torch.device) -> None:
    def make() -> Example:
        torch.manual_seed(0)
        return example_of(
            UsesCustomOps().to(device),
            lambda step: gaussian(step, device, 8, 16, requires_grad=True),
        )

    managed, _ = assert_trains_alike(make, schedule, device)
    names = [op.name for op in managed.plan.problem.ops]
    assert any("scaled_tanh" in name for name in names), "the custom op is not one opaque op"


def test_a_custom_op_that_cannot_be_captured_is_named(device: torch.device) -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return no_fake(self.linear(x))

    example = example_of(Uses().to(device), lambda step: gaussian(step, device, 8, 16))
    with pytest.raises(CaptureError, match="no_fake") as refusal:
        manage(example)
    assert "register_fake" in str(refusal.value)


class OwnFunction(torch.autograd.Function):
    """An autograd function whose backward is not the derivative: it must be taken as written."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


@EVERY_SCHEDULE
def test_an_autograd_function(schedule: str, device: torch.device) -> None:
    class Rounds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = OwnFunction.apply(layer(x))
            return x

    def make() -> Example:
        torch.manual_seed(0)
        return example_of(
            Rounds().to(device), lambda step: gaussian(step, device, 8, 16, requires_grad=True)
        )

    assert_trains_alike(make, schedule, device)


class FlexAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, 2, width // 2).transpose(1, 2)
            for t in self.project(x).chunk(3, dim=-1)
        )

        def bias(score, b, h, i, j):
            return score + (i - j) * 0.1

        return flex_attention(q, k, v, score_mod=bias).transpose(1, 2).reshape(x.shape)


def works_or_refused(make: Callable[[], Example], device: torch.device, name: str) -> None:
    """Equal to eager under every schedule, or refused with the name of what is not supported."""
    try:
        manage(make())
    except CaptureError as error:
        refusal = str(error)
    else:
        for schedule in SCHEDULES:
            assert_trains_alike(make, schedule, device)
        return
    assert name in refusal


@pytest.mark.filterwarnings("ignore:.*flex_attention.*without torch.compile")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_flex_attention_works_or_is_refused_by_name(device: torch.device) -> None:
    """On a CPU it has no backward: there eager's own refusal comes through."""

    def make() -> Example:
        torch.manual_seed(0)
        return example_of(
            FlexAttention().to(device),
            lambda step: gaussian(step, device, 2, 16, 16, requires_grad=True),
        )

    if device.type == "cpu":
        with pytest.raises(NotImplementedError, match="FlexAttention does not support backward"):
            manage(make())
        with torch.no_grad(), pytest.raises(CaptureError, match="flex_attention") as refusal:
            manage(make())
        assert "submodules" in str(refusal.value)
    else:
        works_or_refused(make, device, "flex_attention")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_branches_on_tensors_are_refused_by_name(device: torch.device) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            h = self.linear(x)
            return torch.cond(h.sum() > 0, torch.tanh, torch.sin, (h,))

    example = example_of(Branches().to(device), lambda step: gaussian(step, device, 8, 16))
    with pytest.raises(CaptureError, match=r"cond.*test_special_ops\.py"):
        manage(example)


@torch.library.custom_op("rekindle_tests::by_address", mutates_args=())
def by_address(x: Tensor) -> Tensor:
    """As the wrapper of a kernel does: takes addresses, which only real tensors have."""
    assert x.data_ptr()
    assert x.is_contiguous()
    return x * 2


@by_address.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


by_address.register_autograd(lambda ctx, gradient: by_address(gradient.contiguous()))


@EVERY_SCHEDULE
def test_an_op_that_takes_addresses(schedule: str, device: torch.device) -> None:
    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = by_address(layer(x)).tanh()
            return x

    def make() -> Example:
        torch.manual_seed(0)
        return example_of(Uses().to(device), lambda step: gaussian(step, device, 8, 16))

    managed, _ = assert_trains_alike(make, schedule, device)
    assert any("by_address" in op.name for op in managed.plan.problem.ops)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton kernels need a CUDA device")
def test_a_triton_kernel_works_or_is_refused_by_name() -> None:
    require("triton")
    from support import triton_kernel

    device = torch.device("cuda")

    def make() -> Example:
        torch.manual_seed(0)
        return example_of(
            triton_kernel.Doubles().to(device),
            lambda step: gaussian(step, device, 8, 16, requires_grad=True),
        )

    works_or_refused(make, device, "double")


class OpCount(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.runs[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def one_process_group():
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


@EVERY_SCHEDULE
def test_collectives_run_once_and_in_order(schedule: str, one_process_group) -> None:
    from torch.distributed import _functional_collectives as collectives

    class Synchronized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                h = layer(x)
                mean = collectives.all_reduce(h.detach().mean(dim=0), "sum", one_process_group)
                x = (h - mean).tanh()
            return x

    def make() -> Example:
        torch.manual_seed(0)
        return example_of(Synchronized(), lambda step: gaussian(step, torch.device("cpu"), 8, 16))

    managed, _ = assert_trains_alike(make, schedule, torch.device("cpu"))
    with OpCount() as count:
        managed(gaussian(0, torch.device("cpu"), 8, 16)).sum().backward()
    reductions = [n for name, n in count.runs.items() if "all_reduce" in name]
    assert sum(reductions) == 3


@pytest.mark.parametrize("loss", ["dense gradient", "expanded gradient"])
def test_a_schedule_runs_its_ops_as_often_as_it_says(loss: str, device: torch.device) -> None:
    """The other tests would pass on a module that ignores its schedule: this one would not. A
    gradient in another layout than planned (`.sum()` gives one without strides) is learnt from
    the first backward: from the second step on the schedule holds for it too."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
    example = example_of(
        nn.Sequential(*layers).to(device), lambda step: gaussian(step, device, 8, 16)
    )
    runs = {}
    for schedule in ("keep-all", "thrice"):
        managed = manage(example, schedule)
        for _ in range(2):
            with OpCount() as count:
                out = managed(*example.inputs(0)[0])
                (out.square() if loss == "dense gradient" else out).sum().backward()
        runs[schedule] = sum(n for name, n in count.runs.items() if "tanh.default" in name)
    assert runs == {"keep-all": 3, "thrice": 9}


@pytest.mark.filterwarnings("ignore:.*find_unused_parameters")
@pytest.mark.parametrize("schedule", ["keep-all", "sqrt", "thrice"])
def test_distributed_data_parallel(schedule: str, one_process_group) -> None:
    """Wrapped in DistributedDataParallel: buckets are reduced, gradients are eager's."""
    cpu = torch.device("cpu")

    def make() -> Example:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh()) for _ in range(6)]
        return example_of(nn.Sequential(*layers), lambda step: gaussian(step, cpu, 8, 16))

    def wrapped(model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)

    plain, example = make(), make()
    expected = train(plain, wrapped(plain.model))
    got = train(example, wrapped(manage(example, schedule)))
    assert_same(expected, got)
