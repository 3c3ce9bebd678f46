"""Random layered graphs: the family of RL1 to RL4, at any size.

The graphs are those of Gagrani et al. (NeurIPS 2022), with durations as Moccasin added them:
layers of random width between one source and one sink, edges between neighbouring layers in
windows, some skip edges, sizes from a mixture of normals, and a random topological order.
"""

import math
from itertools import pairwise
from random import Random

from rekindle.core.problem import Op, Problem, Value

# Behind each parameter: its name in the paper.
WIDTH_SPREAD = 0.75  # sigma_N
EDGE_DENSITY = 0.2  # rho_E
SKIP_SHARE = 0.14  # rho_S
# Sizes in thousands of bytes: (weight, mean, standard deviation) of each normal.
SIZE_MIXTURE = ((0.3, 0.5, 0.5), (0.3, 1.0, 1.0), (0.3, 3.0, 1.0), (0.1, 5.0, 1.0))

Edge = tuple[int, int]


def random_layered(num_ops: int, seed: int = 0) -> Problem:
    """A graph of `num_ops` ops (at least 3); each makes one value, the sink's is the output."""
    if num_ops < 3:
        raise ValueError(f"num_ops is {num_ops}; a source, a layer and a sink need at least 3")
    rng = Random(seed)
    layers = _layers(rng, num_ops)
    adjacent = [edge for upper, lower in pairwise(layers) for edge in _adjacent(rng, upper, lower)]
    # A set is walked in the same order in every process here: hashes of tuples of whole numbers are
    # not randomized.
    edges = set(adjacent) | _skips(rng, layers, len(adjacent))
    parents: list[list[int]] = [[] for _ in range(num_ops)]
    for source, target in edges:
        parents[target].append(source)
    sizes = [_size(rng) for _ in range(num_ops)]
    costs = [0, *(rng.randint(1, 999) for _ in range(num_ops - 2)), 0]
    order = _topological_order(rng, parents)
    place = {node: position for position, node in enumerate(order)}
    return Problem(
        values=tuple(Value(str(node), sizes[node]) for node in order),
        ops=tuple(
            Op(
                str(node),
                costs[node],
                tuple(sorted(place[p] for p in parents[node])),
                (place[node],),
            )
            for node in order
        ),
        outputs=(place[num_ops - 1],),
        name=f"random-layered-{num_ops}-{seed}",
        cost_unit="unit",
    )


def _layers(rng: Random, num_ops: int) -> list[range]:
    """Consecutive node ids, layer by layer: the source, the random layers, the sink."""
    width_factor = rng.uniform(0.25, 0.5)
    mean = num_ops / math.ceil(math.sqrt(num_ops * (1 / width_factor - 1)))
    low = max(1, math.ceil(mean * (1 - WIDTH_SPREAD)))
    high = max(low, math.floor(mean * (1 + WIDTH_SPREAD)))
    layers = [range(1)]
    used = 1  # the source
    while used < num_ops - 1:
        width = min(rng.randint(low, high), num_ops - 1 - used)
        layers.append(range(used, used + width))
        used += width
    layers.append(range(used, used + 1))
    return layers


def _adjacent(rng: Random, upper: range, lower: range) -> list[Edge]:
    wide, narrow = (upper, lower) if len(upper) >= len(lower) else (lower, upper)
    num_wide, num_narrow = len(wide), len(narrow)
    num_edges = round(EDGE_DENSITY * num_wide * num_narrow + (1 - EDGE_DENSITY) * num_wide)
    # Windows of equal width, one wider for as many nodes as the density leaves over.
    share, extra = divmod(num_edges, num_wide)
    with_extra = set(rng.sample(range(num_wide), extra))
    edges = []
    for n in range(num_wide):
        count = share + (n in with_extra)
        # Whole-number ceiling of n (narrow - 1) / (wide - 1).
        centre = -(-n * (num_narrow - 1) // max(1, num_wide - 1))
        start = min(max(0, centre - (count - 1) // 2), num_narrow - count)
        for m in range(start, start + count):
            pair = (wide[n], narrow[m])
            edges.append(pair if wide is upper else pair[::-1])
    return edges


def _skips(rng: Random, layers: list[range], num_adjacent: int) -> set[Edge]:
    """Edges over two layers or more, none at the source or the sink; repeats collapse."""
    inner = layers[1:-1]
    if len(inner) < 3:
        return set()
    edges = set()
    for _ in range(math.ceil(num_adjacent * SKIP_SHARE / (1 - SKIP_SHARE))):
        upper = rng.randrange(len(inner) - 2)
        lower = rng.randrange(upper + 2, len(inner))
        x = rng.random()
        y = min(x + 0.2 * rng.random(), 0.999)
        source = inner[upper][math.floor(x * len(inner[upper]))]
        target = inner[lower][math.floor(y * len(inner[lower]))]
        edges.add((source, target))
    return edges


def _size(rng: Random) -> int:
    weights = [weight for weight, _, _ in SIZE_MIXTURE]
    _, mean, deviation = rng.choices(SIZE_MIXTURE, weights)[0]
    # Drawn again until it is above 0, in tens of bytes: a value without size would be a token.
    while (size := round(100 * rng.normalvariate(mean, deviation)) * 10) <= 0:
        pass
    return size


def _topological_order(rng: Random, parents: list[list[int]]) -> list[int]:
    children: list[list[int]] = [[] for _ in parents]
    for node, above in enumerate(parents):
        for parent in sorted(above):
            children[parent].append(node)
    missing = [len(above) for above in parents]
    ready = [node for node, count in enumerate(missing) if count == 0]
    order = []
    # Any that is ready, with equal chance: a first-in order would always be the layers' own.
    while ready:
        k = rng.randrange(len(ready))
        ready[k], ready[-1] = ready[-1], ready[k]
        node = ready.pop()
        order.append(node)
        for child in children[node]:
            missing[child] -= 1
            if missing[child] == 0:
                ready.append(child)
    return order
