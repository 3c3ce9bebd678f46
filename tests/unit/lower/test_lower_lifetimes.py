"""Copies in the emitted code live by the very rule that memory is counted by."""

import pytest
import torch
from support.random_models import RandomModel
from support.recording import capture
from support.schedules import SCHEDULES
from torch import nn

from rekindle.core.simulate import copies
from rekindle.lower.lifetimes import lifetimes
from rekindle.profile import profile_nodes
from rekindle.program import analyse
from rekindle.program.formulate import formulate

MODELS = {
    "dropout": lambda: (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()), 1),
    "batch norm": lambda: (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(True)), 1),
    # In-place ops, views, several outputs, buffers that are written to.
    **{f"random {seed}": lambda seed=seed: (RandomModel(seed), 2) for seed in (0, 5, 8)},
}


@pytest.mark.parametrize("hold_outputs", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_as_simulated(model, schedule, hold_outputs):
    torch.manual_seed(0)
    module, num_inputs = MODELS[model]()
    shape = (8, 4) if num_inputs == 1 else (8, 16)
    joint = capture(module, tuple(torch.randn(shape) for _ in range(num_inputs)))
    program = analyse(joint, hold_outputs=hold_outputs)
    problem = formulate(program, profile_nodes(joint.nodes))
    steps = SCHEDULES[schedule](problem)
    mine = [(c.value, c.made, c.last) for c in lifetimes(program, steps.ops).copies]
    assert mine == [(c.value_id, c.first, c.last) for c in copies(problem, steps)]
