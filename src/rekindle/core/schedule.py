"""`Schedule`: the op ids in execution order. An op that stands twice is recomputed."""

from dataclasses import dataclass

from rekindle.core.problem import Problem


@dataclass(frozen=True, slots=True)
class Schedule:
    ops: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ops)


def keep_all(problem: Problem) -> Schedule:
    """Every op once, in the listed order."""
    return Schedule(tuple(range(len(problem.ops))))
