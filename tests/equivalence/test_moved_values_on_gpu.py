"""On a GPU: what runs on side streams is waited for, whatever else keeps device and host busy."""

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import assert_same, train
from support.manage import manage
from support.moving import OPTIONS, device_file, moving
from support.zoo import CASES
from torch import nn

import rekindle
from rekindle.runtime.host_memory import Piece, host_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BUSY_CYCLES = 20_000_000  # about 10 ms


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512))]
    return nn.Sequential(*layers).cuda()


def managed(folder: Path, seed: int = 1) -> nn.Module:
    x = torch.zeros(1024, 512, device="cuda")
    given = moving("keep-all", seed)
    profile = device_file(folder, "h200")
    return rekindle.rematerialize(
        net(), (x,), schedule=given, on_miss="raise", device_profile=profile, **OPTIONS
    )


def batches(num: int) -> list[torch.Tensor]:
    source = torch.Generator("cuda").manual_seed(3)
    return [torch.randn(1024, 512, device="cuda", generator=source) for _ in range(num)]


def gradients(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(model(x).square().mean(), list(model.parameters()))


@pytest.mark.parametrize("name", ["gpt2", "resnet18", "transformer", "lora"])
def test_equal_to_eager(name: str, tmp_path: Path) -> None:
    case = next(c for c in CASES if c.name == name)
    device = torch.device("cuda", torch.cuda.current_device())
    expected, again = train(case.build(device)), train(case.build(device))
    example = case.build(device)
    given = moving("sqrt", 2)
    new = manage(example, given, device_profile=device_file(tmp_path, "h200"), **OPTIONS)
    assert_same(expected, train(example, new), again)


def test_exact_while_everything_is_busy(tmp_path: Path) -> None:
    """Another stream works, the device lags behind at random, and the host runs ahead."""
    eager, new = net(), managed(tmp_path)
    other, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    source = random.Random(0)
    for x in batches(100):
        expected = gradients(eager, x)
        with torch.cuda.stream(other):
            for _ in range(source.randrange(5)):
                noise.add_(0.0)
        loss = new(x).square().mean()
        if source.random() < 0.3:
            torch.cuda._sleep(source.randrange(BUSY_CYCLES))
        if source.random() < 0.2:
            torch.cuda.synchronize()
        got = torch.autograd.grad(loss, list(new.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("waits", [True, False])
def test_host_memory_is_not_written_before_the_last_step_has_read_it(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps on two streams, one after the other on the host: the second may begin while the
    first has not begun on the device."""
    eager, new = net(), managed(tmp_path)
    first, second = batches(2)
    expected = [gradients(eager, x) for x in (first, second)]
    for _ in range(3):
        gradients(new, first)  # allocates what there is to allocate
    torch.cuda.synchronize()
    if not waits:
        monkeypatch.setattr(Piece, "free", property(lambda _: None, lambda _, __: None))
        for piece in host_memory(torch.device("cuda")).idle:
            vars(piece).pop("free", None)
    streams = [torch.cuda.Stream() for _ in range(2)]
    got = []
    for stream, x in zip(streams, (first, second), strict=True):
        with torch.cuda.stream(stream):
            if x is first:
                torch.cuda._sleep(10 * BUSY_CYCLES)
            got.append(gradients(new, x))
    torch.cuda.synchronize()
    equal = [
        all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
        for one, other in zip(expected, got, strict=True)
    ]
    assert equal == [True, True] if waits else not all(equal)


def test_host_memory_is_pinned_and_as_large_as_planned(tmp_path: Path) -> None:
    gc.collect()
    new = managed(tmp_path)
    gradients(new, batches(1)[0])
    memory = host_memory(torch.device("cuda"))
    [piece] = memory.idle
    assert piece.num_bytes >= new.plan.runner.lowered.host.num_bytes
    assert piece.data.is_pinned()
    del new, piece
    gc.collect()
    assert memory.num_bytes == 0
