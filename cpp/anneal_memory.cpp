#include "anneal_memory.h"

#include <algorithm>
#include <cmath>

#include "anneal_timeline.h"
#include "wide.h"

namespace rekindle {

namespace {

using Size = std::int64_t;
constexpr Size chunk = 32;  // slots at a time: a fixed number, so that the loops have no rests

constexpr std::size_t idx(std::int32_t i) { return static_cast<std::size_t>(i); }

Size above(Size x, Size line) { return x > line ? x : line; }

}  // namespace

REKINDLE_WIDE void sum_above(const MemoryView& view, std::span<const MemorySegment> segments,
                             std::int64_t soft, std::int64_t hard, std::int64_t& soft_change,
                             std::int64_t& hard_change) {
    const Size gap = hard - soft;
    Size soft_sum = 0, hard_sum = 0;
    for (const MemorySegment& s : segments) {
        for (Size first = s.first; first <= s.last;) {
            const Size block = first >> view.block_bits;
            const Size start = first & -chunk;
            const Size last = std::min<Size>(s.last, start + chunk - 1);
            const Size most = view.maximum[block] + std::max<Size>(s.change, 0);
            const Size base = view.pending[block] - soft;
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
    soft_change = soft_sum;
    hard_change = hard_sum;
}

REKINDLE_WIDE std::int64_t largest(const std::int64_t* numbers, int count) {
    Size most = numbers[0];
    for (Size start = 0; start < count; start += chunk)
        for (Size k = 0; k < chunk; ++k) most = std::max(most, numbers[start + k]);
    return most;
}

// --- the timeline's memory -------------------------------------------------------------------------

void Timeline::count_excess() {
    excess_ = soft_ = 0;
    for (Slot t = 0; t < num_slots_; ++t)
        if (op_at(t) >= 0) {
            excess_ += over(memory_at(t), budget_);
            soft_ += over(memory_at(t), soft_line_);
        }
}

void Timeline::rebuild_memory() {
    const std::size_t blocks = idx(num_slots_ >> block_bits_);
    memory_.assign(idx(num_slots_), 0);
    pending_.assign(blocks, 0);
    maximum_.assign(blocks, 0);
    std::vector<std::int64_t> delta(idx(num_slots_) + 1, 0);
    for (Id v = 0; v < p_.num_values(); ++v) {
        const auto list = events(v);
        if (list.empty()) continue;
        intervals(v, list, true, new_intervals_, false);
        for (std::size_t k = 0; k < new_intervals_.count; ++k) {
            delta[idx(new_intervals_.room[k].first)] += p_.size_of(v);
            delta[idx(new_intervals_.room[k].last) + 1] -= p_.size_of(v);
        }
    }
    std::int64_t live = 0, largest = 0;
    for (Slot t = 0; t < num_slots_; ++t) {
        live += delta[idx(t)];
        const Id op = op_at(t);
        memory_[idx(t)] = live + (op >= 0 ? p_.workspace[idx(op)] : -empty_offset);
        largest = std::max(largest, memory_[idx(t)]);
    }
    // The excess of all slots together stays below 2^62.
    std::int64_t total = largest;
    for (Id v = 0; v < p_.num_values(); ++v)
        if (p_.producer_of(v) >= 0) total += p_.size_of(v);
    shift_ = 0;
    while (((total >> shift_) + 1) > (std::int64_t{1} << 61) / (std::int64_t{num_slots_} + 1))
        ++shift_;
    round_ = (std::int64_t{1} << shift_) - 1;
    weight_.assign(blocks, 0);
    for (std::size_t b = 0; b < blocks; ++b) refresh_block(b);
    if (unit_ > 0) rebuild_smooth();
    count_excess();
}

void Timeline::apply_memory(int sign) {
    // Segments come in order, several to a block: its maximum is found once, after the last.
    std::size_t stale = no_block;
    for (const MemorySegment& s : segments_) add_range(s.first, s.last, sign * s.change, stale);
    if (stale != no_block) refresh_block(stale);
}

void Timeline::add_range(Slot first, Slot last, std::int64_t change, std::size_t& stale) {
    const Slot size = 1 << block_bits_;
    while (first <= last) {
        const auto block = idx(first >> block_bits_);
        const auto start = static_cast<Slot>(block << block_bits_);
        const Slot stop = std::min(last, start + size - 1);
        if (first == start && stop == start + size - 1) {
            pending_[block] += change;
            maximum_[block] += change;
            if (unit_ > 0) weight_[block] *= std::exp2(static_cast<double>(change) / unit_);
        } else {
            for (Slot t = first; t <= stop; ++t) memory_[idx(t)] += change;
            if (stale != block && stale != no_block) refresh_block(stale);
            stale = block;
        }
        first = stop + 1;
    }
}

void Timeline::refresh_block(std::size_t block) {
    const std::int64_t* first = memory_.data() + (block << block_bits_);
    maximum_[block] = largest(first, 1 << block_bits_) + pending_[block];
    if (unit_ > 0) refresh_weight(block);
}

void Timeline::refresh_weight(std::size_t block) {
    const std::size_t first = block << block_bits_, stop = (block + 1) << block_bits_;
    const double base = static_cast<double>(pending_[block]) - smooth_base_;
    double sum = 0;
    for (std::size_t t = first; t < stop; ++t)
        if (memory_[t] + pending_[block] >= 0)
            sum += std::exp2((static_cast<double>(memory_[t]) + base) / unit_);
    weight_[block] = sum;
}

void Timeline::smooth(double unit) {
    unit_ = unit;
    rebuild_smooth();
}

void Timeline::rebuild_smooth() {
    smooth_base_ = static_cast<double>(peak());
    weight_.assign(maximum_.size(), 0);
    for (std::size_t b = 0; b < weight_.size(); ++b) refresh_weight(b);
}

double Timeline::smooth_peak() const {
    double sum = 0;
    for (double w : weight_) sum += w;
    return smooth_base_ + unit_ * std::log2(std::max(sum, 1e-300));
}

}  // namespace rekindle
