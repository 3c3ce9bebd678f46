"""H-Partition: the graph of the layers as a hierarchy of small convex groups.

HiRemate (Gusak et al., ICML 2025), Algorithm 1 and Appendix A, bottom to top:

1. `_candidates`: for each node x, with a(x) the closest node through which every path to x goes
   (all direct predecessors have it as a common ancestor; a virtual node stands before all), the
   nodes between a(x) and x, with and without either end. Those beyond `max_group` are dropped.
2. `_Level.run`: the candidate with the lowest score becomes a group (`_Level.score`, Eq. 1: the
   bytes that enter and leave it, times (ops per node)^alpha); candidates that overlap a group take
   all of it in, or are dropped when they grow beyond `max_group`. Until `max_top` nodes are left
   or no candidate is.
3. The groups become nodes of the next level, until `max_top` nodes are left.

Every group has a single way in: either one node of it is the only one with predecessors outside,
or all its predecessors outside are one node. Such a group is convex (Lemma A.2: a path that left it
and came back would have to pass that node twice). `_Level.valid` checks it on every union instead
of relying on Theorem A.4, whose proof leaves out groups that contain their head.

Near-linear: a(x) by jump pointers in the tree of immediate dominators, O(log n) each; a candidate
holds at most `max_group` nodes and is touched at most as often; a heap with lazy deletion.

Beyond the paper: where a level leaves most nodes as they are (long skips leave groups at the start
of the graph alone, and the hierarchy would become as deep as the graph), its nodes are grouped by
cutting the topological order where the fewest bytes cross (`intervals`); an interval of a
topological order is convex.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.partition.layer_graph import Graph, Group, quotient

ROOT = -1


@dataclass(frozen=True, slots=True)
class HPartition:
    """The partitioner of HiRemate: groups of few nodes, made bottom up."""

    # What the program of a level grows with; at the top it has the most time.
    max_top: int = 12  # M^t
    max_group: int = 8  # M^l
    # App. D.1: its effect is small, and which value is best differs between models.
    alpha: float = 0.5
    slow: float = 0.7  # a level that leaves more than this share of the nodes is helped on

    def partition(self, graph: Graph) -> Group:
        groups = [Group((x,)) for x in range(len(graph))]
        while len(graph) > max(1, self.max_top):
            parts = _Level(graph, self).run()
            # Else the hierarchy would get nearly as many levels as the graph has nodes.
            stuck = len(parts) > self.max_top and len(parts) > self.slow * len(graph)
            graph, order = quotient(graph, parts)
            groups = [_union([groups[x] for x in sorted(parts[p])]) for p in order]
            if stuck:
                parts = intervals(graph, self.max_group)
                graph, order = quotient(graph, parts)
                groups = [_union([groups[x] for x in sorted(parts[p])]) for p in order]
        return _union(groups)


def _union(groups: Sequence[Group]) -> Group:
    if len(groups) == 1:
        return groups[0]
    layers = sorted(x for group in groups for x in group.layers)
    return Group(tuple(layers), tuple(groups))


def intervals(graph: Graph, length: int) -> list[list[int]]:
    """The topological order cut into pieces of at most `length` nodes where, in sum over the cuts,
    the fewest bytes cross."""
    num = len(graph)
    length = max(2, min(length, (num + 1) // 2))
    crossing = [0] * (num + 1)
    # The last one, as nodes are listed in a topological order.
    last_read: dict[int, int] = {}
    for x, reads in enumerate(graph.reads):
        for v in reads:
            last_read[v] = x
    for x, makes in enumerate(graph.makes):
        for v in makes:
            end = num if v in graph.leaves else last_read.get(v, x)
            crossing[x + 1] += graph.size[v]
            if end + 1 <= num:
                crossing[end + 1] -= graph.size[v]
    for cut in range(1, num + 1):
        crossing[cut] += crossing[cut - 1]
    typical = max(1, sum(crossing) // (num + 1))  # each cut counts, even where nothing crosses
    # The cheapest cuts of every prefix, by the cheapest of every shorter one.
    best, back = [0] * (num + 1), [0] * (num + 1)
    for end in range(1, num + 1):
        start = min(range(max(0, end - length), end), key=lambda k: (best[k], k))
        best[end] = best[start] + crossing[end] + typical
        back[end] = start
    parts, end = [], num
    while end:
        parts.append(list(range(back[end], end)))
        end = back[end]
    return parts[::-1]


def dominators(graph: Graph) -> list[int]:
    """Per node: the closest node through which every path from the virtual root to it goes."""
    num = len(graph)
    parent, depth, jump = [ROOT] * num, [0] * num, [ROOT] * num

    def level(x: int) -> int:
        return depth[x] if x >= 0 else -1

    def ancestor_at(x: int, wanted: int) -> int:
        while level(x) > wanted:
            x = jump[x] if level(jump[x]) >= wanted else parent[x]
        return x

    def common(x: int, y: int) -> int:
        if level(x) > level(y):
            x = ancestor_at(x, level(y))
        else:
            y = ancestor_at(y, level(x))
        while x != y:
            if jump[x] != jump[y]:
                x, y = jump[x], jump[y]
            else:
                x, y = parent[x], parent[y]
        return x

    for x, before in enumerate(graph.edges):
        if not before:
            continue
        above = before[0]
        for y in before[1:]:
            above = common(above, y)
            if above == ROOT:
                break
        parent[x] = above
        depth[x] = level(above) + 1
        # Jumps of growing length, so that any ancestor is O(log n) away.
        up = jump[above] if above >= 0 else ROOT
        upper = jump[up] if up >= 0 else ROOT
        balanced = above >= 0 and depth[above] - level(up) == level(up) - level(upper)
        jump[x] = upper if balanced else above
    return parent


def _candidates(graph: Graph, max_group: int) -> list[frozenset[int]]:
    """All groups of two or more nodes between some x and a(x), either end in or out."""
    found: dict[frozenset[int], None] = {}
    above = dominators(graph)
    for x, a in enumerate(above):
        inner = {x}
        work = [x]
        # One more than `max_group`, since either end may be left out of the group.
        while work and len(inner) <= max_group + 1:
            for y in graph.edges[work.pop()]:
                if y != a and y not in inner:
                    inner.add(y)
                    work.append(y)
        if len(inner) > max_group + 1:
            continue
        whole = frozenset(inner)
        ends = (whole, whole - {x}) if a == ROOT else _with_head(whole, x, a)
        for group in ends:
            if 2 <= len(group) <= max_group:
                found[group] = None
    return list(found)


def _with_head(inner: frozenset[int], x: int, a: int) -> tuple[frozenset[int], ...]:
    outer = inner | {a}
    return inner, inner - {x}, outer, outer - {x}


class _Level:
    """One pass over the candidates of a graph."""

    def __init__(self, graph: Graph, options: HPartition) -> None:
        self.graph = graph
        self.options = options
        self.num_readers: dict[int, int] = {}
        for reads in graph.reads:
            for v in reads:
                self.num_readers[v] = self.num_readers.get(v, 0) + 1

    def run(self) -> list[list[int]]:
        """The parts, single nodes included."""
        num = len(self.graph)
        candidates = [c for c in _candidates(self.graph, self.options.max_group) if self.valid(c)]
        # Candidates are looked up by node, so that a merge touches those alone that overlap it.
        member: list[set[int]] = [set() for _ in range(num)]  # per node: its candidates
        heap: list[tuple[float, int, int]] = []
        alive: list[frozenset[int] | None] = list(candidates)
        known = {c: k for k, c in enumerate(candidates)}
        for k, group in enumerate(candidates):
            heap.append((self.score(group), len(group), k))
            for x in group:
                member[x].add(k)
        heapq.heapify(heap)
        group_of: list[frozenset[int]] = [frozenset((x,)) for x in range(num)]
        num_left = num
        # A heap cannot change an entry: a changed candidate is entered anew, and the old entry is
        # passed over when it comes up.
        entries = {k: entry for entry in heap for k in (entry[2],)}
        while heap and num_left > self.options.max_top:
            entry = heapq.heappop(heap)
            k = entry[2]
            chosen = alive[k]
            if chosen is None or entries[k] != entry:
                continue
            # A candidate may have taken in whole groups by now, so this counts groups, not nodes.
            num_left -= len({group_of[x] for x in chosen}) - 1
            for x in chosen:
                group_of[x] = chosen
            touched = sorted({c for x in chosen for c in member[x]})
            # In a fixed order, so that equal graphs give equal hierarchies and equal parts are
            # found.
            for c in touched:
                old = alive[c]
                assert old is not None
                merged = old | chosen
                for x in old:
                    member[x].discard(c)
                del known[old]
                alive[c] = None
                if merged == chosen or len(merged) > self.options.max_group:
                    continue
                if merged in known or not self.valid(merged):
                    continue
                alive[c] = merged
                known[merged] = c
                for x in merged:
                    member[x].add(c)
                entries[c] = (self.score(merged), len(merged), c)
                heapq.heappush(heap, entries[c])
        return [sorted(g) for g in dict.fromkeys(group_of)]

    def score(self, group: frozenset[int]) -> float:
        graph = self.graph
        here: dict[int, int] = {}
        for x in group:
            for v in graph.reads[x]:
                here[v] = here.get(v, 0) + 1
        # Eq. 1: bytes that enter plus bytes that leave, times (ops per node)^alpha.
        total = weight = 0
        own = set()
        for x in group:
            weight += graph.weight[x]
            for v in graph.makes[x]:
                own.add(v)
                if v in graph.leaves or here.get(v, 0) < self.num_readers.get(v, 0):
                    total += graph.size[v]
        total += sum(graph.size[v] for v in here if v not in own)
        return float(total * (weight / len(group)) ** self.options.alpha)

    def valid(self, group: frozenset[int]) -> bool:
        """Whether there is a single way in, which makes the group convex."""
        # Counted together: the nodes of the group with predecessors outside, and these
        # predecessors. One of the two numbers has to be 1.
        outside: set[int] = set()
        num_entries = 0
        for x in group:
            before = self.graph.edges[x]
            enters = not before
            if not before:
                outside.add(ROOT)
            for y in before:
                if y not in group:
                    outside.add(y)
                    enters = True
            num_entries += enters
            if num_entries > 1 and len(outside) > 1:
                return False
        return True
