"""Costs as functions of sizes that change: known for some sizes, computed for any.

Of two calls that differ in their sizes alone, the estimates are computed for each. Where one was
measured, its numbers are scaled to the other by the estimates: times in proportion, workspace too,
but never below what was measured. Between two sizes that were measured the ratio of what was
measured to the estimate is drawn as a line.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from rekindle.capture.changing_sizes import SizesAt
from rekindle.plans.plan_record import Source
from rekindle.profile.base import OpProfile, Profile
from rekindle.profile.block_sizes import blocks_of
from rekindle.profile.device import DeviceDescription
from rekindle.profile.estimate import estimate, output_blocks
from rekindle.profile.op_signature import OpCall, QuickKeys, signature
from rekindle.profile.profiler import assemble


@dataclass(frozen=True, slots=True)
class Known:
    """The profile for some sizes."""

    profile: Profile
    ops: tuple[OpProfile, ...]  # of the family's distinct calls
    estimates: tuple[OpProfile, ...]


class ChangingCosts:
    """The distinct calls of a graph whose sizes change, and what is known of them."""

    def __init__(self, nodes: Iterable[fx.Node], description: DeviceDescription) -> None:
        self.description = description
        self.names: list[str] = []
        self.which: list[int] = []
        self.nodes: list[fx.Node] = []  # one for each distinct call
        self.known: list[Known] = []
        keys = QuickKeys(with_symbols=True)
        seen: dict[Hashable, int] = {}
        for node in nodes:
            if node.op != "call_function":
                continue
            try:
                key = keys.key(node)
                index = seen.setdefault(key, len(self.nodes))
            except TypeError:  # an argument that cannot be hashed
                index = len(self.nodes)
            if index == len(self.nodes):
                self.nodes.append(node)
            self.names.append(node.name)
            self.which.append(index)

    def add(self, profile: Profile, at: SizesAt) -> None:
        """What was found for some sizes."""
        estimates = [estimate(signature(node, at), self.description) for node in self.nodes]
        ops = [profile[node.name] for node in self.nodes]
        self.known.append(Known(profile, tuple(ops), tuple(estimates)))

    def at(self, at: SizesAt) -> Profile:
        """The profile for any sizes."""
        calls = [signature(node, at) for node in self.nodes]
        ops = [self._op(i, call) for i, call in enumerate(calls)]
        first = self.known[0].profile
        return assemble(first.device, first.kind, self.names, self.which, calls, ops, 0.0)

    def _op(self, i: int, call: OpCall) -> OpProfile:
        like = estimate(call, self.description)
        known = [(k.ops[i], k.estimates[i]) for k in self.known]
        measured = [pair for pair in known if pair[0].source is not Source.ESTIMATED]
        if not measured:
            return like
        workspace = max(_workspace(op, of, like) for op, of in measured)
        return dataclasses.replace(
            like,
            workspace_bytes=workspace,
            output_bytes=_outputs(call, self.known[0].profile.kind, measured),
            source=measured[0][0].source,
            device_ns=_scaled(measured, like, "device_ns"),
            host_ns=round(sum(op.host_ns for op, _ in measured) / len(measured)),
        )


def _scaled(measured: Sequence[tuple[OpProfile, OpProfile]], like: OpProfile, name: str) -> int:
    """By the ratio of what was measured to what was estimated, drawn between the nearest two."""
    points = sorted(
        (getattr(estimated, name), getattr(op, name) / max(1, getattr(estimated, name)))
        for op, estimated in measured
    )
    x = getattr(like, name)
    below = [p for p in points if p[0] <= x][-1:] or points[:1]
    above = [p for p in points if p[0] >= x][:1] or points[-1:]
    (x0, r0), (x1, r1) = below[0], above[0]
    share = 0.0 if x1 <= x0 else (x - x0) / (x1 - x0)
    found: int = round(x * (r0 + share * (r1 - r0)))
    return found


def _workspace(op: OpProfile, estimated: OpProfile, like: OpProfile) -> int:
    """A kernel of a library may need as much for a small call; never less than was seen."""
    ratio = max(1.0, like.device_ns / max(1, estimated.device_ns))
    return math.ceil(op.workspace_bytes * ratio)


def _outputs(
    call: OpCall, kind: str, measured: Sequence[tuple[OpProfile, OpProfile]]
) -> tuple[int, ...]:
    """The blocks of the outputs: what is asked for, and what a kernel took above that."""
    asked = output_blocks(call, blocks_of(kind))
    excess = [0] * len(asked)
    for op, estimated in measured:
        for k, (seen, of) in enumerate(zip(op.output_bytes, estimated.output_bytes, strict=False)):
            if k < len(excess):
                excess[k] = max(excess[k], seen - of)
    return tuple([n + more if n else 0 for n, more in zip(asked, excess, strict=True)])
