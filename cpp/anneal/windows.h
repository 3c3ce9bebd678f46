// Large neighbourhoods of the annealer: one stretch of the schedule is heated and cooled again
// while the rest stays cold, and what that made better is kept; then another stretch.
//
// Heating the whole schedule throws away what is good everywhere to mend what is bad somewhere, and
// the best of some restarts is the one that was lucky on the whole. Stretch by stretch, each place
// is tried on its own and its best is kept. The rest must not stand still meanwhile: room that
// better packing makes at the tightest steps is worth something only where a run much later goes in
// return. So moves are proposed everywhere, most of them in the stretch, and judged at the
// temperature of where they are.
//
// Nor is heat enough: it shakes the order, but which runs are repeated it changes one by one, each
// against the budget, and most sets of them that are as good have no such way between them. So in
// most of the stretches memory above the budget is let off at first, by a random factor on its
// price that returns to one: runs go that nothing but the budget asks for, and then others come,
// where memory is short by then. That takes more moves than heat alone.
#pragma once

#include <cstdint>
#include <vector>

#include "anneal/timeline.h"
#include "core/random.h"

namespace rekindle {

class Windows {
   public:
    // `line` is within the budget.
    explicit Windows(const Timeline& line);

    // Another stretch, more often where memory is near the budget: from a few dozen steps to half
    // of all, for a number of moves in proportion, at a random temperature of at most `hot` mean
    // costs.
    void pick(const Timeline& line, Random& random, double hot);
    Slot low() const { return low_; }  // [low, high)
    Slot high() const { return high_; }
    std::int64_t moves() const { return moves_; }
    double heat() const { return heat_; }  // in mean costs
    // The factor on the price of memory when this share of the moves is made; 1 in the later half.
    double ease(double done) const;

    // The stretch has cooled. Goes on from what it has become, if that is hardly worse than before
    // (`tolerance`, in cost); else from the schedule before; after many that bring nothing, from
    // the best.
    void settle(Timeline& line, const std::vector<Id>& best, std::int64_t best_cost,
                double tolerance);

   private:
    Slot low_ = 0, high_ = 0;
    std::int64_t moves_ = 0;
    double heat_ = 0, ease_ = 0;
    std::vector<Id> current_;
    std::int64_t current_cost_ = 0, best_cost_ = 0;
    int since_better_ = 0;
};

}  // namespace rekindle
