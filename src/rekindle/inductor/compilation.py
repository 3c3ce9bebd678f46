"""`compiled`: a recorded `JointGraph` -> one whose ops are Inductor's kernels.

Inductor cuts the functional graph in two and compiles each half once, with one buffer per value.
The kernel calls become the nodes of a new joint graph, which a schedule may run in another order
and more than once; a new budget needs no new compilation.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rekindle.capture import JointGraph
from rekindle.capture.joint import Origin
from rekindle.capture.node_facts import facts
from rekindle.inductor.functional import Functional, functional
from rekindle.inductor.kernel_graph import KernelGraph, Shown
from rekindle.inductor.wrapper import NotCompiled, read_wrapper
from rekindle.torch_compat import (
    CompiledText,
    compile_graph,
    cut_in_two,
    inductor_settings,
    outside_modes,
)

aten = torch.ops.aten


def compiled(joint: JointGraph) -> JointGraph:
    """The graph of a recorded one with Inductor's kernels. Raises NotCompiled where there is none,
    and whatever Inductor raises."""
    with outside_modes(), inductor_settings():
        source = functional(joint)
        return _Compilation(joint, source).graph()


class _Compilation:
    def __init__(self, joint: JointGraph, source: Functional) -> None:
        self.joint = joint
        self.source = source
        statistics = _left_alone(source)
        self.kernels = KernelGraph(joint, statistics)

    def graph(self) -> JointGraph:
        source, kernels = self.source, self.kernels
        num_outputs = len(source.written) + len(source.outputs)
        if self.joint.forward_only:
            forward, backward = source.graph, None
        else:
            forward, backward = cut_in_two(source.graph, source.inputs, num_outputs, source.mode)
        saved = self._write_back(forward, backward)
        primals = [kernels.placeholder(node) for node in source.primals]
        made = self._run(forward, primals, len(source.outputs), "forward")
        outputs = self._outputs(made[: len(source.outputs)])
        forward_nodes = tuple(kernels.graph.nodes)
        gradients: dict[fx.Node, fx.Node] = {}
        if backward is not None:
            kept = dict(zip(saved, made[len(source.outputs) :], strict=True))
            gradients = self._backward(backward, kept)
        copies = kernels.copies
        return replace(
            self.joint,
            nodes=tuple(kernels.graph.nodes),
            entries=tuple([node and copies[node] for node in self.joint.entries]),
            outputs=outputs,
            gradients=tuple([(copies[leaf], gradients[g]) for leaf, g in self.joint.gradients]),
            idle=tuple([copies[node] for node in self.joint.idle]),
            origin=Origin(self.joint, copies, forward_nodes),
            kernels="inductor",
        )

    def _write_back(self, forward: fx.GraphModule, backward: fx.GraphModule | None) -> list[str]:
        """The last states of what is written to become writes at the end of the forward, where
        Inductor makes them parts of its kernels. Returns the names of what is saved."""
        source = self.source
        output = next(iter(reversed(forward.graph.nodes)))
        results = list(output.args[0])
        placeholders = [n for n in forward.graph.nodes if n.op == "placeholder"]
        position = {node: i for i, node in enumerate(source.primals)}
        given = {n.name for n in (backward.graph.nodes if backward else ())}
        for node, last in zip(source.written, results, strict=False):
            held = placeholders[position[node]]
            if held.name in given:
                raise NotCompiled(f"the backward reads {node.name}, which the forward writes to")
            with forward.graph.inserting_before(output):
                copy = forward.graph.call_function(aten.copy_.default, (held, last))
                copy.meta.update(last.meta)
        results = results[len(source.written) :]
        output.args = (tuple(results),)
        forward.recompile()
        return [n.name for n in results[len(source.outputs) :]]

    def _run(
        self, graph: fx.GraphModule, given: Sequence[Shown], num_visible: int, kind: Any
    ) -> list[Any]:
        mode = self.source.mode
        with mode:
            inputs = [_fake_like(self.kernels, shown) for shown in given]
        if self.joint.forward_only:
            kind = "inference"
        text: CompiledText = compile_graph(graph, inputs, range(num_visible), kind, mode)
        return self.kernels.run(read_wrapper(text.text), text.scope, given)

    def _backward(self, backward: fx.GraphModule, kept: dict[str, Any]) -> dict[fx.Node, fx.Node]:
        kernels = self.kernels
        kernels.phase = "backward"
        tangents = [kernels.placeholder(node) for node in self.source.tangents]
        given = []
        for node in backward.graph.nodes:
            if node.op == "placeholder":
                name = node.name
                is_tangent = name.startswith("tangents_")
                given.append(tangents[int(name[9:]) - 1] if is_tangent else kept[name])
        made = self._run(backward, given, len(self.source.gradients), "backward")
        taken: set[int] = set()
        found = {}
        outside = {facts(n).storage for n in kernels.copies.values()}
        for recorded, shown in zip(self.source.gradients, made, strict=True):
            if shown is None:
                raise NotCompiled(f"a gradient ({recorded.name}) is no tensor")
            node = kernels.node_of(shown)
            storage = facts(node).storage
            # `.grad` is added to in place: no two may share memory, nor with what is passed in.
            own = facts(recorded).storage
            if storage in taken or (storage in outside and own not in outside):
                node = kernels.clone(node)
            node = self._laid_out(recorded, node)
            taken.add(facts(node).storage)
            found[recorded] = node
        return found

    def _laid_out(self, recorded: fx.Node, node: fx.Node) -> fx.Node:
        """What leaves the graph lies in memory as eager lays it: Inductor lays out weights of
        convolutions anew, and autograd would copy their gradients."""
        value, wanted = facts(node).value, facts(recorded).value
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise NotCompiled(
                f"Inductor makes {recorded.name} a tensor of {value.dtype} {tuple(value.shape)}, "
                f"and eager one of {wanted.dtype} {tuple(wanted.shape)}"
            )
        return node if _has_layout(value, wanted) else self.kernels.laid_out(node, wanted)

    def _outputs(self, made: Sequence[Any]) -> tuple[fx.Node, ...]:
        kernels = self.kernels
        by_node: dict[fx.Node, fx.Node] = {}
        taken = {facts(n).storage for n in kernels.copies.values()}
        for recorded, shown in zip(self.source.outputs, made, strict=True):
            node = kernels.node_of(shown)
            if facts(node).storage in taken:
                node = kernels.clone(node)
            node = self._laid_out(recorded, node)
            taken.add(facts(node).storage)
            by_node[recorded] = node
        by_storage = {facts(n).storage: made for n, made in by_node.items()}
        found = []
        for recorded in self.joint.outputs:
            root = by_storage.get(facts(recorded).storage)
            if root is None:
                found.append(kernels.copied(recorded))
            elif recorded in by_node:
                found.append(by_node[recorded])
            else:
                found.append(kernels.shown_like(root, facts(recorded).value))
        return tuple(found)


def _has_layout(value: torch.Tensor, wanted: torch.Tensor) -> bool:
    return all(
        x == y or n == 1
        for x, y, n in zip(value.stride(), wanted.stride(), wanted.shape, strict=True)
    )


def _fake_like(kernels: KernelGraph, shown: Shown) -> torch.Tensor:
    root = facts(shown.buffer.node).value
    size = root.untyped_storage().nbytes() // root.dtype.itemsize
    room = torch.empty(size, dtype=root.dtype, device=root.device)
    view = shown.view
    if view is None:
        return torch.as_strided(room, root.shape, root.stride(), root.storage_offset())
    return torch.as_strided(room, view.size, view.stride, root.storage_offset() + view.offset)


def _left_alone(source: Functional) -> frozenset[fx.Node]:
    """The placeholders whose contents reach nothing but their own next state, such as running
    statistics: a kernel that moves them may run again on anything in their place."""
    nodes = list(source.graph.graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    results = nodes[-1].args[0]
    found = []
    for i, node in enumerate(source.written):
        start = placeholders[source.primals.index(node)]
        reached = {start}
        for each in nodes[:-1]:
            if any(a in reached for a in each.all_input_nodes):
                reached.add(each)
        if not any(r in reached for k, r in enumerate(results) if k != i):
            found.append(node)
    return frozenset(found)
