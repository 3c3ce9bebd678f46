"""The stage itself: nodes of a graph, each described (`NodeFacts`) -> Profile.

Distinct calls are found first; the numbers of each are taken from the disk cache, or estimated.
Nothing runs here: a step on the sample, op by op, measures what is not known
(`runtime.measured_step`), and `with_measured` puts its numbers in the place of the estimates.

Costs of a stream. The host issues ops in order and the device works them off in order; steps follow
each other without waiting, so the host runs ahead until one of the two is always at work: a step
takes the longer of the two sums (`stream_ns`). Planning needs a number per op whose sum is the
step: device time, plus the same share of the excess of host time everywhere, chosen so that the sum
over the graph is that of its stream.
"""

import dataclasses
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from rekindle.capture.changing_sizes import SizesAt
from rekindle.plans.plan_record import Source
from rekindle.profile.base import OpProfile, Profile
from rekindle.profile.cache import ProfileCache, device_name, environment
from rekindle.profile.device import DeviceDescription, load_device
from rekindle.profile.estimate import estimate
from rekindle.profile.op_signature import OpCall, QuickKeys, signature

_SETUP_S = {"cpu": 0.015, "cuda": 0.012}  # per distinct op: inputs, memory run, repeats


@dataclass(frozen=True, slots=True)
class ProfileProgress:
    """How far profiling is, before each op that is measured."""

    num_done: int
    num_total: int
    op: str  # measured next
    elapsed_s: float
    expected_s: float  # of the whole, known before the first op runs


ProfileListener = Callable[[ProfileProgress], None]


def profile_nodes(
    nodes: Iterable[fx.Node],
    device: torch.device | str | None = None,
    *,
    description: DeviceDescription | None = None,
    cache: bool = True,
    remeasure: bool = False,
    on_progress: ProfileListener | None = None,
    at: SizesAt | None = None,
) -> Profile:
    """Numbers for every call_function node: those of earlier runs on `device`, else estimates.
    `at`: for these sizes, where sizes change.

    `device` defaults to where the nodes' tensors are. With a `description` of another device all
    numbers are estimates for that one. `remeasure` leaves earlier numbers out.
    """
    start = time.perf_counter()
    names, which, calls = distinct_calls(nodes, at)
    where = torch.device(device) if device is not None else _device_of(calls)
    if description is None and not is_there(where):
        description = describe(where)
    if description is not None:
        if on_progress is not None:  # two calls, as for what is measured: it takes no time
            for num_done in (0, len(calls)):
                elapsed = time.perf_counter() - start
                on_progress(ProfileProgress(num_done, len(calls), "", elapsed, 0.0))
        return _estimated(start, names, which, calls, description)
    like = describe(where)
    old = ProfileCache(environment(where)) if cache and not remeasure else None
    found = [None if old is None else old.get(call.key) for call in calls]
    ops = [op or estimate(call, like) for call, op in zip(calls, found, strict=True)]
    wall_s = time.perf_counter() - start
    return assemble(device_name(where), where.type, names, which, calls, ops, wall_s)


def with_measured(
    profile: Profile,
    device: torch.device,
    found: Mapping[int, OpProfile],
    why_not: str = "",
    *,
    cache: bool = True,
    wall_s: float = 0.0,
) -> Profile:
    """The profile with what was measured, by position in `ops`. What is still an estimate is so for
    the reason `why_not`. Measurements are kept on disk for later runs."""
    ops = [
        found[i]
        if i in found
        else dataclasses.replace(op, note=why_not)
        if op.source is Source.ESTIMATED and why_not
        else op
        for i, op in enumerate(profile.ops)
    ]
    if cache and found:
        ProfileCache(environment(device)).put((profile.calls[i].key, op) for i, op in found.items())
    return assemble(
        profile.device,
        profile.kind,
        list(profile.names),
        list(profile.which),
        list(profile.calls),
        ops,
        profile.wall_s + wall_s,
    )


def estimate_nodes(nodes: Iterable[fx.Node], device: DeviceDescription) -> Profile:
    """Numbers for every call_function node on the described device, without running anything."""
    return _estimated(time.perf_counter(), *distinct_calls(nodes), device)


def is_there(device: torch.device) -> bool:
    """Whether ops can run on it: a model on "meta", say, has no data."""
    return device.type == "cpu" or (device.type == "cuda" and bool(torch.cuda.is_available()))


def describe(device: torch.device) -> DeviceDescription:
    """The shipped description that is nearest to a device of this machine."""
    if device.type != "cuda":
        return load_device("cpu")
    if torch.cuda.is_available():
        title = torch.cuda.get_device_name(device).lower().replace(" ", "")
        for name in ("h200", "h100", "a100", "rtx4090"):
            if name in title:
                return load_device(name)
    return load_device("a100")


def expected_s(calls: Sequence[OpCall], device: torch.device) -> float:
    """How long measuring these calls will take, by the estimate of each."""
    description = describe(device)
    runs = 12  # batches of at least 2 ms, and longer ops about this often
    work_ns = sum(estimate(call, description).device_ns for call in calls)
    return len(calls) * _SETUP_S.get(device.type, 0.02) + runs * work_ns / 1e9


def distinct_calls(
    nodes: Iterable[fx.Node], at: SizesAt | None = None
) -> tuple[list[str], list[int], list[OpCall]]:
    """Node names, per node the position of its call, and the distinct calls."""
    names: list[str] = []
    which: list[int] = []
    calls: list[OpCall] = []
    quick = QuickKeys(at is not None)
    seen: dict[Hashable, int] = {}
    position: dict[str, int] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        key: Hashable = None
        try:
            key = quick.key(node)
            index = seen.get(key, -1)
        except TypeError:  # an argument that cannot be hashed
            index = -1
        if index < 0:
            call = signature(node, at)
            index = position.setdefault(call.key, len(calls))
            if index == len(calls):
                calls.append(call)
            if key is not None:
                seen[key] = index
        names.append(node.name)
        which.append(index)
    return names, which, calls


def stream_ns(ops: Iterable[OpProfile]) -> int:
    """How long host and device need for these ops, in one of many steps."""
    return max(stream_sums(ops))


def stream_sums(ops: Iterable[OpProfile]) -> tuple[int, int]:
    """How long the host needs to issue these ops, and how long the device to run them."""
    issued = done = 0
    for op in ops:
        issued += op.host_ns
        done += op.device_ns
    return issued, done


def assemble(
    device: str,
    kind: str,
    names: list[str],
    which: list[int],
    calls: list[OpCall],
    ops: list[OpProfile],
    wall_s: float,
) -> Profile:
    """A profile of all nodes out of the profiles of the distinct ops."""
    return Profile(
        device=device,
        kind=kind,
        names=tuple(names),
        which=tuple(which),
        ops=tuple(_with_stream_costs(kind, which, ops)),
        calls=tuple(calls),
        wall_s=wall_s,
    )


def _with_stream_costs(kind: str, which: list[int], ops: list[OpProfile]) -> list[OpProfile]:
    """Costs whose sum over the graph is the time of its stream."""
    if kind == "cpu":
        # The host is the device: an op costs its time, and so does a view.
        return [dataclasses.replace(op, cost_ns=max(op.device_ns, op.host_ns)) for op in ops]
    work = sum(ops[i].device_ns for i in which)
    excess = sum(max(0, ops[i].host_ns - ops[i].device_ns) for i in which)
    # Between 0, where the device is always at work, and 1, where it always waits for the host.
    share = (stream_ns(ops[i] for i in which) - work) / excess if excess else 0.0
    return [
        dataclasses.replace(
            op, cost_ns=op.device_ns + round(share * max(0, op.host_ns - op.device_ns))
        )
        for op in ops
    ]


def _estimated(
    start: float,
    names: list[str],
    which: list[int],
    calls: list[OpCall],
    device: DeviceDescription,
) -> Profile:
    ops = [estimate(call, device) for call in calls]
    wall_s = time.perf_counter() - start
    return assemble(device.name, device.kind, names, which, calls, ops, wall_s)


def _device_of(calls: Sequence[OpCall]) -> torch.device:
    """Where the work is done: a GPU if any op is there."""
    kinds = {call.device for call in calls}
    kind = next((k for k in sorted(kinds) if k != "cpu"), "cpu")
    if kind == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(kind)
