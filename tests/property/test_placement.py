"""Placements against brute force, and what must hold for all of them."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.core.generate import cut_rectangle
from rekindle.core.placement import Block, overlapping, place


def best_by_brute_force(blocks: list[Block]) -> int:
    """The least over all orders, each block at the lowest place that is free during its life: a
    shortest placement whose blocks have sunk is one of these."""
    best = sum(b.size + b.alignment for b in blocks)
    for order in itertools.permutations(blocks):
        placed: list[tuple[Block, int]] = []
        for block in order:
            beside = sorted(
                (offset, offset + other.size)
                for other, offset in placed
                if other.birth < block.death and block.birth < other.death
            )
            at = 0
            for begin, end in beside:
                if at + block.size <= begin:
                    break
                at = max(at, -(-end // block.alignment) * block.alignment)
            placed.append((block, at))
        best = min(best, max((offset + b.size for b, offset in placed), default=0))
    return best


def random_blocks(rng: random.Random, num: int, aligned: bool = False) -> list[Block]:
    found = []
    for _ in range(num):
        birth = rng.randrange(8)
        size, death = rng.randrange(1, 9), birth + rng.randrange(1, 6)
        found.append(Block(size, birth, death, rng.choice((1, 2, 4)) if aligned else 1))
    return found


@pytest.mark.parametrize("aligned", [False, True])
def test_the_shortest_placement_of_few_blocks_is_found_and_proven(aligned: bool) -> None:
    for seed in range(60):
        blocks = random_blocks(random.Random(seed), 6, aligned)
        found = place(blocks, time_limit_s=5)
        assert found.size_bytes == best_by_brute_force(blocks), blocks
        assert found.lower_bound == found.size_bytes
        assert found.gap == 0
        assert overlapping(blocks, found.offsets) is None


block = st.builds(
    lambda size, birth, life, alignment: Block(size, birth, birth + life, alignment),
    st.integers(0, 50),
    st.integers(-5, 30),
    st.integers(0, 12),
    st.sampled_from((1, 1, 1, 8, 512)),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(block, max_size=40), st.integers(0, 3))
def test_every_placement_is_valid(blocks: list[Block], seed: int) -> None:
    found = place(blocks, time_limit_s=0.02, seed=seed)
    assert overlapping(blocks, found.offsets) is None
    ends = [o + b.size for b, o in zip(blocks, found.offsets, strict=True)]
    assert found.size_bytes >= max(ends, default=0)
    times = sorted({b.birth for b in blocks})
    live = [sum(b.size for b in blocks if b.birth <= t < b.death) for t in times]
    assert max(live, default=0) <= found.lower_bound <= found.size_bytes


def test_blocks_that_fill_a_rectangle_are_placed_without_a_gap() -> None:
    for seed in range(12):
        blocks = cut_rectangle(random.Random(seed), 30, 64, 40)
        found = place(blocks, capacity=64, time_limit_s=20)
        assert found.size_bytes == 64, seed
        assert overlapping(blocks, found.offsets) is None


def test_the_same_seed_gives_the_same_placement_and_a_capacity_ends_the_search() -> None:
    blocks = random_blocks(random.Random(3), 200)
    least = place(blocks, time_limit_s=0).size_bytes  # the first greedy order alone
    one, two = (place(blocks, capacity=least, time_limit_s=60, seed=5) for _ in range(2))
    assert one == two
    assert one.size_bytes <= least


@pytest.mark.parametrize(
    "bad",
    [Block(-1, 0, 1), Block(1, 2, 1), Block(1, 0, 1, 0), Block(2**62, 0, 1)],
)
def test_what_is_no_block_is_refused(bad: Block) -> None:
    with pytest.raises(ValueError, match="a block needs"):
        place([bad])


def test_an_overlap_is_seen() -> None:
    blocks = [Block(4, 0, 2), Block(4, 1, 3), Block(4, 2, 4, alignment=8)]
    assert overlapping(blocks, (0, 4, 0)) is None
    assert overlapping(blocks, (0, 3, 0)) == (0, 1)
    assert overlapping(blocks, (0, 4, 4)) == (2, 2)
    assert overlapping(blocks, (0, 8, 8)) == (1, 2)
    assert place([]).size_bytes == 0
