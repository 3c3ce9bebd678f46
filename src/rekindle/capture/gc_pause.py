"""Python's garbage collector, at rest while a graph is built.

A capture makes some hundred thousand objects that all stay. The collector, which runs by how many
there are, would walk them and everything else in the process several times over: a third of the
time that planning takes, and more with every plan that came before.
"""

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_num_inside = 0
_was_on = False


@contextlib.contextmanager
def collector_at_rest() -> Iterator[None]:
    """Inside, what nobody refers to is freed as always; cycles wait until the last thread has left.
    A collector that the user has switched off stays so."""
    global _num_inside, _was_on
    with _lock:
        if not _num_inside:
            _was_on = gc.isenabled()
            gc.disable()
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside and _was_on:
                gc.enable()
