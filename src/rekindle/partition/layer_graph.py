"""What partitioners work on and what they make.

A forward/backward problem is seen as *layers*: a forward op with the backward ops that belong to
it. `read_layers` pairs them by `grad_of` and keeps one invariant: what a backward op of layer i
reads from the backward was made by a layer at or after i in the listed order, so that running the
layers of any convex group forward, and later backward in reverse, is a valid order.

A partitioner turns the graph of the layers into a tree of groups. A group is convex: no path
leaves it and comes back, so that it can be run as one step.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rekindle.core import Problem


@dataclass(frozen=True, slots=True)
class Layer:
    """A forward op with the backward ops that belong to it."""

    forward: int  # op id
    backward: tuple[int, ...]  # op ids in listed order


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers in listed order of their forward ops."""

    layers: tuple[Layer, ...]
    layer_of: tuple[int, ...]  # per op: its layer, -1 for the loss op
    loss: int | None  # op id


@dataclass(frozen=True, slots=True)
class Graph:
    """A DAG whose nodes are listed in a topological order, and the values that run along it.

    An edge orders two nodes, with or without a value.
    """

    edges: tuple[tuple[int, ...], ...]  # per node: the nodes before it
    reads: tuple[tuple[int, ...], ...]  # per node: the values it reads from other nodes
    makes: tuple[tuple[int, ...], ...]  # per node: the values it makes that something reads
    leaves: frozenset[int]  # values that are read outside the graph too
    size: tuple[int, ...]  # per value
    weight: tuple[int, ...]  # per node: the number of ops in it

    def __len__(self) -> int:
        return len(self.edges)


@dataclass(frozen=True, slots=True)
class Group:
    """A convex set of layers; its children, in an order in which they can run, make it up."""

    layers: tuple[int, ...]  # in listed order
    children: tuple["Group", ...] = field(default=())

    @property
    def depth(self) -> int:
        """The number of levels, a single layer being none."""
        return 1 + max(child.depth for child in self.children) if self.children else 0

    def walk(self) -> Iterable["Group"]:
        """This group and all below it that have children."""
        if self.children:
            yield self
            for child in self.children:
                yield from child.walk()


class Partitioner(Protocol):
    """Any way to turn the graph of the layers into a tree of convex groups."""

    def partition(self, graph: Graph) -> Group:
        """A group of all layers."""


def reason_without_phases(problem: Problem) -> str | None:
    """None if the problem is one training step that can be seen as layers, else why not."""
    phases = [op.phase for op in problem.ops]
    if None in phases:
        i = phases.index(None)
        return (
            f"op {i} ({problem.ops[i].name!r}) has no phase; the method needs every op marked "
            "forward, loss or backward"
        )
    for phase in ("forward", "backward"):
        if phase not in phases:
            return f"there is no {phase} op, so no forward/backward structure to work on"
    producer = problem.producer
    for i, op in enumerate(problem.ops):
        for v in op.inputs:
            by = producer[v]
            if by < 0:
                continue
            made_in = phases[by]
            if phases[i] == "forward" and made_in != "forward":
                return f"forward op {i} reads value {v}, which the {made_in} makes"
            if phases[i] == "loss" and made_in == "backward":
                return f"the loss op reads value {v}, which the backward makes"
    return None


def read_layers(problem: Problem) -> Layers:
    """Pairs the backward ops with forward ops. Those without `grad_of`, or whose `grad_of` would
    break the invariant, go with the earliest layer they read a gradient from."""
    assert reason_without_phases(problem) is None
    ops, producer = problem.ops, problem.producer
    forward = [i for i, op in enumerate(ops) if op.phase == "forward"]
    place = {i: k for k, i in enumerate(forward)}
    layer_of = [-1] * len(ops)
    backward: list[list[int]] = [[] for _ in forward]
    for i, op in enumerate(ops):
        if op.phase == "forward":
            layer_of[i] = place[i]
        elif op.phase == "backward":
            # A backward op that reads no gradient but the loss's may go with any layer.
            latest = len(forward) - 1
            for v in op.inputs:
                by = producer[v]
                if by >= 0 and ops[by].phase == "backward":
                    latest = min(latest, layer_of[by])
            # `grad_of` pairs ops as autograd does, and gives way to the invariant.
            wanted = place.get(op.grad_of, latest) if op.grad_of is not None else latest
            layer_of[i] = min(latest, wanted)
            if layer_of[i] >= 0:
                backward[layer_of[i]].append(i)
    layers = tuple(Layer(i, tuple(b)) for i, b in zip(forward, backward, strict=True))
    return Layers(layers, tuple(layer_of), problem.loss_op)


def layer_graph(problem: Problem, layers: Layers) -> Graph:
    """The forward graph of the layers. An order that the backward asks for is an edge as well;
    resident values are none (they are always there, whoever reads them)."""
    producer, layer_of = problem.producer, layers.layer_of
    edges: list[set[int]] = [set() for _ in layers.layers]
    reads: list[tuple[int, ...]] = []
    makes: list[tuple[int, ...]] = []
    # What is read outside leaves every group that makes it.
    leaves: set[int] = set(problem.outputs)
    for j, layer in enumerate(layers.layers):
        op = problem.ops[layer.forward]
        reads.append(tuple(v for v in op.inputs if producer[v] >= 0))
        edges[j].update(layer_of[producer[v]] for v in reads[j])
        made = []
        for v in op.outputs:
            readers = [problem.ops[i].phase for i in problem.readers[v]]
            if "loss" in readers:
                leaves.add(v)
            if v in leaves or "forward" in readers:
                made.append(v)
        makes.append(tuple(made))
        for i in layer.backward:
            for v in problem.ops[i].inputs:
                later = layer_of[producer[v]] if producer[v] >= 0 else -1
                # Nearly always a forward path leads from j to `later` already. Where none does,
                # this edge keeps groups convex for the backward too.
                if later > j and problem.ops[producer[v]].phase == "backward":
                    edges[later].add(j)
    return Graph(
        edges=tuple(tuple(sorted(e)) for e in edges),
        reads=tuple(reads),
        makes=tuple(makes),
        leaves=frozenset(leaves),
        size=tuple(value.size for value in problem.values),
        weight=(1,) * len(layers.layers),
    )


def quotient(graph: Graph, parts: Sequence[Sequence[int]]) -> tuple[Graph, tuple[int, ...]]:
    """The graph whose nodes are the parts, in a topological order (earliest member first), and
    which part each of them is. The parts must cover the graph and be convex together."""
    part_of = [-1] * len(graph)
    for p, members in enumerate(parts):
        for x in members:
            part_of[x] = p
    before: list[set[int]] = [set() for _ in parts]
    after: list[list[int]] = [[] for _ in parts]
    for x, edges in enumerate(graph.edges):
        for y in edges:
            if part_of[y] != part_of[x]:
                before[part_of[x]].add(part_of[y])
    for p, earlier in enumerate(before):
        for q in earlier:
            after[q].append(p)
    missing = [len(earlier) for earlier in before]
    # The earliest member first, so that the order of the parts follows the listed order and does
    # not depend on how the parts were numbered.
    heap = [(min(parts[p]), p) for p in range(len(parts)) if not missing[p]]
    heapq.heapify(heap)
    order: list[int] = []
    while heap:
        _, p = heapq.heappop(heap)
        order.append(p)
        for q in after[p]:
            missing[q] -= 1
            if not missing[q]:
                heapq.heappush(heap, (min(parts[q]), q))
    if len(order) < len(parts):
        raise ValueError("the parts are not convex: two of them need each other")
    new = {p: k for k, p in enumerate(order)}
    makes, reads = _crossing(graph, [parts[p] for p in order])
    return Graph(
        edges=tuple(tuple(sorted(new[q] for q in before[p])) for p in order),
        reads=reads,
        makes=makes,
        leaves=graph.leaves,
        size=graph.size,
        weight=tuple(sum(graph.weight[x] for x in parts[p]) for p in order),
    ), tuple(order)


def _crossing(
    graph: Graph, parts: Sequence[Sequence[int]]
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Per part: the values it makes that are read elsewhere, and those it reads from elsewhere."""
    num_readers: dict[int, int] = {}
    for reads in graph.reads:
        for v in reads:
            num_readers[v] = num_readers.get(v, 0) + 1
    all_makes, all_reads = [], []
    for members in parts:
        here: dict[int, int] = {}
        made = [v for x in members for v in graph.makes[x]]
        own = set(made)
        for x in members:
            for v in graph.reads[x]:
                here[v] = here.get(v, 0) + 1
        all_makes.append(
            tuple(v for v in made if v in graph.leaves or here.get(v, 0) < num_readers.get(v, 0))
        )
        all_reads.append(tuple(v for v in here if v not in own))
    return tuple(all_makes), tuple(all_reads)
