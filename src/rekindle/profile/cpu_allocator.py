"""What the CPU allocator takes and gives back while something runs, from the profiler's events."""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import profiler


def allocator_deltas(fn: Callable[[], Any]) -> list[int]:
    """The CPU allocator's events while `fn` runs, in order: bytes taken (+) and given back (-)."""
    session = profiler.profile(
        activities=[profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    )
    with _without_profiler_log():
        session.start()
    try:
        fn()
    finally:
        with _without_profiler_log():
            session.stop()
    results = session.profiler.kineto_results
    # Kineto's events are the only account that the CPU allocator gives: it has no statistics.
    events = [e for e in results.events() if e.name() == "[memory]"]
    events = [e for e in events if e.device_type() == torch.autograd.DeviceType.CPU]
    events.sort(key=lambda e: e.start_ns())
    return [e.nbytes() for e in events]


@contextmanager
def _without_profiler_log() -> Iterator[None]:
    """The profiler library writes its own state changes to stderr, past Python and past its log
    level (lines "USDT:..." and "STAGE:..."); those are dropped, anything else passes on."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # no stderr at all
        yield
        return
    try:
        with tempfile.TemporaryFile() as caught:
            os.dup2(caught.fileno(), 2)
            try:
                yield
            finally:
                sys.stderr.flush()
                os.dup2(kept, 2)
            caught.seek(0)
            rest = [line for line in caught if not line.startswith((b"USDT:", b"STAGE:"))]
            if rest:
                os.write(2, b"".join(rest))
    finally:
        os.close(kept)


def peak_of(deltas: list[int]) -> int:
    """The highest level above the start."""
    level = peak = 0
    for delta in deltas:
        level += delta
        peak = max(peak, level)
    return peak
