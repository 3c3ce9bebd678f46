"""The budget in terms people use: what is resident, what one step may add, and how that adds up.

`budget` counts what a step adds to what is resident. `device_budget` counts the whole device:
the step's budget is then what remains of it after the residents (parameters, buffers, inputs,
optimizer state, gradients that are already there) and a headroom for fragmentation. "auto" starts
from what is free now, so only what is still to come (optimizer state before its first step) is
taken off. Gradients that the step makes are part of the step's budget.
"""

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rekindle.core import parse_budget
from rekindle.errors import BudgetInfeasible, InvalidBudget, no_such
from rekindle.plans.options import DEFAULTS
from rekindle.profile.block_sizes import blocks_of

# A parameter of two different small sides: of each tensor of state one sees by its size whether it
# is as large as the parameter, a row or a column of it (Adafactor).
_PROBE = (3, 5)


@dataclass(frozen=True, slots=True)
class Residents:
    """Bytes on the device that a step finds there, by kind."""

    parameters_bytes: int = 0
    buffers_bytes: int = 0
    inputs_bytes: int = 0
    gradients_bytes: int = 0  # there before the step: gradients being accumulated
    optimizer_bytes: int = 0
    optimizer_missing_bytes: int = 0  # of optimizer_bytes: not allocated yet
    optimizer_how: str = "none"  # "given" (its state counted), "estimated", "none"
    buckets_bytes: int = 0  # of DistributedDataParallel, which copies gradients to reduce them
    step_gradients_bytes: int = 0  # made by the step, inside its budget

    @property
    def total_bytes(self) -> int:
        return (
            self.parameters_bytes
            + self.buffers_bytes
            + self.inputs_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.buckets_bytes
        )

    def rows(self) -> tuple[tuple[str, int], ...]:
        """What is resident, by name."""
        rows = (
            ("parameters", self.parameters_bytes),
            ("buffers", self.buffers_bytes),
            ("inputs", self.inputs_bytes),
            ("gradients there already", self.gradients_bytes),
            (f"optimizer state ({self.optimizer_how})", self.optimizer_bytes),
            ("gradient buckets", self.buckets_bytes),
        )
        return tuple((name, num_bytes) for name, num_bytes in rows if num_bytes)


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """A budget for the whole device and the step's share of it."""

    asked: str
    device_bytes: int  # what the residents, the headroom and the step share
    residents: Residents
    headroom_bytes: int
    step_bytes: int  # the `budget` of the step
    is_free_now: bool  # device_bytes is what was free, residents already taken off

    def rows(self) -> tuple[tuple[str, int], ...]:
        """The sum, line by line: the first line minus all others but the last gives the last."""
        r = self.residents
        rows = [("free on the device now" if self.is_free_now else "device", self.device_bytes)]
        if self.is_free_now:
            if r.optimizer_missing_bytes:
                rows.append(("optimizer state to come", r.optimizer_missing_bytes))
        else:
            rows += [
                ("parameters", r.parameters_bytes),
                ("buffers", r.buffers_bytes),
                ("inputs", r.inputs_bytes),
                ("gradients there already", r.gradients_bytes),
                (f"optimizer state ({r.optimizer_how})", r.optimizer_bytes),
            ]
        if r.buckets_bytes:
            rows.append(("gradient buckets", r.buckets_bytes))
        rows.append(("headroom", self.headroom_bytes))
        rows.append(("for one step", self.step_bytes))
        return tuple(rows)

    def __str__(self) -> str:
        first, *rest, last = self.rows()
        parts = " ".join(f"- {_size(n)} {name}" for name, n in rest if n)
        return f"{self.asked!r}: {_size(first[1])} {first[0]} {parts} = {_size(last[1])} {last[0]}"


def residents_of(
    model: nn.Module,
    args: Any = (),
    optimizer: torch.optim.Optimizer | str | None = None,
    ranks: int = 1,
) -> Residents:
    """What the model, its inputs and its optimizer keep on the device.

    `optimizer` is one that exists (its state is counted, or probed where it has none yet) or the
    name of one of torch.optim's ("adamw"). With several `ranks`, each holds the gradient buckets of
    DistributedDataParallel as well.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    # An argument may be one of the model's own tensors: it is not there twice.
    own = {_key(t) for t in (*parameters, *model.buffers())}
    inputs = [t for t in _tensors(args) if _key(t) not in own]
    total = missing = 0
    how = "none"
    if optimizer is not None:
        total, missing = _optimizer_bytes(optimizer, trained)
        how = "estimated" if missing else "given"
    return Residents(
        parameters_bytes=_bytes(parameters),
        buffers_bytes=_bytes(b for b in model.buffers() if _key(b) not in map(_key, parameters)),
        inputs_bytes=_bytes(inputs),
        gradients_bytes=_bytes(p.grad for p in parameters if p.grad is not None),
        optimizer_bytes=total,
        optimizer_missing_bytes=missing,
        optimizer_how=how,
        # DistributedDataParallel copies every gradient into a bucket, whatever their number is.
        buckets_bytes=_bytes(trained) if ranks > 1 else 0,
        step_gradients_bytes=_bytes(p for p in trained if p.grad is None),
    )


def device_budget(
    asked: int | float | str,
    device: torch.device | str,
    residents: Residents,
    headroom: float | int | str = DEFAULTS.headroom,
    memory_bytes: int | None = None,
) -> DeviceBudget:
    """The step's budget from one for the whole device: bytes, "40GiB", a fraction, or "auto".

    With `memory_bytes` the device is not this machine's but an empty one of that size.
    """
    where = torch.device(device)
    free_now = asked == "auto" and memory_bytes is None
    if free_now:
        total = free_bytes(where)
        # What is free now has the rest taken off already; these come with the first step.
        taken = residents.optimizer_missing_bytes + residents.buckets_bytes
    else:
        whole = total_bytes(where) if memory_bytes is None else memory_bytes
        total = whole if asked == "auto" else parse_budget(asked, whole)
        taken = residents.total_bytes
    spare = headroom_bytes(headroom, total)
    step = total - taken - spare
    if step <= 0:
        raise BudgetInfeasible(
            f"device_budget {asked!r} is {total:,} bytes; {taken:,} are resident and {spare:,} "
            "are headroom, so nothing is left for a step: give a larger one, a smaller model or "
            "batch, or less headroom"
        )
    return DeviceBudget(str(asked), total, residents, spare, step, free_now)


def headroom_bytes(headroom: float | int | str, total: int) -> int:
    """A fraction of the whole in [0, 1), or bytes, or a size with a unit."""
    if isinstance(headroom, float) and not isinstance(headroom, bool):
        if not (math.isfinite(headroom) and 0 <= headroom < 1):
            raise InvalidBudget(f"headroom {headroom!r} is not a fraction in [0, 1) or a size")
        return math.ceil(headroom * total)  # up: never less than was asked for
    if headroom == 0 and not isinstance(headroom, bool):
        return 0
    return parse_budget(headroom, total)


def free_bytes(device: torch.device) -> int:
    """What an allocation could get now: free on the device, and cached by torch without use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + cached)
    return _host_pages("MemAvailable:")


def total_bytes(device: torch.device) -> int:
    """The memory of a device; of the host for a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return _host_pages("MemTotal:")


def _host_pages(field: str) -> int:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith(field):
                    return int(line.split()[1]) * 1024  # the file counts in kB of 1024 bytes
    except OSError:
        pass
    raise InvalidBudget(
        "the memory of this machine cannot be read: give device_budget as a size, not as a "
        'fraction or "auto"'
    )


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The optimizer of torch.optim with that name, in any case; raises InvalidBudget."""
    by_name = {
        n.lower(): c
        for n, c in vars(torch.optim).items()
        if inspect.isclass(c)
        and issubclass(c, torch.optim.Optimizer)
        and c is not torch.optim.Optimizer
    }
    if name.lower() not in by_name:
        raise InvalidBudget(
            f"{no_such('optimizer in torch.optim', name, by_name)}; or give the optimizer itself"
        )
    return by_name[name.lower()]


def _optimizer_bytes(
    optimizer: torch.optim.Optimizer | str, trained: list[nn.Parameter]
) -> tuple[int, int]:
    """All bytes of optimizer state, and those of them not allocated yet."""
    if isinstance(optimizer, str):
        kind = optimizer_class(optimizer)
        needed = sum(_state_bytes(kind, {}, p) for p in trained)
        return needed, needed
    there = missing = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # An optimizer that has taken a step knows best; before that its state is probed.
            state = optimizer.state.get(parameter)
            if state:
                there += _bytes(_tensors(state))
            elif parameter.requires_grad:
                missing += _state_bytes(type(optimizer), group, parameter)
    return there + missing, missing


def _state_bytes(
    kind: type[torch.optim.Optimizer], options: dict[str, Any], parameter: torch.Tensor
) -> int:
    """What one step of such an optimizer makes for one parameter, by a step on a tiny one."""
    accepted = inspect.signature(kind.__init__).parameters
    given = {k: v for k, v in options.items() if k in accepted and k != "params"}
    # They ask for a device, and the tiny parameter is on the CPU; the state is the same without.
    given.pop("fused", None)
    given.pop("capturable", None)
    probe = nn.Parameter(torch.zeros(_PROBE, dtype=parameter.dtype))
    probe.grad = torch.zeros_like(probe)
    try:
        optimizer = kind([probe], **given)
        optimizer.step()
    except Exception as error:
        raise InvalidBudget(
            f"the state of {kind.__name__} cannot be estimated ({error}): take one step with it "
            "before planning, or give the budget of the step itself"
        ) from error
    blocks = blocks_of(parameter.device.type)
    total = 0
    for tensor in _tensors(optimizer.state[probe]):
        if tensor.shape == probe.shape:
            count = parameter.numel()
        elif tensor.numel() in _PROBE and parameter.dim() > 1:  # a row or a column of statistics
            count = parameter.shape[0 if tensor.numel() == _PROBE[0] else -1]
        else:
            continue  # counters of a few bytes
        total += blocks.block_bytes(count * tensor.element_size())
    return total


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        return [t for v in tree.values() for t in _tensors(v)]
    if isinstance(tree, (tuple, list)):
        return [t for v in tree for t in _tensors(v)]
    return []


def _key(tensor: torch.Tensor) -> int:
    # By the address: tied parameters and views count once. Empty and meta tensors have none, and
    # fake tensors do not like to be asked.
    if hasattr(tensor, "fake_mode"):
        return id(tensor)
    return int(tensor.untyped_storage().data_ptr()) or id(tensor)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Blocks of the distinct storages."""
    blocks: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        blocks[_key(tensor)] = blocks_of(tensor.device.type).block_bytes(storage.nbytes())
    return sum(blocks.values())


def _size(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"
