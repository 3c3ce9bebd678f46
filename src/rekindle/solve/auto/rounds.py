"""What `auto` does in a round of improvement, and in which turn."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Round:
    """One round of annealing: how it differs from the others."""

    hot: float = 0.0  # temperature of annealing, in mean op costs
    afresh: bool = False  # half of the seeds start from the plain order, not from the incumbent
    limit: float = 1.0  # of the budget: a tighter one sometimes leads to a cheaper schedule
    ratchet: bool = False  # the limit is lowered to the budget step by step
    windows: bool = False  # one stretch of the incumbent after another, the rest stays cold
    long: bool = False  # one run on each core, LONGER where another round has several
    multistart: bool = False  # several from the plain order, then on from the best of them
    lns: bool = False


COLD, AFRESH = Round(0.05), Round(50.0, afresh=True)
SQUEEZE = Round(50.0, afresh=True, ratchet=True)
REPAIR = Round(1.0)
TIGHTER = Round(50.0, afresh=True, limit=0.98)
MULTISTART = Round(50.0, multistart=True)
LNS = Round(lns=True)
WINDOWS, MANY_WINDOWS = Round(30.0, windows=True), Round(30.0, windows=True, long=True)
AFTER_SAVE_SETS: tuple[Round, ...] = (
    COLD, LNS, MULTISTART, WINDOWS, MULTISTART, LNS, TIGHTER, MULTISTART, Round(3.0),
)  # fmt: skip
# One annealing from the plain order may end far above another: several, rather than longer ones.
# Then stretch by stretch.
FROM_NOTHING: tuple[Round, ...] = (
    AFRESH, MANY_WINDOWS, Round(10.0, afresh=True), MANY_WINDOWS, TIGHTER, MANY_WINDOWS,
    Round(3.0), LNS,
)  # fmt: skip
# Where gradients alone do not fit, annealing from the plain order ends far above the budget.
TIGHT: tuple[Round, ...] = (LNS, LNS, COLD, LNS, WINDOWS)
