"""`rotor`, `rotor-floating`, `revolve` and `sequential`: methods for a chain of blocks.

Beaumont et al., "Optimal re-materialization strategies for heterogeneous chains", ACM TOMS 2024.
The chain is that of `partition.chain`; its forward runs bare (F_none, and F_ck where the input is
kept) or by an option that saves what its backward reads (F_all); B is that backward.

- rotor (Sec. 4.4, Alg. 3-4): an input that is kept stays until its backward. With C(s, t, m) the
  least cost of blocks s to t with m bytes beside the input of s,
    C(s, t, m) = min( cost(s) + C(s+1, t, m - saved(s)),                            F_all first
                      min_k bare(s..k-1) + C(k, t, m - input(k)) + C(s, k-1, m) )   F_ck first
  where each run must fit beside what stands. O(n^3 M), `cpp/chain/chain_dp.cpp`.
- rotor-floating (Sec. 4.3, Alg. 1-2): the last kept input may be given up for a later one. The
  theorem as printed misses the move of that input alone; with it, and in O(n^4 M) where the paper
  has O(n^6 M), in `cpp/chain/chain_floating.cpp`.
- revolve (Sec. 5.4): only inputs are kept, and F_all runs right before its backward.
- sequential (Chen et al. 2016; torch's checkpoint_sequential): equal segments, of each only the
  input is kept; every number of segments is tried.

Memory is counted in slots (500 to the budget), sizes rounded up. The sequence becomes op ids
(`lower_steps`): F_none, F_ck and F_all are the same ops, what is kept follows from later reads. As
rounding and the blocks' measures err on the safe side, the table reaches beyond the budget, the
sequences of all its costs are lowered, and the exact simulation decides (`chain_search`).
`rotor` and `rotor-floating` then drop runs whose older results can stay within the budget.
`rotor-floating` looks at the persistent program first, which sees more blocks: its own sequences
are of a larger space, so it is never the dearer of the two.
`revolve` and `sequential` stay as published.

Known limits: within a block all or nothing is saved; values that ops without a gradient share
between blocks, and results of run-once ops, are kept from their first run on; more than
`max_blocks` blocks are joined to that many.
"""

import time
from dataclasses import dataclass
from typing import ClassVar

from rekindle.core import Problem, Schedule, Solution, keep_all
from rekindle.partition.chain import unmeasured_chain
from rekindle.partition.separators import find_rows
from rekindle.solve.chains.chain_dp import Rule, segment_steps
from rekindle.solve.chains.chain_search import ChainSearch, solve_by_rule


def _reason(problem: Problem) -> str | None:
    rows = find_rows(problem)
    return rows if isinstance(rows, str) else None


@dataclass(frozen=True, slots=True)
class _ByRule:
    """What the three programs share; each is a final class with its rule."""

    # As many as in the paper's experiments; rounding up then costs at most one slot per value.
    slots: int = 500
    max_blocks: int = 400
    prune: bool = True  # False: the paper's sequence as it is

    name: ClassVar[str]
    rule: ClassVar[Rule]
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        return _reason(problem)

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        return solve_by_rule(
            problem,
            budget,
            self.rule,
            name=self.name,
            slots=self.slots,
            max_blocks=self.max_blocks,
            prune=self.prune,
            time_limit_s=time_limit_s,
        )


@dataclass(frozen=True, slots=True)
class Rotor(_ByRule):
    """The optimal schedule of a chain in which a kept input stays until its backward."""

    name: ClassVar[str] = "rotor"
    rule: ClassVar[Rule] = Rule.persistent


@dataclass(frozen=True, slots=True)
class RotorFloating(_ByRule):
    """As `rotor`, but the last kept input may be given up for a later one."""

    # O(n^4 M): fewer sums than for 400 blocks in O(n^3 M).
    max_blocks: int = 80

    name: ClassVar[str] = "rotor-floating"
    rule: ClassVar[Rule] = Rule.floating


@dataclass(frozen=True, slots=True)
class Revolve(_ByRule):
    """The baseline that saves block inputs alone."""

    # The baseline is to be what it is in the paper.
    prune: bool = False

    name: ClassVar[str] = "revolve"
    rule: ClassVar[Rule] = Rule.revolve


@dataclass(frozen=True, slots=True)
class Sequential:
    """The baseline of `torch.utils.checkpoint_sequential`: equal segments."""

    max_trials: int = 64

    name: ClassVar[str] = "sequential"
    requires: ClassVar[tuple[str, ...]] = ()
    exact: ClassVar[bool] = False

    def accepts(self, problem: Problem) -> str | None:
        return _reason(problem)

    def solve(
        self,
        problem: Problem,
        budget: int,
        *,
        time_limit_s: float,
        seed: int,
        warm_start: Schedule | None = None,
    ) -> Solution:
        deadline = time.monotonic() + time_limit_s
        rows = find_rows(problem)
        assert not isinstance(rows, str), "accepts was asked first"
        # Segments ask for no sizes: the simulation finds what each number of them needs.
        chain = unmeasured_chain(problem, rows)
        search = ChainSearch(problem, chain, budget, deadline)
        search.found.append(keep_all(problem).ops)
        try:
            for count in _counts(len(chain), self.max_trials):
                # Asked before each trial; keep-all is there in any case.
                if search.left_s() == 0:
                    search.stopped_by = "time limit"
                    break
                search.try_steps(segment_steps(len(chain), count))
        except KeyboardInterrupt:
            search.stopped_by = "interrupt"
        return search.solution(self.name)


def _counts(num_blocks: int, max_trials: int) -> list[int]:
    """Every number of segments, or, of a long chain, those in even ratios."""
    if num_blocks <= max_trials:
        return list(range(1, num_blocks + 1))
    # Even ratios, as one segment more changes little where there are many.
    ratio = num_blocks ** (1 / (max_trials - 1))
    return sorted({round(ratio**k) for k in range(max_trials)})
