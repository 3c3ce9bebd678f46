#include "anneal_memory.h"

#include <algorithm>
#include <cstddef>

#include "wide.h"

namespace rekindle {

namespace {

using Size = std::int64_t;
constexpr Size chunk = 32;  // slots at a time: a fixed number, so that the loops have no rests

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

}  // namespace rekindle
