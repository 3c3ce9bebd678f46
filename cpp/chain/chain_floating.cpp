// Rotor's Theorem 4.7, corrected and in O(n^4 M) where the paper has O(n^6 M).
//
// C(s, t, l, m): the input of s and the gradients into l are there; the backward of l, ..., t must
// run, and the input of s need not outlive that. Three ways to begin:
//   save   (s = t): block s by an option, then C(s+1, s+1, l, m - saved).
//   keep   bare s .. cut-1 with the input of s kept, C(cut, back, l, m - input[cut]) for some
//          t < back <= l, then C(s, t, back-1, m).
//   move   (s < t): bare s with its input dropped, then C(s+1, t, l, m + input[s] - input[s+1]).
// Theorem 4.7 as printed moves the floating activation only together with a keep; chains where the
// move is followed by a save are then missed. With the move alone, by one block at a time, the
// theorem's r > s is a sequence of moves and a keep, so only (cut, back) is left to choose, and the
// best cut for each back, G(s, back, l, m), does not depend on t.
#include <algorithm>

#include "chain/chain_common.h"

namespace rekindle {

namespace {

class Floating final : public ChainTable {
   public:
    Floating(SlotChain chain, Control& control)
        : chain_(std::move(chain)), n_(chain_.n), width_(chain_.top + 1) {
        rows_.assign(n_ * (n_ + 1) * (n_ + 2) / 6 * width_, unreachable);
        finished = fill(control);
    }

    double cost(std::size_t slots) const override {
        return row(0, 0, n_ - 1)[std::min(slots, chain_.top)];
    }

    std::vector<ChainStep> build(std::size_t slots) const override {
        std::vector<ChainStep> steps;
        slots = std::min(slots, chain_.top);
        if (cost(slots) < unreachable) write(0, 0, n_ - 1, slots, steps);
        return steps;
    }

   private:
    // Parts by l, then t, then s <= t.
    std::size_t place(std::size_t s, std::size_t t, std::size_t l) const {
        return (l * (l + 1) * (l + 2) / 6 + t * (t + 1) / 2 + s) * width_;
    }
    double* row(std::size_t s, std::size_t t, std::size_t l) { return &rows_[place(s, t, l)]; }
    const double* row(std::size_t s, std::size_t t, std::size_t l) const {
        return &rows_[place(s, t, l)];
    }

    bool fill(Control& control) {
        std::vector<double> best_cut(n_ * width_);
        for (std::size_t l = 0; l < n_; ++l)
            for (std::size_t s = l + 1; s-- > 0;) {
                if (control.expired()) return false;
                std::fill(best_cut.begin(), best_cut.end(), unreachable);
                for (std::size_t back = s + 1; back <= l; ++back)
                    cuts(s, back, l, &best_cut[back * width_]);
                for (std::size_t t = s; t <= l; ++t) {
                    double* acc = row(s, t, l);
                    if (t == s) save_first(s, l, acc);
                    for (std::size_t back = t + 1; back <= l; ++back)
                        relax_sum(acc, &best_cut[back * width_], 0, row(s, t, back - 1), 0.0, 0,
                                  width_);
                    if (s < t) move_first(s, t, l, acc);
                }
            }
        return true;
    }

    // G: bare s .. cut-1, then C(cut, back, l), over all cuts.
    void cuts(std::size_t s, std::size_t back, std::size_t l, double* acc) const {
        for (std::size_t cut = s + 1; cut <= back; ++cut) {
            const std::size_t from = std::max(chain_.input[cut], chain_.bare_need(s, cut - 1, l));
            relax_shifted(acc, row(cut, back, l), chain_.input[cut], chain_.bare_cost(s, cut), from,
                          width_);
        }
    }

    void save_first(std::size_t s, std::size_t l, double* acc) const {
        for (const SlotOption& o : chain_.options[s]) {
            std::size_t from = chain_.option_need(s, l, o);
            if (s == l) {
                for (std::size_t m = from; m < width_; ++m) acc[m] = std::min(acc[m], o.cost);
            } else {
                relax_shifted(acc, row(s + 1, s + 1, l), o.saved, o.cost, std::max(from, o.saved),
                              width_);
            }
        }
    }

    // Slots after the move; more than the table has cannot be used.
    std::size_t moved(std::size_t s, std::size_t m) const {
        return std::min(m + chain_.input[s] - chain_.input[s + 1], chain_.top);
    }
    std::size_t move_from(std::size_t s, std::size_t l) const {
        const std::size_t gap =
            chain_.input[s + 1] > chain_.input[s] ? chain_.input[s + 1] - chain_.input[s] : 0;
        return std::max(gap, chain_.move_need(s, l));
    }

    void move_first(std::size_t s, std::size_t t, std::size_t l, double* acc) const {
        const double* next = row(s + 1, t, l);
        const double fixed = chain_.bare_cost(s, s + 1);
        for (std::size_t m = move_from(s, l); m < width_; ++m)
            acc[m] = std::min(acc[m], next[moved(s, m)] + fixed);
    }

    void write(std::size_t s, std::size_t t, std::size_t l, std::size_t m,
               std::vector<ChainStep>& steps) const {
        double best = unreachable;
        const SlotOption* choice = nullptr;
        std::size_t cut = 0, back = 0;  // cut == 0 without a choice: the move
        if (s == t)
            for (const SlotOption& o : chain_.options[s]) {
                if (m < chain_.option_need(s, l, o) || (s < l && m < o.saved)) continue;
                const double rest = s == l ? 0.0 : row(s + 1, s + 1, l)[m - o.saved];
                if (rest + o.cost < best) best = rest + o.cost, choice = &o;
            }
        for (std::size_t b = t + 1; b <= l; ++b)
            for (std::size_t k = s + 1; k <= b; ++k) {
                if (m < chain_.input[k] || m < chain_.bare_need(s, k - 1, l)) continue;
                const double x = row(k, b, l)[m - chain_.input[k]] + chain_.bare_cost(s, k) +
                                 row(s, t, b - 1)[m];
                if (x < best) best = x, choice = nullptr, cut = k, back = b;
            }
        if (s < t && m >= move_from(s, l) &&
            row(s + 1, t, l)[moved(s, m)] + chain_.bare_cost(s, s + 1) < best)
            choice = nullptr, cut = 0;
        else if (!choice && cut == 0)
            return;

        const auto block = static_cast<std::int32_t>(s);
        if (choice) {
            steps.push_back({ChainRun::save, block, choice->id});
            if (s < l) write(s + 1, s + 1, l, m - choice->saved, steps);
            steps.push_back({ChainRun::back, block, choice->id});
        } else if (cut == 0) {
            steps.push_back({ChainRun::drop, block, -1});
            write(s + 1, t, l, moved(s, m), steps);
        } else {
            for (std::size_t k = s; k < cut; ++k)
                steps.push_back(
                    {k == s ? ChainRun::keep : ChainRun::drop, static_cast<std::int32_t>(k), -1});
            write(cut, back, l, m - chain_.input[cut], steps);
            write(s, t, back - 1, m, steps);
        }
    }

    SlotChain chain_;
    std::size_t n_, width_;
    std::vector<double> rows_;
};

}  // namespace

std::unique_ptr<ChainTable> solve_floating(SlotChain chain, Control& control) {
    return std::make_unique<Floating>(std::move(chain), control);
}

}  // namespace rekindle
