// The one accounting of bytes: a schedule's validity, its memory per step, and its peaks. The time
// of a schedule with transfers is in lanes.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/problem.h"

namespace rekindle {

enum class Fault : std::uint8_t {
    none,
    no_such_op,
    not_produced,
    once_broken,
    output_missing,
    // Of transfers:
    misplaced,    // they are not in the order of their places
    no_link,      // the problem has no transfers
    not_movable,  // resident, smaller than `least`, or no value at all
    not_on_device,
    on_host,   // sent, and there already
    not_sent,  // dropped, and the newest copy was never sent
    not_on_host,
    not_dropped,  // a sent copy ends without a drop
    not_read,     // a fetched copy that nothing reads
    host_budget,
};

// One making of a value, and how long it lives.
struct Copy {
    std::size_t first;
    std::size_t last;  // == number of steps: lives on beyond the end
    Id value;
};

// A step that moves a value. It stands before the op at position `before` of the schedule (the
// number of ops: after the last), and after the transfers listed earlier with the same position.
struct Transfer {
    enum class Kind : std::uint8_t { send, drop, fetch, release };
    Kind kind;
    Id value;
    std::size_t before;
};

// Steps are ops and transfers together, in the order in which they are executed.
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

    std::vector<std::uint64_t> host_memory;  // per step; empty without transfers
    std::uint64_t host_peak = 0;

    bool valid() const { return fault == Fault::none; }
};

Trace simulate(const Problem& problem, std::span<const Id> schedule,
               std::span<const Transfer> transfers = {});

// In the unit of the ops' costs (ns for a captured model). A double: what searches compare and
// scale.
double total_cost(const Problem& problem, std::span<const Id> schedule);

// Removes each run whose outputs nothing reads before they are recomputed (and that is neither a
// run-once op nor makes a final output). Never raises memory or cost.
std::vector<Id> drop_dead_runs(const Problem& problem, std::span<const Id> schedule);

}  // namespace rekindle
