// The optimum over all schedules of a small problem, by A* over what is in memory.
//
// A state is the set of live values and the set of run-once ops that have run, after a step. A step
// runs one op whose inputs are live. Where that does not fit, some live values are dropped first,
// for nothing: every smallest set (none of which could stay) that makes room. To drop sooner or
// more is never needed, because what is live can still be dropped later. An in-place output takes
// the place of an input that is dropped with the step.
//
// From a state at least the ops must run that the missing goals need, and those that make what
// these miss, and so on: their cost never falls by more than a step costs, so the first time a
// state is taken up its cost is the least, and only states whose cost with that remainder stays
// below the optimum are. Their number decides whether a problem is small enough, not the number of
// values.
#pragma once

#include <cstdint>
#include <vector>

#include "core/control.h"
#include "core/problem.h"

namespace rekindle {

struct ExactResult {
    bool finished = false;     // false: stopped by the limit of time, states or bits
    bool feasible = false;     // a schedule within the budget, and cheaper than `below`, exists
    std::vector<Id> schedule;  // the cheapest
};

struct ExactLimits {
    std::int64_t below = -1;             // only schedules that cost less count; -1: all
    std::size_t max_states = 1'000'000;  // some 100 bytes and a few microseconds each
};

constexpr int max_exact_bits = 64;
constexpr int too_many_bits = 1 << 20;

// How many bits the states of this problem have, or too_many_bits where they cannot say it all.
int exact_bits(const Problem& problem);
ExactResult solve_exact(const Problem& problem, std::int64_t budget, const ExactLimits& limits,
                        Control& control);

}  // namespace rekindle
