// The annealing loop: which proposals are accepted, at what price of memory and temperature, and
// which schedules are kept as the best. What is proposed: moves.h. The schedule and its memory:
// timeline.h.
#include "anneal/anneal.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <thread>

#include "anneal/moves.h"
#include "anneal/snapshot.h"
#include "anneal/timeline.h"
#include "anneal/windows.h"
#include "core/random.h"
#include "core/simulate.h"

namespace rekindle {

namespace {

constexpr std::int64_t period = 1024;     // moves between looks at the clock
constexpr double window_tolerance = 0.3;  // mean costs

class Annealer {
   public:
    Annealer(const Problem& problem, std::span<const Id> start, const AnnealOptions& options)
        : p_(problem), options_(options), random_(options.seed), line_(problem, options.budget),
          moves_(problem, line_, random_, options.reorder_only, options.paper_moves) {
        // M(S) falls best by area, under a budget that is lowered step by step.
        if (options_.objective == Objective::peak && !options_.paper_moves) {
            options_.objective = Objective::area;
            options_.ratchet = true;
        }
        line_.load(drop_dead_runs(p_, start));
        if (options_.ratchet) line_.set_budget(std::max(options.budget, line_.peak()));
        update_soft_line();
        if (options.smooth > 0) line_.smooth(options.smooth);
        result_.seed = options.seed;
        double cost = 0, size = 0;
        int costs = 0, sizes = 0;
        for (Id i = 0; i < p_.num_ops(); ++i)
            if (p_.cost_of(i) > 0 && !p_.is_once(i)) {
                cost += static_cast<double>(p_.cost_of(i));
                ++costs;
            }
        for (Id v = 0; v < p_.num_values(); ++v)
            if (p_.size_of(v) > 0 && p_.producer_of(v) >= 0) {
                size += static_cast<double>(p_.size_of(v));
                ++sizes;
            }
        mean_cost_ = costs ? cost / costs : 1;
        mean_size_ = sizes ? size / sizes : 1;
        // Beyond that length only what costs no more is accepted: a hot schedule would grow without
        // end, and every move's work with it.
        max_steps_ = 8 * line_.num_steps() + 1000;
        // The price makes cost of bytes above the budget, summed over steps. What an average op
        // costs per byte is only where it starts: adapt_price looks for the one that the budget
        // asks for.
        price_ = first_price_ = mean_cost_ / mean_size_;
        if (options_.objective == Objective::area) {
            hot_ = options.hot * mean_cost_;
            cold_ = options.cold * mean_cost_;
        } else {
            value_ = objective();
            hot_ = options.hot * std::abs(value_);
            cold_ = options.cold * std::abs(value_);
        }
        record_best();
    }

    // Ends at the latest when the control's clock shows `until_s`.
    AnnealResult run(Control& control, bool host, double until_s) {
        if (line_.num_steps() == 0 || control.expired(host)) return finish();
        begun_s_ = control.elapsed_s();
        until_s_ = until_s;
        temperature_ = hot_;
        if (options_.windows && options_.objective == Objective::area && line_.excess() == 0 &&
            line_.budget() == options_.budget)
            return run_windows(control, host);
        while (result_.moves < options_.max_moves) {
            const std::int64_t stop = std::min(options_.max_moves, result_.moves + period);
            for (; result_.moves < stop; ++result_.moves) step();
            if (result_.within && result_.best_cost <= options_.enough) break;
            if (control.expired(host)) break;
            const double now_s = control.elapsed_s();
            if (now_s > until_s_) break;
            end_period(now_s);
        }
        return finish();
    }

   private:
    AnnealResult run_windows(Control& control, bool host) {
        Windows windows(line_);
        save();
        while (result_.moves < options_.max_moves) {
            windows.pick(line_, random_, options_.hot);
            low_ = windows.low(), high_ = windows.high();
            moves_.look_at(low_, high_);
            const std::int64_t from = result_.moves, all = std::max(period, windows.moves());
            const double price = price_;
            while (result_.moves < std::min(options_.max_moves, from + all)) {
                const double done =
                    static_cast<double>(result_.moves - from) / static_cast<double>(all);
                const double heat = windows.heat() * mean_cost_;
                temperature_ = heat * std::pow(cold_ / heat, done);
                const double ease = windows.ease(done);
                if (ease < 1) price_ = price * ease;
                for (const std::int64_t stop = std::min(options_.max_moves, result_.moves + period);
                     result_.moves < stop; ++result_.moves)
                    step();
                if (result_.best_cost <= options_.enough || control.expired(host) ||
                    control.elapsed_s() > until_s_)
                    return finish();
                if (ease == 1) adapt_price();
            }
            if (unsaved_) save();
            std::vector<Id> best;
            best_.write(best);
            windows.settle(line_, best, result_.best_cost,
                           window_tolerance * mean_cost_ * random_.exponential());
            best_.forget();
            lowest_.forget();
            met_ = line_.excess() == 0;
        }
        return finish();
    }

    void step() {
        const Moves::Kind kind = moves_.choose();
        auto& counts = result_.by_move[kind];
        ++counts[0];
        const bool proposed = moves_.propose(kind);
        result_.judged += proposed;
        if (!proposed || !accepts(kind)) {
            line_.abandon();
            return;
        }
        save_before_change();
        line_.commit();
        best_.follow(line_.changes());
        lowest_.follow(line_.changes());
        ++counts[1];
        ++result_.accepted;
        ++since_respace_;
        record_best();
#ifdef REKINDLE_DEBUG_CHECKS
        if (!line_.consistent()) std::abort();
#endif
    }

    bool accepts(Moves::Kind kind) {
        const bool heated = high_ == 0 || line_.inside(low_, high_);
        // Accepting a change with probability exp(-change / temperature) is the same as accepting
        // it below temperature * Exp(1). That number is drawn first, so what costs little to know
        // about a change (bounds of it) can reject most proposals before their memory is looked at.
        const double slack = (heated ? temperature_ : cold_) * random_.exponential();
        if (options_.objective != Objective::area) return accepts_by_peak(slack);
        // More than all of the excess cannot be gained, so the cost alone may decide.
        const auto cost = static_cast<double>(line_.cost_change());
        if (cost > slack + price_ * weigh(line_.excess(), line_.soft())) return false;
        // Nor can a further run gain more than what it makes would have taken until then. (If it
        // leaves another run without a reader, that is not seen here: one in thousands.)
        if (cost > slack && (kind == Moves::recompute || kind == Moves::relieve) &&
            !line_.may_gain((cost - slack) / price_, moves_.added(), moves_.added_at(),
                            options_.soft_weight))
            return false;
        if (!line_.settle() || !fits()) return false;
        line_.measure();
        return static_cast<double>(line_.cost_change()) +
                   price_ * weigh(line_.excess_change(), line_.soft_change()) <=
               slack;
    }

    double weigh(std::int64_t excess, std::int64_t soft) const {
        return static_cast<double>(excess) + options_.soft_weight * static_cast<double>(soft);
    }

    bool accepts_by_peak(double slack) {
        if (!line_.settle() || !fits()) return false;
        line_.apply_memory(+1);
        const double after = objective(line_.cost_change());
        line_.apply_memory(-1);
        // Not `> slack`: a custom objective that gives NaN is never accepted.
        if (!(after - value_ <= slack)) return false;
        line_.measure();
        value_ = after;
        return true;
    }

    bool fits() const { return line_.num_steps() < max_steps_ || line_.cost_change() <= 0; }

    double objective(std::int64_t cost_change = 0) const {
        const double budget = static_cast<double>(options_.budget);
        const double cost = static_cast<double>(line_.cost() + cost_change);
        const double peak =
            options_.smooth > 0 ? line_.smooth_peak() : static_cast<double>(line_.peak());
        switch (options_.objective) {
            case Objective::product: return std::max(budget, peak) * cost;
            case Objective::elu: {
                // L(x) = budget + budget * x / 100
                const double x = (peak - budget) * 100 / std::max(budget, 1.0);
                const double bent = x > 0 ? x : std::expm1(x);
                return (budget + budget * bent / 100) * std::pow(cost, 0.6);
            }
            case Objective::custom: return options_.custom(peak, cost);
            default: return peak * (1 + 1e-6 * cost / std::max(1.0, mean_cost_ * p_.num_ops()));
        }
    }

    // --- the best seen --------------------------------------------------------------------------

    // A best schedule is only marked here, and copied when a move is about to change it
    // (save_before_change): on the way down nearly every move finds a new best.
    void record_best() {
        if (line_.excess() == 0 && line_.budget() > options_.budget) {
            lower_budget();
        } else if (line_.excess() == 0) {
            if (!result_.within || line_.cost() < result_.best_cost) {
                result_.within = true;
                result_.best_cost = line_.cost();
                unsaved_ = true;
            }
            met_ = true;
            if (options_.objective != Objective::peak) return;
        } else if (result_.within) {
            return;
        }
        const std::int64_t peak = line_.peak();
        if (smallest_ < 0 || peak < smallest_) {
            smallest_ = peak;
            unsaved_smallest_ = true;
        }
    }

    void lower_budget() {
        const std::int64_t peak = line_.peak();
        if (smallest_ < 0 || peak < smallest_) {
            smallest_ = peak;
            unsaved_smallest_ = true;
        }
        // By 1/256 at least: byte by byte, each tiny gain would end a step of the ratchet.
        line_.set_budget(std::max(options_.budget, peak - 1 - (peak >> 8)));
        update_soft_line();
        if (line_.excess() == 0) record_best();
    }

    void update_soft_line() {
        line_.set_soft(
            static_cast<std::int64_t>(options_.soft * static_cast<double>(line_.budget())));
    }

    // Before the schedule changes: what is best and not yet written down is written down.
    void save_before_change() {
        if (unsaved_ && (line_.cost_change() > 0 || line_.excess_change() > 0)) save();
        if (unsaved_smallest_ && line_.peak() == smallest_) save_smallest();
    }

    void save() {
        best_.save(line_);
        result_.best_peak = line_.peak();
        unsaved_ = false;
    }

    void save_smallest() {
        lowest_.save(line_);
        result_.smallest_peak = smallest_;
        result_.smallest_cost = line_.cost();
        unsaved_smallest_ = false;
    }

    AnnealResult finish() {
        if (unsaved_) save();
        if (unsaved_smallest_) save_smallest();
        best_.write(result_.best);
        lowest_.write(result_.smallest);
        return std::move(result_);
    }

    // --- between periods ------------------------------------------------------------------------

    // Cools by the moves made, which is the same in every run; by the clock only where the moves
    // will not all be made in time.
    double progress(double now_s) const {
        const double made = static_cast<double>(result_.moves);
        const double by_moves = made / static_cast<double>(options_.max_moves);
        const double by_time = (now_s - begun_s_) / std::max(1e-9, until_s_ - begun_s_);
        const bool late = result_.moves > 16 * period && by_time > by_moves;
        return std::clamp(late ? by_time : by_moves, 0.0, 1.0);
    }

    void end_period(double now_s) {
        const double done = progress(now_s);
        temperature_ = hot_ * std::pow(cold_ / hot_, done);
        adapt_price();
        // Moves need empty slots near where they look; they gather elsewhere in time.
        if (since_respace_ > static_cast<std::int64_t>(line_.num_steps()) * 4 ||
            2 * line_.num_steps() > static_cast<std::size_t>(line_.num_slots()) * 3 / 2) {
            if (unsaved_) save();
            if (unsaved_smallest_ && line_.peak() == smallest_) save_smallest();
            line_.respace();
            best_.forget();
            lowest_.forget();
            since_respace_ = 0;
            if (options_.objective != Objective::area) value_ = objective();
        }
    }

    // Dearer while the budget is not met, cheaper while it is: the search stays at the border.
    void adapt_price() {
        // Per 1024 moves. Held within a factor of a million, where it still is a finite number.
        price_ *= met_ ? 0.985 : 1.015;
        price_ = std::clamp(price_, first_price_ * 1e-6, first_price_ * 1e6);
        met_ = line_.excess() == 0;
    }

    const Problem& p_;
    AnnealOptions options_;
    Random random_;
    Timeline line_;
    Moves moves_;
    AnnealResult result_;
    Snapshot best_, lowest_;
    double mean_cost_ = 1, mean_size_ = 1;
    double hot_ = 1, cold_ = 1, temperature_ = 1;
    double price_ = 1, first_price_ = 1;
    double begun_s_ = 0, until_s_ = 0;
    double value_ = 0;         // of the objective, where it is not `area`
    Slot low_ = 0, high_ = 0;  // the stretch that is heated, where not everything is
    std::int64_t smallest_ = -1;
    std::int64_t since_respace_ = 0;
    std::size_t max_steps_ = 0;
    bool unsaved_ = false, unsaved_smallest_ = false, met_ = false;
};

}  // namespace

AnnealResult anneal(const Problem& problem, std::span<const Id> start, const AnnealOptions& options,
                    Control& control, bool host) {
    return Annealer(problem, start, options).run(control, host, control.time_limit_s);
}

std::vector<AnnealResult> anneal_seeds(const Problem& problem,
                                       const std::vector<std::vector<Id>>& starts,
                                       const AnnealOptions& options,
                                       std::span<const std::uint64_t> seeds, int num_threads,
                                       Control& control) {
    std::vector<AnnealResult> results(seeds.size());
    std::atomic<std::size_t> next{0}, first_enough{seeds.size()};
    const auto threads = static_cast<std::size_t>(std::max(1, num_threads));
    auto work = [&](bool host) {
        for (std::size_t k; (k = next++) < seeds.size();) {
            if (k > first_enough) break;
            AnnealOptions mine = options;
            mine.seed = seeds[k];
            // The seeds that still wait for a thread get their share of what time is left.
            const auto rounds = static_cast<double>((seeds.size() - k + threads - 1) / threads);
            const double now_s = control.elapsed_s();
            const double until_s = now_s + (control.time_limit_s - now_s) / rounds;
            results[k] =
                Annealer(problem, starts[k % starts.size()], mine).run(control, host, until_s);
            if (!results[k].within || results[k].best_cost > options.enough) continue;
            for (std::size_t best = first_enough; k < best;)
                if (first_enough.compare_exchange_weak(best, k)) break;
        }
    };
    std::vector<std::thread> others;
    const auto most = static_cast<int>(seeds.size());
    for (int i = 1; i < std::min(num_threads, most); ++i) others.emplace_back(work, false);
    work(true);
    for (auto& thread : others) thread.join();
    // Which later seeds got to run depends on the threads; the answer must not.
    if (first_enough < seeds.size()) results.resize(first_enough + 1);
    return results;
}

}  // namespace rekindle
