// The memory of every slot of a timeline: an array in blocks, each with a pending addition and its
// maximum. A range touches its two border blocks slot by slot and the blocks between once each;
// what lies below the lines before and after is settled by the block's maximum alone.
//
// Chosen by measurement over an add-max segment tree (FastSA, 2.1.1) and one whose leaves are such
// blocks (benchmarks/fastsa/structure.md): a move wants sums over many slots, which a tree has to
// go down to one by one. `structure.py` puts the trees in this one's place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace rekindle {

struct MemorySegment {
    std::int32_t first, last;  // slots
    std::int64_t change;
};

// What to sum: memory above two lines, soft <= hard.
struct Lines {
    std::int64_t soft, hard;
};

struct Excess {
    std::int64_t soft = 0, hard = 0;
};

class BlockMemory {
   public:
    // Empty slots hold less than minus this; all others hold no less than zero.
    static constexpr std::int64_t empty_below = std::int64_t{1} << 60;

    // Makes room for at least `wanted` slots; how many there are.
    std::int32_t resize(std::int32_t wanted);
    void assign(std::span<const std::int64_t> memory);

    std::int64_t at(std::int32_t t) const {
        return memory_[static_cast<std::size_t>(t)] +
               pending_[static_cast<std::size_t>(t >> block_bits_)];
    }
    std::int64_t peak() const;
    std::int32_t peak_slot() const;  // a slot at the peak

    // Segments in order, without overlap; `sign` is 1 or -1.
    void add(std::span<const MemorySegment> segments, int sign);
    // What adding the segments would do to the sums of what exceeds two lines.
    Excess excess_change(std::span<const MemorySegment> segments, Lines lines) const;
    // Adds to `gain` no less than what the weighted excess in [first, stop) would fall by with
    // `size` less in each of these slots; true, and may end early, if `gain` reaches `wanted`.
    bool may_gain(std::int32_t first, std::int32_t stop, std::int64_t size, Lines lines,
                  double soft_weight, double wanted, double& gain) const;

    // Smooth peak: log2 of the sum over steps of 2^(memory / unit), in size units (C.2 of FastSA).
    void smooth(double unit);
    double smooth_peak() const;

   private:
    static constexpr std::size_t no_block = std::numeric_limits<std::size_t>::max();

    std::size_t num_blocks() const { return memory_.size() >> block_bits_; }
    void add_range(std::int32_t first, std::int32_t last, std::int64_t change, std::size_t& stale);
    void refresh_block(std::size_t block);
    void refresh_weight(std::size_t block);

    int block_bits_ = 5;
    std::vector<std::int64_t> memory_;  // per slot, without the block's pending addition
    // Per block, and zeros up to whole chunks.
    std::vector<std::int64_t> pending_;
    std::vector<std::int64_t> maximum_;  // pending addition included
    std::vector<double> weight_;         // sum of 2^((memory - base) / unit)
    double unit_ = 0;                    // of the smooth peak; 0: not kept
    double smooth_base_ = 0;
};

}  // namespace rekindle
