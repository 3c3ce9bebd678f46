"""How fast values move between a device and host memory, and what that does to kernels beside it.

A device description may carry it (the table `host`); of a GPU that is there it is measured
(`measure_host`). A CPU has no lanes of its own for it: there a move is a copy that the ops wait
for, which is of use to tests alone.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from rekindle.core import HostLink

_SHARE_OF_MEMORY = 0.5  # of the host's, for all ranks on it
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class HostRates:
    """The link between a device and host memory."""

    to_host: int  # bytes per second, while the other direction is busy too
    from_host: int
    latency_ns: int  # what a transfer takes besides its bytes
    least_bytes: int  # smaller values are not worth a transfer
    memory_slowdown: (
        float  # how much longer a memory-bound kernel takes beside transfers; 0.3: 30 %
    )
    compute_slowdown: float
    overlaps: bool = True  # whether ops run while values move

    def link(self, host_budget: int | None) -> HostLink:
        """The same for a problem."""
        return HostLink(
            to_host=self.to_host,
            from_host=self.from_host,
            latency=self.latency_ns,
            least=self.least_bytes,
            host_budget=host_budget,
            serial=not self.overlaps,
        )


def spare_host_bytes() -> int:
    """What this process may pin of the host's memory: half of it, shared with the other ranks of
    the machine, and no more than is free. In whole GiB, so that plans of one machine are equal."""
    whole, free = _memory_of_machine()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    share = int(_SHARE_OF_MEMORY * whole) // max(1, ranks)
    return min(share, free) // _GIB * _GIB


def _memory_of_machine() -> tuple[int, int]:
    """Bytes in all, and free; a container may have less than the machine."""
    page = os.sysconf("SC_PAGE_SIZE")
    whole = page * os.sysconf("SC_PHYS_PAGES")
    free = page * os.sysconf("SC_AVPHYS_PAGES")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        most, now = "".join(_lines(limit)), "".join(_lines(used))
        if most.isdigit() and now.isdigit() and int(most) < whole:
            whole, free = int(most), min(free, int(most) - int(now))
    return whole, max(0, free)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text("utf-8").split("\n")
    except OSError:
        return []
