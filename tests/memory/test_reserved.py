"""What the caching allocator really reserves, against what is predicted; on a GPU."""

import copy
import gc
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rekindle
from rekindle import _native
from rekindle.predict.caching_allocator import pool_rules
from rekindle.runtime.arena import NUM_CHECKED_STEPS, NUM_WARM_STEPS
from rekindle.torch_compat import MemoryPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 2**20
SIZES = (1, 3000, 2**18, MIB, MIB + 1, 3 * MIB, 7 * MIB, 10 * MIB, 33 * MIB + 7, 70 * MIB)
WIDTH, ROWS = 1024, 8192


@pytest.mark.parametrize("seed", range(6))
def test_the_model_of_the_allocator_is_the_allocator(seed: int) -> None:
    """Event by event, in a pool that is empty at first; with and without a large segment in it."""
    rng = random.Random(seed)
    pool, model = MemoryPool(torch.cuda.current_device()), _native.CachingPool(pool_rules())
    if seed % 2:
        pool.reserve([300 * MIB])
        model.reserve(300 * MIB)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved() - 300 * MIB * (seed % 2)
    live: list[tuple[Tensor, int]] = []
    for _ in range(250):
        if live and rng.random() < 0.49:
            tensor, block = live.pop(rng.randrange(len(live)))
            del tensor
            model.release(block)
        else:
            size = max(1, int(rng.choice(SIZES) * rng.choice((1, 1, rng.random()))))
            with pool:
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            live.append((tensor, model.allocate(size)))
        assert torch.cuda.memory_allocated() - before[0] == model.allocated_bytes
        assert torch.cuda.memory_reserved() - before[1] == model.reserved_bytes


class Blocks(nn.Module):
    """Random numbers, statistics, and temporaries of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(8))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + torch.dropout(down(up(self.norm(x)).relu()).tanh(), 0.1, True)
        return x.square().mean()


def trained(model: nn.Module, x: Tensor, num_steps: int) -> list[Tensor]:
    torch.manual_seed(5)
    found = []
    for _ in range(num_steps):
        model.zero_grad()
        loss = model(x)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    return [*found, *model.buffers()]


def managed(model: nn.Module, x: Tensor, **options: Any) -> nn.Module:
    options = {"arena": True} | options
    return rekindle.rematerialize(
        model, (x,), budget=0.4, time_limit_s=1, hold_outputs=False, **options
    )


def test_reserved_is_as_predicted_and_close_to_the_peak() -> None:
    torch.manual_seed(0)
    model, x = Blocks().cuda(), torch.randn(ROWS, WIDTH, device="cuda")
    found = {}
    for arena in (False, True):
        planned = managed(copy.deepcopy(model), x, arena=arena)
        trained(planned, x, 10)
        found[arena] = rekindle.measure(planned, (x,))
        predicted = planned.plan.predict()
        assert found[arena].reserved_bytes == pytest.approx(predicted.reserved_bytes, rel=0.02)
        del planned
        gc.collect()
    assert found[True].reserved_bytes <= 1.1 * found[True].peak_bytes + 8 * MIB
    assert found[True].reserved_bytes < found[False].reserved_bytes
    assert found[True].reserved_bytes < rekindle.measure(model, (x,)).reserved_bytes


def test_steps_in_the_arena_are_those_of_eager() -> None:
    torch.manual_seed(0)
    model, x = Blocks().cuda(), torch.randn(ROWS, WIDTH, device="cuda")
    planned = managed(copy.deepcopy(model), x)
    num = NUM_WARM_STEPS + NUM_CHECKED_STEPS + 5
    got, expected = trained(planned, x, num), trained(model, x, num)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    use = planned.plan.runner.arena
    assert use is not None
    assert use.num_inside > NUM_CHECKED_STEPS


def test_the_rest_of_the_device_may_be_full() -> None:
    """Steps go on where the rest of the device is taken, and between steps others may have what the
    arena holds."""
    model, x = Blocks().cuda(), torch.randn(ROWS, WIDTH, device="cuda")
    planned = managed(model, x)
    trained(planned, x, 10)
    size = max(planned.plan.runner.arena.segments)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    filler = torch.empty(free - 64 * MIB, dtype=torch.uint8, device="cuda")
    trained(planned, x, 4)
    more = torch.empty(size - 2 * MIB, dtype=torch.uint8, device="cuda")  # only the arena has it
    del more, filler
    torch.cuda.empty_cache()
    trained(planned, x, 4)
