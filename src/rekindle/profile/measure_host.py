"""The link between a GPU and host memory, measured once with both directions busy, as they are in a
step, and kept with the costs of ops."""

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from rekindle.profile.cache import ProfileCache, environment
from rekindle.profile.host_rates import HostRates
from rekindle.profile.pinned_memory import pinned_bytes

_BYTES = 2**28  # of each transfer that is timed
_SIDE = 8192  # of the matrices whose product is timed beside one
_REPEATS = 5
_RATE_LIMIT = 10**13  # bytes a second that no link has


def host_rates(device: torch.device, *, cache: bool, remeasure: bool) -> HostRates | None:
    """Of a GPU that is there: as an earlier run has measured it, or measured now. None where it
    cannot be measured."""
    kept = ProfileCache(environment(device))
    if cache and not remeasure:
        found = _checked(kept.host_numbers())
        if found is not None:
            return found
    try:
        measured = _measure(device)
    except RuntimeError:  # out of memory, here or there; or it cannot be pinned
        return None
    finally:
        torch.cuda.empty_cache()
    if cache:
        kept.put_host_numbers(dataclasses.asdict(measured))
    return measured


def _checked(numbers: dict[str, Any] | None) -> HostRates | None:
    """What a file says, if it can be so."""
    if numbers is None or numbers.keys() != {f.name for f in dataclasses.fields(HostRates)}:
        return None
    whole = [numbers[k] for k in ("to_host", "from_host", "latency_ns", "least_bytes")]
    if not all(type(n) is int and 0 < n < _RATE_LIMIT for n in whole):
        return None
    shares = [numbers[k] for k in ("memory_slowdown", "compute_slowdown")]
    if not all(type(x) is float and 0 <= x < 10 for x in shares):
        return None
    return HostRates(**numbers)


def _measure(device: torch.device) -> HostRates:
    """Takes about a second, and 1.5 GiB of the device for as long."""
    with torch.cuda.device(device), torch.no_grad():
        lanes = _Lanes(device)
        try:
            if not lanes.is_pinned:
                raise RuntimeError("host memory cannot be pinned")
            both = [lanes.copies(2) for _ in range(_REPEATS)]
            to_host, from_host = (statistics.median(ns) for ns in zip(*both, strict=True))
            latency = statistics.median([lanes.latency_ns() for _ in range(_REPEATS)])
            # Not random: streams stay where they are.
            factor = torch.ones(_SIDE, _SIDE, device=device, dtype=torch.bfloat16)
            product = torch.empty_like(factor)
            streamed = torch.ones(_BYTES // 4, device=device)
            compute = lanes.slowdown(lambda: torch.mm(factor, factor, out=product))
            memory = lanes.slowdown(lambda: streamed.mul_(1.0))
        finally:
            lanes.close()
    rate_to, rate_from = (round(2 * _BYTES * 1e9 / ns) for ns in (to_host, from_host))
    latency_ns = max(1, round(latency))
    # A value that moves in less than the latency is not worth it, rounded to a power of two.
    worth = latency_ns * min(rate_to, rate_from) / 1e9
    least = 2 ** max(12, math.ceil(math.log2(worth)))
    return HostRates(rate_to, rate_from, latency_ns, least, memory, compute)


class _Lanes:
    """Buffers and streams for transfers in both directions."""

    def __init__(self, device: torch.device) -> None:
        self.compute = torch.cuda.current_stream(device)
        self.streams = [torch.cuda.Stream(device) for _ in range(2)]
        pinned = [pinned_bytes(_BYTES, device) for _ in range(2)]
        host = [data for data, _, _ in pinned]
        self._unpin = [unpin for _, unpin, _ in pinned]
        self.is_pinned = not any(code for _, _, code in pinned)
        there = [data.new_empty(_BYTES, device=device) for data in host]
        self.pairs = [(host[0], there[0]), (there[1], host[1])]  # target, source

    def close(self) -> None:
        torch.cuda.synchronize()
        for unpin in self._unpin:
            unpin()

    def _start(self, lane: int, num: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = self.streams[lane]
        target, source = self.pairs[lane]
        with torch.cuda.stream(stream):
            begin.record()
            for _ in range(num):
                target.copy_(source, non_blocking=True)
            end.record()
        return begin, end

    def copies(self, num: int) -> tuple[float, ...]:
        """Nanoseconds of so many transfers each way, both at once."""
        torch.cuda.synchronize()
        events = [self._start(lane, num) for lane in range(2)]
        torch.cuda.synchronize()
        return tuple(1e6 * begin.elapsed_time(end) for begin, end in events)

    def latency_ns(self) -> float:
        """Of a transfer of few bytes, among others."""
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        target, source = (t[:512] for t in self.pairs[0])
        with torch.cuda.stream(self.streams[0]):
            begin.record()
            for _ in range(20):
                target.copy_(source, non_blocking=True)
            end.record()
        torch.cuda.synchronize()
        return float(1e6 * begin.elapsed_time(end) / 20)

    def slowdown(self, run: Callable[[], Any]) -> float:
        """How much longer a kernel takes while transfers run both ways, as a share."""
        run()
        alone = statistics.median([self._run_ns(run, False) for _ in range(_REPEATS)])
        beside = statistics.median([self._run_ns(run, True) for _ in range(_REPEATS)])
        return round(max(0.0, beside / alone - 1), 4)

    def _run_ns(self, run: Callable[[], Any], beside: bool) -> float:
        torch.cuda.synchronize()
        if beside:
            for lane in range(2):
                self._start(lane, 4)  # about 20 ms, longer than the kernels below
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(self.compute)
        for _ in range(3):
            run()
        end.record(self.compute)
        torch.cuda.synchronize()
        return float(1e6 * begin.elapsed_time(end))
