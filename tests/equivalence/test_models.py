"""Bitwise equal to eager: every model of the zoo, every schedule, three steps with an optimizer."""

import pytest
import torch
from support.compare import Record, assert_same, keep, record_state, seed, train
from support.further_models import FURTHER
from support.manage import manage
from support.schedules import SCHEDULES
from support.zoo import CASES, Case, Example

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


def state_of(example: Example, device: torch.device) -> Record:
    record: Record = {}
    record_state(record, "now", example.model, device)
    for name, parameter in example.model.named_parameters():
        record[f"parameter {name}"] = keep(parameter)
        record[f"gradient {name}"] = keep(parameter.grad)
    for name, module in example.model.named_modules():
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        record[f"module {name}"] = f"training {module.training}, {hooks} hooks"
    return record


@EVERY_SCHEDULE
@EVERY_CASE
def test_three_steps_equal_eager(case: Case, schedule: str, device: torch.device) -> None:
    check(case, schedule, device)


@pytest.mark.slow
@EVERY_SCHEDULE
@pytest.mark.parametrize("case", FURTHER, ids=lambda case: case.name)
def test_further_models_equal_eager(case: Case, schedule: str, device: torch.device) -> None:
    check(case, schedule, device)


def check(case: Case, schedule: str, device: torch.device) -> None:
    expected = train(case.build(device))
    again = train(case.build(device)) if device.type == "cuda" else None
    example = case.build(device)
    seed(3)
    before = state_of(example, device)
    managed = manage(example, schedule)
    assert_same(before, state_of(example, device))  # planning leaves no trace
    assert isinstance(managed, type(example.model))
    assert managed is not example.model
    got = train(example, managed)
    assert_same(expected, got, again)
