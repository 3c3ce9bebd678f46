"""Problems made from a seed, for tests, benchmarks and the demo. Same arguments, same problem.

- `random_layered`: the family of graphs behind RL1 to RL4, at any size.
- `chain`, `unet`, `transformer`: training graphs, forward, loss and backward.
- `random_problem`: small graphs with everything the format allows in them.
- `random_schedule`: a valid schedule of any problem, with repeats.
- `cut_rectangle`: blocks for a static placement that leaves no gap.
"""

from rekindle.core.generate.layered import random_layered
from rekindle.core.generate.random_problems import random_problem, random_schedule
from rekindle.core.generate.rectangles import cut_rectangle
from rekindle.core.generate.training import TrainingGraph, chain, transformer, unet

__all__ = [
    "TrainingGraph",
    "chain",
    "cut_rectangle",
    "random_layered",
    "random_problem",
    "random_schedule",
    "transformer",
    "unet",
]
