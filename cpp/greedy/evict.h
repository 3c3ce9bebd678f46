// Greedy rematerialization: walk an order of the ops, keep what fits, evict what is cheapest to
// bring back per byte and time until its next use, recompute (recursively) what is missing.
// The eviction score follows dynamic tensor rematerialization (Kirisame et al. 2021), with the true
// next use in place of staleness, since the future is known here.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "core/control.h"
#include "core/problem.h"
#include "greedy/recompute_cost.h"

namespace rekindle {

// How victims are chosen: the smallest
//     exp(weight) * projected_cost^cost_power / (size * wait^wait_power)
// goes first, by its logarithm. Weights are per value; empty means 0 for all.
struct EvictPolicy {
    double cost_power = 1.0;
    double wait_power = 1.0;
    std::vector<double> weight;
};

struct WalkLimits {
    std::size_t steps;
    double cost = std::numeric_limits<double>::infinity();
};

struct Eviction {
    bool fits = false;         // false: some op could not be run within the limit
    std::vector<Id> schedule;  // without dead runs
};

// One order of one problem, prepared for many walks. An order may run ops again: then the walk does
// so too, and what an op made before is not kept until there. Not for several threads at once.
class EvictWalk {
   public:
    EvictWalk(const Problem& problem, std::span<const Id> order);

    // `limit` bounds the memory; the simulated peak is at most that where `fits`.
    // A walk that is to take more than `most.steps` or cost more than `most.cost` ends at once, as
    // one that does not fit.
    Eviction run(std::int64_t limit, const EvictPolicy& policy, WalkLimits most, Control& control,
                 bool host = true);

   private:
    struct Frame {
        Id op;
        std::size_t next_input;
    };
    struct Entry {
        double score;
        Id value;
        bool operator<(const Entry& other) const {
            return score < other.score || (score == other.score && value < other.value);
        }
    };

    void reset();
    bool demand(Id target, const WalkLimits& most, Control& control);
    void execute(Id op);
    void drop(Id v);
    void finish(Id v);
    bool make_room(Id op);
    bool may_die(Id v, Id op) const;
    bool overwrite(Id op, std::int64_t& fresh);
    bool release(bool anyway);
    void fix(Id v);
    bool can_release(Id v, bool anyway) const;
    Id choose();
    double score(Id v);
    void changed(Id v);
    std::size_t next_use(Id v, std::size_t after);
    bool helps_missing(Id v) const;
    bool evictable(Id v) const;

    const Problem& p;
    std::span<const Id> order_;
    const EvictPolicy* policy_ = nullptr;
    bool host_ = true;
    std::int64_t limit_ = 0;
    std::int64_t used_ = 0;
    std::size_t now_ = 0;
    double cost_ = 0;
    std::vector<Id> schedule_;

    // Fixed per order.
    std::vector<std::uint8_t> is_target_;
    std::vector<std::size_t> use_start_, uses_, last_need_;
    std::vector<double> log_wait_, log_size_;
    std::vector<double> rest_;  // per step: the cost of the order's ops from there on

    // Per walk.
    std::vector<std::uint8_t> live_, fixed_;
    std::vector<std::int32_t> pins_;
    std::vector<std::size_t> next_use_;
    std::vector<Id> alive_;
    std::vector<Id> fixed_values_;    // of which some may be gone
    std::vector<std::size_t> place_;  // position in alive_
    std::vector<double> projected_;  // logarithm of the cost to bring a live value back, or unknown
    std::vector<Entry> victims_;     // the next ones to go, worst first
    std::vector<Id> todo_, dying_;
    std::vector<Frame> stack_;
    RecomputeCost recompute_cost_;
};

Eviction evict(const Problem& problem, std::span<const Id> order, std::int64_t limit,
               std::size_t max_steps, Control& control);

}  // namespace rekindle
