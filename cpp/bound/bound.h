// A lower bound on the cost of any schedule within a budget, in any order, at any size.
//
// Take one op k and the moment of its first run. Every other op that is needed at all has run
// before that moment, or runs after it, or both, and then its cost is paid once more. What has run
// before is closed: with an op, all that it reads has been made. Ancestors of k have run,
// descendants have not; the others are free, so the bound holds for every order. A value that is
// read after the moment is in memory at it, or its producer runs after it; so is a target. What is
// in memory, beside what k itself reads and makes, fits into the budget less what k takes. So the
// extra cost is at least
//     min  sum of cost(i) over ops i that run on both sides
//     s.t. sum of size(v) over values v kept  <=  room
//          an op that has not run before runs after; what has run before is closed
//          an op that runs after has its inputs kept, or their producers run after
// whose Lagrangian in the price of memory is a minimum cut with two labels per op ("has not run
// before" and "runs after"). The best price is where two known cuts meet, again and again: the
// bound is concave in the price. A bound above the cost of all ops says that nothing fits.
// Capacities are whole numbers, rounded down, and the value taken is the flow: never above the
// truth.
#pragma once

#include <cstdint>
#include <vector>

#include "core/control.h"
#include "core/problem.h"

namespace rekindle {

struct Bound {
    double extra = 0;         // proven: any schedule within the budget costs at least this more
    bool infeasible = false;  // proven: no schedule within the budget
    double price = 0;         // cost per byte at the best bound
    std::vector<Id> kept;     // the values that the best cut keeps at that moment
};

// `price`: where to begin, or 0. `least`: a moment that cannot give more is left as soon as that
// shows.
Bound bound_at(const Problem& problem, Id op, std::int64_t budget, Control& control,
               double price = 0, double least = 0);

}  // namespace rekindle
