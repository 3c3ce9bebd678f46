// What it costs to bring a value back: the cost of its op and of the missing ancestors, each once.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/problem.h"

namespace rekindle {

class RecomputeCost {
   public:
    explicit RecomputeCost(const Problem& problem)
        : p_(problem), seen_(static_cast<std::size_t>(problem.num_ops()), 0) {}

    // With these values there; looks at the inputs of no more than `max_ops` ops.
    double of(Id v, std::span<const std::uint8_t> live, int max_ops) {
        ++stamp_;
        todo_.clear();
        double total = 0;
        const auto visit = [&](Id op) {
            // Stamps instead of a cleared set: a call costs what it visits, not the size of the
            // problem.
            if (std::exchange(seen_[static_cast<std::size_t>(op)], stamp_) == stamp_) return;
            total += static_cast<double>(p_.cost_of(op));
            todo_.push_back(op);
        };
        visit(p_.producer_of(v));
        while (!todo_.empty() && max_ops-- > 0) {
            const Id op = todo_.back();
            todo_.pop_back();
            for (Id w : p_.inputs[op])
                if (!live[static_cast<std::size_t>(w)]) visit(p_.producer_of(w));
        }
        return total;
    }

   private:
    const Problem& p_;
    std::vector<std::uint32_t> seen_;
    std::uint32_t stamp_ = 0;
    std::vector<Id> todo_;
};

}  // namespace rekindle
