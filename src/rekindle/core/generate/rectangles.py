"""Blocks to place, with a placement that is known to exist."""

import random

from rekindle.core.placement import Block


def cut_rectangle(rng: random.Random, num: int, capacity: int, length: int) -> list[Block]:
    """Blocks that fill a rectangle of time and addresses without a gap: it is cut again and again,
    so a placement within the capacity exists, and a shorter one does not."""
    parts = [(0, capacity, 0, length)]
    while len(parts) < num:
        parts.sort(key=lambda p: (p[1] - p[0]) * (p[3] - p[2]))
        low, high, begin, end = parts.pop(rng.randrange(len(parts) // 2, len(parts)))
        if rng.random() < 0.5 and high - low > 1:
            cut = rng.randrange(low + 1, high)
            parts += [(low, cut, begin, end), (cut, high, begin, end)]
        elif end - begin > 1:
            cut = rng.randrange(begin + 1, end)
            parts += [(low, high, begin, cut), (low, high, cut, end)]
        else:
            parts.append((low, high, begin, end))
    rng.shuffle(parts)
    return [Block(high - low, begin, end) for low, high, begin, end in parts]
