#include "evict.h"

#include <algorithm>
#include <limits>

#include "simulate.h"

namespace rekindle {

namespace {

constexpr std::size_t idx(Id i) { return static_cast<std::size_t>(i); }
constexpr std::size_t never = std::numeric_limits<std::size_t>::max();

class Walk {
   public:
    Walk(const Problem& problem, std::span<const Id> order, std::int64_t limit)
        : p(problem), order_(order), limit_(limit) {
        const auto num_values = idx(p.num_values());
        live_.assign(num_values, 0);
        pins_.assign(num_values, 0);
        place_.assign(num_values, never);
        fixed_.assign(num_values, 0);
        seen_.assign(idx(p.num_ops()), 0);
        use_start_.assign(num_values + 1, 0);
        for (Id i : order_)
            for (Id v : p.inputs[i]) ++use_start_[idx(v) + 1];
        for (std::size_t v = 0; v < num_values; ++v) use_start_[v + 1] += use_start_[v];
        uses_.resize(use_start_.back());
        auto fill = use_start_;
        for (std::size_t t = 0; t < order_.size(); ++t)
            for (Id v : p.inputs[order_[t]]) uses_[fill[idx(v)]++] = t;
        next_use_.assign(use_start_.begin(), use_start_.end() - 1);
        is_target_.assign(num_values, 0);
        for (Id v : p.targets) is_target_[idx(v)] = 1;
        newest_held_.assign(num_values, 0);
        find_last_needs();
    }

    bool run(std::size_t max_steps, Control& control) {
        for (now_ = 0; now_ < order_.size(); ++now_) {
            if (!demand(order_[now_], max_steps, control)) return false;
            retire(order_[now_]);
        }
        // What must be there at the end and was evicted meanwhile.
        now_ = order_.size();
        for (Id v : p.targets) {
            if (!live_[idx(v)] && !demand(p.producer_of(v), max_steps, control)) return false;
            ++pins_[idx(v)];
        }
        return true;
    }

    std::vector<Id> schedule;

   private:
    struct Frame {
        Id op;
        std::size_t next_input;
    };

    // Until when v may be wanted, directly or to bring back what is made from it.
    void find_last_needs() {
        last_need_.assign(idx(p.num_values()), 0);
        for (std::size_t v = 0; v < last_need_.size(); ++v) {
            if (use_start_[v] < use_start_[v + 1]) last_need_[v] = uses_[use_start_[v + 1] - 1];
            if (is_target_[v]) last_need_[v] = order_.size();
        }
        for (std::size_t t = order_.size(); t-- > 0;) {
            const Id op = order_[t];
            if (p.is_once(op)) continue;
            std::size_t need = 0;
            for (Id v : p.outputs[op]) need = std::max(need, last_need_[idx(v)]);
            for (Id v : p.inputs[op]) last_need_[idx(v)] = std::max(last_need_[idx(v)], need);
        }
    }

    // Runs `target` and before it, depth first, whatever is missing for it.
    bool demand(Id target, std::size_t max_steps, Control& control) {
        stack_.clear();
        stack_.push_back({target, 0});
        bool fits = true;
        while (!stack_.empty()) {
            Frame& frame = stack_.back();
            const auto inputs = p.inputs[frame.op];
            if (frame.next_input < inputs.size()) {
                const Id v = inputs[frame.next_input];
                if (live_[idx(v)]) {
                    ++pins_[idx(v)];
                    ++frame.next_input;
                } else {
                    const Id producer = p.producer_of(v);
                    if (p.is_once(producer) && produced_once(producer)) {
                        fits = false;  // gone for good: cannot happen, such values are fixed
                        break;
                    }
                    stack_.push_back({producer, 0});
                }
                continue;
            }
            const Id op = frame.op;
            if (schedule.size() >= max_steps || control.expired() || !make_room(op)) {
                fits = false;
                break;
            }
            execute(op);
            for (Id v : inputs) --pins_[idx(v)];
            stack_.pop_back();
            // A value that was only brought back for this op and is never read again goes at once.
            for (Id v : inputs)
                if (live_[idx(v)] && pins_[idx(v)] == 0 && !stack_.empty()) drop_if_useless(v);
        }
        if (!fits)
            for (const Frame& f : stack_)
                for (std::size_t k = 0; k < f.next_input; ++k) --pins_[idx(p.inputs[f.op][k])];
        return fits;
    }

    bool produced_once(Id op) const { return ran_once_.size() > idx(op) && ran_once_[idx(op)]; }

    void execute(Id op) {
        schedule.push_back(op);
        if (p.is_once(op)) {
            if (ran_once_.empty()) ran_once_.assign(idx(p.num_ops()), 0);
            ran_once_[idx(op)] = 1;
        }
        if (op == p.loss)
            for (Id v : p.held) {  // the caller keeps this copy
                fix(v);
                newest_held_[idx(v)] = 1;
            }
        for (Id v : p.outputs[op]) {
            if (newest_held_[idx(v)]) {
                // The held copy stays, unseen from here on; the new one may come and go.
                newest_held_[idx(v)] = 0;
                fixed_[idx(v)] = 0;
                used_ += p.size_of(v);
                continue;
            }
            if (live_[idx(v)]) continue;  // the older copy dies, the new one takes its place
            live_[idx(v)] = 1;
            used_ += p.size_of(v);
            if (p.is_once(op)) fix(v);
            place_[idx(v)] = alive_.size();
            alive_.push_back(v);
        }
    }

    // Values that cannot come back (run-once ops made them, or what they are made from is gone)
    // stay until nothing can need them.
    void fix(Id v) { fixed_[idx(v)] = 1; }

    std::size_t next_use(Id v) {
        auto& k = next_use_[idx(v)];
        while (k < use_start_[idx(v) + 1] && uses_[k] < now_) ++k;
        if (k < use_start_[idx(v) + 1]) return uses_[k];
        return is_target_[idx(v)] ? order_.size() : never;
    }

    void drop(Id v) {
        live_[idx(v)] = 0;
        used_ -= p.size_of(v);
        const std::size_t hole = place_[idx(v)];
        alive_[hole] = alive_.back();
        place_[idx(alive_[hole])] = hole;
        alive_.pop_back();
        place_[idx(v)] = never;
    }

    void drop_if_useless(Id v) {
        if (!fixed_[idx(v)] && next_use(v) == never && !helps_missing(v)) drop(v);
    }

    // Whether a missing value with a future would be brought back from v.
    bool helps_missing(Id v) {
        for (Id i : p.readers[v])
            for (Id w : p.outputs[i])
                if (!live_[idx(w)]) return true;
        return false;
    }

    // After a step of the base order: what nothing can need any more is freed.
    void retire(Id op) {
        for (Id v : p.inputs[op]) finish(v);
        for (Id v : p.outputs[op]) finish(v);
    }

    void finish(Id v) {
        if (!live_[idx(v)] || pins_[idx(v)] > 0 || is_target_[idx(v)]) return;
        if (newest_held_[idx(v)]) return;
        if (next_use_[idx(v)] < use_start_[idx(v) + 1] && uses_[use_start_[idx(v) + 1] - 1] > now_)
            return;
        if (fixed_[idx(v)] ? last_need_[idx(v)] > now_ : helps_missing(v)) return;
        drop(v);
    }

    bool make_room(Id op) {
        std::int64_t fresh = p.workspace[idx(op)];
        for (Id v : p.outputs[op])
            if (!live_[idx(v)] || newest_held_[idx(v)]) fresh += p.size_of(v);
        // What this op is about to make again is no gain as a victim.
        for (Id v : p.outputs[op]) ++pins_[idx(v)];
        bool fits = true;
        while (fits && used_ + fresh > limit_) {
            if (release(false)) continue;
            const Id victim = choose();
            if (victim >= 0) {
                drop(victim);
            } else {
                fits = release(true);
            }
        }
        for (Id v : p.outputs[op]) --pins_[idx(v)];
        return fits;
    }

    // Frees a value that cannot come back and is only kept in case something made from it must be
    // brought back: what is made from it is fixed in its place. Without `anyway`, only where that
    // fixes no more bytes (beyond the final outputs) than it frees. The largest such value goes.
    bool release(bool anyway) {
        Id best = -1;
        for (Id v : alive_) {
            if (!fixed_[idx(v)] || newest_held_[idx(v)] || is_target_[idx(v)]) continue;
            if (pins_[idx(v)] > 0 || p.size_of(v) == 0 || next_use(v) != never) continue;
            if (best >= 0 && p.size_of(v) <= p.size_of(best)) continue;
            if (can_release(v, anyway)) best = v;
        }
        if (best < 0) return false;
        for (Id i : p.readers[best]) {
            if (p.is_once(i)) continue;
            for (Id w : p.outputs[i])
                if (last_need_[idx(w)] >= now_) fix(w);
        }
        drop(best);
        return true;
    }

    bool can_release(Id v, bool anyway) {
        std::int64_t newly_fixed = 0;
        for (Id i : p.readers[v]) {
            if (p.is_once(i)) continue;  // has run (v has no next use) and never runs again
            for (Id w : p.outputs[i]) {
                if (last_need_[idx(w)] < now_) continue;
                if (!live_[idx(w)]) return false;
                if (!fixed_[idx(w)] && !is_target_[idx(w)]) newly_fixed += p.size_of(w);
            }
        }
        return anyway || newly_fixed <= p.size_of(v);
    }

    Id choose() {
        Id best = -1;
        double best_score = 0;
        for (Id v : alive_) {
            if (pins_[idx(v)] > 0 || fixed_[idx(v)] || p.size_of(v) == 0) continue;
            const std::size_t next = next_use(v);
            if (next == order_.size() && now_ >= order_.size()) continue;
            double score;
            if (next == never && !helps_missing(v)) {
                score = -1;
            } else {
                const double wait =
                    next == never ? 2.0 * static_cast<double>(order_.size())
                                  : static_cast<double>(next - std::min(next, now_)) + 1.0;
                score = projected_cost(v) / (static_cast<double>(p.size_of(v)) * wait);
            }
            if (best < 0 || score < best_score) {
                best = v;
                best_score = score;
            }
        }
        return best;
    }

    // What it costs to bring v back: its producer and the missing ancestors, up to a bound.
    double projected_cost(Id v) {
        ++stamp_;
        todo_.clear();
        double total = 0;
        int budget = 24;
        auto visit = [&](Id op) {
            if (seen_[idx(op)] == stamp_) return;
            seen_[idx(op)] = stamp_;
            total += static_cast<double>(p.cost_of(op));
            todo_.push_back(op);
        };
        visit(p.producer_of(v));
        while (!todo_.empty() && budget-- > 0) {
            const Id op = todo_.back();
            todo_.pop_back();
            for (Id w : p.inputs[op])
                if (!live_[idx(w)]) visit(p.producer_of(w));
        }
        return total + 1e-9;
    }

    const Problem& p;
    std::span<const Id> order_;
    std::int64_t limit_;
    std::int64_t used_ = 0;
    std::size_t now_ = 0;
    std::vector<std::uint8_t> live_, fixed_, is_target_, ran_once_;
    std::vector<std::uint8_t> newest_held_;  // the live copy is the one that the caller holds
    std::vector<std::int32_t> pins_;
    std::vector<std::size_t> place_;  // position in alive_
    std::vector<Id> alive_;
    std::vector<std::size_t> use_start_, uses_, next_use_, last_need_;
    std::vector<Frame> stack_;
    std::vector<std::uint32_t> seen_;
    std::uint32_t stamp_ = 0;
    std::vector<Id> todo_;
};

}  // namespace

Eviction evict(const Problem& problem, std::span<const Id> order, std::int64_t limit,
               std::size_t max_steps, Control& control) {
    Walk walk(problem, order, limit);
    Eviction result;
    result.fits = walk.run(max_steps, control);
    result.schedule = drop_dead_runs(problem, walk.schedule);
    return result;
}

}  // namespace rekindle
