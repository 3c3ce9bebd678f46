"""Amounts as people read them: one spelling for the terminal, the page and the exports."""

from collections.abc import Sequence

from rekindle.core import Problem

# Binary units for bytes, as PyTorch and nvidia-smi print them; decimal ones for time.
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_TIMES = ("ns", "us", "ms", "s")


def size(problem: Problem, amount: int) -> str:
    """`1.50 GiB`; a size in another unit than bytes stays a plain number."""
    if problem.size_unit != "bytes":
        return f"{amount:,} {problem.size_unit}"
    return _scaled(amount, _SIZES, 1024)


def size_rounded_up(problem: Problem, amount: int) -> str:
    """The same, never less than the amount: for a size that somebody will ask for."""
    if problem.size_unit != "bytes":
        return size(problem, amount)
    k = max(0, min(len(_SIZES) - 1, (abs(amount).bit_length() - 1) // 10))
    if k == 0:
        return f"{amount} B"
    return f"{-(-100 * amount // 1024**k) / 100:.2f} {_SIZES[k]}"


def cost(problem: Problem, amount: int) -> str:
    """A cost with a unit that suits its size."""
    if problem.cost_unit != "ns":
        return f"{amount:,} {problem.cost_unit}"
    return _scaled(amount, _TIMES, 1000)


def overhead(new_cost: int, keep_all_cost: int) -> float:
    """The increase over keep-all, 0.07 for 7 %."""
    if keep_all_cost == 0:  # all ops are views
        return 0.0
    return (new_cost - keep_all_cost) / keep_all_cost


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    return f"{100 * share:.1f} %"


def signed_percent(share: float, digits: int = 1) -> str:
    """`+8.3 %`; what rounds to nothing has no minus sign."""
    text = f"{100 * share:+.{digits}f} %"
    return text.replace("-", "+") if float(text[:-2]) == 0 else text


def counted(count: int, noun: str) -> str:
    """`1 op`, `12 ops`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _scaled(amount: int, units: Sequence[str], step: int) -> str:
    value, k = float(amount), 0
    while k < len(units) - 1 and abs(value) >= step:
        value, k = value / step, k + 1
    return f"{amount} {units[0]}" if k == 0 else f"{value:.2f} {units[k]}"
