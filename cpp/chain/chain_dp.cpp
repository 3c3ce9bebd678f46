// The persistent program (Theorem 4.8, and revolve), and what both programs share: the two inner
// loops.
#include "chain/chain_dp.h"

#include <algorithm>

#include "chain/chain_common.h"
#include "core/simd.h"

namespace rekindle {

namespace {

// Sums and minima only, in one order: all clones give the same bits. Never a fused multiply-add.
REKINDLE_SIMD_CLONES
void relax_sum_simd(double* acc, const double* first, const double* second, double fixed,
                    std::size_t count) {
    for (std::size_t k = 0; k < count; ++k) {
        const double x = first[k] + second[k] + fixed;
        acc[k] = x < acc[k] ? x : acc[k];
    }
}

REKINDLE_SIMD_CLONES
void relax_shifted_simd(double* acc, const double* first, double fixed, std::size_t count) {
    for (std::size_t k = 0; k < count; ++k) {
        const double x = first[k] + fixed;
        acc[k] = x < acc[k] ? x : acc[k];
    }
}

// C(s, t, m) of Theorem 4.8 for all m at once. Tiles of s and t keep the rows in the cache: of
// the n^3 / 6 splits, almost all are between rows that are complete before the tile begins.
class Persistent final : public ChainTable {
   public:
    Persistent(SlotChain chain, bool revolve, Control& control)
        : chain_(std::move(chain)), revolve_(revolve), width_(chain_.top + 1) {
        const std::size_t n = chain_.n;
        rows_.assign(n * (n + 1) / 2 * width_, unreachable);
        least_.assign(n * n, width_);
        enough_.assign(n * n, width_);
        find_enough();
        finished = fill(control);
    }

    double cost(std::size_t slots) const override {
        return row(0, chain_.n - 1)[std::min(slots, chain_.top)];
    }

    std::vector<ChainStep> build(std::size_t slots) const override {
        std::vector<ChainStep> steps;
        slots = std::min(slots, chain_.top);
        if (cost(slots) < unreachable) write(0, chain_.n - 1, slots, steps);
        return steps;
    }

   private:
    // At one cut, the 16 parts of a tile read 8 rows. 24 chunks of 1 KiB fit a first-level cache.
    static constexpr std::size_t tile = 4;
    static constexpr std::size_t chunk = 128;

    double* row(std::size_t s, std::size_t t) { return &rows_[(t * (t + 1) / 2 + s) * width_]; }
    const double* row(std::size_t s, std::size_t t) const {
        return &rows_[(t * (t + 1) / 2 + s) * width_];
    }
    std::size_t& least(std::size_t s, std::size_t t) { return least_[s * chain_.n + t]; }
    std::size_t& enough(std::size_t s, std::size_t t) { return enough_[s * chain_.n + t]; }

    // From enough(s, t) slots on, every block runs once by its cheapest option: nothing is better.
    void find_enough() {
        for (std::size_t t = 0; t < chain_.n; ++t)
            for (std::size_t s = t + 1; s-- > 0;) {
                if (revolve_ && s < t) continue;
                const std::size_t rest = s == t ? 0 : enough(s + 1, t);
                if (rest > chain_.top) continue;
                const auto& options = chain_.options[s];
                for (const SlotOption& o : options) {
                    // Options are sorted by cost: only the cheapest ones count here.
                    if (o.cost > options.front().cost) break;
                    const std::size_t after = s == t ? 0 : rest + o.saved;
                    enough(s, t) =
                        std::min(enough(s, t), std::max(after, chain_.option_need(s, t, o)));
                }
            }
    }

    bool fill(Control& control) {
        const std::size_t num_tiles = (chain_.n + tile - 1) / tile;
        for (std::size_t high = 0; high < num_tiles; ++high)
            for (std::size_t low = high + 1; low-- > 0;) {
                if (control.expired()) return false;
                if (low < high) splits_between(low, high);
                finish(low, high);
            }
        return true;
    }

    // The splits at blocks outside both tiles.
    void splits_between(std::size_t low, std::size_t high) {
        const std::size_t t_end = std::min((high + 1) * tile, chain_.n);
        std::size_t limit = 0;
        for (std::size_t s = low * tile; s < (low + 1) * tile; ++s)
            for (std::size_t t = high * tile; t < t_end; ++t) limit = std::max(limit, enough(s, t));
        limit = std::min(limit, width_);
        const std::size_t first_cut = (low + 1) * tile, last_cut = high * tile;
        starts_.clear();
        for (std::size_t cut = first_cut; cut <= last_cut; ++cut)
            for (std::size_t s = low * tile; s < (low + 1) * tile; ++s)
                for (std::size_t t = high * tile; t < t_end; ++t)
                    starts_.push_back(split_start(s, cut, t));
        for (std::size_t from = 0; from < limit; from += chunk) {
            const std::size_t to = std::min(from + chunk, limit);
            const std::size_t* start = starts_.data();
            for (std::size_t cut = first_cut; cut <= last_cut; ++cut)
                for (std::size_t s = low * tile; s < (low + 1) * tile; ++s)
                    for (std::size_t t = high * tile; t < t_end; ++t)
                        split(s, cut, t, std::max(from, *start++), std::min(to, enough(s, t)));
        }
    }

    // The fewest slots with which the chain can be split there.
    std::size_t split_start(std::size_t s, std::size_t cut, std::size_t t) {
        return std::max({least(s, cut - 1), least(cut, t) + chain_.input[cut],
                         chain_.bare_need(s, cut - 1, t)});
    }

    // C_ck: bare from s to cut - 1, then the part (cut, t), then the part (s, cut - 1).
    void split(std::size_t s, std::size_t cut, std::size_t t, std::size_t from, std::size_t to) {
        if (from < to)
            relax_sum(row(s, t), row(cut, t), chain_.input[cut], row(s, cut - 1),
                      chain_.bare_cost(s, cut), from, to);
    }

    void finish(std::size_t low, std::size_t high) {
        const std::size_t t_end = std::min((high + 1) * tile, chain_.n);
        const std::size_t s_end = std::min((low + 1) * tile, chain_.n);
        for (std::size_t t = high * tile; t < t_end; ++t)
            for (std::size_t s = std::min(s_end, t + 1); s-- > low * tile;) {
                for (std::size_t cut = s + 1; cut <= t; ++cut)
                    if (low == high || cut < s_end || cut > high * tile)
                        split(s, cut, t, split_start(s, cut, t), enough(s, t));
                save_first(s, t);
                const double* done = row(s, t);
                least(s, t) = static_cast<std::size_t>(
                    std::find_if(done, done + width_, [](double x) { return x < unreachable; }) -
                    done);
            }
    }

    // C_all, by each option of block s.
    void save_first(std::size_t s, std::size_t t) {
        if (revolve_ && s < t) return;
        double* acc = row(s, t);
        for (const SlotOption& o : chain_.options[s]) {
            std::size_t from = chain_.option_need(s, t, o);
            if (s == t) {
                for (std::size_t m = from; m < width_; ++m) acc[m] = std::min(acc[m], o.cost);
            } else {
                from = std::max(from, least(s + 1, t) + o.saved);
                relax_shifted(acc, row(s + 1, t), o.saved, o.cost, from, width_);
            }
        }
    }

    void write(std::size_t s, std::size_t t, std::size_t m, std::vector<ChainStep>& steps) const {
        // No choices were stored, which would make the table half as large again. Each is found
        // once more: n + options steps for each block of the answer.
        double best = unreachable;
        const SlotOption* choice = nullptr;
        std::size_t cut = 0;
        if (!revolve_ || s == t)
            for (const SlotOption& o : chain_.options[s]) {
                if (m < chain_.option_need(s, t, o) || (s < t && m < o.saved)) continue;
                const double rest = s == t ? 0.0 : row(s + 1, t)[m - o.saved];
                if (rest + o.cost < best) best = rest + o.cost, choice = &o;
            }
        for (std::size_t k = s + 1; k <= t; ++k) {
            if (m < chain_.input[k] || m < chain_.bare_need(s, k - 1, t)) continue;
            const double x =
                row(k, t)[m - chain_.input[k]] + row(s, k - 1)[m] + chain_.bare_cost(s, k);
            if (x < best) best = x, choice = nullptr, cut = k;
        }
        const auto block = static_cast<std::int32_t>(s);
        if (choice) {
            steps.push_back({ChainRun::save, block, choice->id});
            if (s < t) write(s + 1, t, m - choice->saved, steps);
            steps.push_back({ChainRun::back, block, choice->id});
            return;
        }
        for (std::size_t k = s; k < cut; ++k)
            steps.push_back(
                {k == s ? ChainRun::keep : ChainRun::drop, static_cast<std::int32_t>(k), -1});
        write(cut, t, m - chain_.input[cut], steps);
        write(s, cut - 1, m, steps);
    }

    SlotChain chain_;
    bool revolve_;
    std::size_t width_;
    std::vector<double> rows_;         // column by column: (s, t) for t, then s
    std::vector<std::size_t> least_;   // the fewest slots with which a part can be run
    std::vector<std::size_t> enough_;  // slots beyond which more memory does not help
    std::vector<std::size_t> starts_;  // of the splits of the current tiles
};

}  // namespace

void relax_sum(double* acc, const double* first, std::size_t shift, const double* second,
               double fixed, std::size_t from, std::size_t to) {
    if (from < to)
        relax_sum_simd(acc + from, first + (from - shift), second + from, fixed, to - from);
}

void relax_shifted(double* acc, const double* first, std::size_t shift, double fixed,
                   std::size_t from, std::size_t to) {
    if (from < to) relax_shifted_simd(acc + from, first + (from - shift), fixed, to - from);
}

std::unique_ptr<ChainTable> solve_persistent(SlotChain chain, bool revolve, Control& control) {
    return std::make_unique<Persistent>(std::move(chain), revolve, control);
}

std::unique_ptr<ChainTable> solve_chain(const Chain& chain, std::int64_t unit, std::size_t slots,
                                        ChainRule rule, Control& control) {
    SlotChain in_slots(chain, unit, slots);
    if (rule == ChainRule::floating) return solve_floating(std::move(in_slots), control);
    return solve_persistent(std::move(in_slots), rule == ChainRule::revolve, control);
}

std::size_t chain_table_bytes(std::size_t n, std::size_t slots, ChainRule rule) {
    const std::size_t parts =
        rule == ChainRule::floating ? n * (n + 1) * (n + 2) / 6 + 2 * n : n * (n + 1) / 2;
    return parts * (slots + 1) * sizeof(double);
}

}  // namespace rekindle
