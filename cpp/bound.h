// A lower bound on the cost of any schedule within a budget, in any order, at any size.
//
// Take one op k and the moment of its first run. All ancestors of k have run before it; every run of
// a descendant of k comes after it. A value that a descendant needs and that an ancestor makes is in
// memory at that moment, or its producer runs once more afterwards, and then the same holds for what
// that producer reads. What is in memory then, beside what k itself reads and makes, fits into the
// budget less what k takes. So the extra cost is at least
//     min  sum of cost(i) over ops i run again
//     s.t. sum of size(v) over values v kept  <=  room
//          each needed value is kept or its producer runs again; a producer run again needs its inputs
// whose Lagrangian in the price of memory is a minimum cut. The best price is found by bisection.
// Capacities are whole numbers, rounded down, and the value taken is the flow: never above the truth.
#pragma once

#include <cstdint>
#include <vector>

#include "control.h"
#include "problem.h"

namespace rekindle {

struct Bound {
    double extra = 0;          // proven: any schedule within the budget costs at least this more
    bool infeasible = false;   // proven: no schedule within the budget
    double price = 0;          // cost per byte at the best bound
    std::vector<Id> kept;      // the values that the best cut keeps at that moment
};

Bound bound_at(const Problem& problem, Id op, std::int64_t budget, Control& control);

}  // namespace rekindle
