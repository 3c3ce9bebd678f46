"""Compiled kernels for a model's graph, or one sentence that says why there are none."""

import logging
import time
import warnings
import weakref

from torch import nn

from rekindle.capture import JointGraph
from rekindle.capture.gc_pause import collector_at_rest
from rekindle.inductor.compilation import compiled
from rekindle.solve.progress import milestone

log = logging.getLogger("rekindle")

_MOST_KEPT = 4  # of one model

# What was compiled of graphs of a model, while it lives: another budget compiles nothing. None
# where it failed.
_known: weakref.WeakKeyDictionary[nn.Module, list[tuple[JointGraph, JointGraph | None]]] = (
    weakref.WeakKeyDictionary()
)


def with_compiled_kernels(model: nn.Module, joint: JointGraph) -> JointGraph | None:
    """The recorded graph with Inductor's kernels; None, and a warning, where it cannot have
    them: then eager's kernels run."""
    kept = _known.setdefault(model, [])
    for recorded, made in kept:
        if recorded is joint:
            return made
    begun = time.monotonic()
    milestone(f"compiling kernels for {type(model).__name__}")
    found = None
    try:
        with collector_at_rest(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says of its own code
            found = compiled(joint)
        milestone(f"compiled {len(found.nodes):,} nodes in {time.monotonic() - begun:.1f} s")
    except Exception as error:  # a compiler may raise anything; eager's kernels are there
        line = next(iter(str(error).splitlines()), "") or type(error).__name__
        log.warning(
            "no compiled kernels for %s, eager's run instead: %s", type(model).__name__, line[:300]
        )
        log.debug("compiling failed", exc_info=True)
    kept[:] = [(joint, found), *kept[: _MOST_KEPT - 1]]
    return found
