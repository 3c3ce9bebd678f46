"""Memory is what was simulated: live bytes measured op by op equal the simulated peak without
workspace, for every model of the zoo at every schedule; and keep-all needs no more than eager."""

import gc
from dataclasses import replace

import pytest
import torch
from support.compare import seed
from support.manage import example_of, manage
from support.meter import LiveMeter, every_output, measure_step, own_loss
from support.schedules import SCHEDULES
from support.zoo import CASES, Case, Example, gaussian
from torch import nn

import rekindle
from rekindle.core import Problem, simulate
from rekindle.profile import blocks_of
from rekindle.torch_compat import pytree

EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


def without_workspace(problem: Problem) -> Problem:
    return replace(problem, ops=tuple(replace(op, workspace=0) for op in problem.ops))


def measured(example: Example, call: nn.Module, step: int = 0) -> LiveMeter:
    seed(7)
    roots = own_loss if example.own_loss else every_output
    return measure_step(call, example.inputs(step), roots)


def attributes(model: nn.Module) -> dict[int, int]:
    """The bytes of tensors that modules hold as plain attributes, such as a table that the first
    call fills, by the address of their storage."""
    held = [v for m in model.modules() for k, v in vars(m).items() if not k.startswith("_rekindle")]
    leaves = [leaf for leaf in pytree.tree_leaves(held) if isinstance(leaf, torch.Tensor)]
    storages = [leaf.untyped_storage() for leaf in leaves if not isinstance(leaf, nn.Parameter)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@EVERY_SCHEDULE
@EVERY_CASE
def test_the_measured_peak_is_the_simulated_one(
    case: Case, schedule: str, device: torch.device
) -> None:
    example = case.build(device)
    managed = manage(example, schedule)
    problem = without_workspace(managed.plan.problem)
    trace = simulate(problem, managed.plan.schedule)
    before = attributes(managed)
    meter = measured(example, managed)
    filled = sum(size for key, size in attributes(managed).items() if key not in before)
    step = problem.ops[managed.plan.schedule.ops[trace.peak_step]].name
    assert meter.peak == trace.peak, (
        f"measured {meter.peak} at {meter.peak_op}, simulated {trace.peak} at {step}: "
        f"ratio {meter.peak / trace.peak:.4f}"
    )
    assert meter.live == gradient_bytes(managed) + filled, "something else stayed alive"


@EVERY_CASE
def test_keep_all_needs_no_more_than_eager(case: Case, device: torch.device) -> None:
    plain = case.build(device)
    measured(plain, plain.model)  # some models cache a constant tensor at their first call
    plain.model.zero_grad(set_to_none=True)
    eager = measured(plain, plain.model)
    example = case.build(device)
    managed = measured(example, manage(example, "keep-all"))
    assert eager.live == gradient_bytes(plain.model)
    assert managed.peak <= 1.01 * eager.peak, (
        f"managed {managed.peak} at {managed.peak_op}, eager {eager.peak} at {eager.peak_op}: "
        f"ratio {managed.peak / eager.peak:.4f}"
    )


def gradient_bytes(model: nn.Module) -> int:
    storages = [p.grad.untyped_storage() for p in model.parameters() if p.grad is not None]
    sizes = {s._cdata: blocks_of(s.device.type).block_bytes(s.nbytes()) for s in storages}
    return sum(sizes.values())


def wide(device: torch.device) -> Example:
    """Gradients far larger than activations."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128, bias=False), nn.Tanh()) for _ in range(8)]
    return example_of(
        nn.Sequential(*layers).to(device), lambda step: gaussian(step, device, 2, 128)
    )


@pytest.mark.parametrize("schedule", ["keep-all", "sqrt", "floor"])
def test_a_second_micro_batch_needs_no_second_copy_of_all_gradients(
    schedule: str, device: torch.device
) -> None:
    """With gradients there already, eager adds each new one and lets it go; so must we."""
    plain = wide(device)
    measured(plain, plain.model)
    eager = measured(plain, plain.model, step=1)
    example = wide(device)
    managed = manage(example, schedule)
    measured(example, managed)
    second = measured(example, managed, step=1)
    assert eager.peak < gradient_bytes(managed) / 2
    assert second.peak <= 1.01 * eager.peak, f"managed {second.peak}, eager {eager.peak}"
    for mine, theirs in zip(managed.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


@EVERY_SCHEDULE
def test_the_next_step_needs_no_more(schedule: str, device: torch.device) -> None:
    example = wide(device)
    managed = manage(example, schedule)
    first = measured(example, managed)
    managed.zero_grad(set_to_none=True)
    assert measured(example, managed, step=1).peak == first.peak


def test_a_smaller_budget_never_measures_more(device: torch.device) -> None:
    peaks = []
    for fraction in (1.0, 0.8, 0.6):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
        example = example_of(
            nn.Sequential(*layers).to(device), lambda step: gaussian(step, device, 256, 32)
        )
        args, kwargs = example.inputs(0)
        managed = rekindle.rematerialize(
            example.model, args, kwargs, budget=fraction, on_miss="raise"
        )
        plan = managed.plan
        peak = measured(example, managed).peak
        assert peak <= fraction * plan.keep_all_peak_bytes
        peaks.append(peak)
    assert peaks == sorted(peaks, reverse=True)


@EVERY_SCHEDULE
def test_a_dropped_output_frees_everything(schedule: str, device: torch.device) -> None:
    """A forward whose backward never comes leaves nothing behind, without the garbage collector."""
    example = wide(device)
    managed = manage(example, schedule)
    (x,), _ = example.inputs(0)
    gc.disable()
    try:
        with LiveMeter([*managed.parameters(), x]) as meter:
            out = managed(x)
            assert meter.live > 0
            del out
        assert meter.live == 0
    finally:
        gc.enable()
