"""The meaning of schedules with transfers once more, as plainly as possible and slow. Nothing is
shared with the native simulator.

Every question is answered by looking along the steps: where a copy is made, used and ended. A copy
is the pair (value, step that made it).
"""

from dataclasses import dataclass

from rekindle.core import HostLink, Problem, Schedule


class Invalid(Exception):
    pass


@dataclass(frozen=True)
class ReferenceTrace:
    memory: tuple[int, ...]
    host_memory: tuple[int, ...]
    cost: int
    runs: tuple[int, ...]
    finish: tuple[int, ...]  # per step, on its own lane
    ends: tuple[int, int, int]  # of the lanes: compute, to the host, from the host

    @property
    def peak(self) -> int:
        return max(self.memory, default=0)

    @property
    def peak_step(self) -> int:
        return self.memory.index(self.peak) if self.memory else -1

    @property
    def host_peak(self) -> int:
        return max(self.host_memory, default=0)


def simulate(problem: Problem, schedule: Schedule) -> ReferenceTrace:
    walk = Walk(problem, schedule.steps)
    walk.check()
    return walk.trace()


class Walk:
    def __init__(self, problem: Problem, steps) -> None:
        self.problem = problem
        self.steps = steps
        self.end = len(steps)
        self.resident = set(problem.resident)

    # What the steps do

    def op(self, t):
        """The op that step t runs; None where it is a transfer."""
        step = self.steps[t]
        return self.problem.ops[step] if isinstance(step, int) else None

    def makes(self, t) -> tuple[int, ...]:
        op = self.op(t)
        if op is not None:
            return op.outputs
        kind, v = self.steps[t]
        return (v,) if kind == "fetch" else ()

    def uses(self, t) -> tuple[int, ...]:
        """The values whose newest copy step t reads, sends or ends."""
        op = self.op(t)
        if op is not None:
            return tuple(v for v in op.inputs if v not in self.resident)
        kind, v = self.steps[t]
        return (v,) if kind in ("send", "drop") else ()

    def newest(self, v, t):
        """The step that made the copy of v that is there before step t, or None."""
        for s in reversed(range(t)):
            if self.steps[s] == ("drop", v):
                return None
            if v in self.makes(s):
                return s
        return None

    def sent_at(self, v, made, before):
        """The last step before `before` that sent the copy of v, or None. A copy may be sent again
        once the host copy was released."""
        sent = None
        for s in range(made + 1, before):
            if v in self.makes(s):
                break
            if self.steps[s] == ("send", v):
                sent = s
        return sent

    def host_since(self, v, t):
        """The send by which v is on the host before step t, or None."""
        for s in reversed(range(t)):
            if self.steps[s] == ("release", v):
                return None
            if self.steps[s] == ("send", v):
                return s
        return None

    def last_use(self, v, made):
        """The last step at which the copy is in memory; `end` for one that lives on."""
        last = made
        for t in range(made + 1, self.end):
            if v in self.uses(t):
                last = t
                op = self.op(t)
                if op is not None and op.phase == "loss" and v in self.problem.held:
                    return self.end
            if v in self.makes(t) or self.steps[t] == ("drop", v):
                return last
        return self.end if v in self.problem.outputs else last

    # Validity

    def check(self) -> None:
        for t, step in enumerate(self.steps):
            if isinstance(step, int):
                if step not in range(len(self.problem.ops)):
                    raise Invalid(f"step {t} names no op")
            else:
                self.check_transfer(t, *step)
            for v in self.uses(t):
                if self.newest(v, t) is None:
                    raise Invalid(f"step {t} uses what is not there")
        for i, op in enumerate(self.problem.ops):
            if op.once and self.steps.count(i) != 1:
                raise Invalid(f"op {i} stands {self.steps.count(i)} times")
        for v in set(self.problem.outputs) - self.resident:
            if self.newest(v, self.end) is None:
                raise Invalid(f"output {v} is not there")
        self.check_copies()
        link = self.problem.transfers
        budget = None if link is None else link.host_budget
        if budget is not None and max(self.host_memory(), default=0) > budget:
            raise Invalid("too much on the host")

    def check_transfer(self, t, kind, v) -> None:
        link = self.problem.transfers
        if link is None or v not in range(len(self.problem.values)):
            raise Invalid(f"step {t} moves what cannot be moved")
        if v in self.resident or self.problem.values[v].size < link.least:
            raise Invalid(f"step {t} moves what is never moved")
        there = self.host_since(v, t) is not None
        if kind == "send" and there:
            raise Invalid(f"step {t} sends what is on the host")
        if kind in ("fetch", "release") and not there:
            raise Invalid(f"step {t} wants what is not on the host")
        if kind == "drop":
            made = self.newest(v, t)
            if made is None or self.sent_at(v, made, t) is None:
                raise Invalid(f"step {t} drops what was not sent")

    def check_copies(self) -> None:
        for made in range(self.end):
            for v in self.makes(made):
                last = self.last_use(v, made)
                sent = self.sent_at(v, made, self.end)
                if sent is not None and last < self.end and self.steps[last] != ("drop", v):
                    raise Invalid(f"the copy sent at step {sent} ends without a drop")
                if isinstance(self.steps[made], tuple) and last == made:
                    raise Invalid(f"the copy fetched at step {made} is not read")

    # Bytes

    def memory(self) -> tuple[int, ...]:
        sizes = [value.size for value in self.problem.values]
        copies = {(v, t): self.last_use(v, t) for t in range(self.end) for v in self.makes(t)}
        memory = []
        for t in range(self.end):
            used = sum(sizes[v] for (v, made), last in copies.items() if made <= t <= last)
            op = self.op(t)
            if op is not None:
                used += op.workspace
                for source, target in op.inplace:
                    if copies[source, self.newest(source, t)] == t:
                        used -= sizes[target]
            memory.append(used)
        return tuple(memory)

    def host_memory(self) -> tuple[int, ...]:
        """A value counts from its send to its release, both included."""
        sizes = [value.size for value in self.problem.values]
        return tuple(
            sum(
                size
                for v, size in enumerate(sizes)
                if self.host_since(v, t + 1) is not None or self.steps[t] == ("release", v)
            )
            for t in range(self.end)
        )

    # Time

    def trace(self) -> ReferenceTrace:
        finish, ends = self.finish()
        link = self.problem.transfers
        cost = max(ends)
        if link is not None and link.serial:
            cost = self.serial(link)
        return ReferenceTrace(
            memory=self.memory(),
            host_memory=self.host_memory(),
            cost=cost,
            runs=tuple(self.steps.count(i) for i in range(len(self.problem.ops))),
            finish=finish,
            ends=ends,
        )

    def finish(self):
        compute = to_host = from_host = 0
        finish: list[int] = []
        for t, step in enumerate(self.steps):
            op = self.op(t)
            if op is not None:
                waits = [self.arrival(v, t, finish) for v in self.uses(t)]
                compute = max([compute, *waits]) + op.cost
                finish.append(compute)
                continue
            kind, v = step
            link = self.problem.transfers
            size = self.problem.values[v].size
            if kind == "send":
                begin = max(to_host, compute, self.arrival(v, t, finish))
                to_host = begin + transfer_ns(link, size, link.to_host)
                finish.append(to_host)
            elif kind == "drop":
                compute = max(compute, finish[self.sent_at(v, self.newest(v, t), t)])
                finish.append(compute)
            elif kind == "fetch":
                begin = max(from_host, compute, finish[self.host_since(v, t)])
                from_host = begin + transfer_ns(link, size, link.from_host)
                finish.append(from_host)
            else:
                sent = self.host_since(v, t)
                fetches = [s for s in range(sent, t) if self.steps[s] == ("fetch", v)]
                to_host = max([to_host, *(finish[s] for s in fetches)])
                finish.append(to_host)
        return tuple(finish), (compute, to_host, from_host)

    def arrival(self, v, t, finish) -> int:
        """When the copy of v that step t reads is there, as far as it was fetched."""
        made = self.newest(v, t)
        return finish[made] if self.steps[made] == ("fetch", v) else 0

    def serial(self, link: HostLink) -> int:
        total = 0
        for t, step in enumerate(self.steps):
            if isinstance(step, int):
                total += self.problem.ops[step].cost
                continue
            kind, v = step
            size = self.problem.values[v].size
            if kind == "fetch":
                total += transfer_ns(link, size, link.from_host)
            elif kind == "send" and step not in self.steps[:t]:
                total += transfer_ns(link, size, link.to_host)
        return total


def transfer_ns(link: HostLink, size: int, rate: int) -> int:
    whole, rest = divmod(size * 10**9, rate)
    return link.latency + whole + (rest > 0)
