"""Layouts of tensors as digits: how a view of a copy reads what was copied.

A tensor's elements are counted by its index, one digit per dimension, the last one fastest; the
strides say where each step of a digit leads in memory. A chain of views and dense copies only ever
splits digits, merges them and changes their order. So whether a tensor can be read where it was
copied from, and with which strides, is a question about digits alone, and no data is looked at.
Dimensions of size 1 have no digit. (CUTLASS does the same under the name of CuTe layouts.)
"""

import math
from collections.abc import Sequence

Digit = tuple[int, int, int]  # the dimension it is part of, size, stride


def digits_of(shape: Sequence[int], stride: Sequence[int]) -> list[Digit]:
    """A layout as digits of a position: dimension, size and stride, those of size 1 left out."""
    return [(i, n, s) for i, (n, s) in enumerate(zip(shape, stride, strict=True)) if n != 1]


def through(
    digits: Sequence[Digit], copied: Sequence[int], source: Sequence[int]
) -> list[Digit] | None:
    """A tensor of sizes `copied` and strides `source` was copied densely, and these digits read the
    copy, every element once: the digits that read the same of the source. None where it is not so.

    Both are ways to write a position in the copy; from the last digit on, each is split until the
    two agree.
    """
    below = [(n, s) for n, s in zip(copied, source, strict=True) if n != 1]
    split: list[list[Digit]] = [[] for _ in digits]
    position = 1
    for at in sorted(range(len(digits)), key=lambda i: digits[i][2]):
        owner, size, stride = digits[at]
        # Read densely and once: each digit steps over exactly what the digits below it cover.
        if stride != position:
            return None
        position *= size
        while size > 1:
            if not below:
                return None
            num, step = below.pop()
            # Two digits can be split alike only where the size of one divides that of the other.
            taken = math.gcd(num, size)
            if taken != min(num, size):
                return None
            split[at].insert(0, (owner, taken, step))
            size //= taken
            if taken < num:
                below.append((num // taken, step * taken))
    return None if below else [digit for part in split for digit in part]


def merged(digits: Sequence[Digit], num_dims: int) -> tuple[int, ...] | None:
    """One stride per dimension, where the digits of each continue each other."""
    found = [1] * num_dims
    goes_on: dict[int, int] = {}
    # From the innermost part outwards: each part must step as far as the ones below it reach.
    for owner, size, stride in reversed(digits):
        if owner not in goes_on:
            found[owner] = stride
        elif goes_on[owner] != stride:
            return None
        goes_on[owner] = stride * size
    return tuple(found)
