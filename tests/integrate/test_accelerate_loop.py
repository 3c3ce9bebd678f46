"""A loop with Accelerate: the two-line recipe, with mixed precision and accumulation."""

import warnings
from typing import Any

import pytest
import torch
from support.schedules import SCHEDULES
from support.zoo import require
from torch import nn

import rekindle

require("accelerate")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 20


def run(managed: bool, *, accumulate: int, **settings: Any) -> tuple[list[float], nn.Module]:
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **settings)
    layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(5)]
    model = nn.Sequential(*layers)
    if managed:
        model = rekindle.rematerialize(
            model, schedule=SCHEDULES["thrice"], profile="estimate", on_miss="raise"
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.utils.data.TensorDataset(torch.randn(8 * STEPS, 16))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            loss = (model(x) - x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, accelerator.unwrap_model(model)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_recipe(accumulate: int, precision: str) -> None:
    settings = {"accumulate": accumulate, "mixed_precision": precision}
    plain, managed = run(False, **settings), run(True, **settings)
    assert len(plain[0]) == STEPS
    assert managed[0] == plain[0]
    assert managed[1].plan is not None
    mine, theirs = managed[1].state_dict(), plain[1].state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
