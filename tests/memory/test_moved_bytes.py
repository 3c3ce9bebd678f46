"""With values moved to a second memory, which stands for the host, memory is what was simulated: a
device copy is gone with its drop, back with its fetch, and the host has what the plan says."""

import gc
from pathlib import Path

import pytest
import torch
from support.compare import seed
from support.manage import manage
from support.meter import every_output, measure_step, own_loss
from support.moving import OPTIONS, device_file, moving, without_workspace
from support.schedules import SCHEDULES
from support.zoo import CASES, Case

from rekindle.core import host_layout, simulate
from rekindle.runtime.host_memory import host_memory

QUICK = ("mlp-mixer", "lora", "experts", "lstm")  # each by another schedule


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_model_keeps_to_the_simulation(case: Case, schedule: str, tmp_path: Path) -> None:
    assert_as_simulated(case, schedule, tmp_path)


@pytest.mark.parametrize("number", range(len(QUICK)))
def test_the_measured_peak_is_the_simulated_one(number: int, tmp_path: Path) -> None:
    case = next(c for c in CASES if c.name == QUICK[number])
    assert_as_simulated(case, list(SCHEDULES)[number], tmp_path)


def assert_as_simulated(case: Case, schedule: str, tmp_path: Path) -> None:
    example = case.build("cpu")
    given = moving(schedule, seed=3)
    managed = manage(example, given, device_profile=device_file(tmp_path), **OPTIONS)
    problem = without_workspace(managed.plan.problem)
    steps = managed.plan.schedule
    trace = simulate(problem, steps)
    assert any(t.kind == "drop" for t in steps.transfers)
    roots = own_loss if example.own_loss else every_output
    measure_step(managed, example.inputs(0), roots)  # the first step takes the host memory
    managed.zero_grad(set_to_none=True)
    on_host = [piece.data for piece in host_memory(torch.device("cpu")).idle]
    seed(7)
    meter = measure_step(managed, example.inputs(0), roots, on_host)
    assert meter.peak == trace.peak, f"at {meter.peak_op}: ratio {meter.peak / trace.peak:.4f}"
    layout = host_layout(steps.steps, [v.size for v in problem.values])
    assert layout == managed.plan.runner.lowered.host
    assert trace.host_peak <= layout.num_bytes <= 1.5 * trace.host_peak
    assert host_memory(torch.device("cpu")).num_bytes >= layout.num_bytes


def test_host_memory_goes_with_the_plans(tmp_path: Path) -> None:
    gc.collect()
    memory = host_memory(torch.device("cpu"))
    case = next(c for c in CASES if c.name == "lora")
    sizes = []
    for number in (1, 2):
        example = case.build("cpu")
        given = moving("keep-all", seed=number)
        managed = manage(example, given, device_profile=device_file(tmp_path), **OPTIONS)
        args, kwargs = example.inputs(0)
        example.loss(managed(*args, **kwargs)).backward()
        sizes.append(managed.plan.runner.lowered.host.num_bytes)
        # One module after the other has the same piece, as long as it is large enough.
        assert memory.num_bytes == max(sizes)
        if number == 1:
            first = managed
    del managed, example
    gc.collect()
    assert memory.num_bytes <= max(sizes)
    del first
    gc.collect()
    assert memory.num_bytes == 0
