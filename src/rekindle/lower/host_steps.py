"""Transfers as calls in the code of a schedule.

The code of a schedule that moves values has one more input, the first of each of its functions: the
step's transfers (`runtime.transfers.Moves`), on which it calls `send`, `drop`, `fetch`, `arrive`
and `release` with the number of a slot. What is moved is a storage: all tensors that own it are
sent together and come back together; views of them are derived again where they are used. A name
is deleted after its last use, and a drop uses the names of what it ends: so the device copy is
there until the transfer is done, and gone right behind it.

An op that reads a fetched copy for the first time stands behind an `arrive`. What leaves the code
while it is being sent or fetched (an output, a gradient) is waited for first: the caller may write
into it.
"""

import operator
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass

from torch import fx

from rekindle.capture.node_facts import facts
from rekindle.core import HostLayout
from rekindle.core.schedule import Step
from rekindle.lower.graph_writer import GraphWriter, Tensors


@dataclass(frozen=True, slots=True)
class Hosted:
    """A value that is in host memory alone when the forward ends."""

    slot: int
    value: int
    roots: tuple[fx.Node, ...]  # the recorded nodes whose tensors come back, in this order


class HostSteps:
    """Writes the transfers of one schedule, and the waits for them."""

    def __init__(self, layout: HostLayout) -> None:
        self.layout = layout
        self._writer: GraphWriter | None = None
        self._moves: fx.Node | None = None
        self._sent: dict[int, int] = {}  # copy -> slot, where nothing has waited for the send yet
        self._fetched: dict[int, int] = {}  # copy -> slot, where nothing has waited for it yet
        self._roots: dict[int, tuple[fx.Node, ...]] = {}  # slot -> what owns the storage
        self._on_host: dict[int, int] = {}  # value -> slot
        self._dropped: set[int] = set()  # values without a device copy

    def begin(self, writer: GraphWriter) -> None:
        """A new graph: its first input is the step's transfers."""
        if self.layout.slots:
            self._writer, self._moves = writer, writer.placeholder("moves")

    def _call(self, name: str, *args: object) -> fx.Node:
        assert self._writer is not None
        assert self._moves is not None
        return self._writer.method(self._moves, name, args)

    def write(
        self, t: int, step: Step, copy: int | None, buffers: MutableMapping[int, Tensors]
    ) -> None:
        """A transfer; `copy` is the device copy that it reads or makes, where it does."""
        assert not isinstance(step, int)
        kind, v = step
        slot = self.layout.slot_of_step[t]
        if kind == "release":
            self._call("release", slot)
            self._on_host.pop(v, None)
            return
        assert copy is not None
        if kind == "fetch":
            buffers[copy] = Tensors(self._fetch(slot))
            self._fetched[copy] = slot
            self._dropped.discard(v)
            return
        roots = buffers[copy].roots
        self.wait_for([copy])
        self._call(kind, slot, *roots.values())
        if kind == "send":
            self._roots[slot] = tuple(roots)
            self._sent[copy] = self._on_host[v] = slot
        else:
            self._sent.pop(copy, None)
            self._dropped.add(v)

    def _fetch(self, slot: int) -> dict[fx.Node, fx.Node]:
        made = self._call("fetch", slot)
        assert self._writer is not None
        return {
            root: self._writer.call(operator.getitem, (made, i), {}, facts(root))
            for i, root in enumerate(self._roots[slot])
        }

    def wait_for(self, copies: Iterable[int]) -> None:
        """What is read next: of fetched copies, the arrival."""
        if self._fetched:
            for copy in copies:
                slot = self._fetched.pop(copy, None)
                if slot is not None:
                    self._call("arrive", slot)

    def hand_out(self, copy: int, buffers: MutableMapping[int, Tensors]) -> None:
        """What leaves the code: nothing moves it any more."""
        self.wait_for([copy])
        slot = self._sent.pop(copy, None)
        if slot is not None:
            self._call("drop", slot, *buffers[copy].roots.values())

    def made(self, values: Iterable[int]) -> None:
        """An op has made these: they have a device copy again."""
        self._dropped.difference_update(values)

    def hosted(self) -> tuple[Hosted, ...]:
        """What is in host memory alone."""
        return tuple(
            [
                Hosted(slot, v, self._roots[slot])
                for v, slot in self._on_host.items()
                if v in self._dropped
            ]
        )
