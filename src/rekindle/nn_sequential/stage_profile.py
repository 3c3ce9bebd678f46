"""The stages of an `nn.Sequential`, measured one after the other: no graph is captured.

Neighbouring stages become one unit where the second writes into its input, or hands it on: such an
input cannot be kept or recomputed on its own (`_units`). So do those whose backward does not need
what lies between them (`_without_idle_outputs`): as units of their own they would keep it. Each
unit runs bare, with autograd, and backward on the sample; a meter counts the bytes of every storage
that appears (on CUDA the allocator counts), the clock is read `TRIALS` times. Buffers and the
random number generators are left as they were.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rekindle.capture.random_streams import left_alone, reachable_generators
from rekindle.errors import CaptureError
from rekindle.nn_sequential.memory_meters import AllocatorMeter, StorageMeter
from rekindle.nn_sequential.stage_values import detached, tensors_of
from rekindle.partition.chain import Block, Chain, Option

TRIALS = 3


@dataclass(frozen=True, slots=True)
class Unit:
    """Stages that run as one, and what running them again must take care of."""

    stages: tuple[nn.Module, ...]
    parameters: tuple[nn.Parameter, ...]  # those that need a gradient
    draws: bool  # random numbers: a second run must see the same
    changes_buffers: bool  # a second run must not change them again

    def __call__(self, x: Any) -> Any:
        for stage in self.stages:
            x = stage(x)
        return x

    @property
    def buffers(self) -> list[tuple[nn.Module, str, torch.Tensor]]:
        return [
            (module, name, buffer)
            for stage in self.stages
            for module in stage.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    @property
    def generators(self) -> list[torch.Generator]:
        """Those that the stages hold themselves."""
        found = [g for stage in self.stages for g in reachable_generators(stage)]
        return list({id(g): g for g in found}.values())


Own = Sequence[torch.Generator]  # beside the device's


@contextlib.contextmanager
def generators_kept(device: torch.device, own: Own) -> Iterator[None]:
    """Inside, random numbers are drawn as usual; afterwards the generators are as before."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), left_alone(own):
        yield


def generator_states(device: torch.device, own: Own) -> tuple[torch.Tensor, ...]:
    """The states of all generators that a stage may draw from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return (*states, *(generator.get_state() for generator in own))


def set_generator_states(device: torch.device, own: Own, states: Sequence[torch.Tensor]) -> None:
    """Restores what `generator_states` gave."""
    first, *others = states
    torch.set_rng_state(first)
    if device.type == "cuda":
        torch.cuda.set_rng_state(others.pop(0), device)
    for generator, state in zip(own, others, strict=True):
        generator.set_state(state)


@dataclass(frozen=True, slots=True)
class _Measured:
    output_bytes: int
    input_gradient_bytes: int
    parameter_gradient_bytes: int
    bare_peak_bytes: int
    bare_ns: int
    saved_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    step_ns: int  # forward with autograd, and backward


def measure(model: nn.Sequential, sample: Any) -> tuple[tuple[Unit, ...], Chain]:
    """The units of the model and the chain they make on that sample."""
    device = next((t.device for t in tensors_of(sample)), torch.device("cpu"))
    # Stages run several times here: dropout draws and batch norm counts, and none of it may show.
    with _state_kept(model, device):
        units = _without_idle_outputs(_units(model, sample, device), sample)
        seen: set[int] = set()
        results = []
        x = sample
        for unit in units:
            new = sum(p.nbytes for p in unit.parameters if id(p) not in seen)
            # Tied parameters have one gradient: it is counted once.
            seen.update(map(id, unit.parameters))
            result, x = _measure_unit(unit, x, new, device)
            results.append(result)
    return units, _chain(results)


def _units(model: nn.Sequential, sample: Any, device: torch.device) -> tuple[Unit, ...]:
    """One bare pass: which stages write into or hand on their input, draw, or change buffers."""
    groups: list[list[nn.Module]] = []
    draws: list[bool] = []
    changes: list[bool] = []
    input_handed_on = False  # the last stage's output is the model's own input
    x = sample
    with torch.no_grad():
        for k, stage in enumerate(model):
            # An alias has a version of its own only as a new tensor: writes show on the original.
            versions = [t._version for t in tensors_of(x)]
            storages = {t.untyped_storage().data_ptr() for t in tensors_of(x)}
            own = reachable_generators(stage)
            states = generator_states(device, own)
            buffers = [b.clone() for b in stage.buffers()]
            y = stage(x)
            if not tensors_of(y):
                raise CaptureError(
                    f"stage {k} ({type(stage).__name__}) returns no tensor; every stage of a "
                    "chain must return a tensor, or a tuple or list of them"
                )
            written = [t._version for t in tensors_of(x)] != versions
            handed_on = any(t.untyped_storage().data_ptr() in storages for t in tensors_of(y))
            after = generator_states(device, own)
            drew = any(not torch.equal(a, b) for a, b in zip(states, after, strict=True))
            changed = any(
                not torch.equal(a, b) for a, b in zip(buffers, stage.buffers(), strict=True)
            )
            # The caller's tensor: there is no earlier stage to join with, and no copy to run on
            # again.
            if written and k == 0:
                raise CaptureError(
                    f"stage 0 ({type(stage).__name__}) writes into the model's input, so it "
                    "cannot run again; use its out-of-place form"
                )
            if groups and (written or handed_on or input_handed_on):
                groups[-1].append(stage)
                draws[-1] |= drew
                changes[-1] |= changed
            else:
                groups.append([stage])
                draws.append(drew)
                changes.append(changed)
            input_handed_on = handed_on and (k == 0 or input_handed_on)
            x = y
    return tuple(
        Unit(tuple(group), _parameters(group), drew, changed)
        for group, drew, changed in zip(groups, draws, changes, strict=True)
    )


def _without_idle_outputs(units: Sequence[Unit], sample: Any) -> tuple[Unit, ...]:
    """Joins a unit with the next where autograd saves nothing of its output, in neither."""
    joined = [units[0]]
    saved, y = _saved_storages(units[0], sample)
    for unit in units[1:]:
        between = {t.untyped_storage().data_ptr() for t in tensors_of(y)}
        before, x = saved, y
        saved, y = _saved_storages(unit, x)
        # Autograd keeps the value between: it can be kept or recomputed, so the units stay two.
        if between & (before | saved):
            joined.append(unit)
        else:
            last = joined[-1]
            stages = (*last.stages, *unit.stages)
            joined[-1] = Unit(
                stages,
                _parameters(stages),
                last.draws or unit.draws,
                last.changes_buffers or unit.changes_buffers,
            )
    return tuple(joined)


def _saved_storages(unit: Unit, x: Any) -> tuple[set[int], Any]:
    """The addresses of what autograd saves, while the graph is alive, and the output."""
    found: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = unit(detached(x))
    return found, detached(y)


def _parameters(stages: Sequence[nn.Module]) -> tuple[nn.Parameter, ...]:
    found = {id(p): p for stage in stages for p in stage.parameters() if p.requires_grad}
    return tuple(found.values())


def _measure_unit(
    unit: Unit, x: Any, parameter_gradient: int, device: torch.device
) -> tuple[_Measured, Any]:
    known = [
        *tensors_of(x),
        *(t for stage in unit.stages for t in (*stage.parameters(), *stage.buffers())),
    ]

    def meter() -> Any:
        return AllocatorMeter(device) if device.type == "cuda" else StorageMeter(known)

    bare = meter()
    with torch.no_grad(), bare:
        output = unit(x)
    del output
    # Timed without the meter, which is called for each op.
    bare_ns = _median_ns(lambda: _bare(unit, x), device)

    leaf = detached(x)
    step = meter()
    with torch.enable_grad(), step:
        y = unit(leaf)
    saved, forward_peak = step.live_bytes, step.peak_bytes
    following = detached(y)
    outputs = [t for t in tensors_of(y) if t.requires_grad]
    inputs = [t for t in tensors_of(leaf) if t.requires_grad]
    gradients = [torch.ones_like(t) for t in outputs]
    backward_peak = saved
    if outputs:
        step = meter() if device.type == "cuda" else step
        # The CPU's meter goes on counting from the forward; the allocator's begins anew.
        base = 0 if device.type == "cpu" else saved
        step.restart()
        with step:
            made = torch.autograd.grad(
                outputs, [*inputs, *unit.parameters], gradients, allow_unused=True
            )
        backward_peak = base + step.peak_bytes
        del made
    del y, outputs
    step_ns = _median_ns(lambda: _step(unit, x), device)
    return _Measured(
        output_bytes=_bytes(following),
        input_gradient_bytes=_bytes(inputs),
        parameter_gradient_bytes=parameter_gradient,
        bare_peak_bytes=bare.peak_bytes,
        bare_ns=bare_ns,
        saved_bytes=saved,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=backward_peak,
        step_ns=step_ns,
    ), following


def _bytes(value: Any) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors_of(value)}
    return sum(s.nbytes() for s in storages.values())


def _bare(unit: Unit, x: Any) -> None:
    with torch.no_grad():
        unit(x)


def _step(unit: Unit, x: Any) -> None:
    leaf = detached(x)
    with torch.enable_grad():
        outputs = [t for t in tensors_of(unit(leaf)) if t.requires_grad]
    inputs = [t for t in tensors_of(leaf) if t.requires_grad]
    if outputs and (inputs or unit.parameters):
        gradients = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, [*inputs, *unit.parameters], gradients, allow_unused=True)


def _median_ns(run: Callable[[], None], device: torch.device) -> int:
    times = []
    for _ in range(TRIALS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter_ns()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter_ns() - start)
    return int(statistics.median(times))


@contextlib.contextmanager
def _state_kept(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Buffers and generators afterwards are as before."""
    before = [(b, b.clone()) for b in model.buffers()]
    with generators_kept(device, reachable_generators(model)):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)


def _chain(units: Sequence[_Measured]) -> Chain:
    """The model's input is the caller's and not counted. Its output is held by the caller, and the
    gradient of that by the autograd engine until the whole backward is done."""
    blocks = []
    kept = sum(u.parameter_gradient_bytes for u in units)
    # The output and its gradient.
    held = 2 * units[-1].output_bytes
    for k, unit in enumerate(units):
        kept -= unit.parameter_gradient_bytes
        last = k == len(units) - 1
        before = units[k - 1].output_bytes if k else 0
        gradient = units[k + 1].input_gradient_bytes if not last else unit.output_bytes
        # Measured with the gradients of parameters as new tensors: they stay from there on.
        option = Option(
            saved=max(unit.saved_bytes, unit.output_bytes),
            forward_peak=max(unit.forward_peak_bytes, unit.output_bytes),
            backward_peak=unit.backward_peak_bytes,
            cost=unit.step_ns,
        )
        blocks.append(
            Block(
                input_size=before,
                standing=gradient + kept + (0 if last else held),
                bare_cost=unit.bare_ns,
                bare_peak=max(unit.bare_peak_bytes, unit.output_bytes),
                pass_peak=before + max(unit.bare_peak_bytes, unit.output_bytes),
                options=(option,),
            )
        )
    return Chain(tuple(blocks))
