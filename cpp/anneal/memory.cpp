// The loops over slots and blocks. Those marked REKINDLE_SIMD_CLONES are the hot ones; they add and
// compare whole numbers, so every clone gives the same.
#include "anneal/memory.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/simd.h"

namespace rekindle {

namespace {

using Size = std::int64_t;
constexpr Size chunk = 32;  // slots at a time: a fixed number, so that the loops have no rests

constexpr std::size_t idx(std::int32_t i) { return static_cast<std::size_t>(i); }

Size above(Size x, Size line) { return x > line ? x : line; }

struct View {
    const Size* memory;
    const Size* pending;
    const Size* maximum;
    int block_bits;
};

}  // namespace

REKINDLE_SIMD_CLONES static Excess sum_above(const View& view,
                                             std::span<const MemorySegment> segments, Size soft,
                                             Size hard) {
    const Size gap = hard - soft;
    Size soft_sum = 0, hard_sum = 0;
    for (const MemorySegment& s : segments) {
        for (Size first = s.first; first <= s.last;) {
            const Size block = first >> view.block_bits;
            const Size start = first & -chunk;
            const Size last = std::min<Size>(s.last, start + chunk - 1);
            const Size most = view.maximum[block] + std::max<Size>(s.change, 0);
            const Size base = view.pending[block] - soft;
            // Nothing in the block is above the lower line, before or after.
            if (most <= soft) {
                first = ((block + 1) << view.block_bits);
                continue;
            }
            if (last - first < 4) {
                for (Size t = first; t <= last; ++t) {
                    const Size x = view.memory[t] + base, y = x + s.change;
                    soft_sum += above(y, 0) - above(x, 0);
                    hard_sum += above(y, gap) - above(x, gap);
                }
            } else {
                // The whole chunk, with the change masked: a loop of fixed length without branches
                // becomes a few vector instructions; one over [first, last] has rests that cost
                // more than the slots it spares.
                const Size low = first - start, high = last - start;
                const Size* memory = view.memory + start;
                for (Size k = 0; k < chunk; ++k) {
                    const Size x = memory[k] + base;
                    const Size y = x + (k >= low && k <= high ? s.change : 0);
                    soft_sum += above(y, 0) - above(x, 0);
                    hard_sum += above(y, gap) - above(x, gap);
                }
            }
            first = last + 1;
        }
    }
    return {soft_sum, hard_sum};
}

// The largest of `count` numbers, a multiple of 32.
REKINDLE_SIMD_CLONES static Size largest(const Size* numbers, Size count) {
    Size most = numbers[0];
    for (Size start = 0; start < count; start += chunk)
        for (Size k = 0; k < chunk; ++k) most = std::max(most, numbers[start + k]);
    return most;
}

std::int32_t BlockMemory::resize(std::int32_t wanted) {
    block_bits_ = 5;
    // A range costs its two border blocks slot by slot and all blocks between once, so a block is
    // to have about as many slots as there are blocks (up to 8 times fewer: passing a block is
    // cheap).
    while ((wanted >> block_bits_) > (8 << block_bits_)) ++block_bits_;
    const std::int32_t num_blocks = (wanted >> block_bits_) + 1;
    memory_.resize(idx(num_blocks << block_bits_));
    // `largest` reads whole chunks of blocks; those past the last are zero, below any peak.
    const auto whole_chunks = (idx(num_blocks) + chunk - 1) & -std::size_t{chunk};
    pending_.resize(whole_chunks);
    maximum_.assign(whole_chunks, 0);
    weight_.assign(whole_chunks, 0);
    return num_blocks << block_bits_;
}

void BlockMemory::assign(std::span<const std::int64_t> memory) {
    memory_.assign(memory.begin(), memory.end());
    std::fill(pending_.begin(), pending_.end(), 0);
    const double unit = std::exchange(unit_, 0);
    for (std::size_t b = 0; b < num_blocks(); ++b) refresh_block(b);
    if (unit > 0) smooth(unit);
}

std::int64_t BlockMemory::peak() const {
    return std::max<Size>(0, largest(maximum_.data(), static_cast<Size>(maximum_.size())));
}

std::int32_t BlockMemory::peak_slot() const {
    const auto best = std::max_element(maximum_.begin(), maximum_.end());
    auto t = static_cast<std::int32_t>((best - maximum_.begin()) << block_bits_);
    while (at(t) != *best) ++t;
    return t;
}

Excess BlockMemory::excess_change(std::span<const MemorySegment> segments, Lines lines) const {
    const View view{memory_.data(), pending_.data(), maximum_.data(), block_bits_};
    return sum_above(view, segments, lines.soft, lines.hard);
}

bool BlockMemory::may_gain(std::int32_t first, std::int32_t stop, std::int64_t size, Lines lines,
                           double soft_weight, double wanted, double& gain) const {
    while (first < stop) {
        const std::int32_t block = first >> block_bits_;
        const std::int32_t next = std::min(stop, (block + 1) << block_bits_);
        if (const std::int64_t most = maximum_[idx(block)]; most > lines.soft) {
            const auto soft = static_cast<double>(std::min(size, most - lines.soft));
            const auto hard =
                static_cast<double>(std::clamp<std::int64_t>(most - lines.hard, 0, size));
            gain += static_cast<double>(next - first) * (soft_weight * soft + hard);
            if (gain >= wanted) return true;
        }
        first = next;
    }
    return false;
}

void BlockMemory::add(std::span<const MemorySegment> segments, int sign) {
    // Segments come in order, several to a block: its maximum is found once, after the last.
    std::size_t stale = no_block;
    for (const MemorySegment& s : segments) add_range(s.first, s.last, sign * s.change, stale);
    if (stale != no_block) refresh_block(stale);
}

void BlockMemory::add_range(std::int32_t first, std::int32_t last, std::int64_t change,
                            std::size_t& stale) {
    const std::int32_t size = 1 << block_bits_;
    while (first <= last) {
        const auto block = idx(first >> block_bits_);
        const auto start = static_cast<std::int32_t>(block << block_bits_);
        const std::int32_t stop = std::min(last, start + size - 1);
        if (first == start && stop == start + size - 1) {
            pending_[block] += change;
            maximum_[block] += change;
            if (unit_ > 0) weight_[block] *= std::exp2(static_cast<double>(change) / unit_);
        } else {
            for (std::int32_t t = first; t <= stop; ++t) memory_[idx(t)] += change;
            if (stale != block && stale != no_block) refresh_block(stale);
            stale = block;
        }
        first = stop + 1;
    }
}

void BlockMemory::refresh_block(std::size_t block) {
    const std::int64_t* first = memory_.data() + (block << block_bits_);
    maximum_[block] = largest(first, Size{1} << block_bits_) + pending_[block];
    if (unit_ > 0) refresh_weight(block);
}

void BlockMemory::refresh_weight(std::size_t block) {
    const std::size_t first = block << block_bits_, stop = (block + 1) << block_bits_;
    const double base = static_cast<double>(pending_[block]) - smooth_base_;
    double sum = 0;
    for (std::size_t t = first; t < stop; ++t)
        // Empty slots are no steps.
        if (memory_[t] + pending_[block] >= 0)
            sum += std::exp2((static_cast<double>(memory_[t]) + base) / unit_);
    weight_[block] = sum;
}

// Relative to the peak at that time: 2^(memory / unit) itself has no place in a double.
void BlockMemory::smooth(double unit) {
    unit_ = unit;
    smooth_base_ = static_cast<double>(peak());
    for (std::size_t b = 0; b < num_blocks(); ++b) refresh_weight(b);
}

double BlockMemory::smooth_peak() const {
    std::array<double, 8> sums{};  // side by side: each addition waits for the one before
    for (std::size_t b = 0; b < weight_.size(); b += sums.size())
        for (std::size_t k = 0; k < sums.size(); ++k) sums[k] += weight_[b + k];
    const double sum = std::accumulate(sums.begin(), sums.end(), 0.0);
    return smooth_base_ + unit_ * std::log2(std::max(sum, 1e-300));
}

}  // namespace rekindle
