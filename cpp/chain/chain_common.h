// What the chain programs share: a chain in slots, and its limits.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "chain/chain_dp.h"

namespace rekindle {

struct SlotOption {
    std::size_t saved;
    double cost;
    std::int64_t forward_peak, backward_peak;  // in bytes: added to what stands, then rounded once
    std::int32_t id;                           // its place in the chain's list
};

// A chain with sizes in slots, rounded up, and the forward's limits ready for lookup.
class SlotChain {
   public:
    SlotChain(const Chain& chain, std::int64_t unit, std::size_t slots)
        : n(chain.size()), top(slots), chain_(chain), unit_(unit) {
        input.resize(n);
        options.resize(n);
        prefix.assign(n + 1, 0.0);
        for (std::size_t i = 0; i < n; ++i) {
            input[i] = in_slots(chain.input[i]);
            prefix[i + 1] = prefix[i] + static_cast<double>(chain.bare_cost[i]);
            for (std::size_t o = 0; o < chain.options[i].size(); ++o) add(i, o);
            std::sort(options[i].begin(), options[i].end(), [](const auto& x, const auto& y) {
                return std::pair(x.cost, x.id) < std::pair(y.cost, y.id);
            });
        }
        run_peak_.assign(n * n, 0);
        for (std::size_t s = 0; s < n; ++s) {
            std::int64_t peak = chain.bare_peak[s];
            run_peak_[s * n + s] = peak;
            for (std::size_t j = s + 1; j < n; ++j) {
                peak = std::max(peak, chain.pass_peak[j]);
                run_peak_[s * n + j] = peak;
            }
        }
    }

    std::size_t in_slots(std::int64_t bytes) const {
        return static_cast<std::size_t>((bytes + unit_ - 1) / unit_);
    }
    // Slots that the bare forward of s .. last needs beside the input of s, with t standing.
    std::size_t bare_need(std::size_t s, std::size_t last, std::size_t t) const {
        return in_slots(chain_.standing[t] + run_peak_[s * n + last]);
    }
    // Slots that the bare forward of s alone needs if its input is not kept.
    std::size_t move_need(std::size_t s, std::size_t t) const {
        return in_slots(
            std::max<std::int64_t>(0, chain_.standing[t] + chain_.pass_peak[s] - chain_.input[s]));
    }
    // Slots that both runs of an option need, its forward with t standing.
    // Bytes are added first and rounded once: rounding each term would cost a slot for every term.
    std::size_t option_need(std::size_t s, std::size_t t, const SlotOption& o) const {
        return std::max(in_slots(chain_.standing[t] + o.forward_peak),
                        in_slots(chain_.standing[s] + o.backward_peak));
    }
    double bare_cost(std::size_t from, std::size_t to) const { return prefix[to] - prefix[from]; }

    std::size_t n;    // blocks
    std::size_t top;  // the largest number of slots
    std::vector<std::size_t> input;
    std::vector<std::vector<SlotOption>> options;  // cheapest first
    std::vector<double> prefix;

   private:
    void add(std::size_t i, std::size_t o) {
        const BlockOption& given = chain_.options[i][o];
        options[i].push_back({in_slots(given.saved), static_cast<double>(given.cost),
                              given.forward_peak, given.backward_peak,
                              static_cast<std::int32_t>(o)});
    }

    Chain chain_;
    std::int64_t unit_;
    std::vector<std::int64_t> run_peak_;
};

// acc[m] = min(acc[m], fixed + first[m - shift] + second[m]) for m in [from, to).
void relax_sum(double* acc, const double* first, std::size_t shift, const double* second,
               double fixed, std::size_t from, std::size_t to);

// acc[m] = min(acc[m], fixed + first[m - shift]) for m in [from, to).
void relax_shifted(double* acc, const double* first, std::size_t shift, double fixed,
                   std::size_t from, std::size_t to);

std::unique_ptr<ChainTable> solve_persistent(SlotChain chain, bool revolve, Control& control);
std::unique_ptr<ChainTable> solve_floating(SlotChain chain, Control& control);

}  // namespace rekindle
