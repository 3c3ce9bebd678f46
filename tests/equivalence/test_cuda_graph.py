"""A step that is replayed as CUDA graphs equals eager to the bit, whatever comes between."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import rekindle


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.norm = nn.BatchNorm1d(256)
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(256, 64)
        self.last = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(nn.functional.gelu(self.norm(self.first(x))))
        return self.last(x + self.second(hidden))


class Blocks(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).sin().mean()


def _steps(model: nn.Module, device: torch.device, act: Callable[..., None]) -> list[torch.Tensor]:
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for k in range(6):
        x = torch.randn(1024, 64, device=device, requires_grad=True)
        optimizer.zero_grad(set_to_none=True)
        act(model, x, k)
        found += [p.grad.clone() for p in model.parameters()]
        if act not in (interleaved, by_turns):  # two calls: who adds first is the engine's choice
            found.append(x.grad.clone())
        optimizer.step()
    found += [p.detach().clone() for p in model.parameters()]
    found += [b.clone() for b in model.buffers()]
    found.append(torch.cuda.get_rng_state(device))
    return found


def plain(model: nn.Module, x: torch.Tensor, k: int) -> None:
    model(x).backward()


def accumulated(model: nn.Module, x: torch.Tensor, k: int) -> None:
    for _ in range(3):
        model(x).backward()


def kept(model: nn.Module, x: torch.Tensor, k: int) -> None:
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()


def interleaved(model: nn.Module, x: torch.Tensor, k: int) -> None:
    first, second = model(x), model(x * 2)
    (first + second).backward()


def scaled(model: nn.Module, x: torch.Tensor, k: int) -> None:
    (model(x) * (k + 1)).backward()


def without_backward(model: nn.Module, x: torch.Tensor, k: int) -> None:
    if k % 2:
        model(x)
    model(x).backward()


def by_turns(model: nn.Module, x: torch.Tensor, k: int) -> None:
    [plain, kept, interleaved, plain, accumulated, plain][k % 6](model, x, k)


@pytest.mark.parametrize("budget", [1.0, 0.75])
@pytest.mark.parametrize(
    "act",
    [plain, accumulated, kept, interleaved, scaled, without_backward, by_turns],
    ids=lambda f: f.__name__,
)
def test_replayed_steps_equal_eager(
    act: Callable[..., None], budget: float, device: torch.device
) -> None:
    if device.type != "cuda":
        with pytest.raises(ValueError, match="needs a CUDA device"):
            rekindle.rematerialize(
                Blocks(), (torch.zeros(2, 64),), budget=budget, cuda_graph=True, profile="estimate"
            )
        return
    torch.manual_seed(0)
    model = Blocks().to(device)
    third, twin = copy.deepcopy(model), copy.deepcopy(model)
    sample = (torch.randn(1024, 64, device=device, requires_grad=True),)
    managed = rekindle.rematerialize(twin, sample, budget=budget, cuda_graph=True, inplace=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if act is kept else "error")
        expected, found = _steps(model, device, act), _steps(managed, device, act)
        again = _steps(third, device, act)
    for k, (a, b, c) in enumerate(zip(expected, found, again, strict=True)):
        assert torch.equal(a, c), f"eager does not repeat itself in item {k}"
        assert torch.equal(a, b), k
    graphs = managed.plan.runner.graphs
    assert graphs.complete or act is kept, graphs.why_not or "nothing was replayed"


def test_parameters_that_move_end_the_replay(device: torch.device) -> None:
    if device.type != "cuda":
        return
    model = Blocks(0.0).to(device)
    x = torch.randn(1024, 64, device=device)
    managed = rekindle.rematerialize(model, (x,), budget=1.0, cuda_graph=True)
    for _ in range(4):
        managed(x).backward()
    first = model.blocks[0].first
    first.weight.data = first.weight.data.clone()
    managed.zero_grad()
    with pytest.warns(RuntimeWarning, match="lie elsewhere"):
        managed(x).backward()
    mine = [p.grad.clone() for p in managed.parameters()]
    twin = copy.deepcopy(model)
    twin.zero_grad()
    twin(x).backward()
    for a, b in zip(mine, twin.parameters(), strict=True):
        assert torch.equal(a, b.grad)
