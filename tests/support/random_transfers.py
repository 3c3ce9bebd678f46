"""Random links to the host, and random schedules that move values over them."""

from dataclasses import replace
from random import Random

from rekindle.core import HostLink, Problem, Schedule, schedule_of
from rekindle.core.generate import random_problem, random_schedule
from rekindle.core.schedule import TRANSFER_KINDS, Step

# Bytes per second at which 1 to 20 bytes take about what an op does, and far from it.
RATES = (1, 3 * 10**7, 10**8, 10**9, 7 * 10**9, 2**61)


def random_link(rng: Random, total_size: int) -> HostLink:
    return HostLink(
        to_host=rng.choice(RATES[1:]) if rng.random() < 0.95 else RATES[0],
        from_host=rng.choice(RATES[1:]) if rng.random() < 0.95 else RATES[0],
        latency=rng.choice((0, 0, 1, 7, 40)),
        least=rng.choice((0, 0, 1, 2, 6)),
        host_budget=None if rng.random() < 0.7 else rng.randint(0, total_size // 2),
        serial=rng.random() < 0.25,
    )


def random_transfer_problem(rng: Random, num_ops: int) -> Problem:
    problem = random_problem(rng, num_ops, inplace=rng.random(), once=0.1, loss=rng.random())
    link = random_link(rng, sum(value.size for value in problem.values))
    return replace(problem, transfers=link)


def random_transfer_schedule(problem: Problem, rng: Random, *, rate: float = 0.5) -> Schedule:
    """A schedule with transfers that is valid but for the host budget: ops in a random order, some
    of them again, and before each of them transfers at the given rate."""
    ops = random_schedule(problem, rng, repeats=0.5 * rng.random()).ops
    return schedule_of(Inserting(problem, ops, rng, rate).steps())


class Inserting:
    def __init__(self, problem: Problem, ops: tuple[int, ...], rng: Random, rate: float) -> None:
        assert problem.transfers is not None
        self.problem, self.ops, self.rng, self.rate = problem, ops, rng, rate
        least = problem.transfers.least
        resident = set(problem.resident)
        self.movable = {
            v for v, x in enumerate(problem.values) if v not in resident and x.size >= least
        }
        self.found: list[Step] = []
        self.device: set[int] = set()
        self.host: set[int] = set()
        self.sent: set[int] = set()  # device copies that must end by a drop
        self.unread: set[int] = set()  # fetched copies

    def transfer(self, kind, v: int) -> None:
        self.found.append((kind, v))
        match kind:
            case "send":
                self.host.add(v)
                self.sent.add(v)
                self.unread.discard(v)
            case "drop":
                self.sent.discard(v)
                self.device.discard(v)
            case "fetch":
                self.device.add(v)
                self.unread.add(v)
            case "release":
                self.host.discard(v)

    def steps(self) -> list[Step]:
        for k, i in enumerate(self.ops):
            while self.rng.random() < self.rate:
                self.any_transfer(k)
            op = self.problem.ops[i]
            for v in op.inputs:
                if v in self.movable and v not in self.device:
                    self.transfer("fetch", v)
                self.unread.discard(v)
            for v in op.outputs:
                if v in self.unread:  # its copy would end unread: send it, and it is read
                    if v in self.host:
                        self.transfer("release", v)
                    self.transfer("send", v)
                if v in self.sent:
                    self.transfer("drop", v)
            self.found.append(i)
            self.device.update(op.outputs)
        self.finish()
        return self.found

    def any_transfer(self, k: int) -> None:
        kind = self.rng.choice(TRANSFER_KINDS)
        device, host = self.device & self.movable, self.host
        match kind:
            case "send":
                fit = device - host
            case "drop":
                fit = self.sent & self.host | {v for v in self.sent if not self.is_read(v, k)}
                fit -= set(self.problem.outputs) - self.host
            case "fetch":
                fit = host - self.sent - self.unread
                fit = {v for v in fit if self.is_read(v, k)} or fit & set(self.problem.outputs)
            case _:
                fit = host & device | {v for v in host if not self.is_read(v, k)}
                fit -= set(self.problem.outputs) - device
        if fit:
            self.transfer(kind, self.rng.choice(sorted(fit)))

    def is_read(self, v: int, k: int) -> bool:
        """Before it is made again."""
        for i in self.ops[k:]:
            if v in self.problem.ops[i].inputs:
                return True
            if v in self.problem.ops[i].outputs:
                return False
        return False

    def finish(self) -> None:
        for v in sorted(self.movable & set(self.problem.outputs) - self.device):
            self.transfer("fetch", v)
        for v in sorted(self.sent - set(self.problem.outputs)):
            self.transfer("drop", v)


def changed_steps(problem: Problem, schedule: Schedule, rng: Random) -> Schedule:
    """A few steps moved, taken away, doubled or put in: seldom valid."""
    steps = list(schedule.steps)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(steps) + 1)
        match rng.randrange(5):
            case 0 if steps:
                del steps[at % len(steps)]
            case 1 if steps:
                steps.insert(at, steps.pop(rng.randrange(len(steps))))
            case 2 if steps:
                steps.insert(at, rng.choice(steps))
            case 3:
                steps.insert(at, rng.randrange(len(problem.ops)))
            case _:
                kind = rng.choice(TRANSFER_KINDS)
                steps.insert(at, (kind, rng.randrange(len(problem.values))))
    return schedule_of(steps)
