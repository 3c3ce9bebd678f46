"""Tree decompositions of op graphs, and their bags as a tree of balanced separators.

An op with several outputs is one vertex; two ops are adjacent if one reads what the other makes.
`eliminate` decomposes by min-fill; `separator_tree` roots the bags at centroids and takes from each
bag the vertices of the bags above it, so that what leaves the subtree of a bag goes to bags above
it only, and every vertex is in exactly one bag.
"""

import heapq
import time
from dataclasses import dataclass, field

from rekindle.core import Problem


@dataclass(frozen=True, slots=True)
class OpGraph:
    """The ops as vertices: whom each one reads from, and who must have run at the end."""

    inputs: tuple[tuple[int, ...], ...]
    targets: tuple[int, ...]

    @staticmethod
    def of(problem: Problem) -> "OpGraph":
        producer = problem.producer
        inputs = tuple(
            tuple(sorted({producer[v] for v in op.inputs if producer[v] >= 0}))
            for op in problem.ops
        )
        wanted = {producer[v] for v in problem.outputs if producer[v] >= 0}
        wanted.update(i for i, op in enumerate(problem.ops) if op.once)
        return OpGraph(inputs, tuple(sorted(wanted)))


@dataclass(slots=True)
class Bag:
    """A node of a tree decomposition: vertices of the graph, and the bags beside it."""

    vertices: tuple[int, ...]
    neighbours: list[int] = field(default_factory=list)


def eliminate(
    graph: OpGraph, max_width: int, deadline: float = float("inf")
) -> tuple[list[Bag], int]:
    """A tree decomposition by min-fill, and its width. Where every vertex left has more than
    `max_width` neighbours, or time is up, all of them are one bag."""
    num = len(graph.inputs)
    # Sets of neighbours as bits of whole numbers: union, difference and size are a few instructions
    # for every 64 vertices, where Python sets take one step per member.
    adjacent = [0] * num
    for v, inputs in enumerate(graph.inputs):
        for u in inputs:
            adjacent[v] |= 1 << u
            adjacent[u] |= 1 << v

    def key(v: int) -> tuple[int, int, int]:
        around = adjacent[v]
        degree = around.bit_count()
        # Too many neighbours to count the fill of; such vertices come last, by degree.
        if degree > max_width:
            return (num * num, degree, v)
        # Each missing edge is seen from both of its ends, and u itself is in `around`.
        fill = sum((around & ~adjacent[u]).bit_count() - 1 for u in bits(around))
        return (fill // 2, degree, v)

    keys = [key(v) for v in range(num)]
    heap = sorted(keys)
    gone = [False] * num
    removed: list[tuple[int, int]] = []
    num_left = num
    while heap:
        entry = heapq.heappop(heap)
        v = entry[2]
        if gone[v] or entry != keys[v]:
            continue
        around = adjacent[v]
        degree = around.bit_count()
        # The bag of v would be all that is left, or is too wide: the rest becomes one bag.
        if degree == num_left - 1 or degree > max_width:
            break
        if len(removed) % 64 == 0 and time.monotonic() > deadline:
            break
        removed.append((v, around))
        gone[v] = True
        num_left -= 1
        # Whose fill may have changed: the neighbours of v, and theirs.
        touched = around
        for u in bits(around):
            touched |= adjacent[u]
            adjacent[u] = (adjacent[u] | around) & ~((1 << u) | (1 << v))
        for u in bits(touched & ~(1 << v)):
            fresh = key(u)
            if fresh != keys[u]:
                keys[u] = fresh
                heapq.heappush(heap, fresh)
    return _bag_tree([v for v in range(num) if not gone[v]], removed)


def _bag_tree(rest: list[int], removed: list[tuple[int, int]]) -> tuple[list[Bag], int]:
    """Re-inserts the eliminated vertices, last first: a new bag hangs on one with all its
    neighbours. Of these, the one eliminated first has such a bag: its own."""
    # The rest is the root; it is a clique, or is treated as one.
    bags = [Bag(tuple(rest))]
    bag_of = dict.fromkeys(rest, 0)
    place = {v: k for k, (v, _) in enumerate(removed)}
    width = len(rest) - 1
    for v, around in reversed(removed):
        members = list(bits(around))
        home = 0
        if members:
            first = min(members, key=lambda u: place.get(u, len(removed)))
            home = bag_of[first]
        bag_of[v] = len(bags)
        bags[home].neighbours.append(len(bags))
        bags.append(Bag((v, *members), [home]))
        width = max(width, len(members))
    return bags, width


def bits(mask: int) -> list[int]:
    """The positions of the ones."""
    out = []
    while mask:
        low = mask & -mask
        out.append(low.bit_length() - 1)
        mask ^= low
    return out


@dataclass(slots=True)
class Node:
    """A bag of the recursion tree, less the vertices of the bags above it."""

    own: list[int]  # in topological order
    children: list[int]
    depth: int
    span: list[int]  # own and those of all below, in topological order


def separator_tree(bags: list[Bag], num_vertices: int) -> list[Node]:
    """Centroid decomposition of the bag tree; parents stand before their children."""
    nodes: list[Node] = []
    taken = [False] * num_vertices
    cut = [False] * len(bags)
    # A stack: the bag tree of a chain is as deep as the chain is long.
    work = [(0, -1, 0)]  # any bag of a component, the parent node, the depth
    while work:
        seed, parent, depth = work.pop()
        centre = _centroid(bags, cut, seed)
        cut[centre] = True
        # Ids of ops are a topological order, and sorted they are one of the bag.
        own = sorted(v for v in bags[centre].vertices if not taken[v])
        for v in own:
            taken[v] = True
        here = parent
        if own or parent < 0:
            here = len(nodes)
            nodes.append(Node(own, [], depth, list(own)))
            if parent >= 0:
                nodes[parent].children.append(here)
        below = depth + (1 if here != parent else 0)
        work.extend((b, here, below) for b in bags[centre].neighbours if not cut[b])
    for node in reversed(nodes):
        for child in node.children:
            node.span.extend(nodes[child].span)
        node.span.sort()
    return nodes


def _centroid(bags: list[Bag], cut: list[bool], seed: int) -> int:
    """The bag without which the largest remaining component is smallest."""
    # The list grows while it is walked: breadth first without a queue.
    order, parent = [seed], {seed: -1}
    for b in order:
        for c in bags[b].neighbours:
            if not cut[c] and c != parent[b]:
                parent[c] = b
                order.append(c)
    weight = dict.fromkeys(order, 1)
    best, best_largest = seed, len(order) + 1
    heaviest = dict.fromkeys(order, 0)
    for b in reversed(order):
        # Without b there remain its subtrees, and all that is not below it.
        largest = max(heaviest[b], len(order) - weight[b])
        if largest < best_largest:
            best, best_largest = b, largest
        if parent[b] >= 0:
            weight[parent[b]] += weight[b]
            heaviest[parent[b]] = max(heaviest[parent[b]], weight[b])
    return best
