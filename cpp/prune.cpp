#include "prune.h"

#include <algorithm>

#include "simulate.h"

namespace rekindle {

namespace {

constexpr std::size_t idx(Id i) { return static_cast<std::size_t>(i); }
constexpr std::size_t none = static_cast<std::size_t>(-1);

class Pruning {
   public:
    Pruning(const Problem& problem, std::span<const Id> schedule, std::uint64_t limit)
        : p_(problem), limit_(limit), steps_(drop_dead_runs(problem, schedule)) {}

    std::vector<Id> run(Control& control) {
        trace_ = simulate(p_, steps_);
        if (!trace_.valid() || trace_.peak > limit_) return steps_;
        while (pass(control)) {
        }
        return steps_;
    }

   private:
    // Tries each repeat once, the most cost per byte first; among equals the one with the shortest
    // way back. What did not fit may fit in the next pass.
    bool pass(Control& control) {
        find_repeats();
        std::vector<std::size_t> order, place(steps_.size());
        std::vector<double> worth(steps_.size(), 0);
        for (std::size_t t = 0; t < steps_.size(); ++t) {
            place[t] = t;
            if (last_use_before_[t].empty()) continue;
            double bytes = 1;
            for (Id v : p_.outputs[steps_[t]]) bytes += static_cast<double>(p_.size_of(v));
            worth[t] = static_cast<double>(p_.cost_of(steps_[t])) / bytes;
            order.push_back(t);
        }
        std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
            if (worth[a] != worth[b]) return worth[a] > worth[b];
            return a - last_use_before_[a].front() < b - last_use_before_[b].front();
        });
        bool changed = false;
        for (std::size_t t : order) {
            if (control.expired()) return false;
            if (place[t] == none || last_use_before_[place[t]].empty() || !may_fit(place[t]))
                continue;
            if (remove(place[t], place)) changed = true;
        }
        return changed;
    }

    // Takes the step out, with the runs that become dead by that, if the peak allows it; then
    // `place` tells where the steps of this pass stand now.
    bool remove(std::size_t step, std::vector<std::size_t>& place) {
        const std::vector<std::uint8_t> stays = live_without(step);
        std::vector<Id> fewer;
        fewer.reserve(steps_.size());
        for (std::size_t t = 0; t < steps_.size(); ++t)
            if (stays[t]) fewer.push_back(steps_[t]);
        Trace next = simulate(p_, fewer);
        if (next.peak > limit_) return false;
        std::vector<std::size_t> moved(steps_.size(), none);
        for (std::size_t t = 0, now = 0; t < steps_.size(); ++t)
            if (stays[t]) moved[t] = now++;
        for (std::size_t& t : place)
            if (t != none) t = moved[t];
        steps_ = std::move(fewer);
        trace_ = std::move(next);
        find_repeats();
        return true;
    }

    std::vector<std::uint8_t> live_without(std::size_t step) const {
        std::vector<std::uint8_t> stays(steps_.size(), 0), needed(idx(p_.num_values()), 0);
        for (Id v : p_.targets) needed[idx(v)] = 1;
        for (std::size_t t = steps_.size(); t-- > 0;) {
            const Id i = steps_[t];
            if (t == step) continue;
            bool live = p_.is_once(i);
            for (Id v : p_.outputs[i]) live = live || needed[idx(v)];
            if (!live) continue;
            stays[t] = 1;
            for (Id v : p_.outputs[i]) needed[idx(v)] = 0;
            for (Id v : p_.inputs[i]) needed[idx(v)] = 1;
        }
        return stays;
    }

    // Per step whose outputs earlier steps have made: the last use of each of the older copies.
    void find_repeats() {
        std::vector<std::size_t> last_use(idx(p_.num_values()), none);
        last_use_before_.assign(steps_.size(), {});
        for (std::size_t t = 0; t < steps_.size(); ++t) {
            const Id i = steps_[t];
            const auto outputs = p_.outputs[i];
            if (std::all_of(outputs.begin(), outputs.end(),
                            [&](Id v) { return last_use[idx(v)] != none; }))
                for (Id v : outputs) last_use_before_[t].push_back(last_use[idx(v)]);
            for (Id v : p_.inputs[i]) last_use[idx(v)] = t;
            for (Id v : outputs) last_use[idx(v)] = t;
        }
    }

    // Whether the older copies fit where they would have to stay: between their last use and now.
    // Other copies may end earlier without this run, so what its inputs free is let go.
    bool may_fit(std::size_t step) const {
        std::uint64_t freed = 0;
        for (Id v : p_.inputs[steps_[step]]) freed += static_cast<std::uint64_t>(p_.size_of(v));
        const auto outputs = p_.outputs[steps_[step]];
        for (std::size_t k = 0; k < outputs.size(); ++k) {
            const auto size = static_cast<std::uint64_t>(p_.size_of(outputs[k]));
            for (std::size_t t = last_use_before_[step][k] + 1; t < step; ++t)
                if (trace_.memory[t] + size > limit_ + freed) return false;
        }
        return true;
    }

    const Problem& p_;
    std::uint64_t limit_;
    std::vector<Id> steps_;
    Trace trace_;
    std::vector<std::vector<std::size_t>> last_use_before_;  // per step, per output
};

}  // namespace

std::vector<Id> drop_needless_runs(const Problem& problem, std::span<const Id> schedule,
                                   std::uint64_t limit, Control& control) {
    return Pruning(problem, schedule, limit).run(control);
}

}  // namespace rekindle
