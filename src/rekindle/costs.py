"""Costs per node until ops are profiled: bytes moved and arithmetic, by a small roofline."""

from dataclasses import dataclass
from typing import Any

import torch

from rekindle.capture import JointGraph
from rekindle.torch_compat import pytree

_BYTES_PER_NS = 10.0
_FLOPS_PER_NS = 50.0


@dataclass(frozen=True, slots=True)
class Cost:
    cost_ns: int
    workspace_bytes: int = 0


def costs_of(joint: JointGraph, how: str) -> dict[str, Cost]:
    del how
    return {n.name: _estimate(n) for n in joint.nodes if n.op == "call_function"}


def _estimate(node: Any) -> Cost:
    ins = [
        n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)
    ]
    outs = [t for t in pytree.tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
    moved = sum(t.numel() * t.element_size() for t in (*ins, *outs))
    flops = 0
    if any(word in str(node.target) for word in ("mm", "convolution", "attention")):
        sizes = sorted((t.numel() for t in (*ins, *outs)), reverse=True)[:3]
        flops = 2 * int(max(1.0, float(torch.tensor(sizes, dtype=torch.float64).prod()) ** 0.5))
    return Cost(1000 + int(moved / _BYTES_PER_NS + flops / _FLOPS_PER_NS))
