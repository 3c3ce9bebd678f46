// Large-neighbourhood search over schedules: take the repeated runs out of a part of the schedule
// (a stretch of time, or of the ops), sometimes force a value to be recomputed instead of kept, let
// the greedy walk (greedy/evict.h) put back what is missing within the budget, by a policy that
// differs a little each time, and take out the runs that there is room for (greedy/prune.h). Kept
// if not dearer. Where there are several starts, a part of the schedule may also be taken from
// another of them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/control.h"
#include "core/problem.h"

namespace rekindle {

struct LnsOptions {
    std::int64_t budget = 0;
    std::int64_t max_tries = 0;
    // From starts that are far from good: every walk is taken to its end, and next to nothing
    // dearer is kept. Else they are annealed: something dearer is kept at first, by up to `hot` of
    // the cost of all ops, and most walks end where they become much dearer than the schedule at
    // hand.
    double hot = 0;
};

struct LnsResult {
    std::vector<Id> schedule;  // never dearer than the start, within the budget
    std::int64_t tries = 0;
};

// Starts must be valid and within the budget; one search per seed on up to `num_threads` threads,
// each from its own start, or all from one.
std::vector<LnsResult> large_neighbourhood_search(const Problem& problem,
                                                  const std::vector<std::vector<Id>>& starts,
                                                  const LnsOptions& options,
                                                  std::span<const std::uint64_t> seeds,
                                                  int num_threads, Control& control);

}  // namespace rekindle
