// How stretches are chosen and what becomes of them; windows.h says why there are any.
#include "anneal/windows.h"

#include <algorithm>
#include <cmath>

namespace rekindle {

namespace {

constexpr double moves_per_slot = 150, eased_moves_per_slot = 600;
constexpr double eased_share = 0.8;  // of the stretches
constexpr double most_ease = 5;      // the price falls at most to exp of minus that ...
constexpr double ease_ends = 0.5;    // ... and is back when so much of the stretch's moves are made
constexpr double least_heat = 0.2;
constexpr Slot shortest = 32;
constexpr double near_budget = 0.93;
constexpr int patience = 40;  // windows

}  // namespace

Windows::Windows(const Timeline& line) : current_cost_(line.cost()), best_cost_(line.cost()) {
    line.write(current_);
}

void Windows::pick(const Timeline& line, Random& random, double hot) {
    const auto slots = static_cast<double>(line.num_slots());
    // From 1/32 to half of the slots, all scales alike.
    const double share = std::exp2(-1 - 4 * random.unit());
    const Slot half = std::max(shortest, static_cast<Slot>(share * slots)) / 2;
    const double near = near_budget * static_cast<double>(line.budget());
    Slot middle = 0;
    for (int tries = 0; tries < 16; ++tries) {
        middle = random.below(line.num_slots());
        // Where memory is far from short, there is nothing to gain; 16 tries, then anywhere.
        if (static_cast<double>(line.memory_at(middle)) > near) break;
    }
    low_ = std::max<Slot>(0, middle - half);
    high_ = std::min(line.num_slots(), middle + half);
    heat_ = least_heat * std::pow(std::max(1.0, hot / least_heat), random.unit());
    const bool is_eased = random.unit() < eased_share;
    ease_ = is_eased ? most_ease * random.unit() : 0;
    moves_ = static_cast<std::int64_t>((is_eased ? eased_moves_per_slot : moves_per_slot) *
                                       (high_ - low_));
}

double Windows::ease(double done) const {
    return ease_ > 0 && done < ease_ends ? std::exp(-ease_ * (1 - done / ease_ends)) : 1;
}

void Windows::settle(Timeline& line, const std::vector<Id>& best, std::int64_t best_cost,
                     double tolerance) {
    since_better_ = best_cost < best_cost_ ? 0 : since_better_ + 1;
    best_cost_ = best_cost;
    if (line.excess() == 0 && static_cast<double>(line.cost() - current_cost_) <= tolerance) {
        line.write(current_);
        current_cost_ = line.cost();
        line.respace();
        return;
    }
    if (best_cost < current_cost_ || since_better_ >= patience) {
        current_ = best;
        current_cost_ = best_cost;
        since_better_ = 0;
    }
    line.load(current_);
}

}  // namespace rekindle
