"""Estimates: by hand where the sum can be done by hand, sane everywhere else."""

import pytest
import torch
from support.profile_graphs import model_graphs, trace

from rekindle.errors import DeviceProfileError
from rekindle.profile import Source, device_names, estimate_nodes, load_device, signature
from rekindle.profile.block_sizes import CudaBlocks, expandable_segments
from rekindle.profile.estimate import estimate, flops, moved_bytes
from rekindle.rewrite.packed_attention import packed_attention_backward

MIB = 2**20


def only_call(fn, *args, name):
    calls = [signature(n) for n in trace(fn, *args).nodes if n.op == "call_function"]
    return next(c for c in calls if c.name.startswith(name))


def test_a_product_is_counted_by_its_flops():
    a = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    call = only_call(torch.mm, a, a, name="aten.mm")
    assert flops(call) == 2 * 4096**3
    h200 = load_device("h200")
    op = estimate(call, h200)
    assert op.device_ns == pytest.approx(1e9 * 2 * 4096**3 / (989e12 * h200.share("matmul")), abs=2)
    assert op.output_bytes == (4096 * 4096 * 2,)
    assert op.source is Source.ESTIMATED


def test_an_elementwise_op_is_counted_by_its_bytes():
    x = torch.empty(1024, 1024, device="meta")
    call = only_call(torch.sin, x, name="aten.sin")
    assert moved_bytes(call) == 8 * MIB
    expanded = only_call(lambda a: torch.sin(a.expand(1024, 1024)), x[:1], name="aten.sin")
    assert moved_bytes(expanded) == 4 * MIB + 4096
    rows = torch.zeros(16, dtype=torch.int64)
    lookup = only_call(torch.embedding, x, rows.to("meta"), name="aten.embedding")
    assert moved_bytes(lookup) == 2 * 16 * 4096 + 16 * 8  # rows read and written, not the table


def test_a_small_op_costs_a_launch_and_a_view_nothing():
    x = torch.empty(8, 8, device="meta")
    h200 = load_device("h200")
    assert estimate(only_call(torch.sin, x, name="aten.sin"), h200).cost_ns == h200.launch_ns
    view = estimate(only_call(lambda a: a.t(), x, name="aten.t"), h200)
    assert (view.cost_ns, view.device_ns, view.output_bytes) == (0, 0, (0,))


@pytest.mark.parametrize("backward", [False, True])
def test_attention_and_convolution_have_formulas(backward):
    def attend(q):
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
        return torch.autograd.grad(out.sum(), q) if backward else out

    def convolve(x, w):
        out = torch.nn.functional.conv2d(x, w)
        return torch.autograd.grad(out.sum(), (x, w)) if backward else out

    q = torch.zeros(2, 4, 32, 16, requires_grad=True)
    suffix = "_backward" if backward else ""
    attention = only_call(
        attend, q, name=f"aten._scaled_dot_product_flash_attention_for_cpu{suffix}"
    )
    products = 2 * 2 * 4 * 32 * 32 * 16  # one of two matrix products of the forward
    assert flops(attention) == products * (5 if backward else 2)
    x, w = torch.zeros(2, 3, 8, 8, requires_grad=True), torch.zeros(5, 3, 3, 3, requires_grad=True)
    convolution = only_call(convolve, x, w, name=f"aten.convolution{suffix}")
    assert flops(convolution) == 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3) * (2 if backward else 1)


def test_attention_that_writes_into_one_tensor_costs_what_it_does():
    q = torch.empty(2, 4, 32, 16, device="meta")
    rest = [torch.empty(n, device="meta") for n in ((2, 4, 32), (), ())]
    call = only_call(
        lambda q, *rest: packed_attention_backward(
            q, q, q, q, q, *rest, 0.0, False, None, [2, 32, 3, 64], False
        ),
        q,
        *rest,
        name="rekindle.packed_attention_backward",
    )
    assert flops(call) == 5 * 2 * 2 * 4 * 32 * 32 * 16


@pytest.mark.parametrize("name", device_names())
def test_every_op_of_the_models_has_an_estimate(name):
    for graph in model_graphs().values():
        profile = estimate_nodes(graph.nodes, load_device(name))
        assert len(profile) == sum(n.op == "call_function" for n in graph.nodes)
        assert all(op.cost_ns >= 0 and op.workspace_bytes >= 0 for _, op in profile.items())
        assert sum(op.cost_ns for _, op in profile.items()) > 0
        assert not profile.not_measured  # an estimate that was asked for is no failure


def test_a_faster_device_is_never_slower():
    graph = model_graphs()["gpt"]
    fast, slow = (estimate_nodes(graph.nodes, load_device(d)) for d in ("h200", "a100"))
    assert all(f.device_ns <= s.device_ns for f, s in zip(fast.ops, slow.ops, strict=True))


def test_blocks_of_the_caching_allocator():
    plain, exact = CudaBlocks(), CudaBlocks(expandable=True)
    assert plain.block_bytes(0) == 0
    assert plain.block_bytes(1) == 512
    assert plain.block_bytes(513) == 1024
    assert plain.block_bytes(5 * MIB + 1) == 5 * MIB + 512
    assert plain.block_bytes(49 * MIB + MIB // 4) == 50 * MIB  # 0.75 MiB are not split off
    assert exact.block_bytes(49 * MIB + MIB // 4) == 49 * MIB + MIB // 4
    assert plain.block_bytes(48 * MIB + MIB // 4) == 48 * MIB + MIB // 4  # 1.75 MiB are


def test_allocator_settings_are_read(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    assert expandable_segments()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert not expandable_segments()


def test_own_description(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[mine]\nlike = "h100"\nbandwidth = 1e12\nflops = { float32 = 1e12 }\n')
    mine, h100 = load_device(path), load_device("h100")
    assert mine.bandwidth == 1e12
    assert mine.rate("float32") == 1e12
    assert mine.rate("bfloat16") == h100.rate("bfloat16")
    assert load_device(f"{path}:mine") == mine
    assert load_device("H200").name == "h200"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\nlike = 'nothing'", "names no complete"),
        ("[a]\nlike = 'h100'\nlaunch_ns = -1", "launch_ns"),
        ("[a]\nlike = 'h100'\nbandwidth = 0", "bandwidth"),
        ("[a]\nlike = 'h100'\nspeed = 3", "unknown"),
        ("[a]\ntitle = 'x'", "missing"),
        ("[a]\nlike = 'h100'\nefficiency = {matmul = 1.5}", "share"),
        ("[a]\nlike = 'h100'\nkind = 'tpu'", "kind"),
        ("[a", "cannot read"),
        ("", "no table"),
    ],
)
def test_a_bad_description_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(DeviceProfileError, match=message):
        load_device(path)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(DeviceProfileError, match="a100, h100, h200, rtx4090, cpu"):
        load_device("b300")
