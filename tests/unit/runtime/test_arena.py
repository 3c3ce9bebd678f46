"""The arena of planned steps, on an allocator that only counts; bytes are MiB-sized."""

import copy
import gc
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle.runtime import arena as arena_module
from rekindle.runtime.arena import NUM_CHECKED_STEPS, NUM_WARM_STEPS, ArenaUse, inside
from rekindle.runtime.runner import Runner

GIB = 2**30
CUDA = torch.device("cuda:0")


class Pool:
    """Stands for a private pool of the allocator."""

    all: ClassVar[list["Pool"]] = []

    def __init__(self, device_index: int) -> None:
        self.device_index, self.size, self.added = device_index, 0, 0
        self.threads: list[int] = []  # that are inside
        self.num_entered = 0
        Pool.all.append(self)

    def reserve(self, segments: Sequence[int]) -> None:
        if Device.refuses:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried ...")
        self.size = sum(segments)

    def large_bytes(self) -> int:
        return self.size + self.added

    def __enter__(self) -> None:
        assert not self.threads, "the allocator refuses to enter a pool twice"
        self.threads.append(threading.get_ident())
        self.num_entered += 1

    def __exit__(self, *_: object) -> None:
        assert self.threads == [threading.get_ident()]
        self.threads.clear()


class Device:
    free = 100 * GIB
    refuses = False
    is_recording = False
    stream = 7
    num_emptied = 0


class Stream:
    @property
    def cuda_stream(self) -> int:
        return Device.stream


def empty_cache() -> None:
    Device.num_emptied += 1


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in (("free", 100 * GIB), ("refuses", False), ("is_recording", False)):
        monkeypatch.setattr(Device, name, value)
    monkeypatch.setattr(Device, "stream", 7)
    monkeypatch.setattr(Device, "num_emptied", 0)
    monkeypatch.setattr(Pool, "all", [])
    monkeypatch.setattr(arena_module, "MemoryPool", Pool)
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "is_current_stream_capturing", lambda: Device.is_recording)
    monkeypatch.setattr(cuda, "mem_get_info", lambda index: (Device.free, 141 * GIB))
    monkeypatch.setattr(cuda, "current_stream", lambda index: Stream())
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "empty_cache", empty_cache)
    return Device


def begun(use: ArenaUse, num: int) -> list[Any]:
    return [use.begin() for _ in range(num)]


def test_the_first_steps_run_outside_and_the_next_can_be_repeated() -> None:
    use = ArenaUse(CUDA, (GIB, 2 * GIB))
    assert use.begin(is_watched=True) is None
    assert begun(use, NUM_WARM_STEPS - 1) == [None] * (NUM_WARM_STEPS - 1)
    found, checked = [], []
    for _ in range(NUM_CHECKED_STEPS + 3):
        found.append(use.begin())
        checked.append(use.is_checked_now)
    assert None not in found
    assert checked == [True] * NUM_CHECKED_STEPS + [False] * 3
    assert [pool.size for pool in Pool.all] == [3 * GIB]
    assert Device.num_emptied == 1  # what the first steps left, once


def warm(num_bytes: int) -> ArenaUse:
    use = ArenaUse(CUDA, (num_bytes,))
    begun(use, NUM_WARM_STEPS)
    return use


def test_inside_a_thread_allocates_from_the_pool_and_others_do_not() -> None:
    arena = warm(GIB).begin()
    assert arena is not None
    pool = Pool.all[0]
    seen = []

    def other() -> None:
        with inside(arena):
            seen.append(list(pool.threads))

    with inside(arena):
        assert pool.threads == [threading.get_ident()]
        with inside(arena):  # a step inside of a step stays where it is
            assert len(pool.threads) == 1
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert seen == [[threading.get_ident()]]
    assert not pool.threads
    other()
    assert seen[1] == [threading.get_ident()]
    with inside(None):
        assert not pool.threads
    with pytest.raises(ValueError, match="boom"), inside(arena):
        raise ValueError("boom")
    assert not pool.threads


def test_plans_of_a_device_and_stream_share_the_largest() -> None:
    small, large = warm(GIB), warm(2 * GIB)
    first = small.begin()
    assert large.begin() is first is small.begin()
    assert [pool.size for pool in Pool.all] == [GIB, 2 * GIB]
    assert first is not None
    assert first.size_bytes == 2 * GIB
    Device.stream = 8
    assert warm(GIB).begin() is not first


def test_the_arena_goes_with_the_last_plan() -> None:
    use, other = warm(GIB), warm(GIB)
    key = (0, 7)
    assert use.begin() is other.begin() is arena_module._arenas[key]
    del use
    gc.collect()
    assert key in arena_module._arenas
    del other
    gc.collect()
    assert key not in arena_module._arenas


@pytest.mark.parametrize("what", ["little is free", "no memory after all"])
def test_without_room_steps_allocate_as_always(what: str) -> None:
    if what == "little is free":
        Device.free = 2 * GIB + 1
    else:
        Device.refuses = True
    use = warm(2 * GIB)
    assert begun(use, 3) == [None] * 3
    Device.free, Device.refuses = 100 * GIB, False
    assert use.begin() is None  # and they do not try again at each step
    assert not use.is_checked_now


def test_a_step_that_is_being_recorded_stays_out() -> None:
    use = warm(GIB)
    Device.is_recording = True
    assert use.begin() is None
    Device.is_recording = False
    assert use.begin() is not None


def test_a_plan_that_needs_far_more_than_its_arena_leaves_it() -> None:
    use = warm(GIB)
    arena = use.begin()
    Pool.all[0].added = GIB // 4
    assert use.begin() is arena
    Pool.all[0].added = GIB  # it is no better than segments as they come
    assert use.begin() is None
    assert use.begin() is None


# ---- a managed module, as if a CPU had arenas


WIDTH = 48


class Trained(nn.Module):
    """Draws random numbers and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.dropout(self.norm(layer(x)).tanh(), 0.2, True)
        return x


def managed_with_arena(model: nn.Module, x: Tensor) -> tuple[Any, Runner]:
    managed = rekindle.rematerialize(model, (x,), budget=0.7, profile="estimate", time_limit_s=0.5)
    runner = managed.plan.runner
    runner.arena = ArenaUse(CUDA, (GIB,))
    return managed, runner


def run(model: nn.Module, x: Tensor, num_steps: int) -> list[Tensor]:
    torch.manual_seed(5)
    found = []
    for _ in range(num_steps):
        model.zero_grad()
        out = model(x)
        out.square().mean().backward()
        found += [out, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return [*found, *(b.clone() for b in model.buffers()), torch.rand(3)]


def test_steps_in_an_arena_are_eagers() -> None:
    model, x = Trained(), torch.randn(64, WIDTH)
    managed, runner = managed_with_arena(copy.deepcopy(model), x)
    got, expected = run(managed, x, 8), run(model, x, 8)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    num_parts = 1 + len(runner.lowered.stretches)
    assert Pool.all[0].num_entered == (8 - NUM_WARM_STEPS) * num_parts
    assert not Pool.all[0].threads


class Gone:
    """Calls what it stands for, but raises once, at the n-th call."""

    def __init__(self, target: Any, at: int) -> None:
        self.target, self.at, self.count = target, at, 0

    def __call__(self, args: Any) -> Any:
        self.count += 1
        if self.count == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.target(args)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("step", [NUM_WARM_STEPS + 1, NUM_WARM_STEPS + NUM_CHECKED_STEPS])
def test_a_step_that_runs_out_of_memory_inside_is_repeated_outside(
    where: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Trained(), torch.randn(64, WIDTH)
    managed, runner = managed_with_arena(copy.deepcopy(model), x)
    lowered = runner.lowered
    if where == "forward":
        forward = Gone(lowered.forward, step)
        object.__setattr__(lowered, "forward", forward)
    else:
        last = lowered.stretches[-1]
        object.__setattr__(last, "run", Gone(last.run, step))
    got, expected = run(managed, x, 8), run(model, x, 8)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    assert runner.arena is not None
    assert runner.arena.segments == ()
    assert not any(pool.threads for pool in Pool.all)


def test_later_an_error_is_raised_once_and_the_next_step_is_outside() -> None:
    model, x = Trained(), torch.randn(64, WIDTH)
    managed, runner = managed_with_arena(copy.deepcopy(model), x)
    run(managed, x, NUM_WARM_STEPS + NUM_CHECKED_STEPS + 1)
    gone = Gone(runner.lowered.forward, 1)
    object.__setattr__(runner.lowered, "forward", gone)
    with pytest.raises(torch.OutOfMemoryError):
        managed(x)
    num_entered = Pool.all[0].num_entered
    managed(x).sum().backward()
    assert Pool.all[0].num_entered == num_entered
    assert not Pool.all[0].threads
