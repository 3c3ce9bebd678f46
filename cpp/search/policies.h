// Search over eviction policies: the greedy walk of greedy/evict.h as a decoder from a few numbers
// (powers, a weight per class of alike values, later per value) to a schedule, and a climb over the
// numbers. Alike layers share their weights, so the space stays small however deep the model is.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/control.h"
#include "core/problem.h"
#include "greedy/evict.h"

namespace rekindle {

struct PolicySearch {
    std::vector<Id> order;        // the base order of all walks
    std::vector<Id> classes;      // per value: its class
    std::vector<double> weights;  // per value: where to start from; empty means 1 for all
    std::int64_t budget = 0;
    std::int64_t max_walks = 1'000'000;
};

struct PolicyResult {
    std::vector<Id> schedule;  // the cheapest within the budget; empty where none was found
    double cost = 0;
    std::int64_t walks = 0;
};

PolicyResult search_policy(const Problem& problem, const PolicySearch& search, std::uint64_t seed,
                           Control& control, bool host = true);

// One climb per seed on up to `num_threads` threads; the cheapest (ties: the first seed's).
PolicyResult search_policies(const Problem& problem, const PolicySearch& search,
                             std::span<const std::uint64_t> seeds, int num_threads,
                             Control& control);

}  // namespace rekindle
