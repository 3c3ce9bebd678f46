#include "prune.h"

#include <algorithm>

#include "simulate.h"

namespace rekindle {

namespace {

constexpr std::size_t idx(Id i) { return static_cast<std::size_t>(i); }

class Pruning {
   public:
    Pruning(const Problem& problem, std::span<const Id> schedule, std::uint64_t limit)
        : p_(problem), limit_(limit), steps_(drop_dead_runs(problem, schedule)) {}

    std::vector<Id> run(Control& control) {
        Trace trace = simulate(p_, steps_);
        if (!trace.valid() || trace.peak > limit_) return steps_;
        bool changed = true;
        while (changed && !control.expired()) {
            changed = false;
            for (std::size_t step : repeats()) {
                if (control.expired()) break;
                if (!may_fit(step, trace)) continue;
                std::vector<Id> without = steps_;
                without.erase(without.begin() + static_cast<std::ptrdiff_t>(step));
                without = drop_dead_runs(p_, without);
                Trace next = simulate(p_, without);
                if (next.peak > limit_) continue;
                steps_ = std::move(without);
                trace = std::move(next);
                changed = true;
                break;  // the positions have shifted
            }
        }
        return steps_;
    }

   private:
    // Steps whose outputs an earlier step has made, the most cost per byte first; among equals the
    // one with the shortest way back. Fills last_use_before_.
    std::vector<std::size_t> repeats() {
        constexpr std::size_t none = static_cast<std::size_t>(-1);
        std::vector<std::size_t> last_use(idx(p_.num_values()), none);
        std::vector<std::size_t> found;
        last_use_before_.assign(steps_.size(), {});
        for (std::size_t t = 0; t < steps_.size(); ++t) {
            const Id i = steps_[t];
            const auto outputs = p_.outputs[i];
            if (std::all_of(outputs.begin(), outputs.end(),
                            [&](Id v) { return last_use[idx(v)] != none; })) {
                found.push_back(t);
                for (Id v : outputs) last_use_before_[t].push_back(last_use[idx(v)]);
            }
            for (Id v : p_.inputs[i]) last_use[idx(v)] = t;
            for (Id v : outputs) last_use[idx(v)] = t;
        }
        std::vector<double> worth(steps_.size(), 0);
        for (std::size_t t : found) {
            double bytes = 1;
            for (Id v : p_.outputs[steps_[t]]) bytes += static_cast<double>(p_.size_of(v));
            worth[t] = static_cast<double>(p_.cost_of(steps_[t])) / bytes;
        }
        std::stable_sort(found.begin(), found.end(), [&](std::size_t a, std::size_t b) {
            if (worth[a] != worth[b]) return worth[a] > worth[b];
            return a - last_use_before_[a].front() < b - last_use_before_[b].front();
        });
        return found;
    }

    // Whether the older copies fit where they would have to stay: between their last use and now.
    // Other copies may end earlier without this run, so only what its inputs free is let go.
    bool may_fit(std::size_t step, const Trace& trace) const {
        std::uint64_t freed = 0;
        for (Id v : p_.inputs[steps_[step]]) freed += static_cast<std::uint64_t>(p_.size_of(v));
        const auto outputs = p_.outputs[steps_[step]];
        for (std::size_t k = 0; k < outputs.size(); ++k) {
            const auto size = static_cast<std::uint64_t>(p_.size_of(outputs[k]));
            for (std::size_t t = last_use_before_[step][k] + 1; t < step; ++t)
                if (trace.memory[t] + size > limit_ + freed) return false;
        }
        return true;
    }

    const Problem& p_;
    std::uint64_t limit_;
    std::vector<Id> steps_;
    std::vector<std::vector<std::size_t>> last_use_before_;  // per step, per output
};

}  // namespace

std::vector<Id> drop_needless_runs(const Problem& problem, std::span<const Id> schedule,
                                   std::uint64_t limit, Control& control) {
    return Pruning(problem, schedule, limit).run(control);
}

}  // namespace rekindle
