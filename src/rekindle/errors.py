"""Every error a user can meet. Each says what was got, what was expected, and what to try."""

from collections.abc import Iterable
from difflib import get_close_matches


def brief(x: object, limit: int = 40) -> str:
    """What was got, as a part of a sentence: at most `limit` characters of it."""
    try:
        text = str(x)
    except ValueError:  # Python refuses to print an int of more than 4,300 digits
        return "a whole number of thousands of digits"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def no_such(kind: str, given: str, names: Iterable[str]) -> str:
    """That there is no solver (device, ...) of that name, the nearest that there is, and all."""
    known = list(names)
    close = get_close_matches(given[:40].lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? There" if close else "there"
    return f"there is no {kind} {brief(given)!r}; {hint} are {', '.join(known)}"


class RekindleError(Exception):
    """The base of all errors that Rekindle raises on purpose."""


class InvalidProblem(RekindleError, ValueError):
    """A problem that breaks a rule of the file format."""


class InvalidSchedule(RekindleError, ValueError):
    """A schedule that cannot be executed, or that belongs to another problem."""


class InvalidBudget(RekindleError, ValueError):
    """A budget that is not a number of bytes, a size with a unit, or a fraction in (0, 1]."""


class FileError(RekindleError, ValueError):
    """A file that cannot be read or parsed."""


class SolverUnavailable(RekindleError):
    """An unknown solver, or one whose libraries are not installed."""


class SolverRefused(RekindleError):
    """A solver that does not support this kind of problem; the message says why."""


class BudgetInfeasible(RekindleError):
    """No schedule was found within the budget. `smallest_peak_bytes` is the smallest peak found."""

    def __init__(self, message: str, smallest_peak_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_peak_bytes = smallest_peak_bytes


class WishRefused(RekindleError, ValueError):
    """A `save` or `recompute` pattern that matches no op, or a request that cannot be met."""


class CaptureError(RekindleError):
    """A model that cannot be captured. The message names the op, and its source line if known."""


class NothingToPlan(CaptureError):
    """A call that runs no ops, or none that a gradient flows through."""


class PlanMismatch(RekindleError):
    """A plan applied to a model, input, torch release or device that it was not made for."""


class ChangedInPlace(RekindleError, RuntimeError):
    """A tensor changed in place before the backward, where eager allows it and the plan cannot."""


class HostMemoryFull(RekindleError, MemoryError):
    """Steps that are alive at one time would need more host memory than `offload` allows."""


class DeviceProfileError(RekindleError, ValueError):
    """A device description that does not exist or cannot be parsed."""
