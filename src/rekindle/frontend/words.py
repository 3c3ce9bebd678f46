"""Guards in words: what differs from the planned call, for a message."""

import re

_PARTS = (
    (re.compile(r"L\['forward'\]\.__self__"), "model"),
    (re.compile(r"L\['(args|kwargs|loss_fn|loss_args|forward)'\]"), r"\1"),
    (re.compile(r"G\['(?:___unnamed_scope|__import)_\w+'\]\."), ""),  # globals
    (re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]"), r".\1"),
    (re.compile(r"\.__dict__\['([^']+)'\]"), r".\1"),
    (re.compile(r"\s+#.*$"), ""),
)


def in_words(failed: str | None) -> str:
    """A guard that failed, as Dynamo writes it, for a person."""
    if failed is None:
        return "something that forward reads has changed"
    text = failed
    for pattern, words in _PARTS:
        text = pattern.sub(words, text)
    if "GLOBAL_STATE" in text:
        return f"the state of torch differs ({text.split(':')[-1].strip()})"
    return f"this no longer holds: {text}"
