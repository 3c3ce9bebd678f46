"""From a call of a model to the graph of its torch calls, with guards on all that it reads."""

from rekindle.frontend.call import Ask, Call, Reading, read
from rekindle.frontend.words import in_words

__all__ = ["Ask", "Call", "Reading", "in_words", "read"]
