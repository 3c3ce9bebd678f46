// Small peaks by order alone: every op once, which order needs the least memory?
//
// What is in memory between two steps depends only on the set of ops that have run, so a search
// over such sets (closed under "what it reads has run") finds the smallest peak: "is there an order
// whose steps all fit a limit" is a reachability question, asked under ever lower limits.
//
// Two rules keep the sets few, and lose nothing. Memory between steps is submodular on closed sets
// (a value counts from where it is made until all of its readers have run), so a later set gains at
// least as much from an op as an earlier one. Hence
// - an op that fits and leaves no more memory than before may run at once;
// - so may an op together with what then runs by the first rule, if that leaves no more than before
//   and each of those others waits for the op: no set between the two is smaller than the last.
//
// Layer by layer (number of ops run), at most `width` sets with the least memory go on. While no
// set had to be left out, failure is a proof.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/control.h"
#include "core/problem.h"

namespace rekindle {

struct OrderSearch {
    std::int64_t budget = 0;  // a peak of no more is small enough
    std::size_t max_width = 1 << 12;
    std::int64_t max_sets = 2'000'000;  // looked at in all; the same for every run
};

struct OrderResult {
    std::vector<Id> order;  // the smallest peak found, or the start
    std::int64_t peak = 0;
    std::int64_t at_least = 0;  // proven: no order without recomputation has a smaller peak
    std::int64_t sets = 0;      // sets of ops looked at
};

// `start`: every op once, in a valid order.
OrderResult smallest_order(const Problem& problem, std::span<const Id> start,
                           const OrderSearch& search, Control& control);

}  // namespace rekindle
