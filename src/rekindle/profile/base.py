"""`Profile`: integer nanoseconds and bytes per op, and how each number was obtained.

Nodes with equal signatures share one `OpProfile`, so a profile of 96 equal layers holds the numbers
of one. Times are of two kinds, since a GPU works through a queue that the host fills: `device_ns`
is what the op adds to the device's queue, `host_ns` what the call costs the host that fills it.
`cost_ns`, the number that planning uses, is what the op costs in a stream of ops: the larger one.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rekindle.plans.plan_record import Source
from rekindle.profile.host_rates import HostRates
from rekindle.profile.op_signature import OpCall

NOISY = 0.5  # repeats of an op that differ by more were measured on a busy machine


@dataclass(frozen=True, slots=True)
class OpProfile:
    """Cost and sizes of one op, and where they are from."""

    cost_ns: int
    workspace_bytes: int  # beyond inputs and outputs, while the op runs
    output_bytes: tuple[int, ...]  # per output in order: its own new block; 0 for a view
    source: Source
    device_ns: int = 0
    host_ns: int = 0
    note: str = ""  # why a number is not measured, or what the measurement met
    fits: bool = True  # False: the op alone ran out of device memory
    spread: float = 0.0  # of the repeats, where it was measured just now: median over fastest - 1

    def as_cached(self) -> "OpProfile":
        return OpProfile(
            cost_ns=self.cost_ns,
            workspace_bytes=self.workspace_bytes,
            output_bytes=self.output_bytes,
            source=Source.CACHED,
            device_ns=self.device_ns,
            host_ns=self.host_ns,
            note=self.note,
            fits=self.fits,
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """Numbers for every node of a graph, by node name."""

    device: str  # the device's own name, or that of its description
    kind: str  # "cuda" or "cpu": whose allocator counts
    names: tuple[str, ...]  # of the nodes, in graph order
    which: tuple[int, ...]  # per node: position in `ops`
    ops: tuple[OpProfile, ...]  # one per distinct signature
    calls: tuple[OpCall, ...]  # per distinct signature
    wall_s: float = 0.0  # what profiling took
    host: HostRates | None = None  # the link to host memory, where values may be moved
    # Not data: found from `names` and `which` when it is made.
    _position: dict[str, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.which)
        assert len(self.ops) == len(self.calls)
        self._position.update(zip(self.names, self.which, strict=True))

    def __getitem__(self, name: str) -> OpProfile:
        """The numbers of the node of that name."""
        return self.ops[self._position[name]]

    def __contains__(self, name: object) -> bool:
        return name in self._position

    def __len__(self) -> int:
        return len(self.names)

    def position(self, name: str) -> int:
        """In `ops` and `calls`, of the node of that name."""
        return self._position[name]

    def items(self) -> Iterator[tuple[str, OpProfile]]:
        return ((name, self.ops[i]) for name, i in zip(self.names, self.which, strict=True))

    @property
    def targets(self) -> tuple[str, ...]:
        """Per distinct signature: the op it calls."""
        return tuple(call.name for call in self.calls)

    @property
    def num_by_source(self) -> Mapping[Source, int]:
        """How many nodes have numbers of each kind."""
        return Counter(self.ops[i].source for i in self.which)

    @property
    def not_measured(self) -> tuple[tuple[str, str], ...]:
        """Each distinct op whose numbers are estimates, with the reason; views are left out."""
        return tuple(
            (target, op.note)
            for target, op in zip(self.targets, self.ops, strict=True)
            if op.source is Source.ESTIMATED and op.note
        )

    @property
    def does_not_fit(self) -> tuple[tuple[str, str], ...]:
        """Each distinct op that alone ran out of device memory."""
        return tuple(
            (target, op.note)
            for target, op in zip(self.targets, self.ops, strict=True)
            if not op.fits
        )

    @property
    def spread(self) -> float:
        """How far the repeats of an op lie apart, in the median over what was measured just now."""
        return statistics.median([op.spread for op in self.ops if op.spread] or [0.0])

    @property
    def is_noisy(self) -> bool:
        """Whether something else kept the machine busy while it was measured."""
        return self.spread > NOISY

    def summary(self) -> str:
        """One line: how many ops, how their numbers were obtained, and how sure they are."""
        counts = self.num_by_source
        parts = ", ".join(f"{counts[s]} {s.value}" for s in Source if counts.get(s))
        line = f"{len(self)} ops, {len(self.ops)} distinct, on {self.device}: {parts or 'none'}"
        if self.not_measured:
            line += f" ({len(self.not_measured)} distinct not measured)"
        if self.spread:
            line += f"; repeats differ by {self.spread:.0%}"
        return line
