"""Which gaps to use so that an op sequence fits a budget, and at which steps.

Choice. Gaps are added one by one until no op is above the budget: each time the gap that relieves
most ops by most bytes for the time that it takes of the lanes. Only the ops count that lie between
the end of its send and the start of its fetch, as the free time of both lanes stands (for fetches
mirrored: the latest start that is still in time). Where none relieves anything so, ops will wait,
and the gap that makes them wait least for its relief is taken. Then each gap goes that the others
make needless.

Placing. One walk over the ops with the clock of all lanes. A send stands right behind the op that
makes the copy. A drop stands where the send is done, or earlier, waiting, where the next op would
not fit otherwise. A fetch stands where the mirrored lane wants it, or later, where the budget has
no room for it yet. The walk keeps the budget; whether it succeeded, `simulate` says.

Known limits: sends and fetches keep the order of their copies and readers; a value is sent once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rekindle.core import HostLink, Schedule
from rekindle.core.schedule import Step, schedule_of
from rekindle.solve.transfers.gaps import Gap, Numbers, Sequence
from rekindle.solve.transfers.lane import IdleTime, durations, queued

WAIT_WEIGHT = 20  # how much a ns that ops wait counts for, in ns of lane time


def fit(sequence: Sequence, budget: int) -> Schedule | None:
    """A schedule of these ops with transfers that should fit the budget; None where no choice of
    gaps relieves every op enough. Its numbers are for `simulate` to say."""
    if int(sequence.memory.max(initial=0)) <= budget:
        return Schedule(sequence.ops)
    if sequence.at_end > budget:
        return None
    chosen = _Choice(sequence, budget).chosen()
    return None if chosen is None else _Placing(sequence, budget, chosen).schedule()


def _link_for(sequence: Sequence, gaps: Iterable[Gap]) -> HostLink:
    """The link, without a host budget where all of these values together keep it: then no bytes
    need be given back before the end."""
    link = sequence.problem.transfers
    assert link is not None
    sizes = {gap.value_id: gap.size for gap in gaps}
    if link.host_budget is not None and sum(sizes.values()) <= link.host_budget:
        return replace(link, host_budget=None)
    return link


class _Choice:
    """Gaps as columns: the arrays have one entry per gap of the sequence."""

    def __init__(self, sequence: Sequence, budget: int) -> None:
        self.sequence, self.budget = sequence, budget
        self.link = _link_for(sequence, sequence.gaps)
        self.horizon = int(sequence.begins[-1])
        gaps = sequence.gaps
        self.values = _column(g.value_id for g in gaps)
        self.made = _column(g.made for g in gaps)
        self.left = _column(g.left for g in gaps)
        self.right = _column(g.right for g in gaps)
        self.sizes = _column(g.size for g in gaps)
        self.sending = durations(self.link, self.sizes, self.link.to_host)
        self.fetching = durations(self.link, self.sizes, self.link.from_host)
        self.ready = sequence.begins[self.made + 1]  # when the copy is there to be sent
        self.wanted = sequence.begins[self.right]  # when it must be back
        self.excess: Numbers = sequence.memory - np.int64(budget)
        self.taken = np.zeros(len(gaps), bool)

    def chosen(self) -> list[Gap] | None:
        order: list[int] = []
        while True:
            begin, stop = self._away()
            excess = self.excess - self._relief(begin, stop)
            if not (excess > 0).any():
                break
            k = self._best(excess, begin, stop)
            if k is None:
                # None helps without waiting. What is left above the budget if ops wait?
                full = self.excess - self._relief(self.left + 1, self.right)
                if not (full > 0).any():
                    break
                k = self._best(full, self.left + 1, self.right, self._waits(full))
                if k is None:
                    return None
            order.append(k)
            self.taken[k] = True
        self._leave_out(order)
        return [g for g, taken in zip(self.sequence.gaps, self.taken, strict=True) if taken]

    def _leave_out(self, order: list[int]) -> None:
        """The last gaps were chosen with the most in place: the first ones are asked first."""
        begin, stop = self._away()
        excess = self.excess - self._relief(begin, stop)
        if (excess > 0).any():
            begin, stop = self.left + 1, self.right
            excess = self.excess - self._relief(begin, stop)
        for k in order:
            inside = slice(int(begin[k]), max(int(begin[k]), int(stop[k])))
            if (excess[inside] + self.sizes[k] <= 0).all():
                excess[inside] += self.sizes[k]
                self.taken[k] = False

    def _relief(self, begin: Numbers, stop: Numbers) -> Numbers:
        """Per op: the bytes that are away if each taken gap is so from op `begin` to before
        `stop`."""
        real = np.flatnonzero(self.taken & (stop > begin))
        change = np.zeros(self.sequence.num_ops + 1, np.int64)
        np.add.at(change, begin[real], self.sizes[real])
        np.add.at(change, stop[real], -self.sizes[real])
        return np.cumsum(change)[:-1]

    def _waits(self, excess: Numbers) -> Numbers:
        """How long ops would wait for each gap if it relieved all that is above the budget in it:
        from the first such op on for the end of its send, behind the last one for its fetch."""
        num_ops = self.sequence.num_ops
        above = np.flatnonzero(excess > 0)
        at = np.searchsorted(above, self.left + 1)
        first = np.append(above, num_ops)[at]
        last = np.append(above, -1)[np.searchsorted(above, self.right) - 1]
        begins = self.sequence.begins
        sending = np.maximum(self.sent_by - begins[first], 0)
        fetching = np.maximum(begins[last + 1] - self.fetch_from, 0)
        return np.where((first < self.right) & (last > self.left), sending + fetching, 0)

    def _best(
        self, excess: Numbers, begin: Numbers, stop: Numbers, waits: Numbers | None = None
    ) -> int | None:
        """The gap with the most relief for the time that it takes of the lanes, or that ops wait
        for it: that is lost, and lane time only perhaps missing to another."""
        needy: Numbers = np.zeros(self.sequence.num_ops + 1, np.int64)
        np.cumsum(excess > 0, out=needy[1:])
        steps: Numbers = np.where(stop > begin, needy[np.maximum(begin, stop)] - needy[begin], 0)
        steps[self.taken | ~self._host_room()] = 0
        if not steps.any():
            return None
        sent = np.isin(self.values, self.values[self.taken])
        time = (self.fetching + np.where(sent, 0, self.sending) + 1).astype(np.float64)
        if waits is not None:
            time = time / WAIT_WEIGHT + waits
        return int(np.argmax(steps / time * np.minimum(self.sizes, excess.max())))

    def _host_room(self) -> NDArray[np.bool_]:
        """Whether the host has room for what a gap would have there."""
        if self.link.host_budget is None:
            return np.ones(self.taken.size, bool)
        spans: dict[int, tuple[int, int]] = {}
        for k in map(int, np.flatnonzero(self.taken)):
            v, made, right = int(self.values[k]), int(self.made[k]), int(self.right[k])
            first, last = spans.get(v, (made, right))
            spans[v] = (min(first, made), max(last, right))
        sizes = self.sequence.problem.values
        if sum(sizes[v].size for v in spans) + int(self.sizes.max()) <= self.link.host_budget:
            return np.ones(self.taken.size, bool)
        used = np.zeros(self.sequence.num_ops + 1, np.int64)
        for v, (first, last) in spans.items():
            used[first : last + 1] += self.sequence.problem.values[v].size
        found = np.ones(self.taken.size, bool)
        for k, gap in enumerate(self.sequence.gaps):
            first, last = spans.get(gap.value_id, (gap.right, gap.right))
            before = used[gap.made : first].max(initial=0)
            after = used[max(last, gap.made) : gap.right + 1].max(initial=0)
            found[k] = max(int(before), int(after)) + gap.size <= self.link.host_budget
        return found

    def _away(self) -> tuple[Numbers, Numbers]:
        """From which op on, and before which one, each gap relieves without any op waiting: of the
        taken ones as the lanes run, of any other if it were taken too."""
        begins, num_ops = self.sequence.begins, self.sequence.num_ops
        done = self.sent_by = self._send_ends()
        begin = np.maximum(np.searchsorted(begins[:-1], done), self.left + 1)
        # Fetches run backwards in time are sends: ready at their reader, done as early as can be.
        late = self.horizon - self.wanted
        order = np.flatnonzero(self.taken)
        order = order[np.argsort(late[order], kind="stable")]
        ends = queued(late[order], self.fetching[order])
        idle = IdleTime(ends - self.fetching[order], ends, self.horizon)
        back = idle.done(late, self.fetching)
        back[order] = ends
        # The fetch stands before the last op that begins by its start.
        self.fetch_from = self.horizon - back
        stop = np.searchsorted(begins, self.fetch_from, side="right") - 1
        return np.minimum(begin, num_ops), np.clip(stop, 0, self.right)

    def _send_ends(self) -> Numbers:
        taken = np.flatnonzero(self.taken)
        # One send for each value, of its first copy with a gap.
        taken = taken[np.argsort(self.made[taken], kind="stable")]
        _, first = np.unique(self.values[taken], return_index=True)
        order = taken[np.sort(first)]
        ends = queued(self.ready[order], self.sending[order])
        idle = IdleTime(ends - self.sending[order], ends, self.horizon)
        done = idle.done(self.ready, self.sending)
        of_value = np.full(len(self.sequence.problem.values), -1, np.int64)
        of_value[self.values[order]] = ends
        sent = of_value[self.values]
        return np.where(sent >= 0, sent, done)


def _column(numbers: Iterable[int]) -> Numbers:
    return np.fromiter(numbers, np.int64)


@dataclass(frozen=True, slots=True)
class _Send:
    gap: Gap  # the first of the value, and so of the copy that is sent
    length: int  # of the transfer, in ns


@dataclass(frozen=True, slots=True)
class _Sent:
    """A copy that was sent and not dropped yet."""

    gap: Gap
    done: int  # when its send is


class _Placing:
    """One walk over the ops; `k` is the op before which, or behind which, transfers are put."""

    def __init__(self, sequence: Sequence, budget: int, chosen: list[Gap]) -> None:
        self.sequence, self.budget = sequence, budget
        self.link = _link_for(sequence, chosen)
        self.gaps = sorted(chosen, key=lambda g: (g.right, g.left))
        sizes = _column(g.size for g in self.gaps)
        self.fetching = durations(self.link, sizes, self.link.from_host)
        self.wanted = self._wanted()
        # What is there if every gap is used to the full. What stays longer is added as it does.
        self.memory = sequence.memory.copy()
        for gap in chosen:
            self.memory[gap.left + 1 : gap.right] -= gap.size
        self.sends, self.releases = self._sends_and_releases()
        self.steps: list[Step] = []
        self.compute = self.to_host = self.from_host = 0  # when each lane is free
        self.on_way: list[_Sent] = []  # in the order in which they are done
        self.done: dict[int, int] = {}  # value -> when it is on the host
        self.arrived: dict[int, int] = {}  # value -> when the fetched copy is there
        self.waiting = list(range(len(self.gaps)))  # those not fetched yet

    def _wanted(self) -> list[int]:
        """Per gap: the op before which its fetch should stand, if nothing waits."""
        begins = self.sequence.begins
        horizon = int(begins[-1])
        rights = _column(g.right for g in self.gaps)[::-1]
        ends = queued(horizon - begins[rights], self.fetching[::-1])
        starts = np.maximum(horizon - ends, 0)[::-1]
        found: list[int] = (np.searchsorted(begins, starts, side="right") - 1).tolist()
        return found

    def _sends_and_releases(self) -> tuple[dict[int, list[_Send]], dict[int, list[int]]]:
        """Per op: what is sent behind it, and what is released there."""
        first: dict[int, Gap] = {}
        last: dict[int, int] = {}
        for gap in sorted(self.gaps, key=lambda g: g.left):
            first.setdefault(gap.value_id, gap)
            last[gap.value_id] = max(last.get(gap.value_id, 0), gap.right)
        sends: dict[int, list[_Send]] = {}
        lengths = durations(self.link, _column(g.size for g in first.values()), self.link.to_host)
        for gap, length in zip(first.values(), lengths.tolist(), strict=True):
            sends.setdefault(gap.made, []).append(_Send(gap, length))
        releases: dict[int, list[int]] = {}
        # Bytes are held to the end of the step where host memory is not scarce. The reader of the
        # last fetch is behind its arrival, so that the lane does not wait for it.
        if self.link.host_budget is not None:
            for v, right in last.items():
                releases.setdefault(right, []).append(v)
        return sends, releases

    def schedule(self) -> Schedule:
        problem = self.sequence.problem
        for k, i in enumerate(self.sequence.ops):
            self._drops(k)
            self._fetches(k)
            op = problem.ops[i]
            arrivals = [self.arrived.pop(v, 0) for v in op.inputs]
            self.compute = max([self.compute, *arrivals]) + op.cost
            self.steps.append(i)
            self.steps += [("release", v) for v in self.releases.get(k, ())]
            for send in self.sends.get(k, ()):
                self.steps.append(("send", send.gap.value_id))
                self.to_host = max(self.to_host, self.compute) + send.length
                self.done[send.gap.value_id] = self.to_host
                self.on_way.append(_Sent(send.gap, self.to_host))
        self._drops(self.sequence.num_ops)
        self._fetches(self.sequence.num_ops)
        return schedule_of(self.steps)

    def _drops(self, k: int) -> None:
        """What is done is dropped as soon as its gap begins; what is not, where the next op needs
        its bytes, and where it is to be fetched."""
        if not self.on_way:
            return
        at_end = k == self.sequence.num_ops
        stays = self._staying(k)
        room = self.budget - (0 if at_end else int(self.memory[k]))
        left: list[_Sent] = []
        for sent in self.on_way:
            must = stays > room or at_end or sent.gap.right <= k
            if sent.gap.left < k and (sent.done <= self.compute or must):
                self.steps.append(("drop", sent.gap.value_id))
                self.compute = max(self.compute, sent.done)
                stays -= sent.gap.size
            else:
                left.append(sent)
        self.on_way = left

    def _staying(self, k: int) -> int:
        """Bytes that are still on the device in spite of their gap."""
        return sum(sent.gap.size for sent in self.on_way if sent.gap.left < k)

    def _fetches(self, k: int) -> None:
        """What the next op reads, what is wanted by now and finds room, in the order of readers."""
        still: list[int] = []
        full = False
        for at, j in enumerate(self.waiting):
            gap = self.gaps[j]
            if gap.right > k:
                if full or self.wanted[j] > k:  # the later ones are wanted later
                    still += self.waiting[at:]
                    break
                if gap.left >= k or not self._gone(gap):
                    still.append(j)
                    continue
                full = not self._has_room(gap, k)
                if full:
                    still.append(j)
                    continue
                self.memory[k : gap.right] += gap.size
            self.steps.append(("fetch", gap.value_id))
            begin = max(self.from_host, self.compute, self.done[gap.value_id])
            self.from_host = self.arrived[gap.value_id] = begin + int(self.fetching[j])
        self.waiting = still

    def _gone(self, gap: Gap) -> bool:
        """Whether it was sent, and its device copy dropped."""
        v = gap.value_id
        return v in self.done and all(sent.gap.value_id != v for sent in self.on_way)

    def _has_room(self, gap: Gap, k: int) -> bool:
        most = max(int(self.memory[k : gap.right].max()), int(self.memory[k]) + self._staying(k))
        return most + gap.size <= self.budget
