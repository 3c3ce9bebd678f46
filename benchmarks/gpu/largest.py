"""The largest size that fits, in few tries: memory is nearly a line in the size, so that line says
where to try, and what happens there corrects it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_FAR = 4


@dataclass(frozen=True, slots=True)
class Found:
    size: int  # the largest that was seen to fit; 0: none
    fails: int | None  # the smallest that was seen not to
    num_tries: int
    closed: bool  # nothing untried is left between the two but what the tolerance allows


def predicted(
    points: Sequence[tuple[int, float]],
    limit: float,
    grain: int,
    *,
    power: int = 1,
    exact: bool = True,
) -> int | None:
    """The largest size within the limit by a line through two points (size, bytes), in size**power;
    None where they make no rising line. The last two, because memory is the largest of several
    lines of which one counts for large sizes; where they are not exact, two that lie apart."""
    known = sorted((size**power, needed) for size, needed in dict(points).items())
    if len(known) < 2:
        return None
    x1, y1 = known[-1]
    apart = [point for point in known if point[0] < (1 if exact else 0.8) * x1]
    x0, y0 = apart[-1] if apart else known[0]
    if y1 <= y0:
        return None
    x = x0 + (limit - y0) * (x1 - x0) / (y1 - y0)
    return _whole(max(x, 0) ** (1 / power) + 1e-6, grain)


def largest(
    fits: Callable[[int], bool],
    predict: Callable[[], int | None],
    *,
    grain: int,
    tolerance: float = 0.02,
    max_tries: int = 8,
    known: int = 0,
    may_go_on: Callable[[], bool] = lambda: True,
) -> Found:
    """`fits` is taken to be monotone; `known` is a size that is known to fit; `predict` is
    asked before every try, so that it can use what the tries have measured. Ends when what fits and
    what does not are one grain apart, or `tolerance` of the size; or open, when the tries or
    `may_go_on` say so."""
    best, fails, in_a_row, last = known, None, 0, True
    num_tries = 0
    while not (closed := _closed(best, fails, grain, tolerance)):
        if num_tries == max_tries or not may_go_on():
            break
        guess = predict()
        if fails is None:
            jump = _gap(best, grain, tolerance) * 2 ** max(0, in_a_row - 2)
            guess = max(guess or grain, best + (jump if best else grain))
        else:
            middle = (best + fails) // 2
            if in_a_row == num_tries:  # nothing tried has fitted: down, by more each time
                jump = _gap(fails, grain, tolerance) * 4 ** (in_a_row - 1)
                guess = min(guess or fails, max(fails - jump, middle))
            elif last and guess is not None and guess < fails and in_a_row < 4:
                guess = max(guess, best + _gap(best, grain, tolerance))  # the end by the line
            else:
                guess = middle
            guess = min(max(guess, best + grain), fails - grain)
        if best:  # no line is believed so far beyond what has run
            guess = min(guess, _FAR * best)
        guess = max(grain, _whole(guess, grain))
        num_tries += 1
        fit = fits(guess)
        in_a_row = in_a_row + 1 if fit == last else 1
        last = fit
        if fit:
            best = guess
        else:
            fails = guess
    return Found(best, fails, num_tries, closed)


def _closed(best: int, fails: int | None, grain: int, tolerance: float) -> bool:
    if fails is None:
        return False
    return fails - best <= (_gap(best, grain, tolerance) if best else grain)


def _gap(size: int, grain: int, tolerance: float) -> int:
    return max(grain, _whole(tolerance * size, grain))


def _whole(size: float, grain: int) -> int:
    return math.floor(size / grain) * grain
