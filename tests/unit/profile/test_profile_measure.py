"""The benches, and the numbers of single calls."""

import time
import types

import torch
from support.profile_graphs import trace

from rekindle.profile import measure as measurement
from rekindle.profile import signature
from rekindle.profile.cpu_allocator import allocator_deltas, peak_of
from rekindle.profile.measure import CpuBench, CudaBench, input_bytes, measure


def only_call(fn, *args):
    return next(signature(n) for n in trace(fn, *args).nodes if n.op == "call_function")


def test_time_is_in_proportion_to_the_work():
    times = []
    for x in (torch.ones(64, 64), torch.ones(768, 768)):
        call = only_call(torch.mm, x, x)
        times.append(measure(call, CpuBench(), lambda x=x: torch.mm(x, x)).device_ns)
    assert times[1] > 50 * times[0]  # 1728 times the work


def test_inputs_are_counted_once_a_storage():
    x = torch.zeros(16, 8)
    assert input_bytes(only_call(lambda a: a + a.t()[:, :1].t(), x)) == 16 * 8 * 4
    assert input_bytes(only_call(lambda a: a.expand(4, 16, 8) * 2, x)) == 16 * 8 * 4


def test_allocator_events_tell_the_peak(capfd):
    def work():
        a = torch.empty(1000, dtype=torch.uint8)
        b = torch.empty(500, dtype=torch.uint8)
        del a
        c = torch.empty(200, dtype=torch.uint8)
        del b, c

    deltas = allocator_deltas(work)
    assert deltas == [1000, 500, -1000, 200, -500, -200]
    assert peak_of(deltas) == 1500
    assert capfd.readouterr().err == ""


class StandInEvent:
    def __init__(self, enable_timing):
        assert enable_timing
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


class StandInCuda:
    """What the bench asks of `torch.cuda`, answered by the CPU: the steps of a measurement can be
    tested without a GPU, its numbers not."""

    Event = StandInEvent

    def __init__(self):
        self.peak = self.allocated = 0

    def get_device_properties(self, device):
        return types.SimpleNamespace(L2_cache_size=2**20)

    def synchronize(self, device):
        pass

    def empty_cache(self):
        pass

    def memory_allocated(self, device):
        return self.allocated

    def reset_peak_memory_stats(self, device):
        self.peak = self.allocated

    def memory_stats(self, device):
        return {
            "requested_bytes.all.current": self.allocated,
            "requested_bytes.all.peak": self.peak,
        }

    def memory_reserved(self, device):
        return self.allocated

    def mem_get_info(self, device):
        return 2**34, 2**35


def test_the_steps_of_a_measurement_on_a_gpu(monkeypatch):
    cuda = StandInCuda()
    monkeypatch.setattr(measurement.torch, "cuda", cuda)
    monkeypatch.setattr(CudaBench, "_BLOCKER", 32)
    bench = CudaBench(torch.device("cpu"), batch_s=1e-4)
    x = torch.zeros(256, 256)
    kept = []

    def run():
        kept.append(x + 1)
        cuda.peak = max(cuda.peak, cuda.allocated + x.nbytes + 4096)
        cuda.allocated += x.nbytes

    assert bench.workspace_bytes(run) == 4096
    timing = bench.timing(lambda: x + 1, x.nbytes)
    assert timing.device_ns > 0
    assert timing.host_ns > 0
    assert bench.timing(lambda: x + 1, 2**30).device_ns > 0
    assert bench.host_ns(lambda: x.t()) > 0
    assert bench.free_bytes() == 2**34
    assert bench.in_stream(1000) >= 1000
    assert bench.is_alive()
    bench.release()
