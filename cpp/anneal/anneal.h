// Simulated annealing over schedules (FastSA, Imanishi et al. 2023), on an incremental timeline.
//
// Reusable: starts from any valid schedule, keeps the cheapest schedule within the budget and the
// one with the smallest peak that it has seen, ends at a move limit (deterministic for a seed) or
// when the control says so.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/control.h"
#include "core/problem.h"

namespace rekindle {

// What is minimised. M is the peak, C the cost, B the budget.
enum class Objective : std::uint8_t {
    area,     // C + price * (sum over steps of the memory above B); the price adapts to meet B
    product,  // max(B, M) * C: equation 1 of the paper
    elu,      // L(Elu(L^-1(M))) * C^0.6: footnote 2, leans away from B
    peak,     // M, then C; without `paper_moves`, as `area` with a ratchet
    custom,   // a function of (M, C)
};

struct AnnealOptions {
    std::int64_t budget = 0;
    Objective objective = Objective::area;
    std::function<double(double, double)> custom;
    double smooth = 0;          // > 0: peak-based objectives see a log-add-exp of that unit (C.2)
    bool reorder_only = false;  // no recomputation: only the order changes (B.2)
    // The budget to meet is lowered step by step, each time below the smallest peak so far, until
    // `budget` is met: finds small peaks where `budget` itself is far out of reach.
    bool ratchet = false;
    bool paper_moves = false;  // only the paper's three moves, at random slots
    std::int64_t enough = -1;  // end as soon as a schedule within the budget costs no more
    std::uint64_t seed = 0;
    std::int64_t max_moves = 1'000'000;
    // Temperatures: for `area` in mean op costs, else as a fraction of the first objective value.
    double hot = 50, cold = 0.02;
    // Heats one stretch after another, to at most `hot`, and keeps the rest cold
    // (anneal/windows.h); for `area`, from a start within the budget.
    bool windows = false;
    // `area` also feels memory above soft * B, at soft_weight times the price.
    double soft = 0.97, soft_weight = 0.1;
};

struct AnnealResult {
    bool within = false;   // a schedule within the budget was seen
    std::vector<Id> best;  // the cheapest within the budget; empty if there was none
    std::int64_t best_cost = 0, best_peak = 0;
    std::vector<Id> smallest;  // the smallest peak seen (only while none was within the budget)
    std::int64_t smallest_cost = 0, smallest_peak = 0;
    // Moves drawn; of these, those for which there was something to propose, and so to judge.
    std::int64_t moves = 0, judged = 0, accepted = 0;
    std::uint64_t seed = 0;
    std::array<std::array<std::int64_t, 2>, 8> by_move{};  // per kind of move: tried, accepted
};

// `start` must be valid. `host`: this thread may poll the control's interrupt.
AnnealResult anneal(const Problem& problem, std::span<const Id> start, const AnnealOptions& options,
                    Control& control, bool host = true);

// One run per seed, on up to `num_threads` threads; results in the order of the seeds, up to the
// first that found `enough`. Each seed starts from its own schedule, or all from one.
std::vector<AnnealResult> anneal_seeds(const Problem& problem,
                                       const std::vector<std::vector<Id>>& starts,
                                       const AnnealOptions& options,
                                       std::span<const std::uint64_t> seeds, int num_threads,
                                       Control& control);

// Makes `num_moves` random moves (all kinds, everything valid accepted) from `start` and compares
// with a full simulation after each; the number of accepted moves, or -1 at the first difference.
std::int64_t check_moves(const Problem& problem, std::span<const Id> start, std::int64_t budget,
                         std::uint64_t seed, std::int64_t num_moves);

}  // namespace rekindle
