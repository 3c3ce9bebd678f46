"""Measurement: every op of the models runs alone, leaves no trace, and failures are data."""

import dataclasses
import time
import types

import pytest
import torch
import torch.nn.functional as F
from support.profile_graphs import model_graphs, trace
from torch import nn

from rekindle.profile import Source, profile_nodes, profiler, signature
from rekindle.profile import measure as measurement
from rekindle.profile.cpu_allocator import allocator_deltas, peak_of
from rekindle.profile.measure import CpuBench, CudaBench, Timing, measure
from rekindle.profile.op_inputs import make_inputs


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("REKINDLE_CACHE_DIR", str(tmp_path))


@pytest.fixture(scope="module")
def graphs():
    return model_graphs()


@pytest.mark.parametrize("name", ["gpt", "vit", "resnet", "unet", "fno", "vit bf16"])
def test_every_op_of_the_models_is_measured(graphs, name, monkeypatch):
    graph = graphs[name]
    profile = profile_nodes(graph.nodes)
    assert profile.not_measured == ()
    assert set(profile.num_by_source) == {Source.MEASURED}
    assert len(profile) == sum(n.op == "call_function" for n in graph.nodes)
    monkeypatch.setattr(profiler, "_measure_all", None)  # the second time nothing runs
    again = profile_nodes(graph.nodes)
    assert set(again.num_by_source) == {Source.CACHED}
    assert [op.cost_ns for op in again.ops] == [op.cost_ns for op in profile.ops]


def index_cases():
    table, index = torch.zeros(7, 5), torch.zeros(3, 5, dtype=torch.int64)
    rows = torch.zeros(4, dtype=torch.int64)
    scores = torch.zeros(6, 9, requires_grad=True)
    image = torch.zeros(2, 3, 8, 8, requires_grad=True)

    def grad(fn):
        return lambda x, *rest: torch.autograd.grad(fn(x, *rest).sum(), x)

    leaf = table.clone().requires_grad_()
    return {
        "gather": (lambda t, i: torch.gather(t, 0, i), table, index),
        "gather backward": (grad(lambda t, i: torch.gather(t, 0, i)), leaf, index),
        "scatter": (lambda t, i: t.scatter(1, i, 1.0), table, index % 5),
        "scatter_add": (lambda t, i: t.scatter_add(0, i, torch.ones(3, 5)), table, index),
        "index": (lambda t, r: t[r], table, rows),
        "index two": (lambda t, r: t[r, r], table, rows),
        "index second": (lambda t, r: t[:, r], table, rows),
        "index backward": (grad(lambda t, r: t[:, r]), leaf, rows),
        "index_put": (lambda t, r: t.index_put((r,), torch.ones(4, 5)), table, rows),
        "index_select": (lambda t, r: t.index_select(1, r), table, rows),
        "index_select backward": (grad(lambda t, r: t.index_select(1, r)), leaf, rows),
        "index_add": (lambda t, r: t.index_add(0, r, torch.ones(4, 5)), table, rows),
        "embedding": (lambda r, t: F.embedding(r, t), rows, table),
        "embedding backward": (grad(lambda t, r: F.embedding(r, t)), leaf, rows),
        "nll": (lambda s, y: F.cross_entropy(s, y), scores, torch.zeros(6, dtype=torch.int64)),
        "nll backward": (grad(F.cross_entropy), scores, torch.zeros(6, dtype=torch.int64)),
        "nll 2d backward": (
            grad(F.cross_entropy),
            torch.zeros(2, 4, 3, 3, requires_grad=True),
            torch.zeros(2, 3, 3, dtype=torch.int64),
        ),
        "max_pool backward": (grad(lambda x: F.max_pool2d(x, 2)), image),
        "adaptive max pool backward": (grad(lambda x: F.adaptive_max_pool2d(x, 2)), image),
        "max along": (grad(lambda t: t.max(1).values), leaf),
        "topk backward": (grad(lambda t: t.topk(2, 1).values), leaf),
        "one_hot": (lambda r: F.one_hot(r, 5), rows),
        "take": (lambda t, r: t.take(r), table, rows),
        "masked_fill": (lambda t: t.masked_fill(torch.ones(7, 5, dtype=torch.bool), 0.0), table),
        "tril mask": (lambda t: torch.where(torch.ones(7, 5).tril().bool(), t, -1e9), table),
        "complex": (lambda t: torch.fft.irfft(torch.fft.rfft(t).conj() * 2), table),
        "float64 batch norm": (
            grad(lambda x, m, v: F.batch_norm(x, m, v, training=True)),
            image.detach().double().requires_grad_(),
            torch.zeros(3, dtype=torch.float64),
            torch.ones(3, dtype=torch.float64),
        ),
        "group norm backward": (grad(lambda x: F.group_norm(x, 1)), image),
        "binary cross entropy": (
            grad(F.binary_cross_entropy),
            torch.full((4,), 0.5, requires_grad=True),
            torch.full((4,), 0.5),
        ),
        "multinomial": (lambda t: torch.multinomial(t.sigmoid(), 3), table),
        "bernoulli": (lambda t: torch.bernoulli(t.sigmoid()), table),
        "empty": (lambda t: t[:0] + 1, table),
        "attention mask": (
            lambda q, m: F.scaled_dot_product_attention(q, q, q, m),
            torch.zeros(2, 2, 8, 8),
            torch.ones(8, 8, dtype=torch.bool),
        ),
    }


@pytest.mark.parametrize("name", index_cases())
def test_indices_masks_and_states_get_values_that_run(name):
    fn, *args = index_cases()[name]
    profile = profile_nodes(trace(fn, *args).nodes, cache=False)
    assert profile.not_measured == ()


def test_a_state_that_only_the_forward_op_makes_is_made_by_it():
    def fn(x):
        return torch.autograd.grad(nn.LSTM(8, 4)(x[:, 0])[0].sum(), x)

    profile = profile_nodes(trace(fn, torch.zeros(2, 3, 8, 8, requires_grad=True)).nodes)
    assert profile.not_measured == ()
    assert any("rnn_layer_backward" in target for target in profile.targets)


def test_data_keeps_shapes_strides_and_sharing():
    base = torch.zeros(40)
    call = next(
        signature(n)
        for n in trace(lambda a, b: a + b, base[4:16].view(3, 4).t(), base[8:20].view(4, 3)).nodes
        if n.op == "call_function"
    )
    # make_fx lifts inputs one by one, so sharing is set by hand as a graph with views has it.
    first, second = call.args
    shared = dataclasses.replace(call, args=(first, dataclasses.replace(second, alias=first.alias)))
    (a, b), _ = make_inputs(shared, torch.device("cpu"), torch.Generator())
    assert (a.shape, a.stride()) == ((4, 3), (1, 4))
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert b.storage_offset() - a.storage_offset() == 4


def test_profiling_leaves_random_streams_and_grad_mode_alone(graphs):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        profile = profile_nodes(graphs["gpt"].nodes, cache=False)
        assert torch.is_autocast_enabled("cpu")
    assert profile.not_measured == ()
    assert torch.equal(torch.rand(4), expected)
    assert torch.is_grad_enabled()


@torch.library.custom_op("rekindle_test::with_scratch", mutates_args=())
def with_scratch(x: torch.Tensor) -> torch.Tensor:
    scratch = torch.empty(250_000, dtype=torch.float32)
    del scratch
    return x.clone()


@with_scratch.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("rekindle_test::cannot_run", mutates_args=())
def cannot_run(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("this op needs a cluster\nand more")


@cannot_run.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_workspace_is_the_peak_beyond_inputs_and_outputs():
    graph = trace(lambda x: with_scratch(x), torch.zeros(100))
    name, op = next(iter(profile_nodes(graph.nodes).items()))
    assert name.startswith("with_scratch")
    # The scratch is gone before the output is made: it only counts above it.
    assert op.workspace_bytes == 1_000_000 - 400
    assert op.output_bytes == (400,)


def test_an_op_that_fails_alone_is_named_and_estimated():
    graph = trace(lambda x: cannot_run(x) + 1, torch.zeros(100))
    profile = profile_nodes(graph.nodes)
    ((target, reason),) = profile.not_measured
    assert target.startswith("rekindle_test.cannot_run")
    assert "needs a cluster" in reason
    assert "and more" not in reason
    assert profile.num_by_source == {Source.ESTIMATED: 1, Source.MEASURED: 1}
    assert "1 distinct not measured" in profile.summary()


class TinyBench(CpuBench):
    def free_bytes(self):
        return 1000


class ThrowingBench(CpuBench):
    def timing(self, run, num_input_bytes):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class DyingBench(CpuBench):
    def __init__(self):
        super().__init__()
        self.num_timed = 0

    def timing(self, run, num_input_bytes):
        self.num_timed += 1
        if self.num_timed > 2:
            raise RuntimeError("CUDA error: unspecified launch failure")
        return Timing(10, 10)

    def is_alive(self):
        return self.num_timed <= 2


@pytest.mark.parametrize("bench", [TinyBench, ThrowingBench])
def test_out_of_memory_is_an_answer(graphs, monkeypatch, bench):
    monkeypatch.setattr(profiler, "bench_for", lambda device: bench())
    profile = profile_nodes(graphs["vit"].nodes)
    assert profile.does_not_fit
    assert all("does not fit" in reason for _, reason in profile.does_not_fit)
    assert all(op.cost_ns >= 0 for op in profile.ops)


def test_a_lost_device_leaves_the_rest_to_estimates(graphs, monkeypatch):
    monkeypatch.setattr(profiler, "bench_for", lambda device: DyingBench())
    profile = profile_nodes(graphs["vit"].nodes)
    measured = [op for op in profile.ops if op.source is Source.MEASURED]
    assert sum(op.device_ns == 10 for op in measured) == 2  # the others are views
    assert all("was lost" in reason for _, reason in profile.not_measured)
    assert len(profile.not_measured) == len(profile.ops) - len(measured) > 0


def test_a_device_that_is_not_there_leaves_all_to_estimates(graphs, monkeypatch):
    def no_device(device):
        raise RuntimeError("No CUDA GPUs are available")

    monkeypatch.setattr(profiler, "bench_for", no_device)
    profile = profile_nodes(graphs["vit"].nodes)
    assert set(profile.num_by_source) == {Source.ESTIMATED}
    assert "No CUDA GPUs" in profile.not_measured[0][1]


def test_progress_and_what_it_will_take(graphs):
    seen = []
    profile = profile_nodes(graphs["resnet"].nodes, on_progress=seen.append)
    assert [p.num_done for p in seen] == list(range(len(profile.ops) + 1))
    assert {p.num_total for p in seen} == {len(profile.ops)}
    assert len({p.expected_s for p in seen}) == 1
    assert seen[0].expected_s > 0
    assert 0 < seen[-1].elapsed_s <= profile.wall_s


def test_more_layers_cost_no_more_ops():
    from support.profile_graphs import Gpt, joint_graph

    ids = torch.randint(0, 131, (2, 16))
    first = profile_nodes(joint_graph(Gpt(2), lambda out: out, ids).nodes)
    second = profile_nodes(joint_graph(Gpt(8), lambda out: out, ids).nodes)
    assert set(first.num_by_source) == {Source.MEASURED}
    assert set(second.num_by_source) == {Source.CACHED}


def test_time_is_in_proportion_to_the_work():
    small, large = torch.zeros(64, 64), torch.zeros(768, 768)
    times = []
    for x in (small, large):
        call = signature(next(n for n in trace(torch.mm, x, x).nodes if n.op == "call_function"))
        times.append(measure(call, CpuBench(), torch.Generator()).device_ns)
    assert times[1] > 50 * times[0]  # 1728 times the work


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

    def max_memory_allocated(self, device):
        return self.peak

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
