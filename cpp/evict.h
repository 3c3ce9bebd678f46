// Greedy rematerialization: walk an order of the ops, keep what fits, evict what is cheapest to
// bring back per byte and time until its next use, recompute (recursively) what is missing.
// The eviction score follows dynamic tensor rematerialization (Kirisame et al. 2021), with the true
// next use in place of staleness, since the future is known here.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "control.h"
#include "problem.h"

namespace rekindle {

struct Eviction {
    bool fits = false;          // false: some op could not be run within the limit
    std::vector<Id> schedule;   // without dead runs
};

// `limit` bounds the memory (without in-place savings, so the simulated peak is at most that).
// `max_steps` bounds the length, so that a hopeless limit ends soon.
Eviction evict(const Problem& problem, std::span<const Id> order, std::int64_t limit,
               std::size_t max_steps, Control& control);

}  // namespace rekindle
