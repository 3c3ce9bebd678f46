"""A budget as people write it -> whole bytes.

A whole number is bytes; a number with a point is a fraction in (0, 1] of the keep-all peak, rounded
down; else a number with a unit (GiB = 2^30, GB = 10^9).
"""

import math
import re
from fractions import Fraction

from rekindle.errors import InvalidBudget, brief

MIN_BUDGET = "min"  # the smallest budget that is found feasible; known only after a search

UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_PATTERN = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+))\s*([A-Za-z]*)\s*")
_MISTAKE = re.compile(r"\s*(\d+\.?\d*)\s*(%|[A-Za-z]*)\s*")  # a share, or another unit
_TINY = 1024
_LIMIT = 2**62  # as of sizes: a budget above them all would only overflow


def parse_budget(budget: int | float | str, keep_all_peak: int) -> int:
    """The budget in the problem's size unit; raises InvalidBudget with one sentence."""
    if isinstance(budget, bool):  # a subclass of int, and never meant as one byte
        raise _bad(budget)
    if isinstance(budget, int):
        return _whole(budget, budget)
    if isinstance(budget, float):
        if not math.isfinite(budget):
            raise _bad(budget)
        # Of the decimal that was written: 0.1 is a tenth, not the float next to it.
        return _fraction(Fraction(str(budget)), budget, keep_all_peak)
    if not isinstance(budget, str):
        raise _bad(budget)
    # Digits of other scripts match \d, and Python takes quadratic time over thousands of digits.
    match = _PATTERN.fullmatch(budget) if len(budget) <= 64 and budget.isascii() else None
    if match is None:
        raise _bad(budget)
    number, unit = match.groups()
    if unit:
        if unit.lower() not in UNITS:
            raise _bad(budget)
        return _whole(math.floor(Fraction(number) * UNITS[unit.lower()]), budget)
    if "." in number:
        return _fraction(Fraction(number), budget, keep_all_peak)
    return _whole(int(number), budget)


def parse_rate(rate: int | str) -> int:
    """Bytes per second: a whole number, or a size with a unit and "/s" behind it ("55GB/s")."""
    size = rate.strip().removesuffix("/s") if isinstance(rate, str) else rate
    if not isinstance(size, bool) and not is_fraction(size):
        try:
            return parse_budget(size, 0)
        except InvalidBudget:
            pass
    raise InvalidBudget(
        f"rate {brief(rate)!r} is not understood: give bytes per second as a whole number above 0, "
        'or as a size with a unit, such as "55GB/s"'
    )


def is_fraction(budget: object) -> bool:
    """Whether a budget is one of the keep-all peak, as `parse_budget` reads it."""
    if isinstance(budget, str):
        match = _PATTERN.fullmatch(budget) if len(budget) <= 64 and budget.isascii() else None
        return match is not None and not match[2] and "." in match[1]
    return isinstance(budget, float)


def _whole(value: int, budget: object) -> int:
    if not 0 < value < _LIMIT:
        raise _bad(budget)
    return value


def _fraction(value: Fraction, budget: object, keep_all_peak: int) -> int:
    if not 0 < value <= 1:
        raise _bad(budget)
    return math.floor(value * keep_all_peak)


def refuse_tiny(name: str, amount: object) -> None:
    """Raises InvalidBudget for a number of bytes that can only be meant in another unit: no step
    of a model is below a KiB. With the unit written out ("8B") it is taken as it is."""
    if isinstance(amount, str):
        amount = int(amount) if amount.isascii() and amount.isdigit() and len(amount) < 5 else None
    if isinstance(amount, int) and not isinstance(amount, bool) and 0 < amount < _TINY:
        other = " or 1.0, all of it" if amount == 1 else ""
        raise InvalidBudget(
            f'{name} {amount} is {amount} bytes; did you mean "{amount}GiB"{other}? Bytes below '
            f'{_TINY} are written "{amount}B"'
        )


def budget_of_bytes(num_bytes: int) -> int | str:
    """A number of bytes as an option that is taken as it is, however small."""
    return num_bytes if num_bytes >= _TINY else f"{num_bytes}B"


def _bad(budget: object) -> InvalidBudget:
    near = _nearest(budget)
    return InvalidBudget(
        f"budget {brief(budget)!r} is not understood: give bytes as a whole number above 0, a "
        'size with a unit such as "8GiB" or "8GB", or a fraction of the keep-all peak with a '
        f"point, above 0.0 and at most 1.0{f'; did you mean {near}?' if near else ''}"
    )


def _nearest(budget: object) -> str:
    """What was probably meant, as it is written; or nothing."""
    text = str(budget) if isinstance(budget, (str, float)) else ""
    match = _MISTAKE.fullmatch(text) if len(text) <= 64 and text.isascii() else None
    if match is None:
        return ""
    number, unit = match.groups()
    if unit == "%":
        share = float(number) / 100
        return f"{share:g}" if 0 < share < 1 else ""
    if unit:
        first = unit[0].upper()
        return f'"{number}{first}iB"' if first in "KMGT" and float(number) > 0 else ""
    return f'"{number}GiB"' if float(number) > 1 else ""
