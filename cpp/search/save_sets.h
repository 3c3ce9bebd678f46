// Search over save sets: a price per value, decoded by a minimum cut into what is kept across one
// moment (for a training step: the loss), that into a schedule, and a climb over the prices.
//
// The schedule of a save set: the ops of the order up to the moment once; then the others, and
// right before each, recomputed once, what it reads and nobody kept. Its cost is the cut's. What
// does not fit is left to the greedy walk (greedy/evict.h) with that schedule as its order; then
// the runs that there is room for are taken out (greedy/prune.h). Alike layers share moves of their
// prices, and moves along the order tell alike layers apart, which a single price cannot. Where the
// moment itself leaves little room, only what crosses a few places of the order can be kept (the
// segments of Chen et al. 2016): how many and where is searched too.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/control.h"
#include "core/problem.h"

namespace rekindle {

struct SaveSetSearch {
    std::vector<Id> order;    // every op once
    Id moment = 0;            // an op
    std::vector<Id> classes;  // per value: its class
    std::int64_t budget = 0;
    std::int64_t max_tries = 1000;
};

struct SaveSetResult {
    std::vector<Id> schedule;  // the cheapest within the budget; empty where none was found
    double cost = 0;
    std::int64_t tries = 0;
};

// The schedule that keeps just `kept` (and the moment's own values) across the moment.
std::vector<Id> schedule_of_save_set(const Problem& problem, std::span<const Id> order, Id moment,
                                     std::span<const Id> kept);

// One climb per seed on up to `num_threads` threads, in the order of the seeds.
std::vector<SaveSetResult> search_save_sets(const Problem& problem, const SaveSetSearch& search,
                                            std::span<const std::uint64_t> seeds, int num_threads,
                                            Control& control);

}  // namespace rekindle
