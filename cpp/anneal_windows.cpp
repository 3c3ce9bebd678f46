#include "anneal_windows.h"

#include <algorithm>
#include <cmath>

namespace rekindle {

namespace {

constexpr double moves_per_slot = 600;
constexpr double most_ease = 5;  // the price falls to at least exp of minus that ...
constexpr double eased = 0.5;    // ... and is back when so much of the stretch's moves are made
constexpr double least_heat = 0.2;
constexpr Slot shortest = 32;
constexpr double near_budget = 0.93;
constexpr int patience = 40;  // windows

}  // namespace

Windows::Windows(const Timeline& line)
    : current_cost_(line.cost()), best_cost_(line.cost()) {
    line.write(current_);
}

void Windows::pick(const Timeline& line, Random& random, double hot) {
    const auto slots = static_cast<double>(line.num_slots());
    const double share = std::exp2(-1 - 4 * random.unit());
    const Slot half = std::max(shortest, static_cast<Slot>(share * slots)) / 2;
    const double near = near_budget * static_cast<double>(line.budget());
    Slot middle = 0;
    for (int tries = 0; tries < 16; ++tries) {
        middle = random.below(line.num_slots());
        if (static_cast<double>(line.memory_at(middle)) > near) break;
    }
    low_ = std::max<Slot>(0, middle - half);
    high_ = std::min(line.num_slots(), middle + half);
    moves_ = static_cast<std::int64_t>(moves_per_slot * (high_ - low_));
    heat_ = least_heat * std::pow(std::max(1.0, hot / least_heat), random.unit());
    ease_ = most_ease * random.unit();
}

double Windows::ease(double done) const {
    return done < eased ? std::exp(-ease_ * (1 - done / eased)) : 1;
}

void Windows::settle(Timeline& line, const std::vector<Id>& best, std::int64_t best_cost,
                     double tolerance) {
    since_better_ = best_cost < best_cost_ ? 0 : since_better_ + 1;
    best_cost_ = best_cost;
    if (line.excess() == 0 &&
        static_cast<double>(line.cost() - current_cost_) <= tolerance) {
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
