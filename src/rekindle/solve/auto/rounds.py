"""What `auto` does in a round of improvement, and in which turn."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Round:
    hot: float = 0.0  # temperature of annealing, in mean op costs
    afresh: bool = False  # half of the seeds start from the plain order, not from the incumbent
    limit: float = 1.0  # of the budget: a tighter one sometimes leads to a cheaper schedule
    ratchet: bool = False  # the limit is lowered to the budget step by step
    windows: bool = False  # one stretch of the incumbent after another, the rest stays cold
    long: bool = False  # one run on each core, LONGER where another round has several
    again: bool = False  # several from the plain order, then on from the best of them
    rebuild: bool = False


COLD, AFRESH = Round(0.05), Round(50.0, afresh=True)
SQUEEZE = Round(50.0, afresh=True, ratchet=True)
MENDED = Round(1.0)
TIGHTER = Round(50.0, afresh=True, limit=0.98)
AGAIN = Round(50.0, again=True)
REBUILD = Round(rebuild=True)
WINDOWS, MANY_WINDOWS = Round(30.0, windows=True), Round(30.0, windows=True, long=True)
AFTER_SAVES: tuple[Round, ...] = (
    COLD, REBUILD, AGAIN, WINDOWS, AGAIN, REBUILD, TIGHTER, AGAIN, Round(3.0),
)  # fmt: skip
# One annealing from the plain order may end far above another: several, rather than longer ones.
# Then stretch by stretch.
FROM_NOTHING: tuple[Round, ...] = (
    AFRESH, MANY_WINDOWS, Round(10.0, afresh=True), MANY_WINDOWS, TIGHTER, MANY_WINDOWS,
    Round(3.0), REBUILD,
)  # fmt: skip
# Where gradients alone do not fit, annealing from the plain order ends far above the budget.
TIGHT: tuple[Round, ...] = (REBUILD, REBUILD, COLD, REBUILD, WINDOWS)
