"""One call of an op on its device, on the arguments that it has in a step: its time, its temporary
memory, the storages that it really makes.

A bench knows one kind of device. `CpuBench` takes time from the monotonic clock and memory from the
profiler's allocator events; `CudaBench` takes time from CUDA events and memory from the caching
allocator's statistics. On a GPU the launches of one batch are queued behind a kernel that keeps the
device busy, so two times come apart: what the host needs to issue an op and what the device needs
to work it off. An op in a stream of others costs the larger one, never its isolated latency.

Nothing here makes an argument: `runtime.measured_step` runs the step and hands each call over. A
bench needs about 150 MiB of a GPU to keep it busy and its cache cold.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rekindle.plans.plan_record import Source
from rekindle.profile.base import OpProfile
from rekindle.profile.block_sizes import Blocks, blocks_of
from rekindle.profile.cpu_allocator import allocator_deltas, peak_of
from rekindle.profile.estimate import output_blocks
from rekindle.profile.issue_cost import stream_cost
from rekindle.profile.op_signature import OpCall

Thunk = Callable[[], Any]


class DoesNotFit(Exception):
    """The op alone needs more memory than the device has free."""


class DeviceLost(Exception):
    """The device does not answer any more; nothing else can be measured on it."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one op: on the device, and of the host that issues it."""

    device_ns: int
    host_ns: int
    spread: float = 0.0  # the median of the repeats over the fastest, less 1; 0: not known


class Bench(Protocol):
    """How one kind of device is measured."""

    device: torch.device

    def in_stream(self, host_ns: int) -> int: ...
    def workspace_bytes(self, run: Thunk) -> int: ...
    def timing(self, run: Thunk, num_input_bytes: int) -> Timing: ...
    def host_ns(self, run: Thunk) -> int: ...
    def free_bytes(self) -> int: ...
    def is_alive(self) -> bool: ...
    def release(self) -> None: ...


def bench_for(device: torch.device) -> Bench:
    """What measures ops on this device."""
    return CudaBench(device) if device.type == "cuda" else CpuBench()


def measure(call: OpCall, bench: Bench, run: Thunk) -> OpProfile:
    """The numbers of one call, which `run` makes as often as it is asked to. Raises DoesNotFit,
    DeviceLost, or the op's own error."""
    try:
        # The first run loads kernels, picks algorithms and makes library handles.
        outputs = _true_blocks(call, run(), blocks_of(bench.device.type))
        if call.is_view:
            # A view has no kernel: only the host works.
            workspace, timing = 0, Timing(0, bench.host_ns(run))
        else:
            workspace = bench.workspace_bytes(run)
            timing = bench.timing(run, input_bytes(call))
    except Exception as error:
        if is_out_of_memory(error):
            raise DoesNotFit(str(error).splitlines()[0]) from None
        if not bench.is_alive():
            raise DeviceLost(str(error).splitlines()[0]) from None
        raise
    host_ns = bench.in_stream(timing.host_ns)
    return OpProfile(
        cost_ns=max(timing.device_ns, host_ns),
        workspace_bytes=workspace,
        output_bytes=outputs,
        source=Source.MEASURED,
        device_ns=timing.device_ns,
        host_ns=host_ns,
        spread=timing.spread,
    )


def input_bytes(call: OpCall) -> int:
    """What the call can read, each storage once."""
    largest: dict[int, int] = {}
    for spec in call.inputs:
        largest[spec.alias] = max(largest.get(spec.alias, 0), spec.touched_bytes)
    return sum(largest.values())


class CpuBench:
    """The monotonic clock and the profiler's allocator events."""

    def __init__(self, batch_s: float = 2e-3, num_batches: int = 5, limit_s: float = 0.5) -> None:
        self.device = torch.device("cpu")
        self.stream = stream_cost(self.device)
        self._batch_s, self._num_batches, self._limit_s = batch_s, num_batches, limit_s

    def in_stream(self, host_ns: int) -> int:
        """The call itself costs more among others; the work that it does does not."""
        return host_ns + max(0, round(self.stream.mixed_ns - self.stream.alone_ns))

    def workspace_bytes(self, run: Thunk) -> int:
        result: list[Any] = []
        deltas = allocator_deltas(lambda: result.append(run()))
        # What stays at the end is the output; beyond it is workspace.
        return max(0, peak_of(deltas) - sum(deltas))

    def timing(self, run: Thunk, num_input_bytes: int) -> Timing:
        samples = self._samples_ns(run)
        per_op = max(1, round(min(samples)))
        return Timing(
            per_op, per_op, spread=statistics.median(samples) / max(1.0, min(samples)) - 1
        )

    def host_ns(self, run: Thunk) -> int:
        return max(1, round(min(self._samples_ns(run))))

    def _samples_ns(self, run: Thunk) -> list[float]:
        """Of an op, in several batches. The least of them counts: whatever else runs on the machine
        can only make a batch slower."""
        started = time.perf_counter_ns()
        run()
        once_ns = max(1, time.perf_counter_ns() - started)
        # Batches of about 2 ms: long beside the clock's own cost, short beside another process.
        repeats = max(1, min(200, int(self._batch_s * 1e9 / once_ns)))
        samples: list[float] = []
        deadline = started + int(self._limit_s * 1e9)
        while len(samples) < self._num_batches:
            begin = time.perf_counter_ns()
            for _ in range(repeats):
                run()
            end = time.perf_counter_ns()
            samples.append((end - begin) / repeats)
            if end > deadline and len(samples) >= 2:  # an op of a second is not run five times
                break
        return samples

    def free_bytes(self) -> int:
        # Free pages alone are few on any machine: most of what is available caches files.
        with contextlib.suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return 1024 * int(line.split()[1])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def is_alive(self) -> bool:
        return True

    def release(self) -> None:
        pass


class CudaBench:
    """CUDA events and the caching allocator's statistics.

    Where an op's inputs are small enough to stay in the L2 cache from one repeat to the next, it is
    also timed with a cold cache (behind a kernel that overwrites it). In a step some inputs were
    just made and some long ago: the op is taken to cost the mean of the two.
    """

    _BLOCKER = 2048  # a float32 product of this size keeps a GPU busy for about 0.3 ms
    _MIN_COLD_BYTES = 2**16  # below this the cache hardly matters beside the launch

    def __init__(self, device: torch.device, batch_s: float = 5e-3, num_batches: int = 3) -> None:
        self.device = device
        self._batch_s, self._num_batches = batch_s, num_batches
        self._left = torch.ones(self._BLOCKER, self._BLOCKER, device=device)
        self._out = torch.empty_like(self._left)
        cache_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        self._cache_bytes = int(cache_bytes) or 50 * 2**20
        # Twice the cache, so that nothing that was in it survives.
        self._flood = torch.zeros(2 * self._cache_bytes, dtype=torch.uint8, device=device)
        for _ in range(3):
            self._block()
        self._block_ns = max(1e4, self._time_on_device(self._block, 5))
        self._flush_ns = statistics.median(self._batch(self._flush, 20)[0] for _ in range(5))
        self.stream = stream_cost(device)

    def in_stream(self, host_ns: int) -> int:
        """All that the host does is issuing: what is slower among others is so in proportion."""
        return round(host_ns * max(1.0, self.stream.mixed_ns / self.stream.alone_ns))

    def workspace_bytes(self, run: Thunk) -> int:
        def requested(what: str) -> int:
            # Not what is allocated: that would follow from which blocks the pool has just now.
            return int(torch.cuda.memory_stats(self.device)[f"requested_bytes.all.{what}"])

        base = requested("current")
        torch.cuda.reset_peak_memory_stats(self.device)
        result = run()
        peak, after = requested("peak"), requested("current")
        del result
        # An op may give back less than it took (an in-place op nothing): the higher level is what
        # stays.
        return blocks_of("cuda").block_bytes(max(0, peak - max(base, after)))

    def timing(self, run: Thunk, num_input_bytes: int) -> Timing:
        run()  # fills the allocator's cache again
        torch.cuda.synchronize(self.device)
        begin = time.perf_counter_ns()
        run()
        torch.cuda.synchronize(self.device)
        once_ns = max(1, time.perf_counter_ns() - begin)
        repeats = max(3, min(50, int(self._batch_s * 1e9 / once_ns)))
        samples = [self._batch(run, repeats) for _ in range(self._num_batches)]
        device_ns = statistics.median(d for d, _ in samples)
        host_ns = statistics.median(h for _, h in samples)
        if self._MIN_COLD_BYTES <= num_input_bytes <= self._cache_bytes:
            device_ns = (device_ns + max(device_ns, self._cold_ns(run, min(20, repeats)))) / 2
        return Timing(max(1, round(device_ns)), max(1, round(host_ns)))

    def host_ns(self, run: Thunk) -> int:
        samples = []
        for _ in range(self._num_batches):
            begin = time.perf_counter_ns()
            for _ in range(50):
                run()
            samples.append((time.perf_counter_ns() - begin) / 50)
        return max(1, round(statistics.median(samples)))

    def _cold_ns(self, run: Thunk, repeats: int) -> float:
        def flush_and_run() -> None:
            self._flush()
            run()

        both = [self._batch(flush_and_run, repeats)[0] for _ in range(self._num_batches)]
        return statistics.median(both) - self._flush_ns

    def _batch(self, run: Thunk, repeats: int) -> tuple[float, float]:
        """Per op: nanoseconds of the device, and of the host that issues it."""
        # Long enough that all launches are queued before the first can start: 25 us for each.
        for _ in range(2 + int(25_000 * repeats / self._block_ns)):
            self._block()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        begin = time.perf_counter_ns()
        for _ in range(repeats):
            run()
        issued = time.perf_counter_ns() - begin
        stop.record()
        torch.cuda.synchronize(self.device)
        return 1e6 * float(start.elapsed_time(stop)) / repeats, issued / repeats

    def _time_on_device(self, run: Thunk, repeats: int) -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            run()
        stop.record()
        torch.cuda.synchronize(self.device)
        return 1e6 * float(start.elapsed_time(stop)) / repeats

    def _block(self) -> None:
        torch.mm(self._left, self._left, out=self._out)

    def _flush(self) -> None:
        self._flood.fill_(0)

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        return int(free + reserved - torch.cuda.memory_allocated(self.device))

    def is_alive(self) -> bool:
        try:
            torch.cuda.synchronize(self.device)
        except RuntimeError:
            return False
        return True

    def release(self) -> None:
        torch.cuda.empty_cache()


def _true_blocks(call: OpCall, result: Any, blocks: Blocks) -> tuple[int, ...]:
    """Blocks of the outputs by the storages that really came back: fake tensors do not
    always know the size of a library's own records."""
    expected = output_blocks(call, blocks)
    found = _flat(result)
    # An op that gives back other tensors for real than without data: the description counts.
    if len(found) != len(expected):
        return expected
    seen: set[int] = set()
    sizes = []
    for spec, out in zip(call.outputs, found, strict=True):
        if spec is None or not isinstance(out, torch.Tensor) or not call.is_new(spec):
            sizes.append(0)
        else:
            sizes.append(0 if spec.alias in seen else blocks.block_bytes(_storage_bytes(out)))
            seen.add(spec.alias)
    return tuple(sizes)


def _storage_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def _flat(result: Any) -> list[Any]:
    if isinstance(result, (tuple, list)):
        return [leaf for item in result for leaf in _flat(item)]
    return [result]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device, or the host, had no room."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    # The CPU allocator has no exception of its own.
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
