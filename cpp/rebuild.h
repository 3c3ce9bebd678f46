// Large-neighbourhood search over schedules: take the repeated runs out of a part of the schedule (a
// stretch of time, or of the ops), sometimes force a value to be made again instead of kept, let the
// greedy walk (evict.h) put back what is missing within the budget, by a policy that differs a
// little each time, and take out the runs that there is room for (prune.h). Kept if not dearer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "control.h"
#include "problem.h"

namespace rekindle {

struct Rebuilt {
    std::vector<Id> schedule;  // never dearer than the start, within the budget
    std::int64_t tries = 0;
};

// Starts must be valid and within the budget; one search per seed on up to `num_threads` threads,
// each from its own start, or all from one.
std::vector<Rebuilt> rebuild(const Problem& problem, const std::vector<std::vector<Id>>& starts,
                             std::int64_t budget, std::span<const std::uint64_t> seeds,
                             std::int64_t max_tries, int num_threads, Control& control);

}  // namespace rekindle
