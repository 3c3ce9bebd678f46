"""Where each value that a schedule sends lies in one piece of host memory.

A send takes its bytes from its step to the value's `release`, both included, or to the end of the
step. Where nothing is released the pieces stand one behind the other and no byte is lost. Where
bytes are used again, larger values are placed first, each at the lowest place that is free for as
long as it stays: the whole may then be a little more than the most that is there at one time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.core.schedule import Step


@dataclass(frozen=True, slots=True)
class HostSlot:
    """The place of what one `send` copies."""

    value_id: int
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class HostLayout:
    """The places of all sends of a schedule."""

    slots: tuple[HostSlot, ...] = ()  # in the order of the sends
    slot_of_step: tuple[int, ...] = ()  # per step: the slot that a transfer is about; else -1
    num_bytes: int = 0  # of the one piece of host memory


def host_layout(steps: Sequence[Step], sizes: Sequence[int]) -> HostLayout:
    """The places of what the steps of a valid schedule send; `sizes` are those of the values."""
    newest: dict[int, int] = {}  # value -> the slot of its last send
    values: list[int] = []
    first: list[int] = []
    last: list[int] = []
    slot_of_step: list[int] = []
    for t, step in enumerate(steps):
        if isinstance(step, int):
            slot_of_step.append(-1)
            continue
        kind, v = step
        if kind == "send":
            newest[v] = len(values)
            values.append(v)
            first.append(t)
            last.append(len(steps))
        elif kind == "release":
            last[newest[v]] = t
        slot_of_step.append(newest[v])
    offsets = _offsets([sizes[v] for v in values], first, last)
    slots = tuple(HostSlot(v, o, sizes[v]) for v, o in zip(values, offsets, strict=True))
    whole = max((slot.offset + slot.num_bytes for slot in slots), default=0)
    return HostLayout(slots, tuple(slot_of_step), whole)


def _offsets(sizes: Sequence[int], first: Sequence[int], last: Sequence[int]) -> list[int]:
    offsets = [0] * len(sizes)
    placed: list[int] = []
    for k in sorted(range(len(sizes)), key=lambda k: (-sizes[k], first[k])):
        # Those that are there at the same time, from the lowest place on.
        beside = [p for p in placed if first[p] <= last[k] and first[k] <= last[p]]
        at = 0
        for p in sorted(beside, key=offsets.__getitem__):
            if at + sizes[k] <= offsets[p]:
                break
            at = max(at, offsets[p] + sizes[p])
        offsets[k] = at
        placed.append(k)
    return offsets
