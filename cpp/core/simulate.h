// The one accounting of bytes and time: a schedule's validity, its memory per step, peak and cost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/problem.h"

namespace rekindle {

enum class Fault : std::uint8_t { none, no_such_op, not_produced, once_broken, output_missing };

// One making of a value, and how long it lives.
struct Copy {
    std::size_t first;
    std::size_t last;  // == number of steps: lives on beyond the end
    Id value;
};

struct Trace {
    Fault fault = Fault::none;
    std::int64_t step = -1;  // where the fault is
    Id op = -1;              // which op it concerns
    Id value = -1;           // which value it concerns
    std::int64_t times = 0;  // how often a run-once op stands

    std::vector<std::uint64_t> memory;  // per step
    std::uint64_t peak = 0;
    std::int64_t peak_step = -1;
    std::vector<std::int64_t> runs;  // per op
    std::vector<Copy> copies;        // in the order they are made

    bool valid() const { return fault == Fault::none; }
};

Trace simulate(const Problem& problem, std::span<const Id> schedule);

// In the unit of the ops' costs (ns for a captured model). A double: what searches compare and
// scale.
double total_cost(const Problem& problem, std::span<const Id> schedule);

// Removes each run whose outputs nothing reads before they are made again (and that is neither a
// run-once op nor makes a final output). Never raises memory or cost.
std::vector<Id> drop_dead_runs(const Problem& problem, std::span<const Id> schedule);

}  // namespace rekindle
