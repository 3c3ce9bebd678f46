"""Predictions: the allocator's model, the stream of host and device, charges of views."""

import random

import pytest
import torch
from support.recording import capture
from torch import Tensor, nn

from rekindle.core import Op, Problem, Schedule, Value, keep_all, simulate
from rekindle.predict import Predictor
from rekindle.predict.caching_allocator import pool_peak
from rekindle.profile import OpProfile, Source, load_device, profile_nodes
from rekindle.profile.block_sizes import CudaBlocks
from rekindle.profile.profiler import stream_ns
from rekindle.program import analyse, charged_nodes
from rekindle.program.formulate import formulate

MIB = 2**20


def random_chain(seed):
    source = random.Random(seed)
    values = [Value("input", 0)]
    ops = []
    for i in range(30):
        size = CudaBlocks(expandable=True).block_bytes(source.randrange(1, 40 * MIB))
        values.append(Value(f"v{i}", size))
        inputs = tuple({i, source.randrange(i + 1)})
        workspace = 512 * source.randrange(4000)
        ops.append(Op(f"op{i}", 1, inputs, (i + 1,), workspace=workspace))
    return Problem(tuple(values), tuple(ops), resident=(0,), outputs=(30,))


@pytest.mark.parametrize("seed", range(5))
def test_with_expandable_segments_the_pool_is_the_simulation(seed):
    problem = random_chain(seed)
    schedule = keep_all(problem)
    assert pool_peak(problem, schedule, expandable=True) == simulate(problem, schedule).peak
    peak = simulate(problem, schedule).peak
    assert peak <= pool_peak(problem, schedule) <= peak + 31 * MIB


def test_in_place_takes_the_block_over():
    values = (Value("x", 0), Value("a", 30 * MIB), Value("b", 30 * MIB))
    ops = (Op("make", 1, (0,), (1,)), Op("over", 1, (1,), (2,), inplace=((1, 2),)))
    problem = Problem(values, ops, resident=(0,), outputs=(2,))
    assert (
        pool_peak(problem, Schedule((0, 1)))
        == 30 * MIB
        == simulate(problem, keep_all(problem)).peak
    )


def test_what_is_resident_shapes_the_pool():
    """Two gradients of 9 MiB fill a segment of 20 MiB; one beside a parameter of 9 MiB gets the
    rest of its segment as a whole, since what would be left is too little to split off."""
    size = 9 * MIB + 512 * 1024
    values = (Value("weight", size), Value("gradient", size))
    ops = (Op("make", 1, (0,), (1,)),)
    problem = Problem(values, ops, resident=(0,), outputs=(1,))
    schedule = keep_all(problem)
    assert simulate(problem, schedule).peak == size
    assert pool_peak(problem, schedule) == 20 * MIB - size
    assert pool_peak(problem, schedule, expandable=True) == size


def op(device_ns, host_ns):
    return OpProfile(0, 0, (), Source.MEASURED, device_ns=device_ns, host_ns=host_ns)


def test_a_step_among_steps_takes_the_longer_of_host_and_device():
    assert stream_ns([op(10, 3)] * 4) == 40  # the host is ahead
    assert stream_ns([op(3, 10)] * 4) == 40  # the device waits for every launch
    assert stream_ns([op(100, 5), op(1, 5), op(1, 5), op(0, 7)]) == 102
    assert stream_ns([op(1, 50), op(100, 1)]) == 101  # the host is a step ahead
    assert stream_ns([op(0, 7)] * 3) == 21


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x.t().reshape(4, 8) @ self.weight, 0.5).sum()


def test_every_node_is_charged_once_and_views_to_their_first_reader():
    joint = capture(Views(), (torch.randn(8, 4),))
    program = analyse(joint)
    charged = [name for names in charged_nodes(program) for name in names]
    assert len(charged) == len(set(charged))
    own = {node.name for op in program.ops for node in op.nodes}
    assert own <= set(charged)
    assert {node.name for node in program.base} & set(charged)
    problem = formulate(program, profile := profile_nodes(joint.nodes))
    assert sum(op.cost for op in problem.ops) == sum(profile[name].cost_ns for name in charged)


def test_states_of_replayed_random_ops_are_foreseen():
    joint = capture(Views(), (torch.randn(8, 4),))
    program = analyse(joint)
    profile = profile_nodes(joint.nodes)
    problem = formulate(program, profile)
    predictor = Predictor(program, profile, problem)
    once = keep_all(problem)
    drop = next(i for i, o in enumerate(problem.ops) if "bernoulli" in o.name)
    loss = problem.loss_op
    twice = Schedule((*range(loss + 1), drop, *range(loss + 1, len(problem.ops))))
    assert predictor.peak_bytes(once) == simulate(problem, once).peak + 4
    assert predictor.peak_bytes(twice) >= simulate(problem, twice).peak + 5056


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.nn.functional.gelu(layer(torch.cat([x, x[: 999 * i]])))
        return x.square().mean()


def test_reserved_bytes_with_and_without_an_arena_and_as_what_is_needed():
    joint = capture(Wide(), (torch.randn(4096, 512),))
    program = analyse(joint)
    profile = profile_nodes(joint.nodes, description=load_device("h200"))
    problem = formulate(program, profile)
    schedule = keep_all(problem)
    plain, own = Predictor(program, profile, problem), Predictor(program, profile, problem, True)
    peak = plain.peak_bytes(schedule)
    assert own.peak_bytes(schedule) == peak
    assert plain.arena(schedule) == ()
    arena = own.arena(schedule)
    assert arena
    assert arena is own.arena(schedule)  # it is searched for once
    assert sum(arena) <= own.reserved_bytes(schedule) < plain.reserved_bytes(schedule)
    predicted = own.predict(schedule)
    assert (predicted.peak_bytes, predicted.reserved_bytes) == (peak, own.reserved_bytes(schedule))
    assert own.needed_bytes(schedule) == own.keep_all_bytes == peak
    whole = Predictor(program, profile, problem, True, in_reserved=True)
    assert whole.needed_bytes(schedule) == whole.keep_all_bytes == own.reserved_bytes(schedule)
    on_cpu = Predictor(program, profile_nodes(joint.nodes), problem, True)
    assert on_cpu.arena(schedule) == ()
    assert on_cpu.reserved_bytes(schedule) == on_cpu.peak_bytes(schedule)
