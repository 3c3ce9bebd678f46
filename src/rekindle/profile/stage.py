"""The stage itself: nodes of a graph, each with `meta["val"]` -> Profile.

Distinct calls are found first; each is estimated, measured or taken from the disk cache once, for
all nodes that make it.
"""

import time
from collections.abc import Iterable

from torch import fx

from rekindle.profile.base import OpProfile, Profile
from rekindle.profile.device import DeviceDescription
from rekindle.profile.estimate import estimate
from rekindle.profile.signature import OpCall, signature


def estimate_nodes(nodes: Iterable[fx.Node], device: DeviceDescription) -> Profile:
    """Numbers for every call_function node, without running anything."""
    start = time.perf_counter()
    names, which, calls = distinct_calls(nodes)
    ops = [estimate(call, device) for call in calls]
    return assemble(device.name, names, which, calls, ops, time.perf_counter() - start)


def distinct_calls(nodes: Iterable[fx.Node]) -> tuple[list[str], list[int], list[OpCall]]:
    """Node names, per node the position of its call, and the distinct calls."""
    names: list[str] = []
    which: list[int] = []
    calls: list[OpCall] = []
    position: dict[str, int] = {}
    for node in nodes:
        if node.op != "call_function":
            continue
        call = signature(node)
        index = position.setdefault(call.key, len(calls))
        if index == len(calls):
            calls.append(call)
        names.append(node.name)
        which.append(index)
    return names, which, calls


def assemble(
    device: str,
    names: list[str],
    which: list[int],
    calls: list[OpCall],
    ops: list[OpProfile],
    wall_s: float,
) -> Profile:
    return Profile(
        device=device,
        names=tuple(names),
        which=tuple(which),
        ops=tuple(ops),
        targets=tuple(call.name for call in calls),
        wall_s=wall_s,
    )
