"""The idle time of a transfer lane, and when a transfer that is put into it would be done.

A lane's transfers are listed with the time from which each may run. They run in that order; one
that is put in between moves the later ones back. So "how much idle time lies between two moments"
says whether one more transfer fits, and this is asked for all candidates at once.
"""

import numpy as np

from rekindle.core import HostLink
from rekindle.solve.transfers.gaps import Numbers


def durations(link: HostLink, sizes: Numbers, rate: int) -> Numbers:
    """The time of each transfer, in ns."""
    # In whole numbers of any size: bytes times 10^9 may need more than 64 bits.
    found = (link.latency - (-int(s) * 10**9 // rate) for s in sizes)
    return np.fromiter(found, np.int64, sizes.size)


def queued(ready: Numbers, lengths: Numbers) -> Numbers:
    """When each transfer ends, if they run in this order and none before it is ready."""
    # end[k] = max over j <= k of ready[j] + lengths[j] + ... + lengths[k].
    before = np.cumsum(lengths) - lengths
    begins: Numbers = np.maximum.accumulate(ready - before) + before
    return begins + lengths


class IdleTime:
    """Of a lane that is busy in the given spans (apart from each other, in order)."""

    def __init__(self, starts: Numbers, ends: Numbers, horizon: int) -> None:
        # Idle time since 0 as a piecewise linear function of time, with 0 and the horizon as ends.
        edges = np.empty(2 * starts.size + 2, np.int64)
        edges[0], edges[-1] = 0, max(horizon, int(ends[-1]) if ends.size else 0)
        edges[1:-1:2], edges[2:-1:2] = starts, ends
        idle = np.zeros_like(edges)
        gaps = np.diff(edges)
        gaps[1::2] = 0  # busy
        idle[1:] = np.cumsum(gaps)
        self.edges, self.idle = edges.astype(np.float64), idle.astype(np.float64)

    def done(self, ready: Numbers, lengths: Numbers) -> Numbers:
        """The earliest ends of transfers that may start when ready, each alone put in; beyond the
        horizon where there is no room."""
        wanted = np.interp(ready, self.edges, self.idle) + lengths
        k = np.searchsorted(self.idle, wanted, side="left")
        inside = np.minimum(k, self.edges.size - 1)
        # The end of an idle span is where its time is used up.
        found = self.edges[inside] - (self.idle[inside] - wanted)
        late = self.edges[-1] + (wanted - self.idle[-1])
        return np.where(k < self.edges.size, found, late).astype(np.int64)
