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

# What stops Dynamo, where Dynamo's message says little to who has not compiled the model.
_REASONS = {
    "Tensor.numpy()": "a plan cannot run again what numpy computes of the numpy array made",
    "Tensor.retain_grad()": "a plan would not see retain_grad() of an argument, called",
    "Unsupported Tensor.requires_grad_()": (
        "a plan cannot repeat that an argument is made to require grad"
    ),
}


def reason(why: str) -> str:
    """Why code could not be read, for a person."""
    for start, words in _REASONS.items():
        if why.startswith(start):
            return words
    return why.rstrip(".")


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
