// A climb over the numbers of an eviction policy, with small steps back (a tolerance) and returns
// to the best point. Each point costs one greedy walk and one simulation.
#include "search/policies.h"

#include <algorithm>
#include <cmath>

#include "core/parallel.h"
#include "core/random.h"
#include "core/simulate.h"

namespace rekindle {

namespace {

// The numbers that are searched over. Weights are kept as logarithms.
struct Point {
    double cost_power = 1.0;
    double wait_power = 1.0;
    // The walk's limit, over the budget: it is greedy, so the best schedule within the budget is
    // often one that it finds under a limit that is somewhat lower or, since dead runs go later,
    // higher.
    double limit_factor = 1.0;
    std::vector<double> class_weight;
    std::vector<std::pair<Id, double>> value_weight;
};

// Values that a weight can matter for: they have a size, and can be recomputed.
std::vector<Id> weighed_values(const Problem& p) {
    std::vector<Id> found;
    for (Id v = 0; v < p.num_values(); ++v)
        if (p.producer_of(v) >= 0 && !p.is_once(p.producer_of(v)) && p.size_of(v) > 0)
            found.push_back(v);
    return found;
}

// A random point near this one: one of its numbers is changed, or the weights of a few classes.
Point neighbour(const Point& from, Id num_classes, const std::vector<Id>& values, Random& random) {
    Point next = from;
    const double step = std::pow(4.0, random.unit() * 3.0 - 1.5);  // 1/8 .. 8
    const double kind = random.unit();
    if (kind < 0.08) {
        next.cost_power = std::clamp(next.cost_power + 0.3 * random.normal(), 0.0, 2.5);
    } else if (kind < 0.16) {
        next.wait_power = std::clamp(next.wait_power + 0.3 * random.normal(), 0.0, 3.0);
    } else if (kind < 0.22) {
        next.limit_factor = std::clamp(next.limit_factor + 0.02 * random.normal(), 0.8, 1.1);
    } else if (kind < 0.7 || values.empty()) {
        const Id count = 1 + random.below(3);
        for (Id k = 0; k < count; ++k)
            next.class_weight[idx(random.below(num_classes))] += step * random.normal();
    } else {
        const Id v = values[idx(random.below(static_cast<Id>(values.size())))];
        next.value_weight.emplace_back(v, step * random.normal());
    }
    return next;
}

}  // namespace

PolicyResult search_policy(const Problem& p, const PolicySearch& search, std::uint64_t seed,
                           Control& control, bool host) {
    EvictWalk walk(p, search.order);
    Random random(seed);
    const std::size_t max_steps = 4 * search.order.size() + 1000;
    const Id num_classes =
        search.classes.empty()
            ? 0
            : *std::max_element(search.classes.begin(), search.classes.end()) + 1;
    const std::vector<Id> values = weighed_values(p);

    PolicyResult found;
    EvictPolicy policy;
    auto evaluate = [&](const Point& point) -> double {
        ++found.walks;
        policy.cost_power = point.cost_power;
        policy.wait_power = point.wait_power;
        policy.weight.resize(idx(p.num_values()));
        for (Id v = 0; v < p.num_values(); ++v) {
            double log_weight = point.class_weight[idx(search.classes[idx(v)])];
            if (!search.weights.empty()) log_weight += search.weights[idx(v)];
            policy.weight[idx(v)] = log_weight;
        }
        for (const auto& [v, w] : point.value_weight) policy.weight[idx(v)] += w;
        // Beyond e^40 no order of victims changes any more.
        for (double& w : policy.weight) w = std::clamp(w, -40.0, 40.0);
        const auto limit =
            static_cast<std::int64_t>(static_cast<double>(search.budget) * point.limit_factor);
        Eviction result = walk.run(limit, policy, {max_steps}, control, host);
        // The walk found no way; below: it did, but above the budget, which is nearer to a way.
        if (!result.fits) return 1e300;
        const Trace trace = simulate(p, result.schedule);
        if (!trace.valid() || trace.peak > static_cast<std::uint64_t>(search.budget)) return 1e299;
        const double cost = total_cost(p, result.schedule);
        if (found.schedule.empty() || cost < found.cost) {
            found.schedule = std::move(result.schedule);
            found.cost = cost;
        }
        return cost;
    };

    Point current;
    current.class_weight.assign(idx(num_classes), 0.0);
    double current_cost = evaluate(current);
    double best_cost = current_cost;
    Point best = current;
    const double base = total_cost(p, search.order);
    std::int64_t since_better = 0;
    while (found.walks < search.max_walks && !control.expired(host)) {
        Point next = neighbour(current, num_classes, values, random);
        const double cost = evaluate(next);
        // A small tolerance lets the climb cross plateaus and shallow valleys.
        const double tolerance = 0.0005 * base * random.unit() * random.unit();
        if (cost <= current_cost + (current_cost < 1e299 ? tolerance : 0.0)) {
            current = std::move(next);
            current_cost = cost;
        }
        if (cost < best_cost) {
            best_cost = cost;
            best = current;
            since_better = 0;
        } else if (++since_better > 200) {
            current = best;
            current_cost = best_cost;
            since_better = 0;
        }
    }
    return found;
}

PolicyResult search_policies(const Problem& p, const PolicySearch& search,
                             std::span<const std::uint64_t> seeds, int num_threads,
                             Control& control) {
    std::vector<PolicyResult> results(seeds.size());
    search_each_seed(seeds.size(), num_threads, [&](std::size_t k, bool host) {
        results[k] = search_policy(p, search, seeds[k], control, host);
    });
    PolicyResult best;
    std::int64_t walks = 0;
    for (auto& result : results) {
        walks += result.walks;
        if (!result.schedule.empty() && (best.schedule.empty() || result.cost < best.cost))
            best = std::move(result);
    }
    best.walks = walks;
    return best;
}

}  // namespace rekindle
