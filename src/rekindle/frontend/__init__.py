"""From a call of a model to the graph of its torch calls, with guards on all that it reads."""

from rekindle.frontend.call import (
    LOSS_ARGS,
    Ask,
    Call,
    Marks,
    Reading,
    as_loss_args,
    call_of,
    raised_while_read,
    read,
)
from rekindle.frontend.words import in_words

__all__ = [
    "LOSS_ARGS",
    "Ask",
    "Call",
    "Marks",
    "Reading",
    "as_loss_args",
    "call_of",
    "in_words",
    "raised_while_read",
    "read",
]
