"""A tensor that a region uses several times, as several inputs: eager's sums, in eager's order.

The gradient of a tensor is the sum over its uses. Eager adds them one by one, in the order in which
the backward reaches them, whether a use is inside of a region or outside. A region that summed its
own uses first would round otherwise. So each use becomes an input of its own, whose gradient is
handed out alone, and autograd adds them.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from rekindle.capture.joint import JointGraph
from rekindle.capture.node_facts import facts
from rekindle.errors import CaptureError


def separate_uses(graph: fx.Graph, inputs: Sequence[Any]) -> tuple[int, ...]:
    """Gives each call that uses an input which requires grad a placeholder of its own; per
    placeholder of the graph as it is then, which of the inputs it stands for."""
    uses = []
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for i, (node, given) in enumerate(zip(placeholders, inputs, strict=True)):
        uses.append(i)
        if not getattr(given, "requires_grad", False):
            continue
        last = node
        for user in [u for u in node.users if u.op != "output"][1:]:
            with graph.inserting_after(last):
                last = graph.placeholder(f"{node.name}_again")
            last.meta = dict(node.meta)
            user.replace_input_with(node, last)
            uses.append(i)
    return tuple(uses)


def check_uses(joint: JointGraph) -> None:
    """Raises CaptureError where the gradient of one use is still a sum, or where an input that was
    separated is written to."""
    leaves = {id(leaf) for leaf in joint.session.leaves}
    counts: dict[int, int] = {}
    stack = [t.grad_fn for t in joint.session.outputs if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        for below, _ in stack.pop().next_functions:
            if below is None:
                continue
            if hasattr(below, "variable"):
                leaf = id(below.variable)
                counts[leaf] = counts.get(leaf, 0) + 1
            elif below not in seen:
                seen.add(below)
                stack.append(below)
    for leaf, count in counts.items():
        if leaf in leaves and count > 1:
            raise CaptureError("one call uses a tensor several times, and its gradient is a sum")
    recorder = joint.session.recorder
    storages = {recorder.storage_of(leaf) for leaf in joint.session.leaves}
    for node in joint.session.forward_nodes:
        if any(facts(written).storage in storages for written in facts(node).writes):
            raise CaptureError("an input that requires grad is written to in place")
