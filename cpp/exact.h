// The optimum over all schedules of a tiny problem, by shortest paths over what is in memory.
//
// A state is the set of live values and the set of run-once ops that have run. A step runs one op
// whose inputs are live, if what is live, its outputs and its workspace fit (an in-place output may
// take the place of an input that goes with the step); before and after it any live value may be
// dropped for nothing. States are at most 2^(values + run-once ops): for a couple of dozen bits.
#pragma once

#include <cstdint>
#include <vector>

#include "control.h"
#include "problem.h"

namespace rekindle {

struct Exact {
    bool finished = false;     // false: stopped by the limit of time or bits
    bool feasible = false;
    std::vector<Id> schedule;  // cheapest within the budget
};

constexpr int max_exact_bits = 26;
constexpr int too_many_bits = 1 << 20;

// How many bits the states of this problem have, or too_many_bits where they cannot say it all.
int exact_bits(const Problem& problem);
Exact solve_exact(const Problem& problem, std::int64_t budget, Control& control);

}  // namespace rekindle
