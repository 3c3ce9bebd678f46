"""H-Partition's time over the size of the graph, on decoders and on random training graphs.

    python benchmarks/hiremate/partition_speed.py

Writes `partition_speed.json` beside this file: forward ops, all ops, CPU seconds, levels, groups.
The paper reports 2 hours for a graph of 100,000 nodes.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from rekindle.core import Problem
from rekindle.core.generate import TrainingGraph, transformer
from rekindle.partition.hierarchy import HPartition
from rekindle.partition.layer_graph import layer_graph, read_layers

HERE = Path(__file__).parent


def skipping(num_layers: int, seed: int = 0) -> Problem:
    """Layers that read the last one and, often, one of the dozens before it."""
    rng = Random(seed)
    graph = TrainingGraph()
    made = [graph.resident("x", 100)]
    for k in range(num_layers):
        inputs = {made[-1]}
        if rng.random() < 0.5:
            inputs.add(rng.choice(made[-40:]))
        made.append(
            graph.forward(f"f{k}", 1, sorted(inputs), rng.randint(1, 99), saves_inputs=True)
        )
    return graph.finish([made[-1]], f"skipping-{num_layers}")


def cases() -> Iterator[Problem]:
    for num_layers in (100, 1000, 8400):
        yield transformer(num_layers)
    for num_layers in (1000, 10_000, 100_000):
        yield skipping(num_layers)


def main() -> None:
    rows = []
    for problem in cases():
        start = time.process_time()
        graph = layer_graph(problem, read_layers(problem))
        read = time.process_time()
        tree = HPartition().partition(graph)
        rows.append(
            {
                "problem": problem.name,
                "ops": len(problem.ops),
                "forward_ops": len(graph),
                "read_cpu_s": round(read - start, 2),
                "partition_cpu_s": round(time.process_time() - read, 2),
                "levels": tree.depth,
                "groups": sum(1 for _ in tree.walk()),
                "largest": max(len(g.children) for g in tree.walk()),
            }
        )
        print(rows[-1], flush=True)
    (HERE / "partition_speed.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
