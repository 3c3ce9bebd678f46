"""Random models under random schedules: equal to eager to the bit, with the simulated memory."""

from dataclasses import replace

import pytest
import torch
from support.compare import assert_same, seed, train
from support.manage import manage
from support.meter import every_output, measure_step
from support.random_models import ROWS, WIDTH, RandomModel
from support.schedules import SCHEDULES, thrice
from support.zoo import Example, Inputs, gaussian
from torch import Tensor

from rekindle.core import Problem, simulate

CPU = torch.device("cpu")


def example(number: int) -> Example:
    torch.manual_seed(number)
    model = RandomModel(number).train()

    def inputs(step: int) -> Inputs:
        x = gaussian(step, CPU, ROWS, WIDTH, requires_grad=number % 2 == 0)
        return (x, gaussian(step + 50, CPU, ROWS, WIDTH)), {}

    def loss(outputs: tuple[Tensor, ...]) -> Tensor:
        return sum((out * out).mean() for out in every_output(outputs)) + 0.0

    return Example(model, inputs, loss, optimizer="sgd")


def eager_runs(number: int) -> bool:
    """Some programs overwrite what autograd needs: eager refuses those."""
    try:
        train(example(number), steps=1)
    except RuntimeError:
        return False
    return True


def random_schedule(number: int):
    return lambda problem: thrice(problem, number)


def check(number: int) -> None:
    expected = train(example(number))
    for name, schedule in (*SCHEDULES.items(), ("random", random_schedule(number + 1))):
        managed_example = example(number)
        managed = manage(managed_example, schedule=schedule)
        try:
            assert_same(expected, train(managed_example, managed))
            check_memory(number, schedule, name)
        except Exception as error:
            raise AssertionError(f"model {number}, schedule {name}: {error}") from error


def check_memory(number: int, schedule, name: str) -> None:
    plain = example(number)
    args, kwargs = plain.inputs(0)
    seed(3)
    roots = every_output(plain.model(*args, **kwargs))
    if len(roots) != 1:
        return  # the plan assumes one gradient until it has seen which arrive
    managed_example = example(number)
    managed = manage(managed_example, schedule=schedule)
    seed(3)
    meter = measure_step(managed, managed_example.inputs(0))
    trace = simulate(without_workspace(managed.plan.problem), managed.plan.schedule)
    assert meter.peak == trace.peak, f"measured {meter.peak}, simulated {trace.peak}"
    if name == "keep-all":
        plain = example(number)
        seed(3)
        eager = measure_step(plain.model, plain.inputs(0)).peak
        assert meter.peak <= 1.01 * eager, f"managed {meter.peak}, eager {eager}"


def without_workspace(problem: Problem) -> Problem:
    return replace(problem, ops=tuple(replace(op, workspace=0) for op in problem.ops))


RUNNABLE = 12


@pytest.mark.parametrize("number", range(RUNNABLE))
def test_random_models(number: int) -> None:
    if eager_runs(number):
        check(number)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_many_random_models(block: int) -> None:
    checked = 0
    for number in range(RUNNABLE + 20 * block, RUNNABLE + 20 * (block + 1)):
        if eager_runs(number):
            check(number)
            checked += 1
    assert checked


def test_most_random_models_are_accepted_by_eager() -> None:
    assert sum(eager_runs(number) for number in range(RUNNABLE)) >= RUNNABLE // 2
