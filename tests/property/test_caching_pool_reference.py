"""The native model of the caching allocator against the one in plain Python."""

import random

import pytest
from support.reference_caching_pool import MIB, ReferencePool

from rekindle import _native

SIZES = (1, 512, 3000, 2**18, MIB - 100, MIB, MIB + 1, 3 * MIB, 7 * MIB, 10 * MIB, 33 * MIB + 7)


def random_events(rng: random.Random, num: int) -> list[int]:
    events: list[int] = []
    live: list[int] = []
    asked = 0
    for _ in range(num):
        if live and rng.random() < 0.48:
            events.append(-live.pop(rng.randrange(len(live))))
        else:
            asked += 1
            live.append(asked)
            events.append(max(1, int(rng.choice(SIZES) * rng.choice((1, 1, rng.random())))))
    return events


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("divisions", [0, 4])
@pytest.mark.parametrize("max_split", [None, 20 * MIB])
def test_same_blocks_and_segments(expandable, divisions, max_split):
    if expandable and max_split is not None:
        return  # the allocator refuses the two together
    for seed in range(40):
        rng = random.Random(seed)
        events = random_events(rng, 150)
        large = rng.choice((20 * MIB, 64 * MIB))
        reference = ReferencePool(expandable, large, divisions, max_split)
        rules = {} if max_split is None else {"max_split": max_split}
        native = _native.CachingPool(
            _native.PoolRules(expandable, large_segment=large, divisions=divisions, **rules)
        )
        if seed % 3 == 0 and not expandable:
            reference.reserve(64 * MIB)
            native.reserve(64 * MIB)
        theirs, ours = [], []
        for event in events:
            if event > 0:
                theirs.append(reference.allocate(event))
                ours.append(native.allocate(event))
                assert native.block_bytes(ours[-1]) == theirs[-1][1].size
            else:
                reference.release(theirs[-event - 1])
                native.release(ours[-event - 1])
            assert native.allocated_bytes == reference.allocated
            assert native.reserved_bytes == reference.reserved
        assert native.peak_bytes == reference.peak_allocated


def test_a_replay_is_the_pool_step_after_step():
    for seed in range(30):
        rng = random.Random(seed)
        events, held = random_events(rng, 100), [rng.choice(SIZES) for _ in range(5)]
        reference = ReferencePool()
        for size in held:
            reference.allocate(size)
        base = reference.allocated, reference.reserved
        reference.peak_allocated = reference.allocated
        for _ in range(2):
            blocks = []
            for event in events:
                if event > 0:
                    blocks.append(reference.allocate(event))
                else:
                    reference.release(blocks[-event - 1])
                    blocks[-event - 1] = None
            for block in filter(None, blocks):
                reference.release(block)
        found = _native.replay(_native.PoolRules(), events, held, [], 2)
        assert (found.base_allocated, found.base_reserved) == base
        assert found.peak_allocated == reference.peak_allocated
        assert found.peak_reserved == reference.peak_reserved


def test_an_arena_serves_all_large_requests() -> None:
    """A single segment is the smallest of its steps that does; a search finds no more than that."""
    rules = _native.PoolRules()
    for seed in range(30):
        events = random_events(random.Random(seed), 120)
        single = _native.best_arena(rules, events, 0, 0)
        if not single:
            assert all(event <= MIB for event in events)
            continue
        assert len(single) == 1
        searched = _native.best_arena(rules, events, 200_000, seed)
        assert searched == _native.best_arena(rules, events, 200_000, seed)
        live = most = 0
        sizes = [e for e in events if e > 0]
        for event in events:
            large = lambda n: n if n > MIB else 0  # noqa: E731
            live += large(event) if event > 0 else -large(sizes[-event - 1])
            most = max(most, live)
        assert most <= sum(searched) <= sum(single)
        for arena in (single, searched):
            found = _native.replay(rules, events, [], arena, 2)
            assert found.large_reserved == sum(arena)
        smaller = sum(single) - 2 * MIB
        if smaller > 0:
            assert _native.replay(rules, events, [], [smaller], 1).large_reserved > smaller


def test_events_that_give_back_what_is_not_there_are_refused():
    rules = _native.PoolRules()
    for events in ([-1], [5, -2], [5, -1, -1], [0]):
        with pytest.raises(ValueError, match="not there"):
            _native.replay(rules, events, [], [], 1)
