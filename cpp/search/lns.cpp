// Destroy and repair: what a part of the schedule repeats is taken out (or taken from another
// schedule), and the greedy walk of evict.h puts back what is missing.
#include "search/lns.h"

#include <algorithm>
#include <cmath>

#include "core/parallel.h"
#include "core/random.h"
#include "core/simulate.h"
#include "greedy/evict.h"
#include "greedy/prune.h"

namespace rekindle {

namespace {

constexpr double min_tolerance = 0.0003;  // a tolerance that crosses plateaus and shallow valleys

class LargeNeighbourhoodSearch {
   public:
    LargeNeighbourhoodSearch(const Problem& problem, const std::vector<std::vector<Id>>& starts,
                             std::size_t which, const LnsOptions& options, std::uint64_t seed,
                             Control& control, bool host)
        : p_(problem), starts_(starts), options_(options), random_(seed), control_(control),
          host_(host), current_(starts[which]), current_cost_(total_cost(problem, current_)) {
        best_ = current_;
        best_cost_ = current_cost_;
        for (std::int64_t cost : p_.cost) base_ += static_cast<double>(cost);
    }

    LnsResult run() {
        LnsResult result;
        int since_better = 0;
        while (result.tries < options_.max_tries && !control_.expired(host_)) {
            const double hot = tolerance(result.tries++);
            std::vector<Id> next = repair(wants_crossover() ? crossover() : destroy());
            if (next.empty()) continue;
            const double cost = total_cost(p_, next);
            if (cost <= current_cost_ + hot * base_ * random_.unit() * random_.unit()) {
                current_ = std::move(next);
                current_cost_ = cost;
            }
            if (current_cost_ < best_cost_) {
                best_ = current_;
                best_cost_ = current_cost_;
                since_better = 0;
            } else if (++since_better > 200 && hot <= min_tolerance) {
                current_ = best_;
                current_cost_ = best_cost_;
                since_better = 0;
            }
        }
        result.schedule = std::move(best_);
        return result;
    }

   private:
    // Falls evenly, in its logarithm, with the tries or with the time.
    double tolerance(std::int64_t tries) const {
        if (options_.hot <= min_tolerance) return min_tolerance;
        const double made = static_cast<double>(tries) / static_cast<double>(options_.max_tries);
        const double done =
            std::min(1.0, std::max(made, control_.elapsed_s() / control_.time_limit_s));
        return options_.hot * std::pow(min_tolerance / options_.hot, done);
    }

    bool wants_crossover() { return starts_.size() > 1 && random_.chance(0.2); }

    // A length of up to `most`, uniform in its logarithm.
    double length(double most) { return std::exp(random_.unit() * std::log(std::max(2.0, most))); }

    // The current schedule with a part of another in its place: from where one op first runs to
    // where another does. What the parts miss of each other is put back by the walk.
    std::vector<Id> crossover() {
        const auto& other = starts_[idx(random_.below(static_cast<Id>(starts_.size())))];
        const std::vector<std::size_t> mine = first_runs(current_), theirs = first_runs(other);
        std::vector<Id> ops;
        for (std::size_t t = 0; t < current_.size(); ++t)
            if (mine[idx(current_[t])] == t) ops.push_back(current_[t]);
        const double most = static_cast<double>(ops.size());
        const auto from = static_cast<std::size_t>(random_.unit() * most);
        const auto to = std::min(ops.size() - 1, from + static_cast<std::size_t>(length(most)));
        const std::size_t first = theirs[idx(ops[from])], last = theirs[idx(ops[to])];
        if (first > last) return destroy();  // they run the other way round there
        std::vector<Id> order;
        const auto add = [&order](const std::vector<Id>& line, std::size_t begin, std::size_t end) {
            order.insert(order.end(), line.data() + begin, line.data() + end);
        };
        add(current_, 0, mine[idx(ops[from])]);
        add(other, first, last);
        add(current_, mine[idx(ops[to])], current_.size());
        return order;
    }

    std::vector<std::size_t> first_runs(std::span<const Id> schedule) const {
        std::vector<std::size_t> first(p_.cost.size(), schedule.size());
        for (std::size_t t = schedule.size(); t-- > 0;) first[idx(schedule[t])] = t;
        return first;
    }

    // The current schedule without the repeated runs of a part of it.
    std::vector<Id> destroy() {
        // A stretch of time frees room at neighbouring steps; a stretch of ops (whose ids follow
        // the model) takes a layer's repeats out wherever they stand.
        const bool by_time = random_.chance(0.6);
        const double most = static_cast<double>(by_time ? current_.size() : p_.cost.size());
        const double from = random_.unit() * most, to = from + length(most);
        const double share = random_.chance(0.5) ? 1.0 : 0.5;
        std::vector<std::uint8_t> seen(p_.cost.size(), 0);
        std::vector<Id> order;
        order.reserve(current_.size() + 8);
        const std::size_t forced =
            random_.chance(0.4)
                ? static_cast<std::size_t>(random_.unit() * static_cast<double>(current_.size()))
                : current_.size();
        for (std::size_t t = 0; t < current_.size(); ++t) {
            const Id op = current_[t];
            const double place = static_cast<double>(by_time ? static_cast<Id>(t) : op);
            if (t >= forced && t < forced + 4) force(op, seen, order);
            const bool inside = place >= from && place <= to;
            if (seen[idx(op)] && inside && random_.unit() < share) continue;
            seen[idx(op)] = 1;
            order.push_back(op);
        }
        return order;
    }

    // Something that `op` reads is recomputed for it.
    void force(Id op, std::span<const std::uint8_t> seen, std::vector<Id>& order) {
        const auto inputs = p_.inputs[op];
        if (inputs.empty()) return;
        const Id v = inputs[idx(random_.below(static_cast<Id>(inputs.size())))];
        const Id producer = p_.producer_of(v);
        if (!p_.is_once(producer) && seen[idx(producer)]) order.push_back(producer);
    }

    // Within the budget and without needless runs; empty where the walk found no way.
    std::vector<Id> repair(const std::vector<Id>& order) {
        EvictPolicy policy;
        policy.cost_power = std::clamp(1.0 + 0.3 * random_.normal(), 0.0, 2.5);
        policy.wait_power = std::clamp(1.0 + 0.4 * random_.normal(), 0.0, 3.0);
        const double spread = random_.chance(0.3) ? 0.0 : random_.unit();
        if (spread > 0) {
            policy.weight.resize(p_.size.size());
            for (double& weight : policy.weight) weight = spread * random_.normal();
        }
        EvictWalk walk(p_, order);
        WalkLimits most{2 * current_.size() + 100};
        // Most walks that end far above the current cost show it early; one in ten is let run.
        if (options_.hot > 0 && random_.chance(0.9))
            most.cost = current_cost_ + 0.2 * (current_cost_ - base_);
        Eviction result = walk.run(options_.budget, policy, most, control_, host_);
        if (!result.fits) return {};
        const auto limit = static_cast<std::uint64_t>(options_.budget);
        std::vector<Id> ops = drop_needless_runs(p_, result.schedule, limit, control_, host_);
        const Trace trace = simulate(p_, ops);
        if (!trace.valid() || trace.peak > limit) return {};
        return ops;
    }

    const Problem& p_;
    const std::vector<std::vector<Id>>& starts_;
    const LnsOptions& options_;
    Random random_;
    Control& control_;
    bool host_;
    std::vector<Id> current_, best_;
    double current_cost_ = 0, best_cost_ = 0, base_ = 0;
};

}  // namespace

std::vector<LnsResult> large_neighbourhood_search(const Problem& p,
                                                  const std::vector<std::vector<Id>>& starts,
                                                  const LnsOptions& options,
                                                  std::span<const std::uint64_t> seeds,
                                                  int num_threads, Control& control) {
    std::vector<LnsResult> results(seeds.size());
    search_each_seed(seeds.size(), num_threads, [&](std::size_t k, bool host) {
        results[k] =
            LargeNeighbourhoodSearch(p, starts, k % starts.size(), options, seeds[k], control, host)
                .run();
    });
    return results;
}

}  // namespace rekindle
