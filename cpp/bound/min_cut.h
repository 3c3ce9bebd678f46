// The network of one moment: what is asked for after the first run of an op, and how it may be had.
//
// A value that a descendant of the op needs and that is not the op's own is kept, or its producer
// runs again, and then needs its own inputs. With a cost for keeping each value the cheapest choice
// is a minimum cut. search/save_sets.h makes schedules with it. (The network of bound/bound.h is
// larger: it also says which of the ops that are free to run on either side have run.)
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/control.h"
#include "core/problem.h"

namespace rekindle {

// Maximum flow by Dinic's algorithm with whole capacities.
class MaxFlow {
   public:
    static constexpr std::int64_t infinite = std::int64_t{1} << 61;

    // Levels exist from the start: `run` may end at once, by the clock, and `reached` is asked all
    // the same.
    explicit MaxFlow(std::size_t num_nodes) : head_(num_nodes, -1), level_(num_nodes, -1) {}
    void clear();
    void add_edge(std::int32_t from, std::int32_t to, std::int64_t capacity);
    std::int64_t run(std::int32_t source, std::int32_t sink, Control& control, bool host);
    // After run: whether the node is on the source's side of the minimum cut.
    bool on_source_side(std::int32_t node) const {
        return level_[static_cast<std::size_t>(node)] >= 0;
    }

   private:
    struct Edge {
        std::int32_t to, next;
        std::int64_t capacity;
    };
    bool levels(std::int32_t source, std::int32_t sink);
    std::int64_t augment(std::int32_t source, std::int32_t sink);

    std::vector<std::int32_t> head_, next_, level_, queue_, path_;
    std::vector<Edge> edges_;
};

// Per op: whether it must have run before the first run of `op`; whether it runs only after.
std::vector<std::uint8_t> ancestors(const Problem& problem, Id op);
std::vector<std::uint8_t> descendants(const Problem& problem, Id op);

class SaveSetCut {
   public:
    SaveSetCut(const Problem& problem, Id op);

    // The least sum of what is recomputed and of keep_cost[v] over the values that are kept, never
    // above the truth. Where the control expires, it is nothing.
    double cut(std::span<const double> keep_cost, Control& control, bool host = true);
    std::vector<Id> kept() const;  // by the last cut

   private:
    const Problem& p_;
    std::vector<std::uint8_t> before_;  // per op: an ancestor
    MaxFlow flow_;
    std::vector<Id> values_;  // the first num_needed_ are asked for by descendants themselves
    std::size_t num_needed_ = 0;
    std::vector<std::int32_t> value_node_, op_node_;
    double scale_ = 1, max_capacity_ = 0;
};

}  // namespace rekindle
