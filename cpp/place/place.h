// Static placement: offsets in one range of addresses for blocks whose lifetimes are known, so that
// blocks that live at once do not overlap and the range is short. Strongly NP-hard (dynamic storage
// allocation, Garey and Johnson SR2).
//
//   lower bound  the most bytes that live at once
//   greedy       blocks in some order, each at the lowest place that is free during its life; the
//                order is improved by moving blocks that end too high to the front
//   exact        depth first over placements in ascending order of offsets, for one capacity
//
// The exact search keeps to canonical solutions, as MiniMalloc does (Moffitt, ASPLOS 2023): every
// block lies on the bottom or on another, which any solution becomes when its blocks sink. So the
// order of placement is the whole solution. A node fails where, in some stretch of time, the blocks
// still to come cannot be stacked above the lowest offsets that are left to them.
#pragma once

#include <cstdint>
#include <vector>

#include "core/control.h"

namespace rekindle {

struct Interval {
    std::int64_t size;
    std::int64_t birth;  // alive from here
    std::int64_t death;  // up to here, exclusive
    std::int64_t alignment;
};

struct Placement {
    std::vector<std::int64_t> offsets;
    std::int64_t bytes = 0;        // the end of the highest block
    std::int64_t lower_bound = 0;  // proven: no placement needs less
};

// The best placement found; ends where it is proven to be the shortest, or within the capacity.
Placement place(const std::vector<Interval>& intervals, std::int64_t capacity, std::uint64_t seed,
                Control& control);

}  // namespace rekindle
