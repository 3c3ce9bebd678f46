"""The allocator's rules by hand, and what a schedule asks of it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle import _native
from rekindle.core import Op, Problem, Schedule, Value, keep_all, simulate
from rekindle.predict.caching_allocator import (
    best_arena,
    pool_events,
    pool_peak,
    pool_rules,
    reserved_peak,
)
from rekindle.profile.block_sizes import CudaBlocks, allocator_settings

MIB = 2**20


class Pool:
    """The native pool, with blocks that know their size."""

    def __init__(self, **rules):
        self.native = _native.CachingPool(_native.PoolRules(**rules))

    def take(self, request):
        block = self.native.allocate(request)
        return block, self.native.block_bytes(block)

    def give(self, *blocks):
        for block, _ in blocks:
            self.native.release(block)

    @property
    def reserved(self):
        return self.native.reserved_bytes / MIB


def test_small_requests_are_exact_and_share_a_segment():
    pool = Pool()
    blocks = [pool.take(1000) for _ in range(3)]
    assert pool.native.allocated_bytes == 3 * 1024
    assert pool.reserved == 2
    pool.give(*blocks)
    assert pool.native.allocated_bytes == 0
    assert pool.take(MIB)[1] == MIB
    assert pool.reserved == 2  # the freed blocks were one again
    pool.take(MIB)
    pool.take(1)
    assert pool.reserved == 4


def test_a_rest_of_at_most_one_mib_stays_with_the_block():
    pool = Pool()
    assert pool.take(49 * MIB + MIB // 4)[1] == 50 * MIB
    assert pool.take(48 * MIB + MIB // 4)[1] == 48 * MIB + MIB // 4
    assert Pool(expandable=True).take(49 * MIB + MIB // 4)[1] == 49 * MIB + MIB // 4


def test_the_smallest_block_that_is_large_enough_is_taken():
    pool = Pool()
    pool.give(pool.take(30 * MIB), pool.take(20 * MIB))
    assert pool.take(19 * MIB + MIB // 2)[1] == 20 * MIB
    assert pool.take(25 * MIB)[1] == 25 * MIB
    assert pool.reserved == 50


def test_requests_of_one_to_ten_mib_share_segments_of_twenty():
    pool = Pool()
    assert [pool.take(6 * MIB)[1] for _ in range(3)] == [6 * MIB] * 3
    assert pool.reserved == 20
    assert pool.take(19 * MIB // 10)[1] == 2 * MIB  # takes the last 2 MiB whole
    assert Pool(large_segment=40 * MIB).take(2 * MIB)[1] == 2 * MIB


def test_blocks_of_two_segments_never_become_one():
    pool = Pool()
    pool.give(pool.take(30 * MIB), pool.take(30 * MIB))
    pool.take(60 * MIB)
    assert pool.reserved == 120
    arena = Pool()
    arena.native.reserve(60 * MIB)
    arena.give(arena.take(30 * MIB), arena.take(30 * MIB))
    arena.take(60 * MIB)
    assert arena.reserved == 60


def test_expandable_segments_grow_by_their_unit_at_the_end():
    pool = Pool(expandable=True)
    first, second = pool.take(15 * MIB), pool.take(10 * MIB)
    assert pool.reserved == 40
    pool.give(first)
    third = pool.take(20 * MIB)  # behind the second: 15 MiB are there
    assert pool.reserved == 60
    pool.give(second, third)
    assert pool.take(60 * MIB)[1] == 60 * MIB
    assert pool.reserved == 60
    pool.take(512)
    assert pool.reserved == 62


def test_rounding_to_shares_of_a_power_of_two():
    pool = Pool(divisions=4)
    assert pool.take(1200 * 1024)[1] == 1280 * 1024  # the example of torch's documentation
    assert pool.take(1024 * 1024)[1] == 1024 * 1024
    assert pool.take(513)[1] == 1024


def test_blocks_above_the_split_limit_stay_whole():
    pool = Pool(max_split=100 * MIB)
    big = pool.take(200 * MIB)
    pool.give(big)
    pool.take(30 * MIB)
    assert pool.reserved == 230  # not from the large one
    assert pool.take(190 * MIB)[1] == 200 * MIB
    assert pool.reserved == 230


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 60 * MIB)), max_size=60), st.booleans())
def test_the_pool_never_loses_a_byte(actions, expandable):
    pool, live = Pool(expandable=expandable), []
    for is_free, size in actions:
        if is_free and live:
            pool.give(live.pop(size % len(live)))
        else:
            live.append(pool.take(size))
            rounded = -(-size // 512) * 512
            slack = 0 if expandable or rounded <= MIB else MIB
            assert rounded <= live[-1][1] <= rounded + slack
        held = sum(size for _, size in live)
        assert pool.native.allocated_bytes == held <= pool.native.peak_bytes
        assert held <= pool.native.reserved_bytes
    pool.give(*live)
    assert pool.native.allocated_bytes == 0


def random_chain(seed):
    source = random.Random(seed)
    values = [Value("input", 0)]
    ops = []
    for i in range(30):
        size = CudaBlocks(expandable=True).block_bytes(source.randrange(1, 40 * MIB))
        values.append(Value(f"v{i}", size))
        inputs = tuple({i, source.randrange(i + 1)})
        workspace = 512 * source.randrange(4000)
        ops.append(Op(f"op{i}", 1, inputs, (i + 1,), workspace=workspace))
    return Problem(tuple(values), tuple(ops), resident=(0,), outputs=(30,))


@pytest.mark.parametrize("seed", range(5))
def test_an_arena_reserves_less_than_segments_as_they_come(seed):
    problem = random_chain(seed)
    schedule = keep_all(problem)
    peak, arena = simulate(problem, schedule).peak, best_arena(problem, schedule)
    assert peak - 31 * MIB <= sum(arena)
    reserved = reserved_peak(problem, schedule, arena=arena)
    assert sum(arena) <= reserved < reserved_peak(problem, schedule)
    assert pool_peak(problem, schedule) <= reserved_peak(problem, schedule)


def test_what_the_caller_makes_is_no_request_of_the_ops():
    values = (Value("x", 0), Value("y", 40 * MIB), Value("dy", 50 * MIB), Value("dx", 60 * MIB))
    ops = (
        Op("forward", 1, (0,), (1,), workspace=3 * MIB),
        Op("loss", 0, (1,), (2,), recomputable=False, phase="loss"),
        Op("backward", 1, (2,), (3,)),
    )
    problem = Problem(values, ops, resident=(0,), outputs=(3,))
    schedule = keep_all(problem)
    both = [40 * MIB, 3 * MIB, -2, 50 * MIB, -1, 60 * MIB, -3]
    assert pool_events(problem, schedule) == both
    assert pool_events(problem, schedule, callers=False) == [40 * MIB, 3 * MIB, -2, -1, 60 * MIB]
    assert pool_events(problem, schedule, own=False) == [50 * MIB, -1]
    assert reserved_peak(problem, schedule) == (40 + 20 + 50 + 60) * MIB
    arena = best_arena(problem, schedule)
    assert arena == (60 * MIB,)
    assert reserved_peak(problem, schedule, arena=arena, also=[512]) == (60 + 50 + 2) * MIB


def test_the_settings_of_this_process(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    text = "max_split_size_mb:128, roundup_power2_divisions:[256:1,>:8],large_segment_size_mb:40"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", text)
    assert allocator_settings() == {
        "max_split_size_mb": "128",
        "roundup_power2_divisions": "[256:1;>:8]",
        "large_segment_size_mb": "40",
    }
    pool = _native.CachingPool(pool_rules())
    pool.allocate(2 * MIB)
    assert pool.reserved_bytes == 40 * MIB
    problem = random_chain(0)
    assert best_arena(problem, keep_all(problem)) == ()  # sizes are rounded by other rules
    for setting in ("backend:cudaMallocAsync", "expandable_segments:True"):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", setting)
        assert best_arena(problem, keep_all(problem)) == ()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    assert best_arena(problem, keep_all(problem))
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert best_arena(problem, keep_all(problem)) == ()


def test_a_step_without_large_requests_has_no_arena():
    problem = Problem((Value("x", 0), Value("y", 100)), (Op("op", 1, (0,), (1,)),), (0,), (1,))
    assert best_arena(problem, Schedule((0,))) == ()
