// The timeline's array of memory, slot by slot in blocks: the loops that are worth wide registers.
#pragma once

#include <cstdint>
#include <span>

namespace rekindle {

struct MemorySegment {
    std::int32_t first, last;  // slots
    std::int64_t change;
};

struct MemoryView {
    const std::int64_t* memory;   // per slot, without its block's pending addition
    const std::int64_t* pending;  // per block
    const std::int64_t* maximum;  // per block, pending addition included
    int block_bits;
};

// What changes of memory do to the sums of what exceeds two lines, soft <= hard.
void sum_above(const MemoryView& view, std::span<const MemorySegment> segments, std::int64_t soft,
               std::int64_t hard, std::int64_t& soft_change, std::int64_t& hard_change);

// The largest of `count` numbers, a multiple of 32.
std::int64_t largest(const std::int64_t* numbers, int count);

}  // namespace rekindle
