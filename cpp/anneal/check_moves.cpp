// The annealer against the simulator: for tests (tests/property/test_anneal_moves.py).
#include <cstdint>
#include <span>

#include "anneal/anneal.h"
#include "anneal/moves.h"
#include "anneal/timeline.h"
#include "core/random.h"
#include "core/simulate.h"

namespace rekindle {

std::int64_t check_moves(const Problem& problem, std::span<const Id> start, std::int64_t budget,
                         std::uint64_t seed, std::int64_t num_moves) {
    Random random(seed);
    Timeline line(problem, budget);
    Moves moves(problem, line, random, false, false);
    line.load(drop_dead_runs(problem, start));
    if (!line.consistent()) return -1;
    if (line.num_steps() == 0) return 0;
    std::int64_t accepted = 0;
    for (std::int64_t k = 0; k < num_moves; ++k) {
        const auto kind = static_cast<Moves::Kind>(random.below(Moves::num_kinds));
        const bool longer = line.num_steps() > 3 * start.size();
        if (!moves.propose(kind) || !line.evaluate() || (longer && line.cost_change() > 0)) {
            line.abandon();
            continue;
        }
        line.commit();
        ++accepted;
        if (!line.consistent()) return -1;
        if (random.below(200) == 0) line.respace();
        if (random.below(500) == 0) line.set_budget(budget / 2 + random.below(1000));
        if (random.below(500) == 0) line.set_soft(budget / 4 + random.below(1000));
    }
    return accepted;
}

}  // namespace rekindle
