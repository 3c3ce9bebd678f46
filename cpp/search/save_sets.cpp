// The climb of save_sets.h over prices of values.
#include "search/save_sets.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_map>

#include "bound/bound.h"
#include "bound/min_cut.h"
#include "core/parallel.h"
#include "core/random.h"
#include "core/simulate.h"
#include "greedy/evict.h"
#include "greedy/prune.h"

namespace rekindle {

namespace {

constexpr int max_boundaries = 8;
constexpr double infeasible = std::numeric_limits<double>::infinity();

// The numbers that are searched over.
struct Point {
    std::vector<double> price;  // per value: logarithm of the price of a byte, over the first price
    // Places in the order: what is on its way to a later op there costs next to infeasible, so that
    // the ops between two of them are recomputed from the first.
    std::vector<std::int32_t> boundaries;
    // For the greedy walk, where the set alone does not fit: of the budget, and its policy.
    double limit_factor = 1, cost_power = 1, wait_power = 1;
};

class HillClimb {
   public:
    HillClimb(const Problem& problem, const SaveSetSearch& search, double price, std::uint64_t seed,
              Control& control, bool host)
        : p_(problem), search_(search), cut_(problem, search.moment), random_(seed),
          control_(control), host_(host), first_price_(price), place_(problem.size.size(), 0.0),
          made_(problem.size.size(), 0), last_(problem.size.size(), -1) {
        for (std::size_t t = 0; t < search.order.size(); ++t) {
            const Id op = search.order[t];
            for (Id v : p_.outputs[op]) made_[idx(v)] = static_cast<std::int32_t>(t);
            if (length_ > 0) continue;
            for (Id v : p_.inputs[op]) last_[idx(v)] = static_cast<std::int32_t>(t);
            if (op == search.moment) length_ = static_cast<std::int32_t>(t + 1);
        }
        for (std::size_t v = 0; v < place_.size(); ++v)
            place_[v] = static_cast<double>(made_[v]) / length_;
        for (Id c : search.classes) num_classes_ = std::max(num_classes_, c + 1);
        measure_widths();
    }

    SaveSetResult run() {
        Point current = first_points();
        double current_cost = found_.schedule.empty() ? infeasible : found_.cost;
        Point best = current;
        double best_cost = current_cost;
        double base = 0;
        for (std::int64_t cost : p_.cost) base += static_cast<double>(cost);
        int since_better = 0;
        bool elsewhere = false;  // a climb from a start at random, so far worse than the best
        while (!ended()) {
            Point next = current;
            change(next);
            const double cost = evaluate(next);
            // A small tolerance lets the climb cross plateaus and shallow valleys.
            const double tolerance = 0.0005 * base * random_.unit() * random_.unit();
            const bool better = cost < current_cost;
            if (cost <= current_cost + (current_cost < infeasible ? tolerance : 0.0)) {
                current = std::move(next);
                current_cost = cost;
            }
            since_better = better ? 0 : since_better + 1;
            if (current_cost < best_cost) {
                best_cost = current_cost;
                best = current;
                elsewhere = false;
            }
            if (since_better > 150) {
                elsewhere = !elsewhere;
                current = elsewhere ? random_point() : best;
                current_cost = elsewhere ? evaluate(current) : best_cost;
                since_better = 0;
            }
        }
        return std::move(found_);
    }

   private:
    bool ended() { return found_.tries >= search_.max_tries || control_.expired(host_); }

    // What is made at or before each place of the order and read after it, up to the moment.
    void measure_widths() {
        width_.assign(static_cast<std::size_t>(length_), 0);
        for (std::size_t v = 0; v < made_.size(); ++v) {
            if (last_[v] <= made_[v]) continue;
            width_[idx(made_[v])] += p_.size[v];
            width_[idx(last_[v])] -= p_.size[v];
        }
        for (std::size_t t = 1; t < width_.size(); ++t) width_[t] += width_[t - 1];
    }

    // The narrowest place at most so far away; of several, the nearest to the middle.
    std::int32_t narrowest(double middle, double reach) const {
        const double end = static_cast<double>(length_ - 1);
        auto least = static_cast<std::int32_t>(std::clamp(middle, 0.0, end));
        const std::int32_t from = least;
        for (std::int32_t by = 1; by <= static_cast<std::int32_t>(reach); ++by)
            for (const std::int32_t t : {from - by, from + by})
                if (t >= 0 && t < length_ && width_[idx(t)] < width_[idx(least)]) least = t;
        return least;
    }

    std::vector<std::int32_t> even_boundaries(int count) const {
        std::vector<std::int32_t> boundaries;
        const double part = static_cast<double>(length_) / (count + 1);
        for (int k = 1; k <= count; ++k) boundaries.push_back(narrowest(k * part, part / 4));
        return boundaries;
    }

    // Dearer and dearer memory, the same for all, then along the order, then with ever more places
    // to begin again from: the best of these.
    Point first_points() {
        Point best;
        best.price.assign(p_.size.size(), 0.0);
        double best_cost = infeasible;
        auto offer = [&](Point point) {
            const double cost = evaluate(point);
            if (cost >= best_cost) return;
            best_cost = cost;
            best = std::move(point);
        };
        const double slopes[] = {0.0, random_.unit() < 0.5 ? 0.5 : -0.5};
        for (double slope : slopes)
            for (int step = 0; step < 10 && !ended(); ++step) {
                Point point;
                for (double place : place_)
                    point.price.push_back(0.25 * step + slope * (place - 0.5));
                offer(std::move(point));
            }
        for (int count = 1; count <= max_boundaries; ++count)
            for (double level : {0.0, 1.0, 3.0}) {
                if (ended()) return best;
                Point point;
                point.price.assign(p_.size.size(), level);
                point.boundaries = even_boundaries(count);
                offer(std::move(point));
            }
        return best;
    }

    Point random_point() {
        Point point;
        const double level = 2.5 * random_.unit(), slope = random_.normal();
        for (double place : place_) point.price.push_back(level + slope * (place - 0.5));
        point.cost_power = std::clamp(1.0 + 0.3 * random_.normal(), 0.0, 2.5);
        point.wait_power = std::clamp(1.0 + 0.3 * random_.normal(), 0.0, 3.0);
        if (random_.unit() < 0.5)
            point.boundaries = even_boundaries(1 + random_.below(max_boundaries));
        for (int k = 0; k < 6; ++k) change(point);
        return point;
    }

    void change(Point& point) {
        const double kind = random_.unit();
        if (random_.unit() < (point.boundaries.empty() ? 0.03 : 0.2)) {
            change_boundaries(point.boundaries);
        } else if (kind < 0.2) {
            const double by = 0.3 * random_.normal();
            for (double& price : point.price) price += by;
        } else if (kind < 0.3) {
            const double by = 0.5 * random_.normal();
            for (std::size_t v = 0; v < place_.size(); ++v)
                point.price[v] += by * (place_[v] - 0.5);
        } else if (kind < 0.5) {  // a stretch of the order
            const double by = random_.normal(), from = random_.unit();
            const double to = from + 0.5 * random_.unit() * random_.unit();
            for (std::size_t v = 0; v < place_.size(); ++v)
                if (place_[v] >= from && place_[v] <= to) point.price[v] += by;
        } else if (kind < 0.55) {
            const double factor = point.limit_factor + 0.02 * random_.normal();
            point.limit_factor = std::clamp(factor, 0.8, 1.0);
        } else if (kind < 0.6) {
            point.cost_power = std::clamp(point.cost_power + 0.3 * random_.normal(), 0.0, 2.5);
        } else if (kind < 0.65) {
            point.wait_power = std::clamp(point.wait_power + 0.3 * random_.normal(), 0.0, 3.0);
        } else {
            const Id count = 1 + random_.below(3);
            for (Id k = 0; k < count; ++k) {
                const Id chosen = random_.below(num_classes_);
                const double by = random_.normal() * std::pow(4.0, 2.0 * random_.unit() - 1.0);
                for (std::size_t v = 0; v < place_.size(); ++v)
                    if (search_.classes[v] == chosen) point.price[v] += by;
            }
        }
    }

    // One is moved, goes, or comes.
    void change_boundaries(std::vector<std::int32_t>& boundaries) {
        const double kind = random_.unit(), length = static_cast<double>(length_);
        const double reach = length * std::exp2(-2 - 6 * random_.unit());
        if (boundaries.empty() || kind < 0.2) {
            boundaries.push_back(narrowest(length * random_.unit(), reach));
            return;
        }
        std::int32_t& boundary = boundaries[idx(random_.below(static_cast<Id>(boundaries.size())))];
        if (kind < 0.35) {
            boundary = boundaries.back();
            boundaries.pop_back();
        } else {
            boundary = narrowest(boundary + length * 0.1 * random_.normal(), reach);
        }
    }

    double evaluate(const Point& point) {
        ++found_.tries;
        keep_cost_.resize(p_.size.size());
        for (std::size_t v = 0; v < keep_cost_.size(); ++v)
            keep_cost_[v] = first_price_ * static_cast<double>(p_.size[v]) *
                            std::exp(std::clamp(point.price[v], -30.0, 30.0));
        for (std::int32_t boundary : point.boundaries)
            for (std::size_t v = 0; v < keep_cost_.size(); ++v)
                // Not free: among what crosses, the cut still prefers little.
                if (made_[v] <= boundary && boundary < last_[v]) keep_cost_[v] *= 1e-4;
        cut_.cut(keep_cost_, control_, host_);
        if (control_.expired(host_)) return infeasible;
        const std::vector<Id> kept = cut_.kept();
        std::uint64_t key = 0;
        auto mix = [&key](std::uint64_t x) {
            key = (key ^ x) * 0x9e3779b97f4a7c15ULL + (key >> 29);
        };
        for (double x : {point.limit_factor, point.cost_power, point.wait_power})
            mix(static_cast<std::uint64_t>(x * 1e6) + 1);
        for (Id v : kept) mix(static_cast<std::uint64_t>(v) + 1);
        // Many prices give the same set. Two sets with one hash would share a cost, which misleads
        // the climb for a step; what is returned has been simulated.
        const auto [entry, is_new] = known_.try_emplace(key, infeasible);
        if (!is_new) return entry->second;
        return entry->second = cost_of(kept, point);
    }

    double cost_of(std::span<const Id> kept, const Point& point) {
        std::vector<Id> ops = schedule_of_save_set(p_, search_.order, search_.moment, kept);
        const auto budget = static_cast<std::uint64_t>(search_.budget);
        if (simulate(p_, ops).peak > budget) {
            EvictWalk walk(p_, ops);
            const auto limit =
                static_cast<std::int64_t>(static_cast<double>(search_.budget) * point.limit_factor);
            const EvictPolicy policy{point.cost_power, point.wait_power, {}};
            Eviction result = walk.run(limit, policy, {4 * ops.size() + 1000}, control_, host_);
            if (!result.fits) return infeasible;
            ops = std::move(result.schedule);
        }
        ops = drop_needless_runs(p_, ops, budget, control_, host_);
        const Trace trace = simulate(p_, ops);
        if (!trace.valid() || trace.peak > budget) return infeasible;
        const double cost = total_cost(p_, ops);
        if (found_.schedule.empty() || cost < found_.cost) {
            found_.schedule = std::move(ops);
            found_.cost = cost;
        }
        return cost;
    }

    const Problem& p_;
    const SaveSetSearch& search_;
    SaveSetCut cut_;
    Random random_;
    Control& control_;
    bool host_;
    double first_price_;
    std::int32_t length_ = 0;    // of the order up to the moment
    std::vector<double> place_;  // per value: where in that it is made
    std::vector<std::int32_t> made_,
        last_;                         // per value: where it is made, and last read up to there
    std::vector<std::int64_t> width_;  // per place up to the moment
    std::vector<double> keep_cost_;
    Id num_classes_ = 0;
    std::unordered_map<std::uint64_t, double> known_;  // costs of sets that came up before
    SaveSetResult found_;
};

}  // namespace

std::vector<Id> schedule_of_save_set(const Problem& p, std::span<const Id> order, Id moment,
                                     std::span<const Id> kept) {
    std::vector<Id> ops;
    std::vector<std::uint8_t> gone(idx(p.num_values()), 0);
    std::size_t t = 0;
    do {
        ops.push_back(order[t]);
        if (!p.is_once(order[t]))
            for (Id v : p.outputs[order[t]]) gone[idx(v)] = 1;
    } while (order[t++] != moment);
    for (Id v : kept) gone[idx(v)] = 0;
    for (const auto& row : {p.inputs[moment], p.outputs[moment]})
        for (Id v : row) gone[idx(v)] = 0;

    struct Frame {
        Id op;
        std::size_t next_input;
    };
    std::vector<Frame> stack;
    auto run = [&](Id target) {
        stack.push_back({target, 0});
        while (!stack.empty()) {
            Frame& frame = stack.back();
            const auto inputs = p.inputs[frame.op];
            while (frame.next_input < inputs.size() && !gone[idx(inputs[frame.next_input])])
                ++frame.next_input;
            if (frame.next_input < inputs.size()) {
                stack.push_back({p.producer_of(inputs[frame.next_input]), 0});
                continue;
            }
            ops.push_back(frame.op);
            for (Id v : p.outputs[frame.op]) gone[idx(v)] = 0;
            stack.pop_back();
        }
    };
    for (; t < order.size(); ++t) run(order[t]);
    for (Id v : p.targets)
        if (gone[idx(v)]) run(p.producer_of(v));
    return ops;
}

std::vector<SaveSetResult> search_save_sets(const Problem& p, const SaveSetSearch& search,
                                            std::span<const std::uint64_t> seeds, int num_threads,
                                            Control& control) {
    std::vector<SaveSetResult> results(seeds.size());
    const Bound bound = bound_at(p, search.moment, search.budget, control);
    if (bound.infeasible) return results;
    double cost = 0, size = 1;
    for (std::int64_t one : p.cost) cost += static_cast<double>(one);
    for (std::int64_t one : p.size) size += static_cast<double>(one);
    // The bound's price is what memory is worth at this moment: the climb begins where the relaxed
    // problem is optimal. Without one (everything fits there), a hundredth of the mean.
    const double price = bound.price > 0 ? bound.price : 0.01 * cost / size;
    search_each_seed(seeds.size(), num_threads, [&](std::size_t k, bool host) {
        results[k] = HillClimb(p, search, price, seeds[k], control, host).run();
    });
    return results;
}

}  // namespace rekindle
