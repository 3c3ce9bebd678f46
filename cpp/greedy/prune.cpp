// Removal one by one, on the annealer's timeline: it knows what each removal does to memory at
// once, where a simulation per candidate would be quadratic.
#include "greedy/prune.h"

#include <algorithm>

#include "anneal/timeline.h"
#include "core/simulate.h"

namespace rekindle {

namespace {

struct Repeat {
    double worth;  // cost per byte
    Slot wait;     // since the older copy was last read
    Id op;
    Slot slot;
};

// The runs of ops that have run before, the most cost per byte first; among equals the one with the
// shortest way back.
std::vector<Repeat> repeats(const Problem& p, const Timeline& line) {
    std::vector<Repeat> result;
    for (Id op : line.repeated()) {
        double bytes = 1;
        for (Id v : p.outputs[op]) bytes += static_cast<double>(p.size_of(v));
        const double worth = static_cast<double>(p.cost_of(op)) / bytes;
        for (std::int32_t k = 1; k < line.runs(op); ++k) {
            const Slot slot = line.run_of(op, k);
            result.push_back(
                {worth, slot - line.last_read_before(p.outputs[op][0], slot), op, slot});
        }
    }
    std::sort(result.begin(), result.end(), [](const Repeat& a, const Repeat& b) {
        if (a.worth != b.worth) return a.worth > b.worth;
        if (a.wait != b.wait) return a.wait < b.wait;
        return a.slot < b.slot;
    });
    return result;
}

}  // namespace

std::vector<Id> drop_needless_runs(const Problem& p, std::span<const Id> schedule,
                                   std::uint64_t limit, Control& control, bool host) {
    std::vector<Id> steps = drop_dead_runs(p, schedule);
    // The timeline counts with signs; no schedule needs more than this.
    const std::uint64_t most = std::uint64_t{1} << 62;
    Timeline line(p, static_cast<std::int64_t>(std::min(limit, most)));
    line.load(steps);
    if (line.excess() > 0) return steps;
    // What did not fit may fit in the next pass.
    for (bool changed = true; changed;) {
        changed = false;
        for (const Repeat& repeat : repeats(p, line)) {
            if (control.expired(host)) break;
            // It may have gone with another, or be the first run now.
            if (line.op_at(repeat.slot) != repeat.op || line.runs(repeat.op) < 2) continue;
            line.begin();
            line.take(repeat.slot);
            if (line.evaluate() && line.excess_change() <= 0) {
                line.commit();
                changed = true;
            } else {
                line.abandon();
            }
        }
        if (control.expired(host)) break;
    }
    line.write(steps);
    return drop_dead_runs(p, steps);  // of very long chains of dead runs some may be left
}

}  // namespace rekindle
