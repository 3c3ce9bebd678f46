// Search over eviction policies: the greedy walk of evict.h as a decoder from a few numbers (powers,
// a weight per class of alike values, later per value) to a schedule, and a climb over the numbers.
// Alike layers share their weights, so the space stays small however deep the model is.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "control.h"
#include "evict.h"
#include "problem.h"

namespace rekindle {

struct PolicySearch {
    std::vector<Id> order;         // the base order of all walks
    std::vector<Id> classes;       // per value: its class
    std::vector<double> weights;   // per value: where to start from; empty means 1 for all
    std::int64_t budget = 0;
    std::int64_t max_walks = 1'000'000;
    std::uint64_t seed = 0;
};

struct PolicyFound {
    std::vector<Id> schedule;  // the cheapest within the budget; empty where none was found
    double cost = 0;
    std::int64_t walks = 0;
};

PolicyFound search_policy(const Problem& problem, const PolicySearch& search, Control& control);

}  // namespace rekindle
