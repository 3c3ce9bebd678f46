"""Wrapper text as Inductor writes it for a GPU, with kernels that stand in for Triton's."""

import operator
from typing import Any

import pytest
import torch
from torch import nn

from rekindle import pipeline
from rekindle.capture.node_facts import facts, source_of
from rekindle.inductor.kernel_graph import KernelGraph
from rekindle.inductor.wrapper import NotCompiled, read_wrapper
from rekindle.plans.options import Options

TEXT = """
triton_poi_fused_0 = async_compile.triton('triton_poi_fused_0', '''source''', device_str='cuda')
triton_red_fused_1 = async_compile.triton('triton_red_fused_1', '''source''', device_str='cuda')

def call(args):
    primals_1, primals_2 = args
    args.clear()
    assert_size_stride(primals_1, (8, 4), (4, 1))
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cpu((8, 4), (4, 1), torch.float32)
        # Topologically Sorted Source Nodes: [x]
        stream0 = get_raw_stream(0)
        triton_poi_fused_0.run(primals_1, buf0, 32, stream=stream0)
        workspace_0 = empty_strided_cpu((8, ), (1, ), torch.float32)
        buf1 = empty_strided_cpu((8, 4), (4, 1), torch.float32)
        semaphores_0 = empty_strided_cpu((2, ), (1, ), torch.int32)
        semaphores_0.zero_()
        triton_red_fused_1.run(buf0, buf1, workspace_0, semaphores_0, 32, stream=stream0)
        buf2 = workspace_0[0 * 2 * 4 : (0 + 1) * 2 * 4].view(2, 4).sum(dim=0)
        del workspace_0
        buf3 = reinterpret_tensor(buf1, (4, 8), (1, 4), 0)  # alias
        buf4 = empty_strided_cpu((8, 8), (8, 1), torch.float32)
        extern_kernels.mm(buf0, reinterpret_tensor(buf3, (4, 8), (1, 4), 0), out=buf4)
        triton_red_fused_1.run(buf0, buf1, workspace_1, semaphores_0, 32, stream=stream0)
    return (buf4, buf2, reinterpret_tensor(buf1, (4, 8), (1, 4), 0), primals_2, None)
"""


class Kernel:
    """Launched as a Triton kernel of Inductor's is."""

    def __init__(self, names: list[str], compute: Any, mutated: tuple[str, ...] = ()) -> None:
        self.triton_meta = {"signature": {**dict.fromkeys(names, "*"), "XBLOCK": "constexpr"}}
        self.mutated_arg_names = list(mutated)
        self.compute = compute
        self.streams: list[int] = []

    def run(self, *args: Any, stream: int) -> None:
        self.streams.append(stream)
        self.compute(*args)


def double(x: torch.Tensor, out: torch.Tensor, _num: int) -> None:
    out.copy_(2 * x)


def reduce(
    x: torch.Tensor, out: torch.Tensor, workspace: torch.Tensor, semaphores: torch.Tensor, _num: int
) -> None:
    assert not semaphores.any(), "not cleared before each run"
    semaphores.fill_(1)
    out.copy_(x + 1)
    workspace.view(2, 4).copy_(x[:2])


def scope() -> dict[str, Any]:
    return {
        "torch": torch,
        "get_raw_stream": lambda index: 7 + index,
        "empty_strided_cpu": lambda size, stride, dtype: torch.empty_strided(
            size, stride, dtype=dtype
        ),
        "reinterpret_tensor": lambda t, size, stride, offset: t.as_strided(
            size, stride, t.storage_offset() + offset
        ),
        "extern_kernels": torch,
        "triton_poi_fused_0": Kernel(["in_ptr0", "out_ptr0", "xnumel"], double),
        "triton_red_fused_1": Kernel(
            ["in_ptr0", "out_ptr0", "ws_ptr", "sem_ptr", "xnumel"], reduce
        ),
    }


def graph_of(text: str, names: dict[str, Any]) -> tuple[KernelGraph, list[Any]]:
    model = nn.Linear(4, 8)
    joint, _ = pipeline.recorded(Options(budget=1.0), model, (torch.randn(8, 4),), {})
    kernels = KernelGraph(joint, frozenset())
    placeholders = {source_of(n).kind: n for n in joint.nodes if n.op == "placeholder"}
    given = [kernels.placeholder(placeholders[kind]) for kind in ("input", "parameter")]
    return kernels, kernels.run(read_wrapper(text), names, given)


TEXT_ONCE = TEXT.replace(
    "        triton_red_fused_1.run(buf0, buf1, workspace_1, semaphores_0, 32, stream=stream0)\n",
    "",
)


def run(kernels: KernelGraph, given: list[torch.Tensor]) -> dict[Any, Any]:
    values: dict[Any, Any] = {}
    for node in kernels.graph.nodes:
        if node.op == "placeholder":
            values[node] = given.pop(0)
        else:
            values[node] = node.target(*[values.get(a, a) for a in node.args])
    return values


def test_kernels_of_a_gpu_become_calls_of_what_they_read() -> None:
    names = scope()
    kernels, results = graph_of(TEXT_ONCE, names)
    x, weight = torch.randn(8, 4), torch.randn(8, 4)
    nodes = [kernels.node_of(r) for r in results if r is not None]
    values = run(kernels, [x, weight])
    assert torch.equal(values[nodes[0]], (2 * x) @ (2 * x + 1).t())
    assert torch.equal(values[nodes[1]], (2 * x)[:2].sum(0))
    assert torch.equal(values[nodes[2]], (2 * x + 1).t())
    assert values[nodes[3]] is weight
    assert results[4] is None
    assert names["triton_poi_fused_0"].streams == [7]
    for node, value in values.items():
        if isinstance(value, torch.Tensor) and node.op != "placeholder":
            like = facts(node).value
            assert (like.shape, like.stride(), like.dtype) == (
                value.shape,
                value.stride(),
                value.dtype,
            )


def test_a_workspace_that_is_read_later_is_a_result_and_semaphores_are_not() -> None:
    kernels, _ = graph_of(TEXT_ONCE, scope())
    reduction = next(n for n in kernels.graph.nodes if n.name.startswith("triton_red"))
    parts = [n for n in reduction.users if n.target is operator.getitem]
    assert [tuple(facts(n).value.shape) for n in parts] == [(8, 4), (8,)] or [
        tuple(facts(n).value.shape) for n in parts
    ] == [(8,), (8, 4)]
    assert facts(reduction).writes == ()


def test_a_kernel_that_writes_into_what_is_there_says_so() -> None:
    names = scope()
    text = TEXT_ONCE.replace(
        "    return (buf4",
        "    triton_poi_fused_0.run(buf0, buf4, 32, stream=stream0)\n    return (buf4",
    )
    kernels, _ = graph_of(text, names)
    last = [n for n in kernels.graph.nodes if n.name.startswith("triton_poi")][-1]
    assert [n.name for n in facts(last).writes] == ["extern_kernels_mm"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("buf9 = buf0.item() + 1", "is not known"),
        ("for i in range(3): pass", "is not known"),
        ("somewhere_else(buf0)", "somewhere_else"),
        ("triton_poi_fused_0.run(buf0, 32, stream=stream0)", "triton_poi_fused_0"),
    ],
)
def test_what_is_not_known_is_refused_by_name(line: str, why: str) -> None:
    text = TEXT_ONCE.replace("    return (buf4", f"    {line}\n    return (buf4")
    with pytest.raises((NotCompiled, ValueError), match=why):
        graph_of(text, scope())
