"""Every error a user can meet. Each says what was got, what was expected, and what to try."""


def brief(x: object, limit: int = 40) -> str:
    """What was got, for a sentence: never more than a few characters of it."""
    try:
        text = str(x)
    except ValueError:  # Python writes no whole number of more than 4,300 digits
        return "a whole number of thousands of digits"
    return text if len(text) <= limit else text[: limit - 3] + "..."


class RekindleError(Exception):
    """The base of all errors that Rekindle raises on purpose."""


class InvalidProblem(RekindleError, ValueError):
    """A problem that breaks a rule of the format."""


class InvalidSchedule(RekindleError, ValueError):
    """A schedule that cannot be executed, or that was made for another problem."""


class InvalidBudget(RekindleError, ValueError):
    """A budget that is not a number of bytes, a size with a unit, or a fraction in (0, 1]."""


class FileError(RekindleError, ValueError):
    """A file that cannot be read or understood."""


class SolverUnavailable(RekindleError):
    """No solver of that name, or one whose libraries are not installed."""


class SolverRefused(RekindleError):
    """A solver that does not handle this kind of problem; the sentence says why."""


class BudgetInfeasible(RekindleError):
    """No schedule was found within the budget; carries the smallest peak that was found."""

    def __init__(self, message: str, smallest_peak_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_peak_bytes = smallest_peak_bytes


class WishRefused(RekindleError, ValueError):
    """A `save` or `recompute` that means no op, or what cannot be done."""


class CaptureError(RekindleError):
    """A model that cannot be captured; names the op and the source line where there is one."""


class NothingToPlan(CaptureError):
    """A call that computes nothing, or nothing that a gradient goes through."""


class PlanMismatch(RekindleError):
    """A plan applied to a model, input, torch or device it was not made for."""


class DeviceProfileError(RekindleError, ValueError):
    """A device description that does not exist or cannot be understood."""
